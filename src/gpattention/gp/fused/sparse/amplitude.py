"""The Nystrom row sums of sparse attention as one autograd function; the reference is in `gp.amplitude`."""

from typing import Any

import torch
from torch import Tensor

from gpattention.gp.cholesky import failure_counter
from gpattention.gp.differentiation import once_differentiable
from gpattention.gp.fused.layout import (
    allocator,
    by_entries,
    by_rows,
    matrices,
    token_major,
    vectors,
    with_lead,
)
from gpattention.gp.fused.sparse.launch import (
    cut,
    report_inducing,
    scratch_for,
    summed_shares,
    summed_splits,
)
from gpattention.gp.fused.sparse.layout import Sizes, shared_matrices, sizes_of
from gpattention.gp.inputs import Tokens
from gpattention.gp.precision import checks_are_deferred
from gpattention.gp.shapes import broadcast


def fused_sparse_row_sum(t: Tokens, delta: float) -> Tensor:
    """kappa(q, l) (K_ll + delta I)^-1 sum_j kappa(l, k_j) of tokens that need not be centred.  [..., Q]"""
    (l,) = t.inducing  # noqa: E741 - the paper's letter
    lead = broadcast(t.q.shape[:-2], t.k.shape[:-2], l.shape[:-2])
    row_sum: Tensor = _RowSum.apply(  # type: ignore[no-untyped-call]
        matrices(t.q, lead), matrices(t.k, lead), shared_matrices(l, lead),
        None if t.mask is None else vectors(t.mask, lead),
        None if t.query_mask is None else vectors(t.query_mask, lead), delta,
    )  # fmt: skip
    return with_lead(row_sum, lead)


class _RowSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,  # [B, H, Q, C]
        k: Tensor,  # [B, H, K, C]
        l: Tensor,  # [B or 1, H, l, C]  # noqa: E741
        mask: Tensor | None,  # [B, H, K]
        query_mask: Tensor | None,  # [B, H, Q]
        delta: float,
    ) -> Tensor:
        from gpattention.gp.fused.sparse.amplitude_kernels import row_sums_kernel, totals_kernel
        from gpattention.gp.fused.sparse.inducing import inducing_kernel

        (B, H, NQ, C), N, count = q.shape, k.shape[2], l.shape[2]
        sizes = sizes_of(B, H, NQ, N, count, count, C, 1, two=False, pooled=l.shape[0] > 1)
        S, E, empty, deferred = sizes.heads, sizes.sets, allocator(q), checks_are_deferred()
        LP, CP = sizes.padded["LP"], sizes.padded["CP"]
        centres, points, W = empty(E, CP), empty(E, 2, LP, CP), empty(E, 2, LP, LP)
        info = torch.empty(1, E, dtype=torch.int32, device=q.device)
        inducing_kernel[(E, 1)](
            *by_rows(l), *by_rows(l), centres, points, points, W, W, info, failure_counter(q.device),
            int(deferred), delta, E, H, count, count, C, MP=LP, LP=LP, CP=CP, **sizes.launch("inducing"),
        )  # fmt: skip
        if not deferred:
            report_inducing(info, sizes, delta, q.dtype)
        sides = {"POOLED": sizes.pooled, "LP": LP, "CP": CP}
        splits, length, _ = cut(sizes, "sums", N, 0)
        totals, row_sum = empty(S, splits, LP), empty(B, H, NQ)
        totals_kernel[(S, splits)](
            *by_rows(k), *by_entries(mask, q), centres, points, totals, splits, length, H, N, count, C,
            MASKED=mask is not None, **sides, **sizes.launch("sums"),
        )  # fmt: skip
        totals = summed_splits(totals, S)
        splits, length = sizes.cut("rows", NQ)
        row_sums_kernel[(S, splits)](
            *by_rows(q), *by_entries(query_mask, q), centres, points, W, totals, row_sum,
            length, H, NQ, count, C, MASKED=query_mask is not None, **sides, **sizes.launch("rows"),
        )  # fmt: skip
        ctx.sizes, ctx.sides, ctx.delta = sizes, sides, delta
        ctx.save_for_backward(q, k, mask, query_mask, centres, points, W, totals)
        return row_sum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from gpattention.gp.fused.sparse.amplitude_kernels import (
            row_sums_backward_kernel,
            totals_backward_kernel,
        )
        from gpattention.gp.fused.sparse.inducing import inducing_backward_kernel

        q, k, mask, query_mask, centres, points, W, totals = ctx.saved_tensors
        sizes: Sizes = ctx.sizes
        B, H, NQ, N, count, C = sizes.B, sizes.H, sizes.NQ, sizes.N, sizes.l, sizes.C
        S, E, empty, LP, CP = sizes.heads, sizes.sets, allocator(q), ctx.sides["LP"], ctx.sides["CP"]
        splits, length, query_length = cut(sizes, "keys_backward", N, NQ)
        d_q, d_k = token_major(B, H, NQ, C, q), token_major(B, H, N, C, q)
        by_weights, shares, turned = empty(S, splits, LP), empty(2, S, splits, LP * CP), empty(S, LP * LP)
        row_sums_backward_kernel[(S, splits)](
            *by_rows(q), *by_entries(query_mask, q), centres, points, W, totals, grads[0].contiguous(),
            *by_rows(d_q), by_weights, shares, splits, query_length, H, NQ, count, C,
            MASKED=query_mask is not None, **ctx.sides, **sizes.launch("keys_backward"),
        )  # fmt: skip
        totals_backward_kernel[(S, splits)](
            *by_rows(k), *by_entries(mask, q), centres, points, W, totals, summed_splits(by_weights, S),
            *by_rows(d_k), shares[1], turned, splits, length, H, N, count, C,
            MASKED=mask is not None, **ctx.sides, **sizes.launch("keys_backward"),
        )  # fmt: skip
        moved, turned = summed_shares(shares, turned, sizes)
        d_l = empty(E // H, H, count, C)
        inducing_backward_kernel[(E, 1)](
            points, points, W, W, moved, moved, turned, turned, d_l, d_l,
            scratch_for(sizes, empty, 2 * E), ctx.delta, moved, moved, B, H, count, count, C,
            SHARED=False, BATCH=128, MP=LP, LP=LP, CP=CP, SCRATCH=sizes.scratch,
            **sizes.launch("inducing_backward"),
        )  # fmt: skip
        return d_q, d_k, d_l, None, None, None
