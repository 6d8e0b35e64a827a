"""Independent draws with a variance per channel as one autograd function, for SGPA.

The reference is in `Posterior.sample`.
"""

from typing import Any

import torch
from torch import Tensor

from gpattention.gp.differentiation import once_differentiable
from gpattention.gp.fused.layout import by_rows, matrices, padded, token_major

_ROWS = 32


def fused_channel_draw(
    mean: Tensor,  # [..., N, D]
    variance: Tensor,  # [..., N, D]
    noise: Tensor,  # [n, ..., N, D]
) -> Tensor:
    """mean + sqrt(variance) * noise, with a zero gradient where the variance is 0.  [n, ..., N, D]"""
    lead = mean.shape[:-2]
    draws: Tensor = _ChannelDraw.apply(  # type: ignore[no-untyped-call]
        matrices(mean, lead), matrices(variance, lead), noise.contiguous()
    )
    return draws if draws.shape == noise.shape else draws.reshape(noise.shape)


class _ChannelDraw(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mean: Tensor, variance: Tensor, noise: Tensor) -> Tensor:
        from gpattention.gp.fused.draws.per_channel_kernels import channel_draw_kernel

        (B, H, N, D), n = mean.shape, noise.shape[0]
        # token by token, as the output projection reads it
        out = torch.empty(n, B, N, H, D, dtype=mean.dtype, device=mean.device).transpose(2, 3)
        channel_draw_kernel[(B * H, -(-N // _ROWS))](
            *by_rows(mean), *by_rows(variance), noise, out, *out.stride()[:4], mean.numel(), H, N, D, n,
            ROWS=_ROWS, DP=padded(D), num_warps=4,
        )  # fmt: skip
        ctx.save_for_backward(variance, noise)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from gpattention.gp.fused.draws.per_channel_kernels import channel_draw_backward_kernel

        variance, noise = ctx.saved_tensors
        (g,) = grads  # [n, B, H, N, D]
        n, B, H, N, D = g.shape
        g = g if g.stride(-1) == 1 else g.contiguous()
        d_variance = token_major(B, H, N, D, variance)
        channel_draw_backward_kernel[(B * H, -(-N // _ROWS))](
            g, *g.stride()[:4], *by_rows(variance), noise, *by_rows(d_variance), variance.numel(), H, N, D, n,
            ROWS=_ROWS, DP=padded(D), num_warps=4,
        )  # fmt: skip
        return g[0] if n == 1 else g.sum(0), d_variance, None
