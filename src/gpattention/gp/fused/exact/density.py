"""The log density of observations under an amplified GP prior as one autograd function.

Its slow reference is `prior_log_density` of `gp.density` with the covariance of `gp.direct`.  The launches
alone serve the functions of whole models too, which take the density and their moments together.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpattention.gp.cholesky import failure_counter, report_failures
from gpattention.gp.differentiation import once_differentiable
from gpattention.gp.fused.layout import (
    allocator,
    by_entries,
    by_heads,
    by_rows,
    launch,
    matrices,
    padded,
    scalars,
    to_parameters,
    token_major,
    vectors,
    with_lead,
)
from gpattention.gp.precision import checks_are_deferred
from gpattention.gp.shapes import broadcast


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
    lead = broadcast(x.shape[:-2], X.shape[:-2])
    value: Tensor = _Density.apply(  # type: ignore[no-untyped-call]
        matrices(x, lead), matrices(X, lead), noise, scale,
        None if log_amplitude is None else vectors(log_amplitude, lead),
        None if mask is None else vectors(mask, lead), lead, name,
    )  # fmt: skip
    return with_lead(value, lead)


class Prior(NamedTuple):
    """The GP prior of one call: inputs, amplitudes and noise, every tensor with batch and heads."""

    x: Tensor  # [B, H, N, C]
    noise: Tensor  # [B, H]
    scale: Tensor  # [B, H]
    log_amplitude: Tensor | None  # [B, H, N]
    mask: Tensor | None  # [B, H, N]

    @property
    def flags(self) -> dict[str, bool]:
        """What of it the kernels look at."""
        return {"MASKED": self.mask is not None, "AMPLIFIED": self.log_amplitude is not None}


class PriorGradients(NamedTuple):
    """Where the backward pass writes."""

    x: Tensor  # [B, H, N, C]
    X: Tensor  # [B, H, N, D]
    log_amplitude: Tensor  # [B, H, N]
    scale: Tensor  # [B, H]
    noise: Tensor  # [B, H]


def density_forward(
    prior: Prior, X: Tensor, value: Tensor, *, name: str, key: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Write the density [B, H], or minus its sum with the keys' one; returns what the backward pass needs."""
    from gpattention.gp.fused.exact.density_kernels import density_kernel

    x = prior.x
    (B, H, N, C), D = x.shape, X.shape[-1]
    S, NP, CP, DP, empty = B * H, padded(N), padded(C), padded(D), allocator(x)
    inputs, white, gram, root = empty(S, NP, CP), empty(S, NP, DP), empty(S, NP, NP), empty(S, NP, NP)
    turned = empty(S, CP, NP)
    info = torch.empty(B, H, dtype=torch.int32, device=x.device)
    deferred = checks_are_deferred()
    density_kernel[(S,)](
        *by_rows(x), *by_rows(X), *by_entries(prior.mask, x), *by_heads(prior.noise), *by_heads(prior.scale),
        *by_entries(prior.log_amplitude, x), inputs, turned, white, gram, root,
        value if key is None else key, value, info, failure_counter(x.device), int(deferred), H, N, C, D,
        COST=key is not None, **prior.flags, NP=NP, CP=CP, DP=DP, **launch("density", NP),
    )  # fmt: skip
    if not deferred:
        report_failures(info, N, x.dtype, name=name, noise=prior.noise)
    return inputs, white, gram, root


def density_backward(
    grad: Tensor, prior: Prior, saved: tuple[Tensor, ...], to: PriorGradients, *, cost: bool = False
) -> None:
    """Write all gradients; `prior.x` is not looked at."""
    from gpattention.gp.fused.exact.density_kernels import density_backward_kernel

    inputs, white, gram, root = saved
    (B, H, N, C), D = to.x.shape, to.X.shape[-1]
    NP, CP, DP = gram.shape[-1], inputs.shape[-1], white.shape[-1]
    density_backward_kernel[(B * H,)](
        *by_heads(grad), *by_entries(prior.mask, gram), *by_heads(prior.noise), *by_heads(prior.scale),
        *by_entries(prior.log_amplitude, gram), inputs, white, gram, root,
        torch.empty_like(gram), torch.empty_like(white), *by_rows(to.x), *by_rows(to.X),
        to.log_amplitude, to.scale, to.noise, H, N, C, D,
        COST=cost, **prior.flags, NP=NP, CP=CP, DP=DP, **launch("density_backward", NP),
    )  # fmt: skip


class _Density(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # [B, H, N, C]
        X: Tensor,  # [B, H, N, D]
        noise: Tensor,  # [..., 1, 1]
        scale: Tensor,  # [..., 1, 1]
        log_amplitude: Tensor | None,  # [B, H, N]
        mask: Tensor | None,  # [B, H, N]
        lead: torch.Size,
        name: str,
    ) -> Tensor:
        prior = Prior(x, scalars(noise, lead), scalars(scale, lead), log_amplitude, mask)
        value = allocator(x)(*x.shape[:2])
        saved = density_forward(prior, X, value, name=name)
        ctx.lead, ctx.sizes = lead, (*x.shape, X.shape[-1])
        ctx.save_for_backward(noise, scale, log_amplitude, mask, *saved)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        noise, scale, log_amplitude, mask, *saved = ctx.saved_tensors
        B, H, N, C, D = ctx.sizes
        like, empty = saved[0], allocator(saved[0])
        prior = Prior(like, scalars(noise, ctx.lead), scalars(scale, ctx.lead), log_amplitude, mask)
        found = empty(2, 1, B, H)
        to = PriorGradients(
            x=token_major(B, H, N, C, like),
            X=token_major(B, H, N, D, like),
            log_amplitude=empty(B, H, N),
            scale=found[1, 0],
            noise=found[0, 0],
        )
        density_backward(grads[0], prior, tuple(saved), to)
        needed = [p.shape if ctx.needs_input_grad[2 + i] else None for i, p in enumerate((noise, scale))]
        d_noise, d_scale = to_parameters(found, ctx.lead, needed)
        d_log = None if log_amplitude is None else to.log_amplitude
        return to.x, to.X, d_noise, d_scale, d_log, None, None, None
