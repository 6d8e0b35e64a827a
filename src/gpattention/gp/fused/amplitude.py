"""The row sums of kernel attention as one autograd function; the reference is in `gp.amplitude`."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gpattention.gp.fused.layout import (
    allocator,
    by_entries,
    by_rows,
    launch,
    matrices,
    padded,
    token_major,
    vectors,
)
from gpattention.gp.inputs import Tokens


def fused_row_log_sum(t: Tokens) -> Tensor:
    """logsumexp_j(-1/2 |q_i - k_j|^2) over real keys (eq. 25), 0 where there is none.  [..., Q]"""
    lead = torch.broadcast_shapes(t.q.shape[:-2], t.k.shape[:-2])
    log_sum: Tensor = _RowLogSum.apply(  # type: ignore[no-untyped-call]
        matrices(t.q, lead), matrices(t.k, lead),
        None if t.mask is None else vectors(t.mask, lead),
        None if t.query_mask is None else vectors(t.query_mask, lead),
    )  # fmt: skip
    return log_sum.reshape(*lead, log_sum.shape[-1])


class _RowLogSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,  # [B, H, Q, C]
        k: Tensor,  # [B, H, K, C]
        mask: Tensor | None,  # [B, H, K]
        query_mask: Tensor | None,  # [B, H, Q]
    ) -> Tensor:
        from gpattention.gp.fused.amplitude_kernels import amplitude_kernel

        (B, H, NQ, C), N, empty = q.shape, k.shape[2], allocator(q)
        QP, NP, CP = padded(NQ), padded(N), padded(C)
        tokens_q, tokens_k, log_sum = empty(B * H, QP, CP), empty(B * H, NP, CP), empty(B, H, NQ)
        amplitude_kernel[(B * H,)](
            *by_rows(q), *by_rows(k), *by_entries(mask, q), *by_entries(query_mask, q),
            tokens_q, tokens_k, log_sum, H, NQ, N, C,
            MASKED=mask is not None, QUERY_MASKED=query_mask is not None, QP=QP, NP=NP, CP=CP,
            **launch("amplitude", max(QP, NP)),
        )  # fmt: skip
        ctx.sizes = B, H, NQ, N, C
        ctx.save_for_backward(mask, query_mask, tokens_q, tokens_k, log_sum)
        return log_sum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from gpattention.gp.fused.amplitude_kernels import amplitude_backward_kernel

        mask, query_mask, tokens_q, tokens_k, log_sum = ctx.saved_tensors
        B, H, NQ, N, C = ctx.sizes
        (QP, CP), NP = tokens_q.shape[1:], tokens_k.shape[1]
        d_q, d_k = token_major(B, H, NQ, C, log_sum), token_major(B, H, N, C, log_sum)
        amplitude_backward_kernel[(B * H,)](
            grads[0].contiguous(), *by_entries(mask, log_sum), *by_entries(query_mask, log_sum),
            tokens_q, tokens_k, log_sum, allocator(log_sum)(B * H, QP, NP), *by_rows(d_q), *by_rows(d_k),
            H, NQ, N, C,
            MASKED=mask is not None, QUERY_MASKED=query_mask is not None, QP=QP, NP=NP, CP=CP,
            **launch("amplitude_backward", max(QP, NP)),
        )  # fmt: skip
        return d_q, d_k, None, None
