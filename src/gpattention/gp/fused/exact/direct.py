"""The direct model's mean, spread and regulariser as one autograd function on Triton kernels.

Its slow reference is `gp.direct`, `gp.direct_density` and `gp.divergence`; `direct_kernels` holds the
mathematics.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpattention.gp.cholesky import failure_counter, report_failures
from gpattention.gp.differentiation import once_differentiable
from gpattention.gp.fused.exact.cgp import Sizes
from gpattention.gp.fused.exact.density import Prior, PriorGradients, density_backward, density_forward
from gpattention.gp.fused.exact.divergence import divergence_backward, divergence_forward
from gpattention.gp.fused.layout import (
    allocator,
    by_entries,
    by_heads,
    by_rows,
    matrices,
    scalars,
    to_parameters,
    token_major,
    vectors,
    with_lead,
)
from gpattention.gp.inputs import Tokens
from gpattention.gp.posterior import Cost
from gpattention.gp.precision import checks_are_deferred
from gpattention.gp.shapes import broadcast

PRIOR_COVARIANCE = "K_q + tau^2 I"


class DirectMoments(NamedTuple):
    """What the kernels give, amplified and masked."""

    mean: Tensor  # [..., Q, D]
    stddev: Tensor | None  # [..., Q]
    variance: Tensor | None  # [..., Q]
    unit: Tensor | None  # [..., Q] variance at unit amplitude
    key: Tensor | None  # [...] log N(M_k V; 0, M_k), the keys' term
    cost: Tensor | None  # [...] minus both terms of eq. 12 (GP), or the divergence of eq. 23


def fused_direct(t: Tokens, *, with_variance: bool, cost: Cost = "none") -> DirectMoments:
    """Mean of checked inputs (eq. 2) and, if wanted, spread with key density, and the cost.

    A cost ("marginal" or "kl", both with tau^2 = sigma^2) comes with the spread.
    """
    lead = broadcast(*(x.shape[:-2] for x in (t.q, t.k, t.v)))
    mean, *rest = _Direct.apply(  # type: ignore[no-untyped-call]
        *(matrices(x, lead) for x in (t.q, t.k, t.v)),
        t.noise, t.scale_q, t.scale_k,
        None if t.log_amplitude is None else vectors(t.log_amplitude, lead),
        None if t.mask is None else vectors(t.mask, lead),
        None if t.query_mask is None else vectors(t.query_mask, lead),
        lead, with_variance or cost != "none", cost,
    )  # fmt: skip
    return DirectMoments(with_lead(mean, lead), *(None if x is None else with_lead(x, lead) for x in rest))


class _Direct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,  # [B, H, Q, C]
        k: Tensor,  # [B, H, K, C]
        v: Tensor,  # [B, H, K, D]
        noise: Tensor,  # [..., 1, 1]
        scale_q: Tensor,  # [..., 1, 1]
        scale_k: Tensor,  # [..., 1, 1]
        log_amplitude: Tensor | None,  # [B, H, Q]
        mask: Tensor | None,  # [B, H, K]
        query_mask: Tensor | None,  # [B, H, Q]
        lead: torch.Size,
        with_variance: bool,
        cost: Cost,
    ) -> tuple[Tensor | None, ...]:
        from gpattention.gp.fused.exact.cgp_forward import roots_kernel
        from gpattention.gp.fused.exact.direct_kernels import direct_kernel

        (B, H, NQ, _), (N, C), D = q.shape, k.shape[2:], v.shape[3]
        sizes = Sizes(B, H, NQ, N, C, D)
        S, P = sizes.heads, sizes.padded
        QP, NP, CP, DP = P["QP"], P["NP"], P["CP"], P["DP"]
        empty = allocator(q)
        tokens_q, tokens_k, tokens_v = empty(S, QP, CP), empty(S, NP, CP), empty(S, NP, DP)
        turned_k = empty(S, CP, NP)
        grams, roots, turned_roots = (empty(S, NP, NP) if with_variance else tokens_k for _ in range(3))
        K, W = empty(S, QP, NP), empty(S, NP, QP) if with_variance else tokens_k
        weights = K if log_amplitude is None else empty(S, QP, NP)
        mean, raw = token_major(B, H, NQ, D, q), empty(S, QP)
        stddev, variance, unit = empty(B, H, NQ), empty(B, H, NQ), empty(B, H, NQ)
        key, value = empty(B, H), empty(B, H)
        info = torch.empty(B, H, dtype=torch.int32, device=q.device)
        deferred = checks_are_deferred()
        noise_, *scales = (scalars(x, lead) for x in (noise, scale_q, scale_k))
        masks = by_entries(mask, q), by_entries(query_mask, q)
        roots_kernel[(S, 1)](
            *by_rows(k), *by_rows(k), *by_rows(v), *masks[0], *by_heads(noise_), *by_heads(scales[1]),
            tokens_k, tokens_k, tokens_v, turned_k, grams, roots, turned_roots, key, info,
            failure_counter(q.device), int(deferred), S, H, N, C, D,
            MASKED=mask is not None, LATENT=False, FACTORED=int(with_variance), NP=NP, CP=CP, DP=DP,
            **sizes.launch("roots"),
        )  # fmt: skip
        if with_variance and not deferred:
            report_failures(info, N, q.dtype, name="K_k + noise I", noise=noise / scale_k.square())
        direct_kernel[(S,)](
            *by_rows(q), *by_rows(k), *masks[0], *masks[1], *by_heads(noise_),
            *by_heads(scales[0]), *by_heads(scales[1]), *by_entries(log_amplitude, q),
            tokens_q, tokens_k, tokens_v, turned_k, turned_roots, K, weights, W,
            *by_rows(mean), stddev, variance, unit, raw, H, NQ, N, C, D,
            MASKED=mask is not None, QUERY_MASKED=query_mask is not None,
            AMPLIFIED=log_amplitude is not None, VARIANCE=with_variance, **P, **sizes.launch("direct"),
        )  # fmt: skip
        prior = Prior(q, noise_, scales[0], log_amplitude, query_mask)
        saved: tuple[Tensor, ...] = ()
        if cost == "marginal":
            saved = density_forward(prior, mean, value, name=PRIOR_COVARIANCE, key=key)
        elif cost == "kl":
            saved = divergence_forward(prior, mean, None, W, value)
        ctx.sizes, ctx.lead, ctx.with_variance, ctx.cost = sizes, lead, with_variance, cost
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            noise, scale_q, scale_k, log_amplitude, mask, query_mask, mean, stddev, variance, raw,
            tokens_q, tokens_k, tokens_v, grams, roots, K, weights, W, *saved,
        )  # fmt: skip
        if not with_variance:
            return mean, None, None, None, None, None
        return mean, stddev, variance, unit, key, None if cost == "none" else value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        from gpattention.gp.fused.exact.direct_kernels import direct_backward_kernel

        (
            noise, scale_q, scale_k, log_amplitude, mask, query_mask, mean, stddev, variance, raw,
            tokens_q, tokens_k, tokens_v, grams, roots, K, weights, W, *saved,
        ) = ctx.saved_tensors  # fmt: skip
        sizes: Sizes = ctx.sizes
        S, P = sizes.heads, sizes.padded
        B, H, NQ, N, C, D = sizes
        QP, NP, DP = P["QP"], P["NP"], P["DP"]
        empty = allocator(mean)
        by_mean, by_stddev, by_variance, by_unit, by_key, by_cost = grads
        by_mean = torch.zeros_like(mean) if by_mean is None else by_mean
        X, OX, E, scratch = (empty(S, n, NP) for n in (QP, QP, QP, max(QP, NP)))
        d_q, d_k = token_major(B, H, NQ, C, mean), token_major(B, H, N, C, mean)
        d_v, d_log, found = token_major(B, H, N, D, mean), empty(B, H, NQ), empty(3, 2, B, H)
        noise_, *scales = (scalars(x, ctx.lead) for x in (noise, scale_q, scale_k))
        prior = Prior(mean, noise_, scales[0], log_amplitude, query_mask)
        to = PriorGradients(d_q, mean, d_log, found[1, 0], found[0, 0])
        by_explained, key_sign = mean, int(by_key is not None)
        if by_cost is not None:
            to = to._replace(X=token_major(B, H, NQ, D, mean))
        if by_cost is not None and ctx.cost == "kl":
            by_explained = divergence_backward(by_cost, prior, tuple(saved), to)
        elif by_cost is not None:
            density_backward(by_cost, prior, tuple(saved), to, cost=True)
            by_key, key_sign = (by_cost, -1) if by_key is None else (by_key - by_cost, 1)
        spreads = [raw if g is None else g.contiguous() for g in (by_stddev, by_variance, by_unit)]
        direct_backward_kernel[(S,)](
            *by_rows(by_mean), *spreads, *by_rows(mean), stddev, variance, raw,
            *by_entries(mask, mean), *by_entries(query_mask, mean), *by_heads(noise_),
            *by_heads(scales[0]), *by_heads(scales[1]), tokens_q, tokens_k, tokens_v, grams, roots,
            K, weights, W, *by_rows(to.X), by_explained, *by_heads(raw if by_key is None else by_key),
            X, OX, E, scratch, empty(S, QP, DP), empty(S, DP, NP),
            *by_rows(d_q), *by_rows(d_k), *by_rows(d_v), d_log, found, S, H, NQ, N, C, D,
            MASKED=mask is not None, QUERY_MASKED=query_mask is not None,
            AMPLIFIED=log_amplitude is not None, FACTORED=ctx.with_variance,
            BY_STDDEV=by_stddev is not None, BY_VARIANCE=by_variance is not None,
            BY_UNIT=by_unit is not None, PRIOR=by_cost is not None,
            COVARIANCE=by_explained is not mean, KEY_SIGN=key_sign, **P, **sizes.launch("direct_backward"),
        )  # fmt: skip
        needed = ctx.needs_input_grad[3:6]
        shapes = [p.shape if n else None for p, n in zip((noise, scale_q, scale_k), needed, strict=True)]
        parameters = to_parameters(found, ctx.lead, shapes)
        log_gradient = None if log_amplitude is None else d_log
        return d_q, d_k, d_v, *parameters, log_gradient, *[None] * 5
