"""Triton kernel of attention's forward pass, keys streamed in tiles, nothing N x N in memory.

    e_ij = -1/2 |q_i - k_j|^2  (DISTANCE)  or  scale q_i . k_j
    out_i = sum_j exp(e_ij - s_i) v_j,   s_i = log sum_j exp(e_ij) with NORMALISED rows (eq. 25), else 0

Distances do not see a translation but rounding does, so every program takes its own tokens' mean for
the origin.  Where these are far APART their distances are differences of the tokens in memory; that loop is
one of its own, as the two together have too few registers.

Triton kernels of attention's backward pass; see `forward` for the letters.

    P_ij = exp(e_ij - s_i),  t_i = g_i . out_i with NORMALISED rows, else 0
    E_ij = P_ij (g_i . v_j - t_i),   dv_j = sum_i P_ij g_i
    dq_i = sum_j E_ij (k_j - q_i),   dk_j = sum_i E_ij (q_i - k_j)          (DISTANCE)
    dq_i = scale sum_j E_ij k_j,     dk_j = scale sum_i E_ij q_i

Weights are computed again, nothing N x N is kept, and no two programs add to one place.
"""

import triton
import triton.language as tl
from triton.language import constexpr

from gpattention.ops.tiles import (
    FAR,
    centre_of,
    centred,
    differences,
    exponential,
    head,
    program_head,
    real_rows,
    rows_from,
    rows_of,
    spread_of,
    store_rows,
)

# mypy: disable-error-code="import-not-found,import-untyped,misc,no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201


HIDDEN = tl.constexpr(-1e30)  # instead of -inf, whose differences are NaN


@triton.jit
def exponents(Q, K, q, asked, k, real, C, DISTANCE: constexpr, APART: constexpr):
    """e of queries and keys about one origin; the caller has scaled what dot products want scaled."""
    if APART:
        e = differences(q, asked, k, real, C, Q.shape[0], K.shape[0])
    else:
        e = tl.dot(Q, tl.trans(K), input_precision="ieee")
        if DISTANCE:
            e = e - 0.5 * tl.sum(Q * Q, 1)[:, None] - 0.5 * tl.sum(K * K, 1)[None, :]
    if DISTANCE:
        e = tl.minimum(e, 0.0, tl.PropagateNan.ALL)
    return e


@triton.jit
def weights(e, visible):
    """exp(e) of visible pairs, else 0; NaN stays NaN.  [BQ, BK]"""
    return tl.where(visible, exponential(tl.maximum(e, -200.0, tl.PropagateNan.ALL)), 0.0)


@triton.jit
def sees(asked, real, first_query, first_key, CAUSAL: constexpr, BQ: constexpr, BK: constexpr):
    """Pairs of real tokens, the key not after the query where CAUSAL.  [BQ, BK]"""
    visible = asked[:, None] & real[None, :]
    if CAUSAL:
        i, j = first_query + tl.arange(0, BQ), first_key + tl.arange(0, BK)
        visible = visible & (j[None, :] <= i[:, None])
    return visible


@triton.jit
def attend(
    Q, q, asked, origin, k, v, mask, b, h, first, last, N, C, D, DISTANCE: constexpr, APART: constexpr,
    NORMALISED: constexpr, CAUSAL: constexpr, BQ: constexpr, BK: constexpr, CP: constexpr, DP: constexpr,
):  # fmt: skip
    """sum_j exp(e_ij - m_i) v_j, sum_j exp(e_ij - m_i) and m_i: the largest e_ij if NORMALISED, else 0."""
    k, k_n = k
    v, v_n = v
    largest = tl.zeros((BQ,), tl.float32) + HIDDEN
    total = tl.zeros((BQ,), tl.float32)
    attended = tl.zeros((BQ, DP), tl.float32)
    for start in range(0, last, BK):
        real = real_rows(mask, b, h, start, N, BK)
        K = rows_of((k, k_n), real, C, BK, CP)
        if DISTANCE:
            K = K - origin[None, :]
        e = exponents(Q, K, q, asked, (k, k_n), real, C, DISTANCE, APART)
        visible = sees(asked, real, first, start, CAUSAL, BQ, BK)
        if NORMALISED:
            e = tl.where(visible, e, HIDDEN)
            higher = tl.maximum(largest, tl.max(e, 1))
            shrink = exponential(tl.maximum(largest - higher, -200.0))
            e = e - higher[:, None]
            largest = higher
            total = total * shrink
            attended = attended * shrink[:, None]
        P = weights(e, visible)
        if NORMALISED:
            total += tl.sum(P, 1)
        V = rows_of((v, v_n), real, D, BK, DP)
        attended = tl.dot(P, V, attended, input_precision="ieee")
        k += BK * k_n
        v += BK * v_n
    return attended, total, largest


