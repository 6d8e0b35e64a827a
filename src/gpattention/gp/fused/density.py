"""The log density of observations under an amplified GP prior as one autograd function.

Its slow reference is `prior_log_density` of `gp.density` with the covariance of `gp.direct`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gpattention.gp.cholesky import failure_counter, report_failures
from gpattention.gp.fused.layout import (
    allocator,
    by_entries,
    by_heads,
    by_rows,
    launch,
    matrices,
    padded,
    scalars,
    token_major,
    vectors,
)
from gpattention.gp.precision import checks_are_deferred


def fused_prior_density(
    x: Tensor,  # [..., N, C] inputs
    X: Tensor,  # [..., N, D] observations, zero at padded tokens
    *,
    scale: Tensor,  # [..., 1, 1]
    log_amplitude: Tensor | None,  # [..., N]
    noise: Tensor,  # [..., 1, 1]
    mask: Tensor | None,  # [..., N]
    name: str,
) -> Tensor:
    """log N(X; 0, D_a kappa(x, x) D_a + noise I), summed over channels (eq. 10).  [...]"""
    lead = torch.broadcast_shapes(x.shape[:-2], X.shape[:-2])
    value: Tensor = _Density.apply(  # type: ignore[no-untyped-call]
        matrices(x, lead), matrices(X, lead), scalars(noise, lead), scalars(scale, lead),
        None if log_amplitude is None else vectors(log_amplitude, lead),
        None if mask is None else vectors(mask, lead), name,
    )  # fmt: skip
    return value.reshape(lead)


class _Density(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # [B, H, N, C]
        X: Tensor,  # [B, H, N, D]
        noise: Tensor,  # [B, H]
        scale: Tensor,  # [B, H]
        log_amplitude: Tensor | None,  # [B, H, N]
        mask: Tensor | None,  # [B, H, N]
        name: str,
    ) -> Tensor:
        from gpattention.gp.fused.density_kernels import density_kernel

        B, H, N, C = x.shape
        D, S = X.shape[-1], B * H
        NP, CP, DP = padded(N), padded(C), padded(D)
        empty = allocator(x)
        inputs, white, gram, root = empty(S, NP, CP), empty(S, NP, DP), empty(S, NP, NP), empty(S, NP, NP)
        value = empty(B, H)
        info = torch.empty(B, H, dtype=torch.int32, device=x.device)
        deferred = checks_are_deferred()
        density_kernel[(S,)](
            *by_rows(x), *by_rows(X), *by_entries(mask, x), *by_heads(noise), *by_heads(scale),
            *by_entries(log_amplitude, x), inputs, white, gram, root, value, info,
            failure_counter(x.device), int(deferred), H, N, C, D,
            MASKED=mask is not None, AMPLIFIED=log_amplitude is not None,
            NP=NP, CP=CP, DP=DP, **launch("density", NP),
        )  # fmt: skip
        if not deferred:
            report_failures(info, N, x.dtype, name=name, noise=noise)
        ctx.sizes = B, H, N, C, D
        ctx.save_for_backward(noise, scale, log_amplitude, mask, inputs, white, gram, root)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from gpattention.gp.fused.density_kernels import density_backward_kernel

        noise, scale, log_amplitude, mask, inputs, white, gram, root = ctx.saved_tensors
        B, H, N, C, D = ctx.sizes
        NP, CP, DP = gram.shape[-1], inputs.shape[-1], white.shape[-1]
        empty = allocator(gram)
        d_x, d_X = token_major(B, H, N, C, gram), token_major(B, H, N, D, gram)
        d_log, d_scale, d_noise = empty(B, H, N), empty(B, H), empty(B, H)
        density_backward_kernel[(B * H,)](
            grads[0].contiguous(), *by_entries(mask, gram), *by_heads(noise), *by_heads(scale),
            *by_entries(log_amplitude, gram), inputs, white, gram, root,
            torch.empty_like(gram), torch.empty_like(white), *by_rows(d_x), *by_rows(d_X),
            d_log, d_scale, d_noise, H, N, C, D,
            MASKED=mask is not None, AMPLIFIED=log_amplitude is not None, NP=NP, CP=CP, DP=DP,
            **launch("density_backward", NP),
        )  # fmt: skip
        return d_x, d_X, d_noise, d_scale, None if log_amplitude is None else d_log, None, None
