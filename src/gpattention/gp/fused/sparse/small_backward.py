"""Triton kernel of the gradients of the sparse model's small matrices; `small` has the letters.

From the queries come M = sum_i dvar_i phi_i f_i^T and dc = sum_i phi_i dmean_i^T.  (INDEPENDENT: the first is
Y = sum_i dvar_i phi_i phi_i^T, M = Y R_c, and O below has -2 Y more.)  With Q = R M R_N
(= sum_i dvar_i h_i h_i^T for h = R phi) and c' = R dc, both plus the objectives' own,
    X = Q N + N Q - 2 Q + (c' y^T + y c'^T) / 2,   dB = -R^T X R
    dC = R_l^T (2 T Q + z c'^T) R / s,   dP = R_l^T T c' / s ("dual": C R^T c' / s)
    X_l = T Q T^T + (T c' z^T + z c'^T T^T) / 2 ("dual": the first alone),   dB_l = -R_l^T X_l R_l
so that nothing is differentiated through a Cholesky factor.  And what W's gradient needs (`inducing`)
    O = c dc^T + 2 R_c M^T + 2 dG_q G_q + 2 dG_o G_o + dC^T C,   O_l = 2 dG_k G_k + dP P^T + dC C^T
whose traces, queries and keys apart, are the gradients of log s_q and log s_k.  They are summed transposed,
because the transposes on the right of their products then are those that memory holds (`blocks`).  The keys'
trace would be a small difference of terms that grow with the sequence; with R_l G_k R_l^T = s (I - R_l R_l^T)
and P = s R_l^-1 z it is
    2 <X_l R_l, R_l> - 2 <T Q, T> - g_key D l - <T c', z>   ("dual": + <dP, P> instead of the last)
"""
# mypy: disable-error-code="import-not-found,import-untyped,misc,no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201

import triton
import triton.language as tl

from gpattention.gp.fused.blocks import fetch, store
from gpattention.gp.fused.sparse.blocks import mul, store_turned


@triton.jit
def trace(X, N: tl.constexpr):
    """Sum of the diagonal.  []"""
    i = tl.arange(0, N)
    return tl.sum(tl.where(i[:, None] == i[None, :], X, 0.0))


