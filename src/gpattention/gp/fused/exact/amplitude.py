"""Amplitudes that normalise rows as one autograd function; the reference is in `gp.amplitude`."""

from typing import Any

import torch
from torch import Tensor

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
)
from gpattention.gp.inputs import Tokens
from gpattention.gp.shapes import broadcast


def fused_row_log_amplitude(t: Tokens, most: float | None) -> Tensor:
    """log a_i of eq. 25 for t.scale_q, at most `most`, 0 at padding and where there is no key.  [..., Q]"""
    lead = broadcast(t.q.shape[:-2], t.k.shape[:-2])
    log_amplitude: Tensor = _RowLogAmplitude.apply(  # type: ignore[no-untyped-call]
        matrices(t.q, lead), matrices(t.k, lead), t.scale_q,
        None if t.mask is None else vectors(t.mask, lead),
        None if t.query_mask is None else vectors(t.query_mask, lead),
        lead, most,
    )  # fmt: skip
    return log_amplitude.reshape(*lead, log_amplitude.shape[-1])


class _RowLogAmplitude(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,  # [B, H, Q, C]
        k: Tensor,  # [B, H, K, C]
        scale: Tensor,  # [..., 1, 1]
        mask: Tensor | None,  # [B, H, K]
        query_mask: Tensor | None,  # [B, H, Q]
        lead: torch.Size,
        most: float | None,
    ) -> Tensor:
        from gpattention.gp.fused.exact.amplitude_kernels import amplitude_kernel

        (B, H, NQ, C), N, empty = q.shape, k.shape[2], allocator(q)
        QP, NP, CP = padded(NQ), padded(N), padded(C)
        tokens_q, tokens_k, log_sum = empty(B * H, QP, CP), empty(B * H, NP, CP), empty(B, H, NQ)
        log_amplitude, turned = empty(B, H, NQ), empty(B * H, CP, NP)
        amplitude_kernel[(B * H,)](
            *by_rows(q), *by_rows(k), *by_entries(mask, q), *by_entries(query_mask, q),
            *by_heads(scalars(scale, lead)), tokens_q, tokens_k, turned, log_sum, log_amplitude,
            most or 0.0, H, NQ, N, C,
            MASKED=mask is not None, QUERY_MASKED=query_mask is not None, CAPPED=most is not None,
            QP=QP, NP=NP, CP=CP, **launch("amplitude", max(QP, NP)),
        )  # fmt: skip
        ctx.sizes, ctx.lead, ctx.most = (B, H, NQ, N, C), lead, most
        ctx.save_for_backward(q, k, scale, mask, query_mask, tokens_q, tokens_k, log_sum)
        return log_amplitude

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from gpattention.gp.fused.exact.amplitude_kernels import amplitude_backward_kernel

        q, k, scale, mask, query_mask, tokens_q, tokens_k, log_sum = ctx.saved_tensors
        B, H, NQ, N, C = ctx.sizes
        (QP, CP), NP = tokens_q.shape[1:], tokens_k.shape[1]
        d_q, d_k = token_major(B, H, NQ, C, log_sum), token_major(B, H, N, C, log_sum)
        empty, most = allocator(log_sum), ctx.most
        found = empty(1, 1, B, H)
        amplitude_backward_kernel[(B * H,)](
            grads[0].contiguous(), *by_rows(q), *by_rows(k), *by_entries(mask, log_sum),
            *by_entries(query_mask, log_sum),
            *by_heads(scalars(scale, ctx.lead)), tokens_q, tokens_k, empty(B * H, CP, NP), log_sum,
            empty(B * H, QP, NP), most or 0.0, *by_rows(d_q), *by_rows(d_k), found, H, NQ, N, C,
            MASKED=mask is not None, QUERY_MASKED=query_mask is not None, CAPPED=most is not None,
            QP=QP, NP=NP, CP=CP, **launch("amplitude_backward", max(QP, NP)),
        )  # fmt: skip
        (d_scale,) = to_parameters(found, ctx.lead, [scale.shape if ctx.needs_input_grad[2] else None])
        return d_q, d_k, d_scale, None, None, None, None
