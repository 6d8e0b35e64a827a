"""The exact CGP's mean, variance and regulariser as one autograd function on Triton kernels.

Its slow reference is `gp.moments` with the Gram matrices of `gp.correlated`, `gp.correlated_density` and
`gp.divergence`; `cgp_forward` and `cgp_backward` hold the mathematics.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpattention.gp.cholesky import failure_counter, report_failures
from gpattention.gp.differentiation import once_differentiable
from gpattention.gp.fused.exact.density import Prior, PriorGradients, density_backward, density_forward
from gpattention.gp.fused.exact.divergence import divergence_backward, divergence_forward
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
from gpattention.gp.inputs import Tokens
from gpattention.gp.posterior import Cost
from gpattention.gp.precision import checks_are_deferred
from gpattention.gp.shapes import broadcast

QUERY_COVARIANCE = "marginal covariance of the queries"


class Moments(NamedTuple):
    """What the kernels give, amplified and masked."""

    mean: Tensor  # [..., Q, D]
    variance: Tensor | None  # [..., Q]
    key: Tensor | None  # [...] log N(M_k V; 0, M_k), the keys' term of eq. 10
    cost: Tensor | None  # [...] minus both terms of eq. 10, or the divergence of eq. 23


def fused_cgp(t: Tokens, *, with_variance: bool, cost: Cost = "none") -> Moments:
    """Mean (eq. 4) of checked inputs; if wanted variance (eq. 6) with key density (eq. 10), and a cost.

    A cost ("marginal", eq. 10, or "kl", eq. 23, both with tau^2 = sigma^2) comes with the variance.
    """
    lead = broadcast(*(x.shape[:-2] for x in (t.q, t.k, t.latent, t.v)))
    mean, *rest = _CGP.apply(  # type: ignore[no-untyped-call]
        *(matrices(x, lead) for x in (t.q, t.k, t.latent, t.v)),
        t.noise, t.scale_q, t.scale_k,
        None if t.log_amplitude is None else vectors(t.log_amplitude, lead),
        None if t.mask is None else vectors(t.mask, lead),
        None if t.query_mask is None else vectors(t.query_mask, lead),
        lead, with_variance or cost != "none", cost,
    )  # fmt: skip
    variance, key, value = rest
    return Moments(
        with_lead(mean, lead),
        None if variance is None else with_lead(variance, lead),
        None if key is None else with_lead(key, lead),
        None if value is None else with_lead(value, lead),
    )


class Sizes(NamedTuple):
    """Of the problem and of its padded matrices."""

    B: int
    H: int
    NQ: int
    N: int
    C: int
    D: int

    @property
    def heads(self) -> int:
        """How many programs: one for each sequence and head."""
        return self.B * self.H

    @property
    def padded(self) -> dict[str, int]:
        """Padded sides of queries, keys, inputs and values, as the kernels name them."""
        names = {"QP": self.NQ, "NP": self.N, "CP": self.C, "DP": self.D}
        return {name: padded(n) for name, n in names.items()}

    def launch(self, kernel: str) -> dict[str, int]:
        """Launch options of a kernel."""
        return launch(kernel, max(self.padded["QP"], self.padded["NP"]))


class _CGP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,  # [B, H, Q, C]
        k: Tensor,  # [B, H, K, C]
        o: Tensor,  # [B, H, K, C]
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
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        from gpattention.gp.fused.exact.cgp_forward import roots_kernel, rows_kernel

        (B, H, NQ, _), (N, C), D = q.shape, k.shape[2:], v.shape[3]
        sizes = Sizes(B, H, NQ, N, C, D)
        S, P = sizes.heads, sizes.padded
        QP, NP, CP, DP = P["QP"], P["NP"], P["CP"], P["DP"]
        empty = allocator(q)
        tokens_q, tokens_o, tokens_k = empty(S, QP, CP), empty(S, NP, CP), empty(S, NP, CP)
        tokens_v, values, turned = empty(S, NP, DP), empty(S, NP, DP), empty(3, S, CP, NP)
        grams, roots, turned_roots = (empty(2, S, NP, NP) for _ in range(3))
        K_qo, K_ok, A = empty(S, QP, NP), empty(S, NP, NP), empty(S, QP, NP)
        turned_A, F, scratch = empty(S, NP, QP), empty(S, NP, QP), empty(S, NP, max(QP, NP))
        mean = token_major(B, H, NQ, D, q)
        variance, unit, key, value = empty(B, H, NQ), empty(S, QP), empty(B, H), empty(B, H)
        info = torch.empty(2, S, dtype=torch.int32, device=q.device)
        deferred, factored = checks_are_deferred(), 1 + with_variance
        noise_, *scales = (scalars(x, lead) for x in (noise, scale_q, scale_k))
        masks = by_entries(mask, q), by_entries(query_mask, q)
        roots_kernel[(S, 2)](
            *by_rows(k), *by_rows(o), *by_rows(v), *masks[0], *by_heads(noise_), *by_heads(scales[1]),
            tokens_o, tokens_k, tokens_v, turned, grams, roots, turned_roots, key, info,
            failure_counter(q.device), int(deferred), S, H, N, C, D,
            MASKED=mask is not None, LATENT=True, FACTORED=factored, NP=NP, CP=CP, DP=DP,
            **sizes.launch("roots"),
        )  # fmt: skip
        if not deferred:
            named = (("K_o + noise I", noise), ("K_k + noise I", noise / scale_k.square()))
            for (name, least), found in zip(named, info[:factored], strict=False):
                report_failures(found.view(q.shape[:2]), sizes.N, q.dtype, name=name, noise=least)
        rows_kernel[(S,)](
            *by_rows(q), *by_rows(k), *by_rows(o), *masks[0], *masks[1], *by_heads(noise_),
            *by_heads(scales[0]), *by_heads(scales[1]), *by_entries(log_amplitude, q),
            tokens_q, tokens_o, tokens_k, tokens_v, turned, roots, turned_roots,
            K_qo, K_ok, A, turned_A, F, scratch, values, *by_rows(mean), variance, unit,
            S, H, NQ, N, C, D,
            MASKED=mask is not None, QUERY_MASKED=query_mask is not None,
            AMPLIFIED=log_amplitude is not None, VARIANCE=with_variance, **P, **sizes.launch("rows"),
        )  # fmt: skip
        prior = Prior(q, noise_, scales[0], log_amplitude, query_mask)
        saved: tuple[Tensor, ...] = ()
        if cost == "marginal":
            saved = density_forward(prior, mean, value, name=QUERY_COVARIANCE, key=key)
        elif cost == "kl":
            saved = divergence_forward(prior, mean, turned_A, F, value)
        ctx.sizes, ctx.lead, ctx.with_variance, ctx.cost = sizes, lead, with_variance, cost
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            noise, scale_q, scale_k, log_amplitude, mask, query_mask, mean, variance, unit,
            tokens_q, tokens_o, tokens_k, tokens_v, grams, roots, K_qo, K_ok, A, F, *saved,
        )  # fmt: skip
        if not with_variance:
            return mean, None, None, None
        return mean, variance, key, None if cost == "none" else value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        from gpattention.gp.fused.exact.cgp_backward import inputs_backward_kernel, rows_backward_kernel

        (
            noise, scale_q, scale_k, log_amplitude, mask, query_mask, mean, variance, unit,
            tokens_q, tokens_o, tokens_k, tokens_v, grams, roots, K_qo, K_ok, A, F, *saved,
        ) = ctx.saved_tensors  # fmt: skip
        sizes: Sizes = ctx.sizes
        S, P = sizes.heads, sizes.padded
        B, H, NQ, N, C, D = sizes
        QP, NP, DP = P["QP"], P["NP"], P["DP"]
        empty = allocator(mean)
        by_mean, by_variance, by_key, by_cost = grads
        by_mean = torch.zeros_like(mean) if by_mean is None else by_mean
        X, OX, T, Z, E, scratch = (empty(S, QP, NP) for _ in range(6))
        unit_grad, values, turned_v = empty(S, QP, DP), empty(S, NP, DP), empty(S, DP, NP)
        d_q, d_k, d_o = (token_major(B, H, n, C, mean) for n in (NQ, N, N))
        d_v, d_log, found = token_major(B, H, N, D, mean), empty(B, H, NQ), empty(3, 2, B, H)
        noise_, *scales = (scalars(x, ctx.lead) for x in (noise, scale_q, scale_k))
        masks = by_entries(mask, mean), by_entries(query_mask, mean)
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
        rows_backward_kernel[(S,)](
            *by_rows(by_mean), variance if by_variance is None else by_variance.contiguous(),
            *by_rows(mean), variance, unit, *masks[0], *masks[1], *by_heads(noise_), *by_heads(scales[0]),
            *by_entries(log_amplitude, mean), tokens_q, tokens_o, tokens_v, roots, K_qo, K_ok, A, F,
            *by_rows(to.X), by_explained, X, OX, T, Z, E, scratch, unit_grad, turned_v,
            *by_rows(d_q), d_log, found, S, H, NQ, N, C, D,
            MASKED=mask is not None, QUERY_MASKED=query_mask is not None,
            AMPLIFIED=log_amplitude is not None, VARIANCE=ctx.with_variance,
            WEIGHTED=by_variance is not None, PRIOR=by_cost is not None,
            COVARIANCE=by_explained is not mean, **P, **sizes.launch("rows_backward"),
        )  # fmt: skip
        inputs_backward_kernel[(S, 2)](
            *masks[0], *by_heads(scales[1]), tokens_q, tokens_o, tokens_k, tokens_v, grams, roots, K_ok, A,
            X, OX, T, Z, E, unit_grad, turned_v, *by_heads(unit if by_key is None else by_key),
            empty(2, S, NP, NP), values, *by_rows(d_o), *by_rows(d_k), *by_rows(d_v), found,
            S, H, N, C, D, MASKED=mask is not None, VARIANCE=ctx.with_variance, KEY_SIGN=key_sign,
            **P, **sizes.launch("inputs_backward"),
        )  # fmt: skip
        needed = ctx.needs_input_grad[4:7]
        shapes = [p.shape if n else None for p, n in zip((noise, scale_q, scale_k), needed, strict=True)]
        parameters = to_parameters(found, ctx.lead, shapes)
        log_gradient = None if log_amplitude is None else d_log
        return d_q, d_k, d_o, d_v, *parameters, log_gradient, *[None] * 5