@triton.jit
def attention_kernel(
    q, k, v, mask, query_mask, out, log_sum, scale, H, NQ, N, C, D,
    DISTANCE: constexpr, NORMALISED: constexpr, CAUSAL: constexpr, BQ: constexpr, BK: constexpr,
    CP: constexpr, DP: constexpr,
):  # fmt: skip
    """Program (s, tile): some queries of one sequence and head; keeps s_i of NORMALISED rows."""
    s, b, h = program_head(H)
    first = tl.program_id(1) * BQ
    i = tl.arange(0, BQ)
    asked = real_rows(query_mask, b, h, first, NQ, BQ)
    above = first.to(tl.int64)
    q = rows_from(head(q, b, h), above)
    Q = rows_of(q, asked, C, BQ, CP)
    origin, far = tl.zeros((CP,), tl.float32), False
    if DISTANCE:
        origin = centre_of(Q, asked)
        Q = centred(Q, origin, asked)
        far = spread_of(Q) > FAR
    else:
        Q = Q * scale
    last = N
    if CAUSAL:
        last = tl.minimum(N, first + BQ)
    k, v = head(k, b, h), head(v, b, h)
    if far:
        attended, total, largest = attend(
            Q, q, asked, origin, k, v, mask, b, h, first, last, N, C, D, DISTANCE, True, NORMALISED, CAUSAL,
            BQ, BK, CP, DP,
        )  # fmt: skip
    else:
        attended, total, largest = attend(
            Q, q, asked, origin, k, v, mask, b, h, first, last, N, C, D, DISTANCE, False, NORMALISED, CAUSAL,
            BQ, BK, CP, DP,
        )  # fmt: skip
    if NORMALISED:
        empty = total == 0  # a row that sees nothing
        total = tl.where(empty, 1.0, total)
        attended = attended / total[:, None]
        log_total = tl.where(empty, 0.0, largest + tl.log(total))
        tl.store(log_sum + s * NQ + first + i, log_total, mask=first + i < NQ)
    store_rows(rows_from(head(out, b, h), above), attended, first, NQ, D, BQ, DP)


