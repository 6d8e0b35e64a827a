"""Triton kernel of the sparse model's small matrices, one program per sequence and head (section 3, 4, 11).

    B = I + G_o / s,  R = L_B^-1,   B_l = I + G_k / s,  R_l = L_Bl^-1,   s = sigma^2  (`roots`)
    T = R_l C R^T / s,   z = R_l P / s ("dual": R_l B_l P),   y = T^T z,   c = R^T y
    N = 2 I - R R^T + T^T T = L_N L_N^T,   R_c = R^T L_N,   R_N = L_N^-1                          (15)

With B_q = I + G_q / s, u = B_q^-1 c and S = R_c R_c^T
    query = -1/2 [quad + D (log det B_q + n log 2 pi s)],   quad = <u, G_q u> / s + |G_q u|^2 / s^2
    key   = -1/2 [|V|^2 / s - |z|^2 + D (log det B_l + n log 2 pi s)]  ("dual": |P|^2 + s |V|^2 first)
    kl    =  1/2 [quad + D (<S - I, I - B_q^-1> + log det B_q - log det(I + R_c^T G_q R_c / s))]  (24)

Kept for the backward pass, per unit of gradient: e = G_q u / s, U_q = d query / d G_q,
U_kl = d kl / d G_q and Q_kl = R (d kl / d S) R^T.

A transpose on the right of a product is another product (`u_t`) or comes turned from memory; see
`blocks`.
"""
# mypy: disable-error-code="import-not-found,import-untyped,misc,no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201

import triton
import triton.language as tl

from gpattention.gp.fused.blocks import fetch, store
from gpattention.gp.fused.sparse.blocks import mul, note_failure, root_of, store_turned, turn

_LOG_2_PI = tl.constexpr(1.8378770664093453)


@triton.jit
def covariance_root(R, R_t, T, to_N, to_R_N, scratch, N: tl.constexpr):
    """Write N and R_N; R_c, its transpose and the failed pivot.  [N, N], [N, N], []"""
    i = tl.arange(0, N)
    inner = mul(tl.trans(T), T, scratch) - mul(R, R_t, scratch) + tl.where(i[:, None] == i[None, :], 2.0, 0.0)
    store(to_N, inner, N, N)
    _, failed = root_of(inner, to_R_N, N)
    turn(scratch, to_R_N, N, N)
    L_N = mul(inner, fetch(scratch, N, N), scratch)  # N L_N^-T
    return mul(tl.trans(R), L_N, scratch), mul(tl.trans(L_N), R, scratch), failed


@triton.jit
def divergence(
    G, R, R_t, R_q, R_c, R_c_t, R_N, u, u_t, s, quadratic, log_det, D, scratch, N: tl.constexpr,
):  # fmt: skip
    """kl, U_kl, Q_kl, and the failed pivot.  [], [N, N], [N, N], []"""
    i = tl.arange(0, N)
    eye = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    J = mul(tl.trans(R_c), mul(G, R_c, scratch), scratch) / s
    log_det_inner, failed = root_of(J + eye, scratch, N)
    turn(scratch + N * N, scratch, N, N)
    R_I, R_I_t = fetch(scratch, N, N), fetch(scratch + N * N, N, N)
    shrink = mul(tl.trans(R_q), mul(R_q, G, scratch), scratch) / s  # I - B_q^-1
    spread = tl.sum(mul(shrink, R_c, scratch) * R_c)  # <S, I - B_q^-1>
    kl = 0.5 * (quadratic + D * (spread - tl.sum(eye * shrink) + log_det - log_det_inner))
    Z = mul(R_I, R_c_t, scratch)  # Z^T Z = R_c (I + J)^-1 R_c^T
    half = mul(R_q, R_c, scratch)
    white = mul(tl.trans(R_q), half, scratch)  # B_q^-1 R_c
    by_G = (
        mul(white, mul(tl.trans(half), R_q, scratch), scratch)
        + mul(tl.trans(R_q), mul(R_q, shrink, scratch), scratch)
        - mul(tl.trans(Z), Z, scratch)
    )
    by_G = 0.5 * (D * by_G + mul(u, u_t, scratch)) / s
    by_S = mul(R, mul(shrink, R_t, scratch), scratch)
    by_S -= mul(tl.trans(R_N), mul(mul(J, R_I_t, scratch), mul(R_I, R_N, scratch), scratch), scratch)
    return kl, 0.5 * (by_G + tl.trans(by_G)), 0.25 * D * (by_S + tl.trans(by_S)), failed


