"""Noise of a sensor: Gaussian, shot, impulse and speckle."""

import torch
from torch import Tensor

from gpattention.data.corruptions.core import Scene, corruption, nearest_levels


# standard deviation
@corruption("noise", (0.04,), (0.06,), (0.08,), (0.09,), (0.10,))
def gaussian_noise(images: Tensor, scene: Scene, scale: float) -> Tensor:
    """Independent normal noise of standard deviation c on every channel of every pixel."""
    return images + scale * scene.random.normal("noise", *images.shape[1:])


# photons at white
@corruption("noise", (500,), (250,), (100,), (75,), (50,))
def shot_noise(images: Tensor, scene: Scene, photons: float) -> Tensor:
    """Photons: Poisson counts of mean c x, divided by c. The images are read as bytes."""
    levels = nearest_levels(images).long()
    return poisson_counts(levels, photons, scene.random.uniform("photons", *images.shape[1:])) / photons


# share of the values hit
@corruption("noise", (0.01,), (0.02,), (0.03,), (0.05,), (0.07,))
def impulse_noise(images: Tensor, scene: Scene, share: float) -> Tensor:
    """A share c of all values becomes 0 or 1, with equal odds."""
    hit = scene.random.uniform("hit", *images.shape[1:]) <= share
    salt = scene.random.uniform("salt", *images.shape[1:]) <= 0.5
    return torch.where(hit, salt.to(images.dtype), images)


# standard deviation over brightness
@corruption("noise", (0.06,), (0.1,), (0.12,), (0.16,), (0.2,))
def speckle_noise(images: Tensor, scene: Scene, scale: float) -> Tensor:
    """Normal noise in proportion to the brightness."""
    return images + images * scale * scene.random.normal("noise", *images.shape[1:])


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
