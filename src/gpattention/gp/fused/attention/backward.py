"""Triton kernels of attention's backward pass; see `forward` for the letters.

    P_ij = exp(e_ij - s_i),  t_i = g_i . out_i with NORMALISED rows, else 0
    E_ij = P_ij (g_i . v_j - t_i),   dv_j = sum_i P_ij g_i
    dq_i = sum_j E_ij (k_j - q_i),   dk_j = sum_i E_ij (q_i - k_j)          (DISTANCE)
    dq_i = scale sum_j E_ij k_j,     dk_j = scale sum_i E_ij q_i

Weights are computed again, nothing N x N is kept, and no two programs add to one place.
"""
# mypy: disable-error-code="import-not-found,import-untyped,misc,no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201

import triton
import triton.language as tl

from gpattention.gp.fused.attention.forward import exponents, sees, weights
from gpattention.gp.fused.blocks import FAR, centre_of, centred, spread_of
from gpattention.gp.fused.tiles import real_rows, rows_of, store_rows


@triton.jit
def weights_and_gradients(
    Q, K, far, q, q_n, asked, k, k_n, real, C, V, G, log_sum, scale, inner, visible,
    DISTANCE: tl.constexpr, NORMALISED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """P and E of one pair of tiles; `inner` is t, which a WHOLE row gives itself.  [BQ, BK] each"""
    e = exponents(Q, K, far, q, q_n, asked, k, k_n, real, C, DISTANCE)
    if not DISTANCE:
        e = e * scale
    if NORMALISED:
        e = tl.minimum(e - log_sum[:, None], 1.0, tl.PropagateNan.ALL)  # 0 at most, but for rounding
    P = weights(e, visible)
    E = tl.dot(G, tl.trans(V), input_precision="ieee")
    if NORMALISED:
        if WHOLE:
            total = tl.sum(P, 1)  # 1 but for rounding, which this takes away
            P = P * (1.0 / tl.where(total == 0, 1.0, total))[:, None]
            inner = tl.sum(P * E, 1)
        E = E - inner[:, None]
    return P, P * E


@triton.jit
def keys_backward_kernel(
    grad, grad_b, grad_h, grad_n, q, q_b, q_h, q_n, k, k_b, k_h, k_n, v, v_b, v_h, v_n,
    mask, mask_b, mask_h, mask_n, query_mask, query_b, query_h, query_n,
    out, out_b, out_h, out_n, log_sum, scale,
    grad_q, grad_q_b, grad_q_h, grad_q_n, grad_k, grad_k_b, grad_k_h, grad_k_n,
    grad_v, grad_v_b, grad_v_h, grad_v_n,
    H, NQ, N, C, D,
    DISTANCE: tl.constexpr, NORMALISED: tl.constexpr, CAUSAL: tl.constexpr,
    MASKED: tl.constexpr, QUERY_MASKED: tl.constexpr, WHOLE: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr, CP: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Program (s, tile): gradients of some keys and values; of the queries too where the tile is WHOLE."""
    s, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BK
    b, h = s // H, s % H
    i = tl.arange(0, BQ)
    above = first.to(tl.int64)
    real = real_rows(mask + b * mask_b + h * mask_h, mask_n, first, N, MASKED, BK)
    k += b * k_b + h * k_h + above * k_n
    K = rows_of(k, k_n, real, C, BK, CP)
    V = rows_of(v + b * v_b + h * v_h + above * v_n, v_n, real, D, BK, DP)
    origin, far = tl.zeros((CP,), tl.float32), False
    if DISTANCE:
        origin = centre_of(K, real)
        K = centred(K, origin, real)
        far = spread_of(K) > FAR
    q += b * q_b + h * q_h
    grad += b * grad_b + h * grad_h
    out += b * out_b + h * out_h
    query_mask += b * query_b + h * query_h
    grad_q += b * grad_q_b + h * grad_q_h
    by_k = tl.zeros((BK, CP), tl.float32)
    by_v = tl.zeros((BK, DP), tl.float32)
    by_column = tl.zeros((BK,), tl.float32)
    begin = 0
    if CAUSAL:
        begin = first // BQ * BQ  # earlier queries see none of these keys
        below = begin.to(tl.int64)
        q += below * q_n
        grad += below * grad_n
        out += below * out_n
        grad_q += below * grad_q_n
    for start in range(begin, NQ, BQ):
        asked = real_rows(query_mask, query_n, start, NQ, QUERY_MASKED, BQ)
        Q = rows_of(q, q_n, asked, C, BQ, CP)
        if DISTANCE:
            Q = Q - origin[None, :]
        G = rows_of(grad, grad_n, asked, D, BQ, DP)
        total = tl.zeros((BQ,), tl.float32)
        inner = tl.zeros((BQ,), tl.float32)
        if NORMALISED:
            total = tl.load(log_sum + s * NQ + start + i, mask=asked, other=0.0)
            if not WHOLE:
                inner = tl.sum(G * rows_of(out, out_n, asked, D, BQ, DP), 1)
        visible = sees(asked, real, start, first, CAUSAL, BQ, BK)
        P, E = weights_and_gradients(
            Q, K, far, q, q_n, asked, k, k_n, real, C, V, G, total, scale, inner, visible,
            DISTANCE, NORMALISED, WHOLE,
        )  # fmt: skip
        by_v = tl.dot(tl.trans(P), G, by_v, input_precision="ieee")
        by_k = tl.dot(tl.trans(E), Q, by_k, input_precision="ieee")
        by_column += tl.sum(E, 0)
        if WHOLE:
            by_q = tl.dot(E, K, input_precision="ieee")
            if DISTANCE:
                by_q = tl.where(asked[:, None], by_q - tl.sum(E, 1)[:, None] * Q, 0.0)
            else:
                by_q = by_q * scale
            store_rows(grad_q, grad_q_n, by_q, start, NQ, C, BQ, CP)
            grad_q += BQ * grad_q_n
        q += BQ * q_n
        grad += BQ * grad_n
        out += BQ * out_n
    if DISTANCE:
        by_k = tl.where(real[:, None], by_k - by_column[:, None] * K, 0.0)
    else:
        by_k = by_k * scale
    store_rows(grad_k + b * grad_k_b + h * grad_k_h + above * grad_k_n, grad_k_n, by_k, first, N, C, BK, CP)
    store_rows(grad_v + b * grad_v_b + h * grad_v_h + above * grad_v_n, grad_v_n, by_v, first, N, D, BK, DP)


@triton.jit
def queries_backward_kernel(
    grad, grad_b, grad_h, grad_n, q, q_b, q_h, q_n, k, k_b, k_h, k_n, v, v_b, v_h, v_n,
    mask, mask_b, mask_h, mask_n, query_mask, query_b, query_h, query_n,
    out, out_b, out_h, out_n, log_sum, scale,
    grad_q, grad_q_b, grad_q_h, grad_q_n,
    H, NQ, N, C, D,
    DISTANCE: tl.constexpr, NORMALISED: tl.constexpr, CAUSAL: tl.constexpr,
    MASKED: tl.constexpr, QUERY_MASKED: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr, CP: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Program (s, tile): gradients of some queries, where the keys are more than one tile."""
    s, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BQ
    b, h = s // H, s % H
    i = tl.arange(0, BQ)
    above = first.to(tl.int64)
    asked = real_rows(query_mask + b * query_b + h * query_h, query_n, first, NQ, QUERY_MASKED, BQ)
    q += b * q_b + h * q_h + above * q_n
    Q = rows_of(q, q_n, asked, C, BQ, CP)
    G = rows_of(grad + b * grad_b + h * grad_h + above * grad_n, grad_n, asked, D, BQ, DP)
    total = tl.zeros((BQ,), tl.float32)
    inner = tl.zeros((BQ,), tl.float32)
    if NORMALISED:
        total = tl.load(log_sum + s * NQ + first + i, mask=asked, other=0.0)
        inner = tl.sum(G * rows_of(out + b * out_b + h * out_h + above * out_n, out_n, asked, D, BQ, DP), 1)
    k += b * k_b + h * k_h
    v += b * v_b + h * v_h
    mask += b * mask_b + h * mask_h
    origin, far = tl.zeros((CP,), tl.float32), False
    if DISTANCE:
        origin = centre_of(Q, asked)
        Q = centred(Q, origin, asked)
        far = spread_of(Q) > FAR
    else:  # rows of E sum to 0 but for rounding, which what the keys have in common would multiply
        ahead = real_rows(mask, mask_n, 0, N, MASKED, BK)
        origin = centre_of(rows_of(k, k_n, ahead, C, BK, CP), ahead)
    by_q = tl.zeros((BQ, CP), tl.float32)
    by_row = tl.zeros((BQ,), tl.float32)
    last = N
    if CAUSAL:
        last = tl.minimum(N, first + BQ)
    for start in range(0, last, BK):
        real = real_rows(mask, mask_n, start, N, MASKED, BK)
        K = rows_of(k, k_n, real, C, BK, CP)
        if DISTANCE:
            K = K - origin[None, :]
        V = rows_of(v, v_n, real, D, BK, DP)
        visible = sees(asked, real, first, start, CAUSAL, BQ, BK)
        _, E = weights_and_gradients(
            Q, K, far, q, q_n, asked, k, k_n, real, C, V, G, total, scale, inner, visible,
            DISTANCE, NORMALISED, False,
        )  # fmt: skip
        if not DISTANCE:
            K = K - origin[None, :]
        by_q = tl.dot(E, K, by_q, input_precision="ieee")
        by_row += tl.sum(E, 1)
        k += BK * k_n
        v += BK * v_n
    if DISTANCE:
        by_q = tl.where(asked[:, None], by_q - by_row[:, None] * Q, 0.0)
    else:
        by_q = by_q * scale
    store_rows(grad_q + b * grad_q_b + h * grad_q_h + above * grad_q_n, grad_q_n, by_q, first, NQ, C, BQ, CP)
