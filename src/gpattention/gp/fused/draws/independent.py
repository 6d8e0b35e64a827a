"""Independent reparameterised draws as one autograd function; the reference is in `Posterior.sample`."""

from typing import Any

import torch
from torch import Tensor

from gpattention.gp.differentiation import once_differentiable
from gpattention.gp.fused.layout import by_rows, matrices, padded, vectors

_ROWS = 32
_LARGEST_GRID = 65535  # of the second and third axis of a launch


def draws_fit(shape: torch.Size) -> bool:
    """Whether draws [n, ..., Q, D] are within one launch and its 32-bit places within a sequence."""
    return max(shape[0], -(-shape[-2] // _ROWS)) <= _LARGEST_GRID and shape.numel() < 2**31


def fused_draw(
    mean: Tensor,  # [..., Q, D]
    spread: Tensor,  # [..., Q] standard deviation, or variance where `squared`
    noise: Tensor,  # [n, ..., Q, D]
    *,
    squared: bool,
) -> Tensor:
    """mean + standard deviation * noise, with a zero gradient where the spread is 0.  [n, ..., Q, D]"""
    lead = mean.shape[:-2]
    draws: Tensor = _Draw.apply(  # type: ignore[no-untyped-call]
        matrices(mean, lead), vectors(spread, lead), noise.contiguous(), squared
    )
    return draws if draws.shape == noise.shape else draws.reshape(noise.shape)


class _Draw(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mean: Tensor, spread: Tensor, noise: Tensor, squared: bool) -> Tensor:
        from gpattention.gp.fused.draws.independent_kernels import draw_kernel

        (B, H, N, D), n = mean.shape, noise.shape[0]
        spread = spread.contiguous()
        # token by token, as the output projection reads it
        out = torch.empty(n, B, N, H, D, dtype=mean.dtype, device=mean.device).transpose(2, 3)
        draw_kernel[(B * H, -(-N // _ROWS), n)](
            *by_rows(mean), spread, noise, out, *out.stride()[:4], B * H, H, N, D,
            SQUARED=squared, ROWS=_ROWS, DP=padded(D), num_warps=4,
        )  # fmt: skip
        ctx.save_for_backward(spread, noise)
        ctx.squared = squared
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from gpattention.gp.fused.draws.independent_kernels import draw_backward_kernel

        spread, noise = ctx.saved_tensors
        (g,) = grads  # [n, B, H, N, D]
        n, B, H, N, D = g.shape
        g = g if g.stride(-1) == 1 else g.contiguous()
        d_mean = g[0] if n == 1 else g.sum(0)
        d_spread = None
        if ctx.needs_input_grad[1]:
            d_spread = torch.empty_like(spread)
            draw_backward_kernel[(B * H, -(-N // _ROWS))](
                g, *g.stride()[:4], spread, noise, d_spread, B * H, H, N, D, n,
                SQUARED=ctx.squared, ROWS=_ROWS, DP=padded(D), num_warps=4,
            )  # fmt: skip
        return d_mean, d_spread, None, None
