"""Weather: fog and snow."""

import torch
from torch import Tensor

from gpattention.data.corruptions.corruption import Constants, Scene
from gpattention.data.corruptions.levels import cut_levels, fractions, nearest_levels
from gpattention.data.corruptions.motion import smear
from gpattention.data.corruptions.plasma import plasma, plasma_side
from gpattention.data.corruptions.sampling import magnify_centre

_GREY = (0.299, 0.587, 0.114)


def fog(images: Tensor, constants: Constants, scene: Scene) -> Tensor:
    """Clouds are added and the sum is scaled so that the brightest value stays what it was, at most."""
    thickness, decay = constants
    height, width = images.shape[-2:]
    side = plasma_side(height, width)
    clouds = plasma(scene.random.uniform("clouds", side, side), decay)[:, None, :height, :width]
    brightest = images.amax((1, 2, 3), keepdim=True)
    return (images + thickness * clouds) * brightest / (brightest + thickness)


def snow(images: Tensor, constants: Constants, scene: Scene) -> Tensor:
    """Whiten the image and add a layer of flakes, smeared by their fall, and the same layer upside down."""
    mean, spread, zoom, threshold, radius, sigma, kept = constants
    flakes = mean + spread * scene.random.normal("flakes", 1, *images.shape[2:])  # [B, 1, H, W]
    flakes = magnify_centre(flakes, zoom)
    flakes = torch.where(flakes < threshold, 0, flakes)
    angle = 90 * scene.random.uniform("angle") - 135
    flakes = smear(fractions(cut_levels(flakes)), radius, sigma, angle)
    flakes = fractions(nearest_levels(flakes))
    red, green, blue = images.unbind(1)
    grey = (_GREY[0] * red + _GREY[1] * green + _GREY[2] * blue)[:, None]
    whitened = kept * images + (1 - kept) * torch.maximum(images, 1.5 * grey + 0.5)
    return whitened + flakes + flakes.flip(2, 3)
