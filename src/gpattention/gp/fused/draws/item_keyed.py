"""Independent draws with item-keyed noise; the reference is `Posterior.sample` with `ItemNoise.normal`.

The noise is a hash of its place, so the backward pass makes it again instead of keeping it.
"""

from typing import Any

import torch
from torch import Tensor

from gpattention.gp.differentiation import once_differentiable
from gpattention.gp.fused.layout import by_rows, matrices, padded, vectors

_ROWS = 32


def fused_item_draw(
    mean: Tensor,  # [items, ..., Q, D]
    spread: Tensor,  # [items, ..., Q] standard deviation, or variance where `squared`
    keys: Tensor,  # [items]
    *,
    stream: int,
    draws: int,
    squared: bool,
) -> Tensor:
    """mean + standard deviation * noise, with a zero gradient where the spread is 0.  [n, ..., Q, D]"""
    lead = mean.shape[:-2]
    found: Tensor = _ItemDraw.apply(  # type: ignore[no-untyped-call]
        matrices(mean, lead), vectors(spread, lead), keys, stream, draws, squared
    )
    return found.reshape(draws, *mean.shape)


class _ItemDraw(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, spread: Tensor, keys: Tensor, stream: int, draws: int, squared: bool
    ) -> Tensor:
        from gpattention.gp.fused.draws.item_keyed_kernels import item_draw_kernel

        B, H, N, D = mean.shape
        spread, keys = spread.contiguous(), keys.contiguous()
        # token by token, as the output projection reads it
        out = torch.empty(draws, B, N, H, D, dtype=mean.dtype, device=mean.device).transpose(2, 3)
        item_draw_kernel[(B * H, -(-N // _ROWS), draws)](
            *by_rows(mean), spread, keys, stream, out, *out.stride()[:4], B * H // len(keys), H, N, D,
            SQUARED=squared, ROWS=_ROWS, DP=padded(D), num_warps=4,
        )  # fmt: skip
        ctx.save_for_backward(spread, keys)
        ctx.stream, ctx.squared = stream, squared
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from gpattention.gp.fused.draws.item_keyed_kernels import item_draw_backward_kernel

        spread, keys = ctx.saved_tensors
        (g,) = grads  # [n, B, H, N, D]
        n, B, H, N, D = g.shape
        g = g if g.stride(-1) == 1 else g.contiguous()
        d_mean = g[0] if n == 1 else g.sum(0)
        d_spread = None
        if ctx.needs_input_grad[1]:
            d_spread = torch.empty_like(spread)
            item_draw_backward_kernel[(B * H, -(-N // _ROWS))](
                g, *g.stride()[:4], spread, keys, ctx.stream, d_spread, B * H // len(keys), H, N, D, n,
                SQUARED=ctx.squared, ROWS=_ROWS, DP=padded(D), num_warps=4,
            )  # fmt: skip
        return d_mean, d_spread, None, None, None, None
