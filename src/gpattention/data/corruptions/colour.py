"""Changes of colour: contrast, brightness and saturation.

Brightness and saturation are the V and S of HSV; with H kept, the way there and back is a straight line from
each pixel to the grey of its brightest channel, so no hue need be computed.
"""

import torch
from torch import Tensor

from gpattention.data.corruptions.corruption import Constants, Scene


def contrast(images: Tensor, constants: Constants, scene: Scene) -> Tensor:
    """Shrink the distance to each channel's mean to the factor c."""
    (factor,) = constants
    mean = pixel_mean(images)
    return (images - mean) * factor + mean


def pixel_mean(images: Tensor) -> Tensor:
    """The mean of each channel, [B, C, 1, 1], by halving: torch's order of summing depends on the batch."""
    rest = images.flatten(2)
    while rest.shape[2] > 1:
        half = rest.shape[2] // 2
        odd = rest[..., 2 * half :]
        rest = torch.cat([rest[..., :half] + rest[..., half : 2 * half], odd], 2)
    return rest[..., None] / (images.shape[2] * images.shape[3])


def brightness(images: Tensor, constants: Constants, scene: Scene) -> Tensor:
    """Add c to the value V of HSV, at most up to 1; hue and saturation stay."""
    (more,) = constants
    value = images.amax(1, keepdim=True)
    relative = torch.where(value > 0, images / value, 1)  # black has no saturation and becomes grey
    return relative * (value + more).clamp(max=1)


def saturate(images: Tensor, constants: Constants, scene: Scene) -> Tensor:
    """Multiply the saturation S of HSV by c1 and add c2, within [0, 1]; hue and value stay.

    The hue of grey is 0, red, so that c2 > 0 turns grey reddish, as in the published images.
    """
    factor, more = constants
    value = images.amax(1, keepdim=True)
    below = value - images
    range_ = below.amax(1, keepdim=True)
    saturation = torch.where(value > 0, range_ / value, 0)
    red = images.new_tensor([0.0, 1.0, 1.0])[:, None, None]
    direction = torch.where(range_ > 0, below / range_, red)
    return value - value * (saturation * factor + more).clamp(0, 1) * direction
