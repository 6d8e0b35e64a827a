"""Linear interpolation between pixels: at any places, and of a magnified centre."""

import math

import torch
from torch import Tensor

from gpattention.data.corruptions.filters import Border, inside


def sample_linearly(images: Tensor, y: Tensor, x: Tensor, border: Border) -> Tensor:
    """Values of images [B, C, H, W] at the places y, x [B, H', W'], by the four pixels around each."""
    height, width = images.shape[-2:]
    top, left = y.floor(), x.floor()
    down, right = (y - top)[:, None], (x - left)[:, None]  # [B, 1, H', W'], weights
    rows = [inside(top.long() + i, height, border) for i in (0, 1)]
    columns = [inside(left.long() + i, width, border) for i in (0, 1)]
    upper = _pick(images, rows[0], columns[0]) * (1 - right) + _pick(images, rows[0], columns[1]) * right
    lower = _pick(images, rows[1], columns[0]) * (1 - right) + _pick(images, rows[1], columns[1]) * right
    return upper * (1 - down) + lower * down


def _pick(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Pixels of images [B, C, H, W] at rows, columns [B, H', W'].  [B, C, H', W']"""
    batch, channels, _, width = images.shape
    place = (rows * width + columns).flatten(1)[:, None].expand(-1, channels, -1)
    return images.flatten(2).gather(2, place).reshape(batch, channels, *rows.shape[1:])


def magnify_centre(images: Tensor, factor: float) -> Tensor:
    """The middle of the images, magnified by `factor` to their own size.

    As the published `clipped_zoom`: cut out ceil(size / factor) pixels, stretch them linearly to
    round(cut * factor) with the corner pixels at the corners, keep the middle `size` of these.
    """
    for axis in (-2, -1):
        size = images.shape[axis]
        cut = math.ceil(size / factor)
        stretched = round(cut * factor)
        first = (stretched - size) // 2
        at = torch.arange(first, first + size, device=images.device, dtype=torch.float64)
        at = at * (cut - 1) / max(stretched - 1, 1)
        low = at.floor().clamp_(max=max(cut - 2, 0))
        share = at - low
        left = low.long() + (size - cut) // 2
        right = (left + 1).clamp_(max=size - 1)
        if axis == -2:
            share = share[:, None]
        images = images.index_select(axis, left) * (1 - share) + images.index_select(axis, right) * share
    return images
