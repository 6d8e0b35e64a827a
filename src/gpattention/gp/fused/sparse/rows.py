"""Triton kernels of the sparse model's queries: mean and variance from the factors, and their gradients.

h_i = R phi_i,  mean_i = y^T h_i,  var_i = 2 |h_i|^2 - |R^T h_i|^2 + |T h_i|^2 + sigma^2     (15)
dh_i = y dmean_i + 2 dvar_i (2 h_i - R R^T h_i + T^T T h_i),   dphi_i = R^T dh_i + 2 dG_q phi_i
Q = sum_i dvar_i h_i h_i^T,   c = sum_i h_i dmean_i^T     for `small_backward`
INDEPENDENT adds s_q^2 a_i^2 - |phi_i|^2 to var_i, what the inducing values leave open of a query.
"""
# mypy: disable-error-code="import-not-found,import-untyped,misc,no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201

import triton
import triton.language as tl

from gpattention.gp.fused.blocks import fetch, store
from gpattention.gp.fused.sparse.blocks import (
    amplitudes,
    dot,
    features_backward,
    fetch_turned,
    kernel_values,
    store_tile,
    tile,
    tile_rows,
)


@triton.jit
def rows_kernel(
    q, q_b, q_h, q_n, query_mask, mask_b, mask_h, mask_n,
    noise, noise_b, noise_h, scale_q, scale_b, scale_h, log_amplitude, log_b, log_h, log_n,
    centres, points, W, factors, mean, mean_b, mean_h, mean_n, variance,
    length, H, NQ, count, C, D,
    QUERY_MASKED: tl.constexpr, AMPLIFIED: tl.constexpr, POOLED: tl.constexpr, INCLUDE: tl.constexpr,
    INDEPENDENT: tl.constexpr, ROWS: tl.constexpr, MP: tl.constexpr, CP: tl.constexpr, DP: tl.constexpr,
    FACTOR_C: tl.constexpr, FACTOR_RC: tl.constexpr, FACTOR_SIZE: tl.constexpr,
):  # fmt: skip
    """Program (s, split): mean and variance of the queries of one split."""
    s, split = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    b, h = s // H, s % H
    e = h
    if POOLED:
        e = s
    centre = tl.load(centres + e * CP + tl.arange(0, CP))
    scale, sigma = tl.load(scale_q + b * scale_b + h * scale_h), tl.load(noise + b * noise_b + h * noise_h)
    q += b * q_b + h * q_h
    query_mask += b * mask_b + h * mask_h
    log_amplitude += b * log_b + h * log_h
    mean += b * mean_b + h * mean_h
    factors += s * FACTOR_SIZE
    points += 2 * e * MP * CP
    W += 2 * e * MP * MP
    begin = split * length
    stop = tl.minimum(begin + length, NQ)
    for start in range(begin, stop, ROWS):
        i, real = tile_rows(start, stop, query_mask, mask_n, QUERY_MASKED, ROWS)
        X = tile(q, q_n, i, real, C, CP) - centre[None, :]
        a = amplitudes(scale, log_amplitude, log_n, i, real, AMPLIFIED, ROWS)
        E = kernel_values(X, fetch_turned(points, MP, CP), real, count, MP)
        phi = a[:, None] * dot(E, fetch_turned(W, MP, MP))
        store_tile(mean, mean_n, dot(phi, fetch(factors + FACTOR_C, MP, DP)), i, stop, D, DP)
        f = dot(phi, fetch(factors + FACTOR_RC, MP, MP))
        found = tl.sum(f * f, 1)
        if INCLUDE:
            found += sigma
        if INDEPENDENT:  # never negative but for rounding
            found += tl.maximum(a * a - tl.sum(phi * phi, 1), 0.0)
        tl.store(variance + s * NQ + i, tl.where(real, found, 0.0), mask=i < stop)


