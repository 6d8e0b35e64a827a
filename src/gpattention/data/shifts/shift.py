"""Shift a batch of images."""

import torch
from torch import Tensor

from gpattention.checks import check_whole, plain
from gpattention.data.corruptions.levels import fractions, nearest_levels
from gpattention.data.corruptions.random_fields import RandomFields
from gpattention.data.shifts.catalogue import SEVERITIES, SHIFTS


def shift(images: Tensor, name: str, severity: int, *, seed: int = 0, first_item: int = 0) -> Tensor:
    """Images [B, 1 or 3, H, W] under the shift `name` of `SHIFTS` at severity 1 to 3.

    Bytes come back as bytes, floats in [0, 1] as floats of their type, on their device.  Image b is item
    `first_item + b`; its random numbers depend on the seed, the item, the shift and the severity alone, so
    batches may be cut at will.

    >>> shift(torch.zeros(4, 3, 32, 32, dtype=torch.uint8), "turned", 2).shape
    torch.Size([4, 3, 32, 32])
    """
    if name not in SHIFTS:
        raise ValueError(f"name: expected one of {', '.join(SHIFTS)}, got {name!r}")
    severity = plain(severity)
    seed, first_item = check_whole("seed", seed), check_whole("first_item", first_item)
    if not isinstance(severity, int) or isinstance(severity, bool) or severity not in SEVERITIES:
        raise ValueError(f"severity: expected 1, 2 or 3, got {severity!r}")
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        raise ValueError(f"images: expected [B, 1 or 3, H, W], got {tuple(images.shape)}")
    if first_item < 0:
        raise ValueError(f"first_item: expected an index of at least 0, got {first_item}")
    chosen = SHIFTS[name]
    if chosen.coloured and images.shape[1] != 3:
        raise ValueError(f"images: expected three channels for {name}, got {images.shape[1]}")
    whole = images.dtype == torch.uint8
    if not whole and not images.is_floating_point():
        raise ValueError(f"images: expected bytes or floats, got {images.dtype}")
    values = fractions(images) if whole else images.to(torch.float64)
    if not whole and not bool(((values >= 0) & (values <= 1)).all()):
        raise ValueError("images: expected floats in [0, 1], got others")
    items = torch.arange(first_item, first_item + len(images), device=images.device)
    random = RandomFields(seed, items, f"shift/{name}", severity)
    changed = chosen.apply(values, chosen.strengths[severity - 1], random)
    return (nearest_levels(changed) if whole else changed.clamp(0, 1)).to(images.dtype)
