"""The sparse model's mean, variance, DTC densities and divergence as one autograd function on kernels.

Short and long sequences take the same way: the long axis is cut into splits whose sums are added in a
fixed order, features are recomputed from tokens wherever they are needed, and nothing with a token axis
is kept but the inputs.  The slow reference is `gp.sparse` with `gp.sparse_density` and `gp.divergence`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpattention.gp.cholesky import failure_counter
from gpattention.gp.differentiation import once_differentiable
from gpattention.gp.fused.layout import (
    allocator,
    by_entries,
    by_heads,
    by_rows,
    matrices,
    token_major,
    vectors,
    with_lead,
)
from gpattention.gp.fused.sparse.launch import (
    Options,
    batched,
    cut,
    only,
    report_inducing,
    report_small,
    scratch_for,
    small_factors,
    summed_shares,
    summed_splits,
    without,
)
from gpattention.gp.fused.sparse.layout import Sizes, per_head, shared_matrices, sizes_of
from gpattention.gp.fused.sparse.shards import Shards
from gpattention.gp.fused.switch import why_not_fused_on
from gpattention.gp.inputs import Tokens
from gpattention.gp.precision import checks_are_deferred
from gpattention.gp.shapes import broadcast
from gpattention.gp.sharding import sum_in_place

_SMALL_BACKWARD = tuple(
    f"FACTOR_{x}"
    for x in (
        "RT", "RL", "T", "TT", "YT", "Z", "ZT", "CT", "RC", "RCT", "RN", "N", "E", "UQ", "UK", "QK", "SIZE",
    )
)  # fmt: skip
_ROWS_BACKWARD = tuple(f"FACTOR_{x}" for x in ("C", "RC", "CW", "RW", "UQ", "UQW", "UK", "UKW", "SIZE"))


class SparseMoments(NamedTuple):
    """What the kernels give, amplified and masked."""

    mean: Tensor  # [..., Q, D]
    variance: Tensor  # [..., Q]
    query: Tensor | None  # [...] log N(N; 0, sigma^2 I + Phi_q Phi_q^T)
    key: Tensor | None  # [...] the same of z_k
    kl: Tensor | None  # [...] eq. 24
    real_keys: Tensor | None = None  # [...] under a group, of all processes, where an objective was asked for
    real_queries: Tensor | None = None  # [...]


def why_not_fused_sparse(t: Tokens) -> str | None:
    """None if the kernels take these tokens, of which there may be any number, also on other processes."""
    channels, inducing = max(t.q.shape[-1], t.v.shape[-1]), max(x.shape[-2] for x in t.inducing)
    return why_not_fused_on(t.q.device, t.q.dtype, channels=channels, inducing=inducing)


def fused_scgp(t: Tokens, options: Options) -> SparseMoments:
    """Mean and variance (eq. 15) of checked inputs, which need not be centred, and the objectives asked."""
    lead = broadcast(*(x.shape[:-2] for x in (t.q, t.k, t.latent, t.v, *t.inducing)))
    m, l = t.inducing[0], t.inducing[-1]  # noqa: E741 - the paper's letter
    mean, variance, counts, *objectives = _SCGP.apply(  # type: ignore[no-untyped-call]
        *(matrices(x, lead) for x in (t.q, t.k, t.latent, t.v)),
        *_points(m, l, lead),
        *(per_head(x, lead) for x in (t.noise, t.scale_q, t.scale_k)),
        None if t.log_amplitude is None else vectors(t.log_amplitude, lead),
        None if t.mask is None else vectors(t.mask, lead),
        None if t.query_mask is None else vectors(t.query_mask, lead),
        options,
    )
    query, key, kl = (None if x is None else with_lead(x, lead) for x in objectives)
    keys, queries = (None, None) if counts is None else (with_lead(x, lead) for x in counts.unbind(-1))
    return SparseMoments(with_lead(mean, lead), with_lead(variance, lead), query, key, kl, keys, queries)


def _points(m: Tensor, l: Tensor, lead: torch.Size) -> tuple[Tensor, Tensor | None]:  # noqa: E741
    """Both sets with the same leading axes; None for a second set that is the first."""
    first, second = shared_matrices(m, lead), None if l is m else shared_matrices(l, lead)
    if second is None:
        return first, None
    B = max(first.shape[0], second.shape[0])
    return first.expand(B, -1, -1, -1), second.expand(B, -1, -1, -1)


class _SCGP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,  # [B, H, Q, C]
        k: Tensor,  # [B, H, K, C]
        o: Tensor,  # [B, H, K, C]
        v: Tensor,  # [B, H, K, D]
        m: Tensor,  # [B or 1, H, m, C]
        l: Tensor | None,  # [B or 1, H, l, C]  # noqa: E741
        noise: Tensor,  # [B or 1, H]
        scale_q: Tensor,  # [B or 1, H]
        scale_k: Tensor,  # [B or 1, H]
        log_amplitude: Tensor | None,  # [B, H, Q]
        mask: Tensor | None,  # [B, H, K]
        query_mask: Tensor | None,  # [B, H, Q]
        options: Options,
    ) -> tuple[Tensor | None, ...]:
        from gpattention.gp.fused.sparse.inducing import inducing_kernel
        from gpattention.gp.fused.sparse.rows import rows_kernel
        from gpattention.gp.fused.sparse.sums import sums_kernel

        (B, H, NQ, C), N, D = q.shape, k.shape[2], v.shape[3]
        second = m if l is None else l
        sizes = sizes_of(
            B, H, NQ, N, m.shape[2], second.shape[2], C, D, two=l is not None, pooled=m.shape[0] > 1
        )
        S, E, P, empty = sizes.heads, sizes.sets, sizes.padded, allocator(q)
        MP, LP, CP = P["MP"], P["LP"], P["CP"]
        centres, points_m, W_m = empty(E, CP), empty(E, 2, MP, CP), empty(E, 2, MP, MP)
        points_l, W_l = (empty(E, 2, LP, CP), empty(E, 2, LP, LP)) if sizes.two else (points_m, W_m)
        info = torch.empty(5, max(S, E), dtype=torch.int32, device=q.device)
        counter, deferred = failure_counter(q.device), checks_are_deferred()
        inducing_kernel[(E, 1 + sizes.two)](
            *by_rows(m), *by_rows(second), centres, points_m, points_l, W_m, W_l, info, counter,
            int(deferred), options.delta, info.shape[1], H, sizes.m, sizes.l, C, MP=MP, LP=LP, CP=CP,
            **sizes.launch("inducing"),
        )  # fmt: skip
        if not deferred:
            report_inducing(info, sizes, options.delta, q.dtype)
        shared = by_heads(batched(scale_q, B)), by_heads(batched(scale_k, B))
        variance_of = by_heads(batched(noise, B))
        masks = by_entries(mask, q), by_entries(query_mask, q)
        amplitude = by_entries(log_amplitude, q)
        masked = {"QUERY_MASKED": query_mask is not None, "AMPLIFIED": log_amplitude is not None}
        wanted = options.density or options.kl
        splits, length, query_length = cut(sizes, "sums", N, NQ if wanted else 0)
        sums = empty(S, splits, sizes.sums["SUM_SIZE"])
        sums_kernel[(S, splits, 2 + wanted)](
            *by_rows(q), *by_rows(k), *by_rows(o), *by_rows(v), *masks[0], *masks[1], *shared[0], *shared[1],
            *amplitude, centres, points_m, points_l, W_m, W_l, sums,
            splits, length, query_length, H, NQ, N, sizes.m, sizes.l, C, D,
            MASKED=mask is not None, **masked, TWO=sizes.two, POOLED=sizes.pooled,
            **P, **sizes.sums, **sizes.launch("sums"),
        )  # fmt: skip
        sums = sum_in_place(summed_splits(sums, S), options.group)
        packed = sizes.factors(kl=options.kl)
        factors, (query, key, kl) = small_factors(sums, W_m, noise, info, sizes, options, train=False)
        if not deferred:
            report_small(info, sizes, options, noise, q.dtype)
        mean, variance = token_major(B, H, NQ, D, q), empty(B, H, NQ)
        splits, length = sizes.cut("rows", NQ)
        rows_kernel[(S, splits)](
            *by_rows(q), *masks[1], *variance_of, *shared[0], *amplitude,
            centres, points_m, W_m, factors, *by_rows(mean), variance,
            length, H, NQ, sizes.m, C, D, **masked, POOLED=sizes.pooled, INCLUDE=options.include_noise,
            INDEPENDENT=options.independent, **without(P, "LP"),
            **only(packed, "FACTOR_C", "FACTOR_RC", "FACTOR_SIZE"),
            **sizes.launch("rows"),
        )  # fmt: skip
        ctx.sizes, ctx.options = sizes, options
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            q, k, o, v, noise, scale_q, scale_k, log_amplitude, mask, query_mask,
            centres, points_m, points_l, W_m, W_l, sums,
        )  # fmt: skip
        counts = None
        if wanted and options.group is not None:  # one process counts its masks itself
            at = sizes.sums["SUM_N"]
            counts = sums.view(B, H, -1)[..., at + 1 : at + 3].clone()  # [B, H, 2]
            ctx.mark_non_differentiable(counts)
        return (
            mean, variance, counts, query if options.density else None, key if options.density else None,
            kl if options.kl else None,
        )  # fmt: skip

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        from gpattention.gp.fused.sparse.inducing import inducing_backward_kernel
        from gpattention.gp.fused.sparse.rows import rows_backward_kernel
        from gpattention.gp.fused.sparse.small_backward import small_backward_kernel
        from gpattention.gp.fused.sparse.sums_backward import keys_backward_kernel

        (
            q, k, o, v, noise, scale_q, scale_k, log_amplitude, mask, query_mask,
            centres, points_m, points_l, W_m, W_l, sums,
        ) = ctx.saved_tensors  # fmt: skip
        sizes: Sizes = ctx.sizes
        options: Options = ctx.options
        info = torch.empty(5, max(sizes.heads, sizes.sets), dtype=torch.int32, device=q.device)
        # made again, with what gradients need: kept, they would weigh as much as the inputs of 64 tokens
        factors, _ = small_factors(sums, W_m, noise, info, sizes, options, train=True)
        by_mean, by_variance, _, by_query, by_key, by_kl = grads
        shards = None
        if options.group is not None:  # the other processes may have gradients where this one has none
            shards = Shards.of(options, by_query, by_key, by_kl, like=q)
            by_query, by_key, by_kl = shards.cotangents
            by_mean = q.new_zeros(*q.shape[:3], sizes.D) if by_mean is None else by_mean
            by_variance = q.new_zeros(q.shape[:3]) if by_variance is None else by_variance
        B, H, NQ, N, C, D = sizes.B, sizes.H, sizes.NQ, sizes.N, sizes.C, sizes.D
        S, E, P, empty = sizes.heads, sizes.sets, sizes.padded, allocator(q)
        MP, LP, CP = P["MP"], P["LP"], P["CP"]
        two = {"TWO": sizes.two, "POOLED": sizes.pooled, "DUAL": options.dual}
        asked = {
            "MEAN": by_mean is not None, "VARIANCE": by_variance is not None,
            "QUERY": by_query is not None, "KL": by_kl is not None,
        }  # fmt: skip
        of_query, of_key, of_kl = (
            by_heads(q[..., 0, 0] if x is None else x) for x in (by_query, by_key, by_kl)
        )
        of_noise, of_scale_q, of_scale_k = (by_heads(batched(x, B)) for x in (noise, scale_q, scale_k))
        packed = sizes.factors(kl=options.kl)
        d_q, d_k, d_o = (token_major(B, H, n, C, q) for n in (NQ, N, N))
        d_v, d_log = token_major(B, H, N, D, q), empty(B, H, NQ) if log_amplitude is not None else None
        splits, length, query_length = cut(sizes, "keys_backward", N, NQ)
        shares_m = empty(3 - sizes.two, S, splits, MP * CP)
        shares_l = empty(2, S, splits, LP * CP) if sizes.two else shares_m[2:]
        rows, scalars = empty(S, splits, sizes.row_sums["ROW_SIZE"]), empty(3, B, H)
        rows_backward_kernel[(S, splits)](
            *by_rows(q), *by_entries(query_mask, q), *of_scale_q, *by_entries(log_amplitude, q),
            centres, points_m, W_m, factors, *by_rows(q if by_mean is None else by_mean),
            q if by_variance is None else by_variance.contiguous(),
            *of_query, *of_kl, *by_rows(d_q), q if d_log is None else d_log, rows, shares_m,
            splits, query_length, H, NQ, sizes.m, C, D,
            QUERY_MASKED=query_mask is not None, AMPLIFIED=log_amplitude is not None, POOLED=sizes.pooled,
            **asked, INDEPENDENT=options.independent, **without(P, "LP"),
            **only(packed, *_ROWS_BACKWARD), **sizes.row_sums,
            **sizes.launch("rows_backward"),
        )  # fmt: skip
        adjoints, turned_m = empty(S, sizes.adjoints["BACK_SIZE"]), empty(S, MP * MP)
        turned_l = empty(S, LP * LP) if sizes.two else turned_m
        rows = summed_splits(rows, S) if shards is None else shards.summed(summed_splits(rows, S))
        small_backward_kernel[(S,)](
            sums, factors, rows, W_m, W_l, *of_noise, *of_scale_q, *of_scale_k,
            *of_query, *of_key, *of_kl, adjoints, turned_m, turned_l, scalars[0], scalars[1], scalars[2],
            scratch_for(sizes, empty, S), H, D,
            **two, INCLUDE=options.include_noise, INDEPENDENT=options.independent,
            **asked, KEY=by_key is not None,
            MP=MP, LP=LP, DP=P["DP"], SCRATCH=sizes.scratch, **sizes.sums,
            **only(packed, *_SMALL_BACKWARD),
            **sizes.row_sums, **sizes.adjoints, **sizes.launch("small_backward"),
        )  # fmt: skip
        if shards is not None:  # these are of all tokens; the processes' gradients of parameters are added up
            for whole in (turned_m, turned_l, scalars) if sizes.two else (turned_m, scalars):
                whole.div_(shards.count)
        keys_backward_kernel[(S, splits, 2)](
            *by_rows(k), *by_rows(o), *by_rows(v), *by_entries(mask, q), *of_noise, *of_scale_k, *of_key,
            centres, points_m, points_l, W_m, W_l, adjoints,
            *by_rows(d_k), *by_rows(d_o), *by_rows(d_v), shares_m, shares_l,
            splits, length, S, H, N, sizes.m, sizes.l, C, D,
            MASKED=mask is not None, **two, KEY=by_key is not None,
            **P, **sizes.adjoints, **sizes.launch("keys_backward"),
        )  # fmt: skip
        d_m, totals = empty(E // H, H, sizes.m, C), empty(3, H)
        d_l = empty(E // H, H, sizes.l, C) if sizes.two else d_m
        moved_m, turned_m = summed_shares(shares_m, turned_m, sizes)
        moved_l, turned_l = summed_shares(shares_l, turned_l, sizes) if sizes.two else (moved_m, turned_m)
        inducing_backward_kernel[(E, 1 + sizes.two)](
            points_m, points_l, W_m, W_l, moved_m, moved_l, turned_m, turned_l, d_m, d_l,
            scratch_for(sizes, empty, 2 * E), options.delta,
            scalars, totals, B, H, sizes.m, sizes.l, C,
            SHARED=not sizes.pooled, BATCH=128, MP=MP, LP=LP, CP=CP, SCRATCH=sizes.scratch,
            **sizes.launch("inducing_backward"),
        )  # fmt: skip
        if sizes.pooled:
            totals = scalars.sum(1)
        d_noise, d_scale_q, d_scale_k = (
            scalars[i] if x.shape[0] == B else totals[i, None]
            for i, x in enumerate((noise, scale_q, scale_k))
        )
        return (
            d_q, d_k, d_o, d_v, d_m, d_l if sizes.two else None, d_noise, d_scale_q, d_scale_k, d_log,
            None, None, None,
        )  # fmt: skip
