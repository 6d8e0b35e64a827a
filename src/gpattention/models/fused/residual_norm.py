"""Residual, bias, dropout and LayerNorm as one autograd function.

What is kept for the backward pass is y; mean, scale and mask are made anew.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from gpattention.attention.column_sums import finish_sums, programs, tile
from gpattention.gp.differentiation import once_differentiable
from gpattention.models.seeded_dropout import seeded_dropout, threshold

_FORWARD_ENTRIES = 1024  # of a program's tile
ALONE, ADDED, INSIDE = 0, 1, 2  # how the residual enters; the kernels' KIND


@dataclass(frozen=True)
class Added:
    """What is added to a residual stream: drop(z + bias)."""

    z: Tensor  # [..., E]
    bias: Tensor | None  # [E]
    rate: float  # of dropout
    site: int
    inside: bool = False  # the stream itself is dropped with it, as positions are


def residual_norm(
    x: Tensor,  # [..., E], or fewer leading axes: the same for all of them
    added: Added | None,
    weight: Tensor,  # [E] of the LayerNorm
    shift: Tensor,  # [E]
    eps: float,
    seed: Tensor | None,  # []
) -> tuple[Tensor, Tensor]:
    """y = x + drop(z + bias) and its LayerNorm.  [..., E] each"""
    if added is None:
        return _ResidualNorm.apply(x, None, None, weight, shift, None, ALONE, 0.0, 0, eps)  # type: ignore[no-untyped-call]
    kind = INSIDE if added.inside else ADDED
    return _ResidualNorm.apply(  # type: ignore[no-untyped-call]
        x, added.z, added.bias, weight, shift, seed, kind, added.rate, added.site, eps
    )


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


class _ResidualNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
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
    ) -> tuple[Tensor, Tensor]:
        from gpattention.models.fused.kernels import residual_norm_kernel

        like = x if z is None else z
        x, like, width = x.contiguous(), like.contiguous(), weight.numel()
        y = x if kind == ALONE else torch.empty_like(like)
        n = torch.empty_like(like)
        rows = like.numel() // width
        tile_rows, padded = tile(width, _FORWARD_ENTRIES)
        options = {"KIND": kind, "BIASED": bias is not None, "EPS": eps, "EP": padded, **dropping(rate, seed)}
        repeated = x.numel() < like.numel()
        residual_norm_kernel[(-(-rows // tile_rows),)](
            x, like, weight if bias is None else bias, weight, shift, weight if seed is None else seed, y, n,
            rows, x.numel() // width, width, site, **options, REPEATED=repeated, ROWS=tile_rows, num_warps=4,
        )  # fmt: skip
        ctx.save_for_backward(y, weight, seed)
        ctx.options, ctx.site, ctx.shape, ctx.repeated = options, site, x.shape, repeated
        ctx.set_materialize_grads(False)
        return y, n

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_y: Tensor | None, by_n: Tensor | None) -> tuple[Tensor | None, ...]:
        from gpattention.models.fused.kernels import residual_norm_backward_kernel

        y, weight, seed = ctx.saved_tensors
        by_n = torch.zeros_like(y) if by_n is None else by_n.contiguous()
        used, by_y = by_y is not None, y if by_y is None else by_y.contiguous()
        options, width, kind = ctx.options, weight.numel(), ctx.options["KIND"]
        rows = y.numel() // width
        tile_rows, _ = tile(width)
        tiles, count = programs(rows, tile_rows)
        by_x = None if kind == INSIDE else torch.empty_like(y)
        by_z = torch.empty_like(y) if kind == INSIDE or (kind == ADDED and options["THRESHOLD"]) else by_x
        partial = torch.empty(count, 3, width, dtype=y.dtype, device=y.device)
        residual_norm_backward_kernel[(count,)](
            y, weight, by_y, by_n, weight if seed is None else seed, by_z if by_x is None else by_x, by_z,
            partial, rows, tiles, width, ctx.site, **options, USED=used, ROWS=tile_rows, num_warps=4,
        )  # fmt: skip
        by_weight, by_shift, by_bias = finish_sums(partial)
        by_x = by_z if by_x is None else by_x
        if ctx.repeated and ctx.needs_input_grad[0] and by_x is not None:
            by_x = by_x.view(-1, *ctx.shape).sum(0)
        return (
            by_x if ctx.needs_input_grad[0] else None,
            None if kind == ALONE else by_z,
            by_bias if options["BIASED"] else None,
            by_weight,
            by_shift,
            *(None,) * 5,
        )