@triton.jit
def small_backward_kernel(
    sums, factors, rows, W_m, W_l, noise, noise_b, noise_h,
    scale_q, scale_q_b, scale_q_h, scale_k, scale_k_b, scale_k_h,
    by_query, query_b, query_h, by_key, key_b, key_h, by_kl, kl_b, kl_h,
    adjoints, turned_m, turned_l, grad_noise, grad_scale_q, grad_scale_k, scratch, H, D,
    TWO: tl.constexpr, POOLED: tl.constexpr, DUAL: tl.constexpr, INCLUDE: tl.constexpr,
    INDEPENDENT: tl.constexpr,
    MEAN: tl.constexpr, VARIANCE: tl.constexpr, QUERY: tl.constexpr, KEY: tl.constexpr, KL: tl.constexpr,
    MP: tl.constexpr, LP: tl.constexpr, DP: tl.constexpr, SCRATCH: tl.constexpr,
    SUM_K: tl.constexpr, SUM_P: tl.constexpr, SUM_C: tl.constexpr, SUM_Q: tl.constexpr,
    SUM_N: tl.constexpr, SUM_SIZE: tl.constexpr,
    FACTOR_RT: tl.constexpr, FACTOR_RL: tl.constexpr, FACTOR_T: tl.constexpr, FACTOR_TT: tl.constexpr,
    FACTOR_YT: tl.constexpr, FACTOR_Z: tl.constexpr, FACTOR_ZT: tl.constexpr, FACTOR_CT: tl.constexpr,
    FACTOR_RC: tl.constexpr, FACTOR_RCT: tl.constexpr, FACTOR_RN: tl.constexpr, FACTOR_N: tl.constexpr,
    FACTOR_E: tl.constexpr,
    FACTOR_UQ: tl.constexpr, FACTOR_UK: tl.constexpr, FACTOR_QK: tl.constexpr, FACTOR_SIZE: tl.constexpr,
    ROW_C: tl.constexpr, ROW_N: tl.constexpr, ROW_SIZE: tl.constexpr,
    BACK_K: tl.constexpr, BACK_P: tl.constexpr, BACK_PW: tl.constexpr, BACK_CM: tl.constexpr,
    BACK_CL: tl.constexpr, BACK_SIZE: tl.constexpr,
):  # fmt: skip
    """Gradients of the sums over tokens, times W, and of sigma^2 and the amplitudes."""
    i = tl.program_id(0).to(tl.int64)
    b, h = i // H, i % H
    e = h
    if POOLED:
        e = i
    s = tl.load(noise + b * noise_b + h * noise_h)
    sums += i * SUM_SIZE
    factors += i * FACTOR_SIZE
    rows += i * ROW_SIZE
    adjoints += i * BACK_SIZE
    scratch += i * SCRATCH
    W_m += 2 * e * MP * MP
    W_l += 2 * e * LP * LP
    R = fetch(factors, MP, MP)
    T, z = fetch(factors + FACTOR_T, LP, MP), fetch(factors + FACTOR_Z, LP, DP)
    by_noise, g_query, g_key, g_kl = 0.0, 0.0, 0.0, 0.0
    Q, by_c = tl.zeros((MP, MP), tl.float32), tl.zeros((MP, DP), tl.float32)
    turned = tl.zeros((MP, MP), tl.float32)  # O^T
    by_prior = 0.0
    if MEAN:
        by_c += fetch(rows + ROW_C, MP, DP)
        turned += mul(by_c, fetch(factors + FACTOR_CT, DP, MP), scratch)
    if VARIANCE:
        M = fetch(rows, MP, MP)
        if INDEPENDENT:
            turned -= 2.0 * M
            by_prior += 2.0 * tl.load(rows + ROW_N + 1)
            M = mul(M, fetch(factors + FACTOR_RC, MP, MP), scratch)
        turned += 2.0 * mul(M, fetch(factors + FACTOR_RCT, MP, MP), scratch)
        half = mul(mul(R, M, scratch), fetch(factors + FACTOR_RN, MP, MP), scratch)
        Q += 0.5 * (half + tl.trans(half))
        if INCLUDE:
            by_noise += tl.load(rows + ROW_N)
    if QUERY:
        g_query = tl.load(by_query + b * query_b + h * query_h)
        turn = mul(fetch(sums + SUM_Q, MP, MP), fetch(factors + FACTOR_UQ, MP, MP), scratch)
        turned += 2.0 * g_query * turn
        by_noise -= g_query * (trace(turn, MP) + 0.5 * D * tl.load(sums + SUM_N + 2)) / s
    if KL:
        g_kl = tl.load(by_kl + b * kl_b + h * kl_h)
        turn = mul(fetch(sums + SUM_Q, MP, MP), fetch(factors + FACTOR_UK, MP, MP), scratch)
        turned += 2.0 * g_kl * turn
        by_noise -= g_kl * trace(turn, MP) / s
        Q += g_kl * fetch(factors + FACTOR_QK, MP, MP)
    if QUERY | KL:
        by_c += (g_kl - g_query) * fetch(factors + FACTOR_E, MP, DP)
    if KEY:
        g_key = tl.load(by_key + b * key_b + h * key_h)
    by_log_scale = trace(turned, MP) + by_prior
    tl.store(grad_scale_q + i, by_log_scale / tl.load(scale_q + b * scale_q_b + h * scale_q_h))

    c, c_t = mul(R, by_c, scratch), mul(tl.trans(by_c), fetch(factors + FACTOR_RT, MP, MP), scratch)
    half = mul(c, fetch(factors + FACTOR_YT, DP, MP), scratch)
    X = 0.5 * (half + tl.trans(half))
    white = mul(z, c_t, scratch)  # [LP, MP]
    u = mul(T, c, scratch)  # [LP, DP]
    X_l = tl.zeros((LP, LP), tl.float32)
    by_scale, held = 0.0, tl.zeros((LP,), tl.float32) + 0.5 * g_key * D  # taken off row by row, below
    if VARIANCE | KL:
        QN = mul(Q, fetch(factors + FACTOR_N, MP, MP), scratch)
        X += QN + tl.trans(QN) - 2.0 * Q
        TQ = mul(T, Q, scratch)
        white += 2.0 * TQ
        X_l += mul(TQ, fetch(factors + FACTOR_TT, MP, LP), scratch)
        held += tl.sum(TQ * T, axis=1)
    G_o = fetch(sums, MP, MP)
    if TWO:
        C = fetch(sums + SUM_C, LP, MP)
    else:
        C = G_o
    by_G = -mul(tl.trans(R), mul(X, R, scratch), scratch) / s
    R_l = fetch(factors + FACTOR_RL, LP, LP)
    by_C = mul(tl.trans(R_l), mul(white, R, scratch), scratch) / s
    by_noise -= (tl.sum(by_G * G_o) + tl.sum(by_C * C)) / s
    if TWO:
        turned_latent = mul(C, tl.trans(by_C), scratch)
        turned += mul(tl.trans(C), by_C, scratch)
        store(adjoints + BACK_CM, mul(by_C, fetch(W_m, MP, MP), scratch), LP, MP)
        store(adjoints + BACK_CL, mul(tl.trans(by_C), fetch(W_l, LP, LP), scratch), MP, LP)
    else:
        by_G += 0.5 * (by_C + tl.trans(by_C))
    turned += 2.0 * mul(G_o, by_G, scratch)
    store(adjoints, 2.0 * mul(by_G, fetch(W_m, MP, MP), scratch), MP, MP)

    P, squares, keys = fetch(sums + SUM_P, LP, DP), tl.load(sums + SUM_N), tl.load(sums + SUM_N + 1)
    j = tl.arange(0, LP)
    eye = tl.where(j[:, None] == j[None, :], 1.0, 0.0)
    if DUAL:
        by_P = mul(C, mul(tl.trans(R), c, scratch), scratch) / s - g_key * P
        by_P_t = tl.trans(by_P)
        by_scale += tl.sum(by_P * P)
        by_noise -= 0.5 * g_key * (squares + D * keys / s)
    else:
        by_z = u + g_key * z
        by_P, by_P_t = mul(tl.trans(R_l), by_z, scratch) / s, mul(tl.trans(by_z), R_l, scratch) / s
        half_l = mul(u + 0.5 * g_key * z, fetch(factors + FACTOR_ZT, DP, LP), scratch)
        X_l += 0.5 * (half_l + tl.trans(half_l))
        by_scale -= tl.sum(u * z)
        by_noise += g_key * (0.5 * squares / s - tl.sum(z * z) - 0.5 * D * keys) / s - tl.sum(u * z) / s
    X_l += 0.5 * g_key * D * eye
    white_l = mul(X_l, R_l, scratch)
    by_scale += 2.0 * tl.sum(tl.sum(white_l * R_l, axis=1) - held)  # 0 in rows of padding
    by_G_l = -mul(tl.trans(R_l), white_l, scratch) / s
    G_k = fetch(sums + SUM_K, LP, LP)
    by_noise -= tl.sum(by_G_l * G_k) / s
    turned_key = 2.0 * mul(G_k, by_G_l, scratch) + mul(P, by_P_t, scratch)
    tl.store(grad_scale_k + i, by_scale / tl.load(scale_k + b * scale_k_b + h * scale_k_h))
    store(adjoints + BACK_K, 2.0 * mul(by_G_l, fetch(W_l, LP, LP), scratch), LP, LP)
    store(adjoints + BACK_P, by_P, LP, DP)
    store(adjoints + BACK_PW, mul(tl.trans(by_P), fetch(W_l, LP, LP), scratch), DP, LP)
    if TWO:
        store_turned(turned_m + i * MP * MP, turned, MP, MP)
        store_turned(turned_l + i * LP * LP, turned_key + turned_latent, LP, LP)
    else:
        store_turned(turned_m + i * MP * MP, turned + turned_key, MP, MP)
    tl.store(grad_noise + i, by_noise)
