"""Motion blur along a straight line, as ImageMagick's MagickMotionBlurImage draws it."""

import math

import torch
from torch import Tensor

from gpattention.data.corruptions.corruption import Constants, Scene
from gpattention.data.corruptions.filters import extend
from gpattention.data.corruptions.levels import fractions, nearest_levels


def motion_blur(images: Tensor, constants: Constants, scene: Scene) -> Tensor:
    """Smear along an angle within 45 degrees of the horizontal; the result is rounded to bytes."""
    radius, sigma = constants
    angle = 90 * scene.random.uniform("angle") - 45  # [B], degrees
    return fractions(nearest_levels(smear(images, radius, sigma, angle)))


def smear(images: Tensor, radius: float, sigma: float, angle: Tensor) -> Tensor:
    """Weighted mean of the 2 radius + 1 pixels from each pixel on in the direction `angle` [B], in degrees.

    The weights fall off as half a Gaussian, the places are rounded to whole pixels, and beyond the border
    the nearest pixel counts.
    """
    weights = smear_weights(radius, sigma)
    reach = len(weights)
    batch, channels, height, width = images.shape
    wide = extend(images, reach, reach, "nearest")
    rows = torch.arange(height, device=images.device)[:, None] + reach
    columns = torch.arange(width, device=images.device) + reach
    start = (rows * wide.shape[-1] + columns).flatten()  # [H W]
    flat, total = wide.flatten(2), torch.zeros_like(images).flatten(2)
    cos, sin = torch.cos(torch.deg2rad(angle)), torch.sin(torch.deg2rad(angle))
    for i, weight in enumerate(weights):
        x, y = torch.ceil(i * cos - 0.5).long(), torch.ceil(i * sin - 0.5).long()  # [B]
        place = start + (y * wide.shape[-1] + x)[:, None]  # [B, H W]
        total.add_(flat.gather(2, place[:, None].expand(-1, channels, -1)), alpha=weight)
    return total.reshape(batch, channels, height, width)


def smear_weights(radius: float, sigma: float) -> list[float]:
    """Half a Gaussian: weights of the pixels 0, 1, ..., 2 ceil(radius), of sum 1."""
    weights = [math.exp(-0.5 * (i / sigma) ** 2) for i in range(2 * math.ceil(radius) + 1)]
    return [weight / sum(weights) for weight in weights]
