"""Bias, GELU, dropout and the linear map after them as one autograd function.

What is kept for the backward pass is the input of the GELU; its output is made anew beside the gradient.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear

from gpattention.attention.column_sums import finish_sums, programs
from gpattention.gp.differentiation import once_differentiable
from gpattention.models.fused.residual_norm import dropping
from gpattention.models.seeded_dropout import seeded_dropout

_ROWS, _COLUMNS = 16, 128


def gelu_linear(
    h: Tensor,  # [..., F]
    bias: Tensor | None,  # [F]
    weight: Tensor,  # [E, F]
    rate: float,
    seed: Tensor | None,  # []
    site: int,
) -> Tensor:
    """drop(gelu(h + bias)) weight^T.  [..., E]"""
    return _GeluLinear.apply(h, bias, weight, rate, seed, site)  # type: ignore[no-untyped-call]


def gelu_linear_reference(
    h: Tensor, bias: Tensor | None, weight: Tensor, rate: float, seed: Tensor | None, site: int
) -> Tensor:
    """The same in plain operations."""
    a = gelu(h if bias is None else h + bias)
    return linear(a if seed is None else seeded_dropout(a, rate, seed, site), weight)


class _GeluLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        bias: Tensor | None,
        weight: Tensor,
        rate: float,
        seed: Tensor | None,
        site: int,
    ) -> Tensor:
        from gpattention.models.fused.kernels import gelu_kernel

        h, hidden = h.contiguous(), weight.shape[1]
        a, rows = torch.empty_like(h), h.numel() // hidden
        options = {"BIASED": bias is not None, "ROWS": _ROWS, "FP": _COLUMNS, **dropping(rate, seed)}
        gelu_kernel[(-(-rows // _ROWS), -(-hidden // _COLUMNS))](
            h, h if bias is None else bias, h if seed is None else seed, a, rows, hidden, site,
            **options, num_warps=4,
        )  # fmt: skip
        ctx.save_for_backward(h, bias, weight, seed)
        ctx.options, ctx.site = options, site
        return linear(a, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_z: Tensor) -> tuple[Tensor | None, ...]:
        from gpattention.models.fused.kernels import gelu_backward_kernel

        h, bias, weight, seed = ctx.saved_tensors
        width, hidden = weight.shape
        by_z = by_z.reshape(-1, width)
        by_a, a = by_z @ weight, torch.empty_like(h)  # the first becomes the gradient of h
        tiles, count = programs(len(by_z), _ROWS)
        partial = torch.empty(count, hidden, dtype=h.dtype, device=h.device)
        gelu_backward_kernel[(count, -(-hidden // _COLUMNS))](
            h, h if bias is None else bias, h if seed is None else seed, by_a, by_a, a, partial,
            len(by_z), tiles, hidden, ctx.site, **ctx.options, num_warps=4,
        )  # fmt: skip
        by_weight = by_z.t() @ a.view(-1, hidden) if ctx.needs_input_grad[2] else None
        by_bias = None if bias is None else finish_sums(partial)
        return by_a.view(h.shape), by_bias, by_weight, None, None, None
