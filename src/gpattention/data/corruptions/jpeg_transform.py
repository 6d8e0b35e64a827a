"""The cosine transform of JPEG in integers, with libjpeg's precision ("islow").

The factorisation is that of C. Loeffler, A. Ligtenberg and G. Moschytz, ICASSP 1989. Constants have 13
fractional bits, and the numbers between the two passes have 2.
"""

import torch
from torch import Tensor

_BITS, _BETWEEN = 13, 2


def _fix(number: float) -> int:
    return round(number * (1 << _BITS))


# rotations of the even half
_E1, _E2, _E3 = _fix(0.541196100), _fix(0.765366865), _fix(-1.847759065)
# and of the odd half
_O0, _O1, _O2, _O3 = _fix(0.298631336), _fix(2.053119869), _fix(3.072711026), _fix(1.501321110)
_R1, _R2, _R3, _R4 = _fix(-0.899976223), _fix(-2.562915447), _fix(-1.961570560), _fix(-0.390180644)
_R5 = _fix(1.175875602)


def frequencies(blocks: Tensor) -> Tensor:
    """Eight times the orthonormal cosine transform of blocks [..., 8, 8] over both axes; integers."""
    rows = _forward(blocks, -1, even_up=_BETWEEN, down=_BITS - _BETWEEN)
    return _forward(rows, -2, even_up=-_BETWEEN, down=_BITS + _BETWEEN)


def from_frequencies(coefficients: Tensor) -> Tensor:
    """The blocks of orthonormal cosine coefficients [..., 8, 8], to the nearest integer."""
    columns = _backward(coefficients, -2, down=_BITS - _BETWEEN)
    return _backward(columns, -1, down=_BITS + _BETWEEN + 3)


def _forward(blocks: Tensor, axis: int, even_up: int, down: int) -> Tensor:
    x = blocks.unbind(axis)
    sums = [x[i] + x[7 - i] for i in range(4)]
    differences = [x[i] - x[7 - i] for i in range(4)]
    outer, inner = sums[0] + sums[3], sums[1] + sums[2]
    outer_gap, inner_gap = sums[0] - sums[3], sums[1] - sums[2]
    turned = (inner_gap + outer_gap) * _E1
    f1, f3, f5, f7 = _rotate_odd(differences[3], differences[2], differences[1], differences[0])[::-1]
    return torch.stack(
        [
            _scale(outer + inner, even_up),
            _round_off(f1, down),
            _round_off(turned + outer_gap * _E2, down),
            _round_off(f3, down),
            _scale(outer - inner, even_up),
            _round_off(f5, down),
            _round_off(turned + inner_gap * _E3, down),
            _round_off(f7, down),
        ],
        axis,
    )


def _backward(coefficients: Tensor, axis: int, down: int) -> Tensor:
    f = coefficients.unbind(axis)
    turned = (f[2] + f[6]) * _E1
    low, high = turned + f[2] * _E2, turned + f[6] * _E3
    plus, minus = (f[0] + f[4]) << _BITS, (f[0] - f[4]) << _BITS
    even = [plus + low, minus + high, minus - high, plus - low]
    odd = _rotate_odd(f[7], f[5], f[3], f[1])[::-1]
    first = [_round_off(e + o, down) for e, o in zip(even, odd, strict=True)]
    last = [_round_off(e - o, down) for e, o in zip(even, odd, strict=True)]
    return torch.stack([*first, *last[::-1]], axis)


def _rotate_odd(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The odd half, which is its own transpose: used in both directions."""
    common = (a + c + b + d) * _R5
    ad, bc = (a + d) * _R1, (b + c) * _R2
    ac, bd = (a + c) * _R3 + common, (b + d) * _R4 + common
    return a * _O0 + ad + ac, b * _O1 + bc + bd, c * _O2 + bc + ac, d * _O3 + ad + bd


def _round_off(x: Tensor, bits: int) -> Tensor:
    """Divide by 2^bits, halves up."""
    return (x + (1 << (bits - 1))) >> bits


def _scale(x: Tensor, bits: int) -> Tensor:
    return x << bits if bits >= 0 else _round_off(x, -bits)
