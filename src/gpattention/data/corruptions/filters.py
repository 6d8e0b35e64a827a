"""Filters as sums of shifted images.

A convolution of torch's may take another algorithm for another batch size; sums of shifted images add up the
same numbers in the same order for every batch.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Border = Literal["nearest", "mirror", "symmetric"]


def inside(positions: Tensor, size: int, border: Border) -> Tensor:
    """Where a position beyond the border is read from, of `size` pixels in a row.

    nearest: a a a [a b c d] d d d; mirror: d c b [a b c d] c b a; symmetric: c b a [a b c d] d c b.
    """
    if border == "nearest" or size == 1:
        return positions.clamp(0, size - 1)
    if border == "mirror":
        period = 2 * size - 2
        folded = positions.remainder(period)
        return torch.minimum(folded, period - folded)
    folded = positions.remainder(2 * size)
    return torch.minimum(folded, 2 * size - 1 - folded)


def extend(images: Tensor, rows: int, columns: int, border: Border) -> Tensor:
    """Images with a margin on every side.  [..., H + 2 rows, W + 2 columns]"""
    height, width = images.shape[-2:]
    if rows:
        y = torch.arange(-rows, height + rows, device=images.device)
        images = images.index_select(-2, inside(y, height, border))
    if columns:
        x = torch.arange(-columns, width + columns, device=images.device)
        images = images.index_select(-1, inside(x, width, border))
    return images


def correlate(images: Tensor, kernel: Sequence[Sequence[float]], border: Border) -> Tensor:
    """Out(y, x) = sum over the kernel's (i, j) of kernel[i][j] in(y + i - centre, x + j - centre)."""
    height, width = images.shape[-2:]
    wide = extend(images, len(kernel) // 2, len(kernel[0]) // 2, border)
    total = torch.zeros_like(images)
    for i, row in enumerate(kernel):
        for j, weight in enumerate(row):
            if weight != 0:
                total.add_(wide[..., i : i + height, j : j + width], alpha=weight)
    return total


def gaussian_weights(sigma: float, radius: int) -> list[float]:
    """Samples of a Gaussian at -radius..radius, of sum 1."""
    weights = [math.exp(-0.5 * (i / sigma) ** 2) for i in range(-radius, radius + 1)]
    return [weight / sum(weights) for weight in weights]


def gaussian_filter(
    images: Tensor, sigma: float, *, border: Border = "nearest", truncate: float = 4.0
) -> Tensor:
    """A Gaussian blur cut off at `truncate` standard deviations, rounded to whole pixels."""
    radius = int(truncate * sigma + 0.5)
    if radius == 0:
        return images.clone()
    weights = gaussian_weights(sigma, radius)
    return correlate(correlate(images, [[w] for w in weights], border), [weights], border)


def box_filter(images: Tensor) -> Tensor:
    """The mean over 3 x 3 pixels, mirrored at the border."""
    ones = [1.0, 1.0, 1.0]
    return correlate(correlate(images, [[w] for w in ones], "mirror"), [ones], "mirror") / 9
