"""Triton kernels of the sparse model's sums over tokens (section 12).

    G_o = Phi_o^T Phi_o,  G_k = Psi_k^T Psi_k,  P = Psi_k^T V,  C = Psi_o^T Phi_o,  G_q = Phi_q^T Phi_q

With one set of inducing inputs Psi_o = Phi_o and C = G_o, which is not summed twice.
"""
# mypy: disable-error-code="import-not-found,import-untyped,misc,no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201

import triton
import triton.language as tl

from gpattention.gp.fused.blocks import store
from gpattention.gp.fused.sparse.blocks import (
    amplitudes,
    dot,
    fetch_turned,
    kernel_values,
    tile,
    tile_rows,
)


@triton.jit
def latent_sums(
    o, o_n, mask, mask_n, begin, stop, centre, points_m, points_l, W_m, W_l, out, count_m, count_l, C,
    MASKED: tl.constexpr, TWO: tl.constexpr, ROWS: tl.constexpr,
    MP: tl.constexpr, LP: tl.constexpr, CP: tl.constexpr, SUM_C: tl.constexpr,
):  # fmt: skip
    """G_o and, for two sets, C of the tokens from begin to stop."""
    G_o = tl.zeros((MP, MP), tl.float32)
    C_lm = tl.zeros((LP, MP), tl.float32)
    for start in range(begin, stop, ROWS):
        i, real = tile_rows(start, stop, mask, mask_n, MASKED, ROWS)
        X = tile(o, o_n, i, real, C, CP) - centre[None, :]
        E = kernel_values(X, fetch_turned(points_m, MP, CP), real, count_m, MP)
        phi = dot(E, fetch_turned(W_m, MP, MP))
        G_o += dot(tl.trans(phi), phi)
        if TWO:
            E_l = kernel_values(X, fetch_turned(points_l, LP, CP), real, count_l, LP)
            C_lm += dot(tl.trans(dot(E_l, fetch_turned(W_l, LP, LP))), phi)
    store(out, G_o, MP, MP)
    if TWO:
        store(out + SUM_C, C_lm, LP, MP)


@triton.jit
def key_sums(
    k, k_n, v, v_n, mask, mask_n, begin, stop, centre, points, W, scale, out, count, C, D,
    MASKED: tl.constexpr, ROWS: tl.constexpr, LP: tl.constexpr, CP: tl.constexpr, DP: tl.constexpr,
    SUM_K: tl.constexpr, SUM_P: tl.constexpr, SUM_N: tl.constexpr,
):  # fmt: skip
    """G_k, P, |V|^2 and the number of real keys from begin to stop."""
    G_k = tl.zeros((LP, LP), tl.float32)
    P = tl.zeros((LP, DP), tl.float32)
    squares = tl.zeros((ROWS,), tl.float32)
    found = tl.zeros((ROWS,), tl.float32)
    for start in range(begin, stop, ROWS):
        i, real = tile_rows(start, stop, mask, mask_n, MASKED, ROWS)
        X = tile(k, k_n, i, real, C, CP) - centre[None, :]
        E = kernel_values(X, fetch_turned(points, LP, CP), real, count, LP)
        psi = scale * dot(E, fetch_turned(W, LP, LP))
        V = tile(v, v_n, i, real, D, DP)
        psi_t = tl.trans(psi)
        G_k += dot(psi_t, psi)
        P += dot(psi_t, V)
        squares += tl.sum(V * V, 1)
        found += real.to(tl.float32)
    store(out + SUM_K, G_k, LP, LP)
    store(out + SUM_P, P, LP, DP)
    tl.store(out + SUM_N, tl.sum(squares))
    tl.store(out + SUM_N + 1, tl.sum(found))


