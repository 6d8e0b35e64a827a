"""What surrounds the attention, with Triton kernels beside slow references in plain operations.

    dropout         masks that are a hash of (seed, site, place): fused and plain paths drop the same entries
    column sums     the gradient of a bias, in two short launches: torch's own sum over rows takes longer than
                    the product that made them, at a few thousand rows
    residual_norm   residual, bias, dropout and LayerNorm; kept for the backward pass is y
    gelu_linear     bias, GELU, dropout and the linear map after them; kept is the input of the GELU
    norm_moments    LayerNorm of means, and the variance behind it; its reference is in `models.moments`

The seed of dropout is a tensor, so that a captured graph reads it anew at every replay; a site is one call of
dropout in a forward pass; a place is an entry of what it drops.  Seed and site make the two halves of a key
of `ops.noise`; two rounds of a 32-bit hash turn them and the place into bits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm, linear

from gpattention.ops.launching import kernels_of
from gpattention.ops.noise import seed_key, stream_key
from gpattention.ops.operators import Fused, Made
from gpattention.ops.switch import is_plain
from gpattention.ops.tapes import Result, Taped

__all__ = [
    "EMBEDDING_SITE",
    "MOST_COLUMNS",
    "Added",
    "drop",
    "first_site",
    "fused_norm_moments",
    "gather_and_sum",
    "gelu_linear",
    "rate_of",
    "residual_norm",
    "seeded_dropout",
]

EMBEDDING_SITE = 0
SITES = 5  # of a block: attention, GELU, feed-forward, and the last two of SGPA's inducing inputs
_WORD = 0xFFFFFFFF
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B  # multipliers of the 32-bit hash


def first_site(block: int) -> int:
    """The first of the `SITES` of a block.

    Args:
        block: its number, counted from 0.

    Returns:
        The site's number.
    """
    return EMBEDDING_SITE + 1 + SITES * block


def rate_of(dropout: nn.Dropout) -> float:
    """The rate in force.

    Args:
        dropout: a module.

    Returns:
        Its rate; 0 outside training.
    """
    return float(dropout.p) if dropout.training else 0.0


def threshold(rate: float) -> int:
    """An entry is dropped where its 24 random bits are below this."""
    return round(rate * 2**24)


def keep_mask(shape: torch.Size, rate: float, seed: Tensor, site: int) -> Tensor:
    """True where an entry is kept.  [*shape]"""
    key = stream_key(seed_key(seed), site)  # []
    place = torch.arange(shape.numel(), device=seed.device) & _WORD
    bits = _scramble(place ^ (key & _WORD))
    bits = _scramble((bits + ((key >> 32) & _WORD)) & _WORD)
    return ((bits >> 8) >= threshold(rate)).view(shape)


def seeded_dropout(x: Tensor, rate: float, seed: Tensor, site: int) -> Tensor:
    """x / (1 - rate) where it is kept, else 0.

    Args:
        x: what is dropped.
        rate: the share that is.
        seed: of the step.  []
        site: of the call.

    Returns:
        A tensor like x.
    """
    if rate == 0:
        return x
    if rate >= 1:
        return torch.zeros_like(x)
    return torch.where(keep_mask(x.shape, rate, seed, site), x * (1 / (1 - rate)), 0.0)


def drop(dropout: nn.Module, x: Tensor, seed: Tensor | None, site: int) -> Tensor:
    """What a module of dropout does, with the mask of a site.

    Args:
        dropout: the module, which is called where somebody watches it, or where there is no seed.
        x: what is dropped.
        seed: of the step.  []
        site: of the call.

    Returns:
        A tensor like x.
    """
    if seed is None or not is_plain(dropout, nn.Dropout):
        return dropout(x)
    return seeded_dropout(x, rate_of(dropout), seed, site)


def _scramble(x: Tensor) -> Tensor:
    """A bijection of 32-bit words, held in int64: shifts, exclusive ors and two products (lowbias32)."""
    x = ((x ^ (x >> 16)) * _FIRST) & _WORD
    x = ((x ^ (x >> 15)) * _SECOND) & _WORD
    return x ^ (x >> 16)


MOST_PROGRAMS = 512  # partial sums of a first stage
_ENTRIES = 2048  # of a program's tile
_COLUMNS = 8  # that one program of the second stage sums: a sector of memory
MOST_COLUMNS = 1024  # a tile holds whole rows


def tile(columns: int, entries: int = _ENTRIES) -> tuple[int, int]:
    """Rows of a tile, and the power of two its columns are padded to."""
    width = max(16, 1 << (columns - 1).bit_length())
    return max(1, entries // width), width


def programs(rows: int, tile_rows: int) -> tuple[int, int]:
    """How many tiles there are, and how many programs share them."""
    tiles = -(-rows // tile_rows)
    return tiles, min(tiles, MOST_PROGRAMS)


def finish_sums(partial: Tensor) -> Tensor:
    """Sum of at most `MOST_PROGRAMS` partial sums.  [P, ...] -> [...]"""
    count, columns = partial.shape[0], partial[0].numel()
    out = torch.empty(partial.shape[1:], dtype=partial.dtype, device=partial.device)
    padded = max(16, 1 << (count - 1).bit_length())
    kernels_of("layers").finish_kernel[(-(-columns // _COLUMNS),)](
        partial, out, count, columns, COUNT=padded, COLUMNS=_COLUMNS, num_warps=4
    )
    return out


def gather_and_sum(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Matrices side by side, and their column sums.

    Args:
        parts: two to four of shape [rows, C].

    Returns:
        [rows, parts * C] and [parts * C].
    """
    gathered, sums = _GATHERED(*parts)
    return gathered, sums


