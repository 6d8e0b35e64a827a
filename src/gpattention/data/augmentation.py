"""Augmentation, off unless asked for: random crop with padding and horizontal flip of a whole batch."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from gpattention.data.keyed import CROP, FLIP, integers


@dataclass(frozen=True, slots=True)
class CropAndFlip:
    """Shift by up to `padding` pixels into black, and mirror every other image.

    What happens to an image depends on (seed, epoch, item) alone, not on its batch or device.
    """

    seed: int = 0
    padding: int = 4
    flip: bool = True

    def __post_init__(self) -> None:
        if self.padding < 0:
            raise ValueError(f"expected padding >= 0, got {self.padding}")

    def __call__(self, images: Tensor, items: Tensor, epoch: int) -> Tensor:
        """New images [B, C, H, W] of the same type; before normalisation, so that black is 0."""
        if images.ndim != 4 or items.shape != images.shape[:1]:
            raise ValueError(
                "expected images [B, C, H, W] and items [B], "
                f"got {tuple(images.shape)} and {tuple(items.shape)}"
            )
        items = items.to(images.device)
        height, width = images.shape[-2:]
        shifts = 2 * self.padding + 1
        top = integers(items, shifts, CROP, self.seed, epoch, 0)
        left = integers(items, shifts, CROP, self.seed, epoch, 1)
        rows = torch.arange(height, device=images.device) + top[:, None]  # [B, H]
        columns = torch.arange(width, device=images.device).expand(len(items), width)  # [B, W]
        if self.flip:
            mirrored = integers(items, 2, FLIP, self.seed, epoch).bool()[:, None]
            columns = torch.where(mirrored, width - 1 - columns, columns)
        columns = columns + left[:, None]
        padded = pad(images, (self.padding,) * 4)
        which = torch.arange(len(items), device=images.device)[:, None, None]
        taken = padded.permute(0, 2, 3, 1)[which, rows[:, :, None], columns[:, None, :]]  # [B, H, W, C]
        return taken.permute(0, 3, 1, 2).contiguous()
