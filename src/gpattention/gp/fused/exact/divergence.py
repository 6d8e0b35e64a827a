"""Launches of a posterior's KL divergence from its prior (eq. 23); the reference is `gp.divergence`.

They serve the autograd functions of whole models, which hand in the factors of what the keys explain and
take its gradient: P = F F^T (direct model), or F F^T + sigma^2 A A^T (exact model), with tau^2 = sigma^2.
"""

import torch
from torch import Tensor

from gpattention.gp.cholesky import failure_counter, report_failures
from gpattention.gp.fused.exact.density import Prior, PriorGradients
from gpattention.gp.fused.layout import allocator, by_entries, by_heads, by_rows, launch, padded
from gpattention.gp.precision import checks_are_deferred


def divergence_forward(
    prior: Prior,
    mean: Tensor,  # [B, H, Q, D]
    A: Tensor | None,  # [S, K', Q'] transposed, padded
    F: Tensor,  # [S, K', Q'] transposed
    value: Tensor,  # [B, H]
) -> tuple[Tensor, ...]:
    """Write the divergence; returns what the backward pass needs."""
    from gpattention.gp.fused.exact.divergence_kernels import divergence_kernel

    x = prior.x
    (B, H, N, C), D = x.shape, mean.shape[-1]
    S, NP, CP, DP, empty = B * H, padded(N), padded(C), padded(D), allocator(x)
    inputs, white, gram, rest = empty(S, NP, CP), empty(S, NP, DP), empty(S, NP, NP), empty(S, NP, NP)
    turned, roots = empty(S, CP, NP), empty(2, S, NP, NP)
    info = torch.empty(2, B, H, dtype=torch.int32, device=x.device)
    deferred = checks_are_deferred()
    divergence_kernel[(S,)](
        *by_rows(x), *by_rows(mean), *by_entries(prior.mask, x), *by_heads(prior.noise),
        *by_heads(prior.scale), *by_entries(prior.log_amplitude, x), F if A is None else A, F,
        inputs, turned, white, gram, rest, roots, value, info, failure_counter(x.device),
        int(deferred), S, H, N, C, D,
        LATENT=A is not None, **prior.flags, NP=NP, KP=F.shape[-2], CP=CP, DP=DP,
        **launch("divergence", max(NP, F.shape[-2])),
    )  # fmt: skip
    if not deferred:
        for name, found in zip(("K_q + tau^2 I", "V + tau^2 I"), info, strict=True):
            report_failures(found, N, x.dtype, name=name, noise=prior.noise)
    return inputs, white, gram, rest, roots


def divergence_backward(grad: Tensor, prior: Prior, saved: tuple[Tensor, ...], to: PriorGradients) -> Tensor:
    """Write all gradients and return that of P at unit amplitude; `prior.x` is not looked at.  [S, Q', Q']"""
    from gpattention.gp.fused.exact.divergence_kernels import divergence_backward_kernel

    inputs, white, gram, rest, roots = saved
    (B, H, N, C), D = to.x.shape, to.X.shape[-1]
    by_explained = torch.empty_like(gram)
    divergence_backward_kernel[(B * H,)](
        *by_heads(grad), *by_entries(prior.mask, gram), *by_heads(prior.noise), *by_heads(prior.scale),
        *by_entries(prior.log_amplitude, gram), inputs, white, gram, rest, roots,
        torch.empty_like(gram), torch.empty_like(gram), torch.empty_like(white), by_explained,
        *by_rows(to.x), *by_rows(to.X), to.log_amplitude, to.scale, to.noise,
        B * H, H, N, C, D, **prior.flags, NP=gram.shape[-1], CP=inputs.shape[-1], DP=white.shape[-1],
        **launch("divergence_backward", gram.shape[-1]),
    )  # fmt: skip
    return by_explained
