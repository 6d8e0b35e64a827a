"""Blurs that are the same for every image: Gaussian, out of focus, and zooming during exposure."""

import numpy as np
from torch import Tensor

from gpattention.data.corruptions.corruption import Constants, Scene
from gpattention.data.corruptions.filters import correlate, gaussian_filter, gaussian_weights
from gpattention.data.corruptions.sampling import magnify_centre


def gaussian_blur(images: Tensor, constants: Constants, scene: Scene) -> Tensor:
    """A Gaussian of standard deviation c pixels, cut off at 4 of them."""
    (sigma,) = constants
    return gaussian_filter(images, sigma)


def defocus_blur(images: Tensor, constants: Constants, scene: Scene) -> Tensor:
    """A disk of a radius in pixels, its edge softened by a 3 x 3 Gaussian."""
    radius, softness = constants
    return correlate(images, disk(radius, softness), "mirror")


def disk(radius: float, softness: float) -> list[list[float]]:
    """The pixels within `radius` of the centre, equally weighted, then blurred over 3 x 3 pixels."""
    reach = int(radius) + 1  # and a margin for the softening
    steps = range(-reach, reach + 1)
    hard = {(y, x) for y in steps for x in steps if y * y + x * x <= radius * radius}
    soft = gaussian_weights(softness, 1)
    return [
        [
            sum(soft[i + 1] * soft[j + 1] for i in (-1, 0, 1) for j in (-1, 0, 1) if (y + i, x + j) in hard)
            / len(hard)
            for x in steps
        ]
        for y in steps
    ]


def zoom_blur(images: Tensor, constants: Constants, scene: Scene) -> Tensor:
    """The mean of the image and of magnifications 1, 1.01, ... up to c."""
    (stop,) = constants
    factors = np.arange(1, stop, 0.01)  # the published constant: rounding errors decide about its last step
    total = images.clone()
    for factor in factors:
        total += magnify_centre(images, float(factor))
    return total / (len(factors) + 1)