@triton.jit
def weights_and_gradients(
    Q, K, q, asked, k, real, C, V, G, log_sum, scale, inner, visible,
    DISTANCE: constexpr, APART: constexpr, NORMALISED: constexpr, WHOLE: constexpr,
):  # fmt: skip
    """P and E of one pair of tiles; `inner` is t, which a WHOLE row gives itself.  [BQ, BK] each"""
    e = exponents(Q, K, q, asked, k, real, C, DISTANCE, APART)
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
def keys_gradients(
    K, V, k, real, origin, q, grad, out, grad_q, log_sum, query_mask, b, h, scale, first, NQ, C, D,
    DISTANCE: constexpr, APART: constexpr, NORMALISED: constexpr, CAUSAL: constexpr, WHOLE: constexpr,
    BQ: constexpr, BK: constexpr, CP: constexpr, DP: constexpr,
):  # fmt: skip
    """sum_i E_ij q_i, sum_i P_ij g_i and sum_i E_ij; writes the gradients of the queries where WHOLE."""
    i = tl.arange(0, BQ)
    q, q_n = q
    grad, grad_n = grad
    out, out_n = out
    grad_q, grad_q_n = grad_q
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
        asked = real_rows(query_mask, b, h, start, NQ, BQ)
        Q = rows_of((q, q_n), asked, C, BQ, CP)
        if DISTANCE:
            Q = Q - origin[None, :]
        G = rows_of((grad, grad_n), asked, D, BQ, DP)
        total = tl.zeros((BQ,), tl.float32)
        inner = tl.zeros((BQ,), tl.float32)
        if NORMALISED:
            total = tl.load(log_sum + start + i, mask=asked, other=0.0)
            if not WHOLE:
                inner = tl.sum(G * rows_of((out, out_n), asked, D, BQ, DP), 1)
        visible = sees(asked, real, start, first, CAUSAL, BQ, BK)
        P, E = weights_and_gradients(
            Q, K, (q, q_n), asked, k, real, C, V, G, total, scale, inner, visible, DISTANCE, APART,
            NORMALISED, WHOLE,
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
            store_rows((grad_q, grad_q_n), by_q, start, NQ, C, BQ, CP)
            grad_q += BQ * grad_q_n
        q += BQ * q_n
        grad += BQ * grad_n
        out += BQ * out_n
    return by_k, by_v, by_column


@triton.jit
def keys_backward_kernel(
    grad, q, k, v, mask, query_mask, out, log_sum, scale, grad_q, grad_k, grad_v, H, NQ, N, C, D,
    DISTANCE: constexpr, NORMALISED: constexpr, CAUSAL: constexpr, WHOLE: constexpr, BQ: constexpr,
    BK: constexpr, CP: constexpr, DP: constexpr,
):  # fmt: skip
    """Program (s, tile): gradients of some keys and values; of the queries too where the tile is WHOLE."""
    s, b, h = program_head(H)
    first = tl.program_id(1) * BK
    above = first.to(tl.int64)
    real = real_rows(mask, b, h, first, N, BK)
    k = rows_from(head(k, b, h), above)
    K = rows_of(k, real, C, BK, CP)
    V = rows_of(rows_from(head(v, b, h), above), real, D, BK, DP)
    origin, far = tl.zeros((CP,), tl.float32), False
    if DISTANCE:
        origin = centre_of(K, real)
        K = centred(K, origin, real)
        far = spread_of(K) > FAR
    q, grad, out, grad_q = head(q, b, h), head(grad, b, h), head(out, b, h), head(grad_q, b, h)
    if far:
        by_k, by_v, by_column = keys_gradients(
            K, V, k, real, origin, q, grad, out, grad_q, log_sum + s * NQ, query_mask, b, h, scale, first, NQ,
            C, D, DISTANCE, True, NORMALISED, CAUSAL, WHOLE, BQ, BK, CP, DP,
        )  # fmt: skip
    else:
        by_k, by_v, by_column = keys_gradients(
            K, V, k, real, origin, q, grad, out, grad_q, log_sum + s * NQ, query_mask, b, h, scale, first, NQ,
            C, D, DISTANCE, False, NORMALISED, CAUSAL, WHOLE, BQ, BK, CP, DP,
        )  # fmt: skip
    if DISTANCE:
        by_k = tl.where(real[:, None], by_k - by_column[:, None] * K, 0.0)
    else:
        by_k = by_k * scale
    store_rows(rows_from(head(grad_k, b, h), above), by_k, first, N, C, BK, CP)
    store_rows(rows_from(head(grad_v, b, h), above), by_v, first, N, D, BK, DP)


@triton.jit
def queries_gradients(
    Q, G, q, asked, origin, k, v, total, inner, mask, b, h, scale, first, last, N, C, D,
    DISTANCE: constexpr, APART: constexpr, NORMALISED: constexpr, CAUSAL: constexpr, BQ: constexpr,
    BK: constexpr, CP: constexpr, DP: constexpr,
):  # fmt: skip
    """sum_j E_ij k_j and sum_j E_ij."""
    k, k_n = k
    v, v_n = v
    by_q = tl.zeros((BQ, CP), tl.float32)
    by_row = tl.zeros((BQ,), tl.float32)
    for start in range(0, last, BK):
        real = real_rows(mask, b, h, start, N, BK)
        K = rows_of((k, k_n), real, C, BK, CP)
        if DISTANCE:
            K = K - origin[None, :]
        V = rows_of((v, v_n), real, D, BK, DP)
        visible = sees(asked, real, first, start, CAUSAL, BQ, BK)
        _, E = weights_and_gradients(
            Q, K, q, asked, (k, k_n), real, C, V, G, total, scale, inner, visible, DISTANCE, APART,
            NORMALISED, False,
        )  # fmt: skip
        if not DISTANCE:
            K = K - origin[None, :]
        by_q = tl.dot(E, K, by_q, input_precision="ieee")
        by_row += tl.sum(E, 1)
        k += BK * k_n
        v += BK * v_n
    return by_q, by_row


@triton.jit
def queries_backward_kernel(
    grad, q, k, v, mask, query_mask, out, log_sum, scale, grad_q, H, NQ, N, C, D,
    DISTANCE: constexpr, NORMALISED: constexpr, CAUSAL: constexpr, BQ: constexpr, BK: constexpr,
    CP: constexpr, DP: constexpr,
):  # fmt: skip
    """Program (s, tile): gradients of some queries, where the keys are more than one tile."""
    s, b, h = program_head(H)
    first = tl.program_id(1) * BQ
    i = tl.arange(0, BQ)
    above = first.to(tl.int64)
    asked = real_rows(query_mask, b, h, first, NQ, BQ)
    q = rows_from(head(q, b, h), above)
    Q = rows_of(q, asked, C, BQ, CP)
    G = rows_of(rows_from(head(grad, b, h), above), asked, D, BQ, DP)
    total = tl.zeros((BQ,), tl.float32)
    inner = tl.zeros((BQ,), tl.float32)
    if NORMALISED:
        total = tl.load(log_sum + s * NQ + first + i, mask=asked, other=0.0)
        inner = tl.sum(G * rows_of(rows_from(head(out, b, h), above), asked, D, BQ, DP), 1)
    k, k_n = head(k, b, h)
    origin, far = tl.zeros((CP,), tl.float32), False
    if DISTANCE:
        origin = centre_of(Q, asked)
        Q = centred(Q, origin, asked)
        far = spread_of(Q) > FAR
    else:  # rows of E sum to 0 but for rounding, which what the keys have in common would multiply
        ahead = real_rows(mask, b, h, 0, N, BK)
        origin = centre_of(rows_of((k, k_n), ahead, C, BK, CP), ahead)
    last = N
    if CAUSAL:
        last = tl.minimum(N, first + BQ)
    if far:
        by_q, by_row = queries_gradients(
            Q, G, q, asked, origin, (k, k_n), head(v, b, h), total, inner, mask, b, h, scale, first, last, N,
            C, D, DISTANCE, True, NORMALISED, CAUSAL, BQ, BK, CP, DP,
        )  # fmt: skip
    else:
        by_q, by_row = queries_gradients(
            Q, G, q, asked, origin, (k, k_n), head(v, b, h), total, inner, mask, b, h, scale, first, last, N,
            C, D, DISTANCE, False, NORMALISED, CAUSAL, BQ, BK, CP, DP,
        )  # fmt: skip
    if DISTANCE:
        by_q = tl.where(asked[:, None], by_q - by_row[:, None] * Q, 0.0)
    else:
        by_q = by_q * scale
    store_rows(rows_from(head(grad_q, b, h), above), by_q, first, NQ, C, BQ, CP)