@triton.jit(do_not_specialize=["splits"])
def rows_backward_kernel(
    q, q_b, q_h, q_n, query_mask, mask_b, mask_h, mask_n,
    scale_q, scale_b, scale_h, log_amplitude, log_b, log_h, log_n,
    centres, points, W, factors, by_mean, mean_b, mean_h, mean_n, by_variance,
    by_query, query_b, query_h, by_kl, kl_b, kl_h,
    grad_q, grad_q_b, grad_q_h, grad_q_n, grad_log, sums, shares,
    splits, length, H, NQ, count, C, D,
    QUERY_MASKED: tl.constexpr, AMPLIFIED: tl.constexpr, POOLED: tl.constexpr,
    MEAN: tl.constexpr, VARIANCE: tl.constexpr, QUERY: tl.constexpr, KL: tl.constexpr,
    INDEPENDENT: tl.constexpr, ROWS: tl.constexpr, MP: tl.constexpr, CP: tl.constexpr, DP: tl.constexpr,
    FACTOR_C: tl.constexpr, FACTOR_RC: tl.constexpr, FACTOR_CW: tl.constexpr, FACTOR_RW: tl.constexpr,
    FACTOR_UQ: tl.constexpr, FACTOR_UQW: tl.constexpr, FACTOR_UK: tl.constexpr, FACTOR_UKW: tl.constexpr,
    FACTOR_SIZE: tl.constexpr, ROW_C: tl.constexpr, ROW_N: tl.constexpr, ROW_SIZE: tl.constexpr,
):  # fmt: skip
    """Program (s, split): gradients of one split's queries and amplitudes, and its sums."""
    s, split = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    b, h = s // H, s % H
    e = h
    if POOLED:
        e = s
    centre = tl.load(centres + e * CP + tl.arange(0, CP))
    scale = tl.load(scale_q + b * scale_b + h * scale_h)
    q += b * q_b + h * q_h
    query_mask += b * mask_b + h * mask_h
    log_amplitude += b * log_b + h * log_h
    by_mean += b * mean_b + h * mean_h
    grad_q += b * grad_q_b + h * grad_q_h
    factors += s * FACTOR_SIZE
    points += 2 * e * MP * CP
    W += 2 * e * MP * MP
    g_query, g_kl = 0.0, 0.0
    if QUERY:
        g_query = tl.load(by_query + b * query_b + h * query_h)
    if KL:
        g_kl = tl.load(by_kl + b * kl_b + h * kl_h)
    M, by_c = tl.zeros((MP, MP), tl.float32), tl.zeros((MP, DP), tl.float32)
    by_m, weight = tl.zeros((MP, CP), tl.float32), tl.zeros((ROWS,), tl.float32)
    prior = tl.zeros((ROWS,), tl.float32)
    begin = split * length
    stop = tl.minimum(begin + length, NQ)
    for start in range(begin, stop, ROWS):
        i, real = tile_rows(start, stop, query_mask, mask_n, QUERY_MASKED, ROWS)
        X = tile(q, q_n, i, real, C, CP) - centre[None, :]
        a = amplitudes(scale, log_amplitude, log_n, i, real, AMPLIFIED, ROWS)
        E = kernel_values(X, fetch_turned(points, MP, CP), real, count, MP)
        phi = a[:, None] * dot(E, fetch_turned(W, MP, MP))
        by_E, by_log = tl.zeros((ROWS, MP), tl.float32), tl.zeros((ROWS,), tl.float32)
        if MEAN:
            g = tile(by_mean, mean_n, i, real, D, DP)
            by_c += dot(tl.trans(phi), g)
            by_E += dot(g, fetch(factors + FACTOR_CW, DP, MP))
            if AMPLIFIED:
                by_log += tl.sum(g * dot(phi, fetch(factors + FACTOR_C, MP, DP)), 1)
        if VARIANCE:
            w = tl.load(by_variance + s * NQ + i, mask=real, other=0.0)
            f = dot(phi, fetch(factors + FACTOR_RC, MP, MP))
            weight += w
            by_log += 2.0 * w * tl.sum(f * f, 1)
            f = w[:, None] * f
            by_E += 2.0 * dot(f, fetch(factors + FACTOR_RW, MP, MP))
            if INDEPENDENT:
                by_log += 2.0 * w * (a * a - tl.sum(phi * phi, 1))
                prior += w * a * a
                weighted = w[:, None] * phi
                M += dot(tl.trans(phi), weighted)  # before R_c, which `small_backward` puts to it
                by_E -= 2.0 * dot(weighted, fetch(W, MP, MP))
            else:
                M += dot(tl.trans(phi), f)
        if QUERY:
            by_E += 2.0 * g_query * dot(phi, fetch(factors + FACTOR_UQW, MP, MP))
            if AMPLIFIED:
                by_log += 2.0 * g_query * tl.sum(phi * dot(phi, fetch(factors + FACTOR_UQ, MP, MP)), 1)
        if KL:
            by_E += 2.0 * g_kl * dot(phi, fetch(factors + FACTOR_UKW, MP, MP))
            if AMPLIFIED:
                by_log += 2.0 * g_kl * tl.sum(phi * dot(phi, fetch(factors + FACTOR_UK, MP, MP)), 1)
        if AMPLIFIED:
            tl.store(grad_log + s * NQ + i, by_log, mask=i < stop)
        by_x, moved = features_backward(X, a[:, None] * by_E * E, points, MP, CP)
        by_m += moved
        store_tile(grad_q, grad_q_n, by_x, i, stop, C, CP)
    sums += (s * splits + split) * ROW_SIZE
    if VARIANCE:
        store(sums, M, MP, MP)
    if MEAN:
        store(sums + ROW_C, by_c, MP, DP)
    tl.store(sums + ROW_N, tl.sum(weight))
    if INDEPENDENT:
        tl.store(sums + ROW_N + 1, tl.sum(prior))
    store(shares + (s * splits + split) * MP * CP, by_m, MP, CP)
