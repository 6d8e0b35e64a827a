"""Pixels to model inputs: each channel less its mean, over its standard deviation."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import torch
from torch import Tensor

_CHUNK = 4096  # images whose float64 copies are held at a time


@dataclass(frozen=True, slots=True)
class Normalisation:
    """Mean and standard deviation of each channel, for pixels in [0, 1], and where they come from."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    source: str  # "training part", "published", ...

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std) or not self.mean:
            raise ValueError(
                f"expected mean and std to have one number per channel, got {self.mean} and {self.std}"
            )
        if not all(s > 0 for s in self.std):
            raise ValueError(f"expected std > 0 in every channel, got {self.std}")

    @classmethod
    def of(cls, images: Tensor, source: str = "training part") -> Self:
        """The moments of these images, [n, C, H, W]."""
        if images.ndim != 4 or len(images) == 0:
            raise ValueError(f"expected images of shape [n, C, H, W], n >= 1, got {tuple(images.shape)}")
        channels = images.shape[1]
        total = torch.zeros(channels, dtype=torch.float64, device=images.device)
        squares = torch.zeros_like(total)
        # sums of 8-bit integers are exact in float64, so neither chunks nor threads change the result
        for chunk in images.split(_CHUNK):
            x = chunk.double().transpose(0, 1).flatten(1)  # [C, n H W]
            total += x.sum(1)
            squares += x.square().sum(1)
        count = images.numel() // channels
        top = 255.0 if images.dtype == torch.uint8 else 1.0
        mean = total / count
        std = (squares / count - mean.square()).clamp_min(0).sqrt()
        return cls(tuple((mean / top).tolist()), tuple((std / top).tolist()), source)

    def __call__(self, images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Model inputs of the same shape; 8-bit images are divided by 255 first, others are in [0, 1]."""
        if images.ndim < 3 or images.shape[-3] != len(self.mean):
            raise ValueError(
                f"expected images of shape [..., {len(self.mean)}, H, W], got {tuple(images.shape)}"
            )
        top = 255.0 if images.dtype == torch.uint8 else 1.0
        shift, scale = _constants(self.mean, self.std, top, dtype, images.device)
        return (images.to(dtype) - shift) * scale


@lru_cache(maxsize=32)
def _constants(
    mean: tuple[float, ...], std: tuple[float, ...], top: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Kept on the device: a copy from the host in every step would make it wait."""
    shift = torch.tensor(mean, dtype=torch.float64) * top
    scale = 1 / (torch.tensor(std, dtype=torch.float64) * top)
    return shift.to(device, dtype).view(-1, 1, 1), scale.to(device, dtype).view(-1, 1, 1)  # [C, 1, 1]


# As commonly published: moments of the 50,000 training images.
PUBLISHED = {
    "cifar10": Normalisation((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), "published"),
    "cifar100": Normalisation((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), "published"),
}