def _gather_and_sum(*parts: Tensor) -> Result:
    (rows, columns), like = parts[0].shape, parts[0]
    total = len(parts) * columns
    tile_rows, width = tile(columns)
    tiles, count = programs(rows, tile_rows)
    out = torch.empty(rows, total, dtype=like.dtype, device=like.device)
    partial = torch.empty(count, total, dtype=like.dtype, device=like.device)
    read = [part if part.stride(1) == 1 else part.contiguous() for part in parts]
    strided = [each for part in (read * 2)[:4] for each in (part, part.stride(0))]
    kernels_of("layers").gather_kernel[(count,)](
        *strided, out, partial, rows, tiles, total, columns,
        PARTS=len(parts), ROWS=tile_rows, CP=width, num_warps=4,
    )  # fmt: skip
    return [out, finish_sums(partial)]


_GATHERED = Taped(_gather_and_sum)


def gather_and_sum_reference(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The same in plain operations."""
    out = torch.cat(list(parts), 1)
    return out, out.sum(0)


_FORWARD_ENTRIES = 1024  # of a program's tile
ALONE, ADDED, INSIDE = 0, 1, 2  # how the residual enters; the kernels' KIND


@dataclass(frozen=True)
class Added:
    """What is added to a residual stream: drop(z + bias).

    Attributes:
        z: [..., E].
        bias: [E].
        rate: of dropout.
        site: of dropout.
        inside: the stream itself is dropped with it, as positions are.
    """

    z: Tensor
    bias: Tensor | None
    rate: float
    site: int
    inside: bool = False


def residual_norm(
    x: Tensor,  # [..., E], or fewer leading axes: the same for all of them
    added: Added | None,
    weight: Tensor,  # [E] of the LayerNorm
    shift: Tensor,  # [E]
    eps: float,
    seed: Tensor | None,  # []
) -> tuple[Tensor, Tensor]:
    """y = x + drop(z + bias) and its LayerNorm.

    Args:
        x: the residual stream.
        added: what is added to it; None for nothing.
        weight: of the LayerNorm.
        shift: of the LayerNorm.
        eps: of the LayerNorm.
        seed: of dropout.

    Returns:
        Both.  [..., E] each

    Raises:
        ValueError: the rate of dropout is not in [0, 1), or has no seed.
    """
    if added is None:
        _, n = _RESIDUAL_NORM(x, None, None, weight, shift, None, ALONE, 0.0, 0, eps)
        return x, n
    kind = INSIDE if added.inside else ADDED
    return _RESIDUAL_NORM(x, added.z, added.bias, weight, shift, seed, kind, added.rate, added.site, eps)


def residual_norm_reference(
    x: Tensor, added: Added | None, weight: Tensor, shift: Tensor, eps: float, seed: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The same in plain operations."""
    y = x
    if added is not None:
        z = added.z if added.bias is None else added.z + added.bias
        z = z + x if added.inside else z
        z = z if seed is None else seeded_dropout(z, added.rate, seed, added.site)
        y = z if added.inside else x + z
    return y, layer_norm(y, weight.shape, weight, shift, eps)


def dropping(rate: float, seed: Tensor | None) -> dict[str, float]:
    """The kernels' constants of a rate of dropout."""
    if not 0 <= rate < 1 or (rate > 0 and seed is None):
        raise ValueError(f"expected a rate of dropout in [0, 1), and a seed where it is above 0, got {rate}")
    return {"THRESHOLD": threshold(rate), "SCALE": 1 / (1 - rate)}


def _residual_norm(
    x: Tensor,
    z: Tensor | None,
    bias: Tensor | None,
    weight: Tensor,
    shift: Tensor,
    seed: Tensor | None,
    kind: int,
    rate: float,
    site: int,
    eps: float,
) -> Made:
    like = x if z is None else z
    x, like, width = x.contiguous(), like.contiguous(), weight.numel()
    y = None if kind == ALONE else torch.empty_like(like)
    n = torch.empty_like(like)
    rows = like.numel() // width
    tile_rows, padded = tile(width, _FORWARD_ENTRIES)
    kernels_of("layers").residual_norm_kernel[(-(-rows // tile_rows),)](
        x, like, weight if bias is None else bias, weight, shift, weight if seed is None else seed,
        x if y is None else y, n, rows, x.numel() // width, width, site,
        KIND=kind, BIASED=bias is not None, EPS=eps, EP=padded, **dropping(rate, seed),
        REPEATED=x.numel() < like.numel(), ROWS=tile_rows, num_warps=4,
    )  # fmt: skip
    return {"y": y, "n": n, "alone": x if y is None else None}


def _residual_norm_backward(
    by_y: Tensor | None, by_n: Tensor | None, x_shape: Sequence[int], y: Tensor | None,
    alone: Tensor | None, bias: Tensor | None, weight: Tensor, seed: Tensor | None, kind: int, rate: float,
    site: int, eps: float, needed: Sequence[bool],
) -> Made:  # fmt: skip
    summed = alone if y is None else y
    assert summed is not None
    by_n = torch.zeros_like(summed) if by_n is None else by_n.contiguous()
    used, by_y = by_y is not None, summed if by_y is None else by_y.contiguous()
    width, dropped = weight.numel(), dropping(rate, seed)
    rows = summed.numel() // width
    tile_rows, padded = tile(width)
    tiles, count = programs(rows, tile_rows)
    by_x = None if kind == INSIDE else torch.empty_like(summed)
    by_z = torch.empty_like(summed) if kind == INSIDE or (kind == ADDED and dropped["THRESHOLD"]) else by_x
    partial = torch.empty(count, 3, width, dtype=summed.dtype, device=summed.device)
    kernels_of("layers").residual_norm_backward_kernel[(count,)](
        summed, weight, by_y, by_n, weight if seed is None else seed, by_z if by_x is None else by_x, by_z,
        partial, rows, tiles, width, site, KIND=kind, BIASED=bias is not None, EPS=eps, EP=padded, **dropped,
        USED=used, ROWS=tile_rows, num_warps=4,
    )  # fmt: skip
    by_weight, by_shift, by_bias = finish_sums(partial)
    by_x = by_z if by_x is None else by_x
    if needed[0] and by_x is not None and math.prod(x_shape) < summed.numel():
        by_x = by_x.view(-1, *x_shape).sum(0)
    return {
        "x": by_x if needed[0] else None, "z": None if kind == ALONE else by_z,
        "bias": None if bias is None else by_bias, "weight": by_weight, "shift": by_shift,
    }  # fmt: skip


_RESIDUAL_NORM = Fused("residual_norm", _residual_norm, ("y", "n"), _residual_norm_backward)


def fused_norm_moments(
    x: Tensor, v: Tensor, weight: Tensor, shift: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """LayerNorm of the mean x, and the variance behind it (eq. M2 of `models.moments`); without a gradient.

    Args:
        x: [..., E]
        v: its variance.  [..., E]
        weight: of the LayerNorm.  [E]
        shift: of the LayerNorm.  [E]
        eps: of the LayerNorm.

    Returns:
        Both.  [..., E] each
    """
    x, v, width = x.contiguous(), v.contiguous(), weight.numel()
    mean, variance = torch.empty_like(x), torch.empty_like(x)
    rows, (tile_rows, padded) = x.numel() // width, tile(width)
    kernels_of("layers").norm_moments_kernel[(-(-rows // tile_rows),)](
        x, v, weight, shift, mean, variance, rows, width, EPS=eps, ROWS=tile_rows, EP=padded, num_warps=4
    )  # fmt: skip
    return mean, variance


_ROWS, _GELU_COLUMNS = 16, 128


def gelu_linear(
    h: Tensor,  # [..., F]
    bias: Tensor | None,  # [F]
    weight: Tensor,  # [E, F]
    rate: float,
    seed: Tensor | None,  # []
    site: int,
) -> Tensor:
    """drop(gelu(h + bias)) weight^T.

    Args:
        h: input of the GELU.
        bias: added to it.
        weight: of the linear map.
        rate: of dropout.
        seed: of dropout.
        site: of dropout.

    Returns:
        [..., E].

    Raises:
        ValueError: the rate of dropout is not in [0, 1), or has no seed.
    """
    z: Tensor
    (z,) = _GELU_LINEAR(h, bias, weight, seed, rate, site)
    return z


def gelu_linear_reference(
    h: Tensor, bias: Tensor | None, weight: Tensor, rate: float, seed: Tensor | None, site: int
) -> Tensor:
    """The same in plain operations."""
    a = gelu(h if bias is None else h + bias)
    return linear(a if seed is None else seeded_dropout(a, rate, seed, site), weight)


def _gelu_linear(
    h: Tensor, bias: Tensor | None, weight: Tensor, seed: Tensor | None, rate: float, site: int
) -> Made:
    h, hidden = h.contiguous(), weight.shape[1]
    a, rows = torch.empty_like(h), h.numel() // hidden
    kernels_of("layers").gelu_kernel[(-(-rows // _ROWS), -(-hidden // _GELU_COLUMNS))](
        h, h if bias is None else bias, h if seed is None else seed, a, rows, hidden, site,
        BIASED=bias is not None, ROWS=_ROWS, FP=_GELU_COLUMNS, **dropping(rate, seed), num_warps=4,
    )  # fmt: skip
    return {"z": linear(a, weight)}


def _gelu_linear_backward(
    by_z: Tensor, h: Tensor, bias: Tensor | None, weight: Tensor, seed: Tensor | None, rate: float,
    site: int, needed: Sequence[bool],
) -> Made:  # fmt: skip
    h, (width, hidden) = h.contiguous(), weight.shape
    by_z = by_z.reshape(-1, width)
    by_a, a = by_z @ weight, torch.empty_like(h)  # the first becomes the gradient of h
    tiles, count = programs(len(by_z), _ROWS)
    partial = torch.empty(count, hidden, dtype=h.dtype, device=h.device)
    kernels_of("layers").gelu_backward_kernel[(count, -(-hidden // _GELU_COLUMNS))](
        h, h if bias is None else bias, h if seed is None else seed, by_a, by_a, a, partial,
        len(by_z), tiles, hidden, site,
        BIASED=bias is not None, ROWS=_ROWS, FP=_GELU_COLUMNS, **dropping(rate, seed), num_warps=4,
    )  # fmt: skip
    by_weight = by_z.t() @ a.view(-1, hidden) if needed[2] else None
    by_bias = None if bias is None else finish_sums(partial)
    return {"h": by_a.view(h.shape), "bias": by_bias, "weight": by_weight}


_GELU_LINEAR = Fused("gelu_linear", _gelu_linear, ("z",), _gelu_linear_backward)
