"""Distance to the nearest marked pixel, as OpenCV's 5 x 5 distance transform approximates it."""

import torch
from torch import Tensor
from torch.nn.functional import pad

_UNIT = 1 << 16  # OpenCV's fixed point
_STRAIGHT, _DIAGONAL, _KNIGHT = _UNIT, round(1.4 * _UNIT), round(2.1969 * _UNIT)
_MOVES = (
    [(y, x, _STRAIGHT) for y, x in ((0, 1), (1, 0))]
    + [(y, x, _DIAGONAL) for y, x in ((1, 1), (1, -1))]
    + [(y, x, _KNIGHT) for y, x in ((1, 2), (2, 1), (1, -2), (2, -1))]
)


def distance(marked: Tensor, most: int) -> Tensor:
    """Length of the shortest way to a marked pixel, at most `most`, float64; marked [B, H, W], bool.

    A way is made of straight steps of length 1, diagonal ones of 1.4 and knight's moves of 2.1969.
    """
    far = most * _UNIT
    height, width = marked.shape[-2:]
    length = torch.where(marked, 0, far)
    while True:
        wide = pad(length, (2, 2, 2, 2), value=far)
        shorter = length
        for y, x, step in _MOVES:
            for side in (1, -1):
                top, left = 2 + side * y, 2 + side * x
                shorter = torch.minimum(shorter, wide[:, top : top + height, left : left + width] + step)
        if torch.equal(shorter, length):
            return length.to(torch.float64) / _UNIT
        length = shorter
