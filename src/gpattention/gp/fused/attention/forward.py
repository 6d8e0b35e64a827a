"""Triton kernel of attention's forward pass, keys streamed in tiles, nothing N x N in memory.

    e_ij = -1/2 |q_i - k_j|^2  (DISTANCE)  or  scale q_i . k_j
    out_i = sum_j exp(e_ij - s_i) v_j,   s_i = log sum_j exp(e_ij) with NORMALISED rows (eq. 25), else 0

Distances do not see a translation but rounding does, so every program takes its own tokens' mean for
the origin.
"""
# mypy: disable-error-code="import-not-found,import-untyped,misc,no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201

import triton
import triton.language as tl

from gpattention.gp.fused.blocks import (
    FAR,
    centre_of,
    centred,
    differences,
    exponential,
    spread_of,
)
from gpattention.gp.fused.tiles import real_rows, rows_of, store_rows

HIDDEN = tl.constexpr(-1e30)  # instead of -inf, whose differences are NaN


@triton.jit
def exponents(Q, K, far, q, q_n, asked, k, k_n, real, C, DISTANCE: tl.constexpr):
    """e of queries and keys about one origin; the caller has scaled what dot products want scaled.

    By differences of the tokens in memory where those that gave the origin are far apart.
    """
    e = tl.dot(Q, tl.trans(K), input_precision="ieee")
    if DISTANCE:
        e = e - 0.5 * tl.sum(Q * Q, 1)[:, None] - 0.5 * tl.sum(K * K, 1)[None, :]
        if far:
            e = differences(q, q_n, asked, k, k_n, real, C, Q.shape[0], K.shape[0])
        e = tl.minimum(e, 0.0, tl.PropagateNan.ALL)
    return e


@triton.jit
def weights(e, visible):
    """exp(e) of visible pairs, else 0; NaN stays NaN.  [BQ, BK]"""
    return tl.where(visible, exponential(tl.maximum(e, -200.0, tl.PropagateNan.ALL)), 0.0)


@triton.jit
def sees(asked, real, first_query, first_key, CAUSAL: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr):
    """Pairs of real tokens, the key not after the query where CAUSAL.  [BQ, BK]"""
    visible = asked[:, None] & real[None, :]
    if CAUSAL:
        i, j = first_query + tl.arange(0, BQ), first_key + tl.arange(0, BK)
        visible = visible & (j[None, :] <= i[:, None])
    return visible


@triton.jit
def attention_kernel(
    q, q_b, q_h, q_n, k, k_b, k_h, k_n, v, v_b, v_h, v_n,
    mask, mask_b, mask_h, mask_n, query_mask, query_b, query_h, query_n,
    out, out_b, out_h, out_n, log_sum, scale,
    H, NQ, N, C, D,
    DISTANCE: tl.constexpr, NORMALISED: tl.constexpr, CAUSAL: tl.constexpr,
    MASKED: tl.constexpr, QUERY_MASKED: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr, CP: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Program (s, tile): some queries of one sequence and head; keeps s_i of NORMALISED rows."""
    s, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BQ
    b, h = s // H, s % H
    i = tl.arange(0, BQ)
    asked = real_rows(query_mask + b * query_b + h * query_h, query_n, first, NQ, QUERY_MASKED, BQ)
    above = first.to(tl.int64)
    q += b * q_b + h * q_h + above * q_n
    Q = rows_of(q, q_n, asked, C, BQ, CP)
    origin, far = tl.zeros((CP,), tl.float32), False
    if DISTANCE:
        origin = centre_of(Q, asked)
        Q = centred(Q, origin, asked)
        far = spread_of(Q) > FAR
    else:
        Q = Q * scale
    k += b * k_b + h * k_h
    v += b * v_b + h * v_h
    mask += b * mask_b + h * mask_h
    largest = tl.zeros((BQ,), tl.float32) + HIDDEN
    total = tl.zeros((BQ,), tl.float32)
    attended = tl.zeros((BQ, DP), tl.float32)
    last = N
    if CAUSAL:
        last = tl.minimum(N, first + BQ)
    for start in range(0, last, BK):
        real = real_rows(mask, mask_n, start, N, MASKED, BK)
        K = rows_of(k, k_n, real, C, BK, CP)
        if DISTANCE:
            K = K - origin[None, :]
        e = exponents(Q, K, far, q, q_n, asked, k, k_n, real, C, DISTANCE)
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
        V = rows_of(v, v_n, real, D, BK, DP)
        attended = tl.dot(P, V, attended, input_precision="ieee")
        k += BK * k_n
        v += BK * v_n
    if NORMALISED:
        empty = total == 0  # a row that sees nothing
        total = tl.where(empty, 1.0, total)
        attended = attended / total[:, None]
        log_total = tl.where(empty, 0.0, largest + tl.log(total))
        tl.store(log_sum + s * NQ + first + i, log_total, mask=first + i < NQ)
    store_rows(out + b * out_b + h * out_h + above * out_n, out_n, attended, first, NQ, D, BQ, DP)
