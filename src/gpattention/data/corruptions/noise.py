"""Noise of a sensor: Gaussian, shot, impulse and speckle."""

import torch
from torch import Tensor

from gpattention.data.corruptions.corruption import Constants, Scene
from gpattention.data.corruptions.levels import nearest_levels


def gaussian_noise(images: Tensor, constants: Constants, scene: Scene) -> Tensor:
    """Independent normal noise of standard deviation c on every channel of every pixel."""
    (scale,) = constants
    return images + scale * scene.random.normal("noise", *images.shape[1:])


def speckle_noise(images: Tensor, constants: Constants, scene: Scene) -> Tensor:
    """Normal noise in proportion to the brightness."""
    (scale,) = constants
    return images + images * scale * scene.random.normal("noise", *images.shape[1:])


def impulse_noise(images: Tensor, constants: Constants, scene: Scene) -> Tensor:
    """A share c of all values becomes 0 or 1, with equal odds."""
    (share,) = constants
    hit = scene.random.uniform("hit", *images.shape[1:]) <= share
    salt = scene.random.uniform("salt", *images.shape[1:]) <= 0.5
    return torch.where(hit, salt.to(images.dtype), images)


def shot_noise(images: Tensor, constants: Constants, scene: Scene) -> Tensor:
    """Photons: Poisson counts of mean c x, divided by c. The images are read as bytes."""
    (photons,) = constants
    levels = nearest_levels(images).long()
    return poisson_counts(levels, photons, scene.random.uniform("photons", *images.shape[1:])) / photons


def poisson_counts(levels: Tensor, photons: float, uniform: Tensor) -> Tensor:
    """Poisson counts of mean `photons` x level / 255: the quantiles at `uniform`, at most `photons`.

    A count above `photons` is whiter than white and would be clipped, so the table ends there.
    """
    counts = torch.arange(int(photons) + 1, dtype=torch.float64)  # [K]
    mean = photons * torch.arange(256, dtype=torch.float64)[:, None] / 255  # [256, 1]
    distribution = torch.special.xlogy(counts, mean).sub_(mean + torch.lgamma(counts + 1)).exp_().cumsum(1)
    distribution[:, -1] = 1
    # one sorted table for all levels: the row of level l is shifted into [l, l + 1]
    table = (distribution.clamp_(max=1) + torch.arange(256)[:, None]).to(uniform.device)  # [256, K]
    place = torch.searchsorted(table.flatten(), (uniform + levels).contiguous())
    return (place - levels * len(counts)).clamp_(min=0).to(torch.float64)
