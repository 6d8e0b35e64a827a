"""Blurs: out of focus, frosted glass, motion, zooming during exposure, Gaussian."""

import math

import numpy as np
import torch
from torch import Tensor

from gpattention.data.corruptions import core
from gpattention.data.corruptions.core import Scene, corruption


# radius, softness of its edge
@corruption("blur", (0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1))
def defocus_blur(images: Tensor, scene: Scene, radius: float, softness: float) -> Tensor:
    """A disk of a radius in pixels, its edge softened by a 3 x 3 Gaussian."""
    return core.correlate(images, disk(radius, softness), "mirror")


def disk(radius: float, softness: float) -> list[list[float]]:
    """The pixels within `radius` of the centre, equally weighted, then blurred over 3 x 3 pixels."""
    reach = int(radius) + 1  # and a margin for the softening
    steps = range(-reach, reach + 1)
    hard = {(y, x) for y in steps for x in steps if y * y + x * x <= radius * radius}
    soft = core.gaussian_weights(softness, 1)
    return [
        [
            sum(soft[i + 1] * soft[j + 1] for i in (-1, 0, 1) for j in (-1, 0, 1) if (y + i, x + j) in hard)
            / len(hard)
            for x in steps
        ]
        for y in steps
    ]


# standard deviation, passes
@corruption("blur", (0.05, 1), (0.25, 1), (0.4, 1), (0.25, 2), (0.4, 2))
def glass_blur(images: Tensor, scene: Scene, sigma: float, passes: float) -> Tensor:
    """Between two Gaussian blurs, pixels are replaced by neighbours, once or twice over the image.

    The published code means to swap a pixel with one up to a pixel away (up and to the left: its random
    integers exclude the upper end), from the bottom right corner on. NumPy hands it views, so the first
    half of the swap overwrites what the second would read: the pixel is replaced and its neighbour kept.
    CIFAR-10-C was made so, and so is this. As no pixel is read after it was written, a pass is one gather.
    """
    height, width = images.shape[-2:]
    moved = core.fractions(core.cut_levels(core.gaussian_filter(images, sigma)))
    for number in range(int(passes)):
        offsets = (2 * scene.random.uniform(f"offsets {number}", 2, height, width)).long() - 1  # -1 or 0
        moved = move_pixels(moved, offsets[:, 0], offsets[:, 1])
    return core.gaussian_filter(moved, sigma)


def move_pixels(images: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """Out(y, x) = in(y + down, x + right) except in the first two rows and columns; offsets [B, H, W]."""
    height, width = images.shape[-2:]
    down, right = down.clone(), right.clone()
    for offset in (down, right):
        offset[:, :2] = 0
        offset[:, :, :2] = 0
    shift = (down * width + right).flatten(1)  # [B, H W]
    place = shift + shift.new_ones(height * width).cumsum(0) - 1
    channels = images.shape[1]
    return images.flatten(2).gather(2, place[:, None].expand(-1, channels, -1)).reshape(images.shape)


# radius, standard deviation
@corruption("blur", (6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5))
def motion_blur(images: Tensor, scene: Scene, radius: float, sigma: float) -> Tensor:
    """Smear along an angle within 45 degrees of the horizontal, as ImageMagick does.

    The result is rounded to bytes.
    """
    angle = 90 * scene.random.uniform("angle") - 45  # [B], degrees
    return core.fractions(core.nearest_levels(smear(images, radius, sigma, angle)))


def smear(images: Tensor, radius: float, sigma: float, angle: Tensor) -> Tensor:
    """Weighted mean of the 2 radius + 1 pixels from each pixel on in the direction `angle` [B], in degrees.

    The weights fall off as half a Gaussian, the places are rounded to whole pixels, and beyond the border
    the nearest pixel counts.
    """
    weights = smear_weights(radius, sigma)
    reach = len(weights)
    batch, channels, height, width = images.shape
    wide = core.extend(images, reach, reach, "nearest")
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


# end of the magnifications
@corruption("blur", (1.06,), (1.11,), (1.16,), (1.21,), (1.26,))
def zoom_blur(images: Tensor, scene: Scene, stop: float) -> Tensor:
    """The mean of the image and of magnifications 1, 1.01, ... up to c."""
    factors = np.arange(1, stop, 0.01)  # the published constant: rounding errors decide about its last step
    total = images.clone()
    for factor in factors:
        total += core.magnify_centre(images, float(factor))
    return total / (len(factors) + 1)


# standard deviation
@corruption("blur", (0.4,), (0.6,), (0.7,), (0.8,), (1,))
def gaussian_blur(images: Tensor, scene: Scene, sigma: float) -> Tensor:
    """A Gaussian of standard deviation c pixels, cut off at 4 of them."""
    return core.gaussian_filter(images, sigma)
