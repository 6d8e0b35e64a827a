"""The exact CGP's mean, variance and key density as one autograd function on Triton kernels.

Its slow reference is `gp.moments` with the Gram matrices of `gp.correlated`; `cgp_forward` and
`cgp_backward` hold the mathematics.
"""

from typing import Any, NamedTuple

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
from gpattention.gp.inputs import Tokens
from gpattention.gp.precision import checks_are_deferred


class Moments(NamedTuple):
    """What the kernels give, amplified and masked."""

    mean: Tensor  # [..., Q, D]
    variance: Tensor | None  # [..., Q]
    key: Tensor | None  # [...] log N(M_k V; 0, M_k), the keys' term of eq. 10


def fused_cgp(t: Tokens, *, with_variance: bool) -> Moments:
    """Mean (eq. 4) and, if wanted, variance (eq. 6) and key density (eq. 10) of checked inputs."""
    lead = torch.broadcast_shapes(*(x.shape[:-2] for x in (t.q, t.k, t.latent, t.v)))
    mean, variance, key = _CGP.apply(  # type: ignore[no-untyped-call]
        *(matrices(x, lead) for x in (t.q, t.k, t.latent, t.v)),
        *(scalars(x, lead) for x in (t.noise, t.scale_q, t.scale_k)),
        None if t.log_amplitude is None else vectors(t.log_amplitude, lead),
        None if t.mask is None else vectors(t.mask, lead),
        None if t.query_mask is None else vectors(t.query_mask, lead),
        with_variance,
    )
    mean = mean.reshape(*lead, *mean.shape[-2:])
    if not with_variance:
        return Moments(mean, None, None)
    return Moments(mean, variance.reshape(*lead, variance.shape[-1]), key.reshape(lead))


class _Sizes(NamedTuple):
    """Of the problem and of its padded matrices."""

    B: int
    H: int
    NQ: int
    N: int
    C: int
    D: int

    @property
    def heads(self) -> int:
        return self.B * self.H

    @property
    def padded(self) -> dict[str, int]:
        names = {"QP": self.NQ, "NP": self.N, "CP": self.C, "DP": self.D}
        return {name: padded(n) for name, n in names.items()}

    def launch(self, kernel: str) -> dict[str, int]:
        return launch(kernel, max(self.padded["QP"], self.padded["NP"]))


