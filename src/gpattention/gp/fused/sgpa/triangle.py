"""Triangular factors with a positive diagonal as one autograd function.

The reference is lower.tril(-1) + diag(floor + softplus(raw)).
"""

from typing import Any

import torch
from torch import Tensor

from gpattention.gp.differentiation import once_differentiable

_COUNT = 512


def fused_triangle(
    lower: Tensor,  # [..., m, m], of which what lies below the diagonal counts
    raw: Tensor,  # [..., m]
    floor: float,
) -> Tensor:
    """Lower triangular matrices whose diagonal is floor + softplus(raw).  [..., m, m]"""
    found: Tensor = _Triangle.apply(lower, raw, floor)  # type: ignore[no-untyped-call]
    return found


class _Triangle(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lower: Tensor, raw: Tensor, floor: float) -> Tensor:
        from gpattention.gp.fused.sgpa.triangle_kernels import triangle_kernel

        lower, raw = lower.contiguous(), raw.contiguous()
        out = torch.empty_like(lower)
        triangle_kernel[(-(-lower.numel() // _COUNT),)](
            lower, raw, out, floor, lower.shape[-1], lower.numel(), COUNT=_COUNT
        )
        ctx.save_for_backward(raw)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from gpattention.gp.fused.sgpa.triangle_kernels import triangle_backward_kernel

        (raw,) = ctx.saved_tensors
        g = grads[0].contiguous()
        d_lower, d_raw = torch.empty_like(g), torch.empty_like(raw)
        triangle_backward_kernel[(-(-g.numel() // _COUNT),)](
            g, raw, d_lower, d_raw, g.shape[-1], g.numel(), COUNT=_COUNT
        )
        return d_lower, d_raw, None
