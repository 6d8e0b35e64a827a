"""Triton kernels of the amplitudes that normalise rows, one program per sequence and head.

e_ij = -1/2 |q_i - k_j|^2,   s_i = log sum_j exp(e_ij),   log a_i = min(log t - s_i, most)              (25)
With g the gradient of log a, 0 where it is capped:   dt = sum_i g_i / t
P_ij = -g_i exp(e_ij - s_i),  dq_i = sum_j P_ij (k_j - q_i),  dk_j = sum_i P_ij (q_i - k_j)
"""
# mypy: disable-error-code="import-not-found,import-untyped,misc,no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201

import triton
import triton.language as tl

from gpattention.gp.fused.blocks import (
    centre_of,
    centred,
    exponential,
    exponents,
    fetch,
    product,
    real_tokens,
    store,
    store_tokens,
    store_turned,
    tokens,
)

_HIDDEN = tl.constexpr(-1e30)  # instead of -inf, whose differences are NaN


@triton.jit
def hidden_exponents(
    q, q_n, asked, k, k_n, real, C, tokens_q, tokens_k, turned,
    QP: tl.constexpr, NP: tl.constexpr, CP: tl.constexpr,
):  # fmt: skip
    """e, never above 0, hidden at padded keys, which come centred and turned too.  [QP, NP]"""
    Q, K = fetch(tokens_q, QP, CP), fetch(tokens_k, NP, CP)
    dot = product(tokens_q, CP, 1, turned, NP, 1, QP, NP, CP)
    e = exponents(dot, Q, K, q, q_n, asked, k, k_n, real, C, QP, NP)
    return tl.where(real[None, :], e, _HIDDEN)


@triton.jit
def amplitude_kernel(
    q, q_b, q_h, q_n, k, k_b, k_h, k_n,
    mask, mask_b, mask_h, mask_n, query_mask, query_b, query_h, query_n,
    scale, scale_b, scale_h,
    tokens_q, tokens_k, turned, log_sum, log_amplitude, most,
    H, NQ, N, C,
    MASKED: tl.constexpr, QUERY_MASKED: tl.constexpr, CAPPED: tl.constexpr,
    QP: tl.constexpr, NP: tl.constexpr, CP: tl.constexpr,
):  # fmt: skip
    """log a of every query, 0 at padding and where there is no real key; keeps the masked tokens and s."""
    s = tl.program_id(0).to(tl.int64)
    b, h = s // H, s % H
    i = tl.arange(0, QP)
    real = real_tokens(mask + b * mask_b + h * mask_h, mask_n, N, MASKED, NP)
    asked = real_tokens(query_mask + b * query_b + h * query_h, query_n, NQ, QUERY_MASKED, QP)
    tokens_q += s * QP * CP
    tokens_k += s * NP * CP
    turned += s * CP * NP
    q += b * q_b + h * q_h
    k += b * k_b + h * k_h
    X = tokens(k, k_n, real, C, NP, CP)
    centre = centre_of(X, real)
    X = centred(X, centre, real)
    store(tokens_k, X, NP, CP)
    store_turned(turned, X, NP, CP)
    X = tokens(q, q_n, asked, C, QP, CP)
    store(tokens_q, centred(X, centre, asked), QP, CP)
    tl.debug_barrier()
    e = hidden_exponents(q, q_n, asked, k, k_n, real, C, tokens_q, tokens_k, turned, QP, NP, CP)
    largest = tl.max(e, 1)
    total = largest + tl.log(tl.sum(exponential(e - largest[:, None]), 1))
    seen = asked & (tl.sum(real.to(tl.int32)) > 0)
    found = tl.log(tl.load(scale + b * scale_b + h * scale_h)) - total
    if CAPPED:
        found = tl.minimum(found, most, tl.PropagateNan.ALL)
    tl.store(log_sum + s * NQ + i, tl.where(seen, total, 0.0), mask=i < NQ)
    tl.store(log_amplitude + s * NQ + i, tl.where(seen, found, 0.0), mask=i < NQ)


@triton.jit
def amplitude_backward_kernel(
    grad, q, q_b, q_h, q_n, k, k_b, k_h, k_n,
    mask, mask_b, mask_h, mask_n, query_mask, query_b, query_h, query_n,
    scale, scale_b, scale_h,
    tokens_q, tokens_k, turned, log_sum, scratch, most,
    grad_q, grad_q_b, grad_q_h, grad_q_n, grad_k, grad_k_b, grad_k_h, grad_k_n, grad_scale,
    H, NQ, N, C,
    MASKED: tl.constexpr, QUERY_MASKED: tl.constexpr, CAPPED: tl.constexpr,
    QP: tl.constexpr, NP: tl.constexpr, CP: tl.constexpr,
):  # fmt: skip
    """Gradients of queries, keys and t."""
    s = tl.program_id(0).to(tl.int64)
    b, h = s // H, s % H
    i = tl.arange(0, QP)
    real = real_tokens(mask + b * mask_b + h * mask_h, mask_n, N, MASKED, NP)
    asked = real_tokens(query_mask + b * query_b + h * query_h, query_n, NQ, QUERY_MASKED, QP)
    tokens_q += s * QP * CP
    tokens_k += s * NP * CP
    turned += s * CP * NP
    scratch += s * QP * NP
    q += b * q_b + h * q_h
    k += b * k_b + h * k_h
    store_turned(turned, fetch(tokens_k, NP, CP), NP, CP)
    tl.debug_barrier()
    total = tl.load(log_sum + s * NQ + i, mask=asked, other=0.0)
    seen = asked & (tl.sum(real.to(tl.int32)) > 0)
    g = tl.where(seen, tl.load(grad + s * NQ + i, mask=asked, other=0.0), 0.0)
    t = tl.load(scale + b * scale_b + h * scale_h)
    if CAPPED:
        g = tl.where(tl.log(t) - total <= most, g, 0.0)
    tl.store(grad_scale + s, tl.sum(g) / t)
    e = hidden_exponents(q, q_n, asked, k, k_n, real, C, tokens_q, tokens_k, turned, QP, NP, CP)
    e = e - total[:, None]
    P = -g[:, None] * exponential(tl.minimum(tl.maximum(e, -200.0), 1.0))  # 0 at most, but for rounding
    P = tl.where(asked[:, None] & real[None, :], P, 0.0)
    store(scratch, P, QP, NP)
    by_row, by_column = tl.sum(P, 1), tl.sum(P, 0)
    tl.debug_barrier()
    moved = product(scratch, NP, 1, tokens_k, CP, 1, QP, CP, NP) - by_row[:, None] * fetch(tokens_q, QP, CP)
    store_tokens(grad_q + b * grad_q_b + h * grad_q_h, grad_q_n, moved, NQ, C, QP, CP)
    moved = product(scratch, 1, NP, tokens_q, CP, 1, NP, CP, QP) - by_column[:, None] * fetch(
        tokens_k, NP, CP
    )
    store_tokens(grad_k + b * grad_k_b + h * grad_k_h, grad_k_n, moved, N, C, NP, CP)