class _CGP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,  # [B, H, Q, C]
        k: Tensor,  # [B, H, K, C]
        o: Tensor,  # [B, H, K, C]
        v: Tensor,  # [B, H, K, D]
        noise: Tensor,  # [B, H]
        scale_q: Tensor,  # [B, H]
        scale_k: Tensor,  # [B, H]
        log_amplitude: Tensor | None,  # [B, H, Q]
        mask: Tensor | None,  # [B, H, K]
        query_mask: Tensor | None,  # [B, H, Q]
        with_variance: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        from gpattention.gp.fused.cgp_forward import roots_kernel, rows_kernel

        (B, H, NQ, _), (N, C), D = q.shape, k.shape[2:], v.shape[3]
        sizes = _Sizes(B, H, NQ, N, C, D)
        S, P = sizes.heads, sizes.padded
        QP, NP, CP, DP = P["QP"], P["NP"], P["CP"], P["DP"]
        empty = allocator(q)
        tokens_q, tokens_o, tokens_k = empty(S, QP, CP), empty(S, NP, CP), empty(S, NP, CP)
        tokens_v, values = empty(S, NP, DP), empty(S, NP, DP)
        grams, roots = empty(2, S, NP, NP), empty(2, S, NP, NP)
        K_qo, K_ok, A, F, scratch = (empty(S, n, NP) for n in (QP, NP, QP, QP, QP))
        mean = token_major(B, H, NQ, D, q)
        variance, unit, key = empty(B, H, NQ), empty(S, QP), empty(B, H)
        info = torch.empty(2, S, dtype=torch.int32, device=q.device)
        deferred, factored = checks_are_deferred(), 1 + with_variance
        parameters = [by_heads(x) for x in (noise, scale_q, scale_k)]
        masks = by_entries(mask, q), by_entries(query_mask, q)
        masked = {"MASKED": mask is not None, "QUERY_MASKED": query_mask is not None}
        roots_kernel[(S, 2)](
            *by_rows(k), *by_rows(o), *by_rows(v), *masks[0], *parameters[0], *parameters[2],
            tokens_o, tokens_k, tokens_v, grams, roots, key, info, failure_counter(q.device), int(deferred),
            S, H, N, C, D,
            MASKED=masked["MASKED"], FACTORED=factored, NP=NP, CP=CP, DP=DP,
            **sizes.launch("roots"),
        )  # fmt: skip
        if not deferred:
            for name, found in zip(("K_o + noise I", "K_k + noise I"), info[:factored], strict=False):
                report_failures(found.view(q.shape[:2]), sizes.N, q.dtype, name=name, noise=noise)
        rows_kernel[(S,)](
            *by_rows(q), *by_rows(k), *masks[0], *masks[1], *(x for p in parameters for x in p),
            *by_entries(log_amplitude, q), tokens_q, tokens_o, tokens_k, tokens_v, roots,
            K_qo, K_ok, A, F, scratch, values, *by_rows(mean), variance, unit,
            S, H, NQ, N, C, D,
            **masked, AMPLIFIED=log_amplitude is not None, VARIANCE=with_variance, **P,
            **sizes.launch("rows"),
        )  # fmt: skip
        ctx.sizes, ctx.with_variance = sizes, with_variance
        ctx.save_for_backward(
            noise, scale_q, scale_k, log_amplitude, mask, query_mask, mean, variance, unit,
            tokens_q, tokens_o, tokens_k, tokens_v, grams, roots, K_qo, K_ok, A, F,
        )  # fmt: skip
        if not with_variance:
            return mean, None, None
        return mean, variance, key

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        from gpattention.gp.fused.cgp_backward import inputs_backward_kernel, rows_backward_kernel

        (
            noise, scale_q, scale_k, log_amplitude, mask, query_mask, mean, variance, unit,
            tokens_q, tokens_o, tokens_k, tokens_v, grams, roots, K_qo, K_ok, A, F,
        ) = ctx.saved_tensors  # fmt: skip
        sizes: _Sizes = ctx.sizes
        S, P = sizes.heads, sizes.padded
        B, H, NQ, N, C, D = sizes
        QP, NP, DP = P["QP"], P["NP"], P["DP"]
        empty = allocator(mean)
        by_mean, by_variance, by_key = grads
        assert by_mean is not None  # gradients are materialised
        X, T, Z, E, scratch = (empty(S, QP, NP) for _ in range(5))
        unit_grad, unit_weight, values = empty(S, QP, DP), empty(S, QP), empty(S, NP, DP)
        d_q, d_k, d_o = (token_major(B, H, n, C, mean) for n in (NQ, N, N))
        d_v = token_major(B, H, N, D, mean)
        d_log, d_noise = empty(B, H, NQ), empty(3, B, H)
        d_scale_q, d_scale_k = empty(B, H), empty(B, H)
        masks = by_entries(mask, mean), by_entries(query_mask, mean)
        amplitude = by_entries(log_amplitude, mean)
        flags = {"MASKED": mask is not None, "VARIANCE": ctx.with_variance}
        rows_backward_kernel[(S,)](
            *by_rows(by_mean), variance if by_variance is None else by_variance.contiguous(),
            *by_rows(mean), variance, unit, *masks[0], *masks[1], *by_heads(noise), *by_heads(scale_q),
            *amplitude, tokens_q, tokens_o, tokens_v, roots, K_qo, K_ok, A, F,
            X, T, Z, E, scratch, unit_grad, unit_weight, *by_rows(d_q), d_log, d_scale_q, d_noise,
            S, H, NQ, N, C, D,
            QUERY_MASKED=query_mask is not None, AMPLIFIED=log_amplitude is not None, **flags, **P,
            **sizes.launch("rows_backward"),
        )  # fmt: skip
        inputs_backward_kernel[(S, 2)](
            *masks[0], *by_heads(noise), *by_heads(scale_k),
            tokens_q, tokens_o, tokens_k, tokens_v, grams, roots, K_ok, A,
            X, T, Z, E, unit_grad, unit_weight, unit_weight if by_key is None else by_key.contiguous(),
            empty(2, S, NP, NP), values, *by_rows(d_o), *by_rows(d_k), *by_rows(d_v), d_scale_k, d_noise,
            S, H, N, C, D, **flags, **P, **sizes.launch("inputs_backward"),
        )  # fmt: skip
        log_gradient = None if log_amplitude is None else d_log
        return d_q, d_k, d_o, d_v, d_noise.sum(0), d_scale_q, d_scale_k, log_gradient, None, None, None