@triton.jit(do_not_specialize=["counted", "programs"])
def small_kernel(
    sums, W, noise, noise_b, noise_h, factors, query, key, kl, scratch, info, counter, counted,
    programs, H, D,
    TWO: tl.constexpr, POOLED: tl.constexpr, DUAL: tl.constexpr, DENSITY: tl.constexpr, KL: tl.constexpr,
    TRAIN: tl.constexpr, MP: tl.constexpr, LP: tl.constexpr, DP: tl.constexpr, SCRATCH: tl.constexpr,
    SUM_K: tl.constexpr, SUM_P: tl.constexpr, SUM_C: tl.constexpr, SUM_Q: tl.constexpr,
    SUM_N: tl.constexpr, SUM_SIZE: tl.constexpr,
    FACTOR_RT: tl.constexpr, FACTOR_RL: tl.constexpr, FACTOR_RQ: tl.constexpr, FACTOR_T: tl.constexpr,
    FACTOR_TT: tl.constexpr, FACTOR_YT: tl.constexpr, FACTOR_Z: tl.constexpr, FACTOR_ZT: tl.constexpr,
    FACTOR_C: tl.constexpr, FACTOR_CT: tl.constexpr, FACTOR_RC: tl.constexpr, FACTOR_RCT: tl.constexpr,
    FACTOR_RN: tl.constexpr, FACTOR_N: tl.constexpr, FACTOR_CW: tl.constexpr, FACTOR_RW: tl.constexpr,
    FACTOR_E: tl.constexpr, FACTOR_UQ: tl.constexpr, FACTOR_UQW: tl.constexpr, FACTOR_UK: tl.constexpr,
    FACTOR_UKW: tl.constexpr, FACTOR_QK: tl.constexpr, FACTOR_DET: tl.constexpr, FACTOR_SIZE: tl.constexpr,
):  # fmt: skip
    """Mean coefficients, covariance root and objectives of one sequence and head from its sums and roots."""
    i = tl.program_id(0).to(tl.int64)
    s = tl.load(noise + i // H * noise_b + i % H * noise_h)
    sums += i * SUM_SIZE
    factors += i * FACTOR_SIZE
    scratch += i * SCRATCH
    if POOLED:
        W += 2 * i * MP * MP
    else:
        W += 2 * (i % H) * MP * MP
    R, R_t = fetch(factors, MP, MP), fetch(factors + FACTOR_RT, MP, MP)
    R_l = fetch(factors + FACTOR_RL, LP, LP)
    P = fetch(sums + SUM_P, LP, DP)
    if DUAL:
        z = mul(R_l, P + mul(fetch(sums + SUM_K, LP, LP), P, scratch) / s, scratch)
    else:
        z = mul(R_l, P, scratch) / s
    if TWO:
        C = fetch(sums + SUM_C, LP, MP)
    else:
        C = fetch(sums, MP, MP)
    T = mul(R_l, mul(C, R_t, scratch), scratch) / s
    y = mul(tl.trans(T), z, scratch)
    c = mul(tl.trans(R), y, scratch)
    if TRAIN:
        store(factors + FACTOR_T, T, LP, MP)
        store_turned(factors + FACTOR_TT, T, LP, MP)
        store_turned(factors + FACTOR_YT, y, MP, DP)
        store(factors + FACTOR_Z, z, LP, DP)
        store_turned(factors + FACTOR_ZT, z, LP, DP)
        store_turned(factors + FACTOR_CT, c, MP, DP)
        store(factors + FACTOR_CW, mul(tl.trans(c), fetch(W, MP, MP), scratch), DP, MP)
    R_c, R_c_t, failed = covariance_root(R, R_t, T, factors + FACTOR_N, factors + FACTOR_RN, scratch, MP)
    note_failure(info + 2 * programs + i, counter, counted, failed)
    store(factors + FACTOR_C, c, MP, DP)
    store(factors + FACTOR_RC, R_c, MP, MP)
    if TRAIN:
        store(factors + FACTOR_RCT, R_c_t, MP, MP)
        store(factors + FACTOR_RW, mul(R_c_t, fetch(W, MP, MP), scratch), MP, MP)
    if DENSITY | KL:
        G_q, R_q = fetch(sums + SUM_Q, MP, MP), fetch(factors + FACTOR_RQ, MP, MP)
        log_det = tl.load(factors + FACTOR_DET + 2)
        half = mul(R_q, c, scratch)
        u, u_t = mul(tl.trans(R_q), half, scratch), mul(tl.trans(half), R_q, scratch)
        e = mul(G_q, u, scratch) / s
        quadratic = tl.sum(u * e) + tl.sum(e * e)
        store(factors + FACTOR_E, e, MP, DP)
        if DENSITY:
            constant = _LOG_2_PI + tl.log(s)
            keys, queries = tl.load(sums + SUM_N + 1), tl.load(sums + SUM_N + 2)
            squares = tl.load(sums + SUM_N)
            if DUAL:
                cost = tl.sum(P * P) + s * squares
            else:
                cost = squares / s - tl.sum(z * z)
            log_det_l = tl.load(factors + FACTOR_DET + 1)
            tl.store(query + i, -0.5 * (quadratic + D * (log_det + queries * constant)))
            tl.store(key + i, -0.5 * (cost + D * (log_det_l + keys * constant)))
            if TRAIN:
                by_G = -0.5 * (mul(u, u_t, scratch) + D * mul(tl.trans(R_q), R_q, scratch)) / s
                store(factors + FACTOR_UQ, by_G, MP, MP)
                store(factors + FACTOR_UQW, mul(by_G, fetch(W, MP, MP), scratch), MP, MP)
        if KL:
            R_N = fetch(factors + FACTOR_RN, MP, MP)
            value, by_G, by_S, failed = divergence(
                G_q, R, R_t, R_q, R_c, R_c_t, R_N, u, u_t, s, quadratic, log_det, D, scratch, MP
            )  # fmt: skip
            note_failure(info + 4 * programs + i, counter, counted, failed)
            tl.store(kl + i, value)
            if TRAIN:
                store(factors + FACTOR_UK, by_G, MP, MP)
                store(factors + FACTOR_UKW, mul(by_G, fetch(W, MP, MP), scratch), MP, MP)
                store(factors + FACTOR_QK, by_S, MP, MP)