@triton.jit
def query_sums(
    q, q_n, mask, mask_n, begin, stop, centre, points, W, scale, log_amplitude, log_n, out, count, C,
    MASKED: tl.constexpr, AMPLIFIED: tl.constexpr, ROWS: tl.constexpr,
    MP: tl.constexpr, CP: tl.constexpr, SUM_Q: tl.constexpr, SUM_N: tl.constexpr,
):  # fmt: skip
    """G_q and the number of real queries from begin to stop."""
    G_q = tl.zeros((MP, MP), tl.float32)
    found = tl.zeros((ROWS,), tl.float32)
    for start in range(begin, stop, ROWS):
        i, real = tile_rows(start, stop, mask, mask_n, MASKED, ROWS)
        X = tile(q, q_n, i, real, C, CP) - centre[None, :]
        a = amplitudes(scale, log_amplitude, log_n, i, real, AMPLIFIED, ROWS)
        E = kernel_values(X, fetch_turned(points, MP, CP), real, count, MP)
        phi = a[:, None] * dot(E, fetch_turned(W, MP, MP))
        G_q += dot(tl.trans(phi), phi)
        found += real.to(tl.float32)
    store(out + SUM_Q, G_q, MP, MP)
    tl.store(out + SUM_N + 2, tl.sum(found))


@triton.jit(do_not_specialize=["splits"])
def sums_kernel(
    q, q_b, q_h, q_n, k, k_b, k_h, k_n, o, o_b, o_h, o_n, v, v_b, v_h, v_n,
    mask, mask_b, mask_h, mask_n, query_mask, query_b, query_h, query_n,
    scale_q, scale_q_b, scale_q_h, scale_k, scale_k_b, scale_k_h, log_amplitude, log_b, log_h, log_n,
    centres, points_m, points_l, W_m, W_l, sums,
    splits, length, query_length, H, NQ, N, count_m, count_l, C, D,
    MASKED: tl.constexpr, QUERY_MASKED: tl.constexpr, AMPLIFIED: tl.constexpr,
    TWO: tl.constexpr, POOLED: tl.constexpr, ROWS: tl.constexpr,
    MP: tl.constexpr, LP: tl.constexpr, CP: tl.constexpr, DP: tl.constexpr,
    SUM_K: tl.constexpr, SUM_P: tl.constexpr, SUM_C: tl.constexpr, SUM_Q: tl.constexpr,
    SUM_N: tl.constexpr, SUM_SIZE: tl.constexpr,
):  # fmt: skip
    """Program (s, split, role): the sums of latent inputs (0), keys (1) or queries (2) of one split."""
    s, split, role = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    b, h = s // H, s % H
    e = h
    if POOLED:
        e = s
    centre = tl.load(centres + e * CP + tl.arange(0, CP))
    out = sums + (s * splits + split) * SUM_SIZE
    mask += b * mask_b + h * mask_h
    begin = split * length
    stop = tl.minimum(begin + length, N)
    points_m += 2 * e * MP * CP
    points_l += 2 * e * LP * CP
    W_m += 2 * e * MP * MP
    W_l += 2 * e * LP * LP
    if role == 0:
        latent_sums(
            o + b * o_b + h * o_h, o_n, mask, mask_n, begin, stop, centre, points_m, points_l, W_m, W_l, out,
            count_m, count_l, C, MASKED, TWO, ROWS, MP, LP, CP, SUM_C,
        )  # fmt: skip
    elif role == 1:
        key_sums(
            k + b * k_b + h * k_h, k_n, v + b * v_b + h * v_h, v_n, mask, mask_n, begin, stop, centre,
            points_l, W_l, tl.load(scale_k + b * scale_k_b + h * scale_k_h), out, count_l, C, D,
            MASKED, ROWS, LP, CP, DP, SUM_K, SUM_P, SUM_N,
        )  # fmt: skip
    else:
        begin = split * query_length
        query_sums(
            q + b * q_b + h * q_h, q_n, query_mask + b * query_b + h * query_h, query_n,
            begin, tl.minimum(begin + query_length, NQ), centre, points_m, W_m,
            tl.load(scale_q + b * scale_q_b + h * scale_q_h),
            log_amplitude + b * log_b + h * log_h, log_n, out, count_m, C,
            QUERY_MASKED, AMPLIFIED, ROWS, MP, CP, SUM_Q, SUM_N,
        )  # fmt: skip
