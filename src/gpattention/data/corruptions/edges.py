"""Edges of a picture in bytes, as OpenCV's Canny finds them."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from gpattention.data.corruptions.filters import correlate, extend

_SHIFT = 15
_TAN_22 = int(0.4142135623730950488016887242097 * (1 << _SHIFT) + 0.5)  # OpenCV's fixed point


def canny(levels: Tensor, low: int, high: int) -> Tensor:
    """Edge pixels of levels [B, H, W], bool: local maxima of |dx| + |dy| above `low` that hang together
    with one above `high`.
    """
    dx = correlate(levels, [[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]], "nearest").long()
    dy = correlate(levels, [[-1.0, -2.0, -1.0], [0.0, 0.0, 0.0], [1.0, 2.0, 1.0]], "nearest").long()
    strength = dx.abs() + dy.abs()
    candidates = (strength > low) & _is_ridge(strength, dx, dy)
    return grow(candidates & (strength > high), candidates)


def _is_ridge(strength: Tensor, dx: Tensor, dy: Tensor) -> Tensor:
    """Whether a pixel is the largest of the three across the edge; of equals, the first one counts."""
    height, width = strength.shape[-2:]
    wide = pad(strength, (1, 1, 1, 1))

    def neighbour(y: int, x: int) -> Tensor:
        return wide[:, 1 + y : 1 + y + height, 1 + x : 1 + x + width]

    def above(y: int, x: int) -> Tensor:
        return strength > neighbour(y, x)

    flat = dx.abs() * _TAN_22
    steep = flat + (dx.abs() << (_SHIFT + 1))  # tan 67.5 = tan 22.5 + 2
    rise = dy.abs() << _SHIFT
    horizontal = above(0, -1) & (strength >= neighbour(0, 1))
    vertical = above(-1, 0) & (strength >= neighbour(1, 0))
    opposed = (dx < 0) != (dy < 0)
    diagonal = torch.where(opposed, above(-1, 1) & above(1, -1), above(-1, -1) & above(1, 1))
    return torch.where(rise < flat, horizontal, torch.where(rise > steep, vertical, diagonal))


def grow(seeds: Tensor, candidates: Tensor) -> Tensor:
    """All candidates that neighbouring candidates, diagonals too, connect with a seed."""
    while True:
        wide = extend(seeds, 1, 1, "nearest")
        rows = wide[:, :-2] | wide[:, 1:-1] | wide[:, 2:]
        grown = (rows[..., :-2] | rows[..., 1:-1] | rows[..., 2:]) & candidates
        if torch.equal(grown, seeds):
            return grown
        seeds = grown
