"""Triton kernels of the direct model (eq. 2), one program per sequence and head; M_k is `cgp_forward`'s.

    K = s_k kappa(q, k),  a_i = s_q exp(log_amplitude_i),  W = K R_k^T,  R_k = L_k^-1
    mean_i = a_i K_i V,  var_i = a_i^2 u_i,  u_i = clamp(1 - |W_i|^2)
Amplitudes may be too large for float32 where kernel values are too small, so products a_i K_ij are made of
exponents.  W is made and kept as W^T = R_k K^T, which wants nothing transposed on the right but K, as it is
made (see `blocks`).  With g the gradient of the mean, Omega that of the unit covariance, c that of the keys'
density:
    X = W R_k,  E = (g V^T) * a K - 2 (Omega X) * K,  dV = (a K)^T g - c M_k V
    dM_k = X^T Omega X - c/2 (D R_k^T R_k + V V^T)
    d s_k = (sum (g V^T) * a K - 2 sigma^2 tr(X^T Omega X)) / s_k + the density's: u is one of sigma^2 / s_k^2
    dq_i = sum_j E_ij (k_j - q_i),  dk_j = sum_i E_ij (q_i - k_j) + what M_k passes on
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
from gpattention.gp.fused.exact.cgp_backward import key_gram_backward


@triton.jit
def direct_kernel(
    q, q_b, q_h, q_n, k, k_b, k_h, k_n,
    mask, mask_b, mask_h, mask_n, query_mask, query_b, query_h, query_n,
    noise, noise_b, noise_h, scale_q, scale_q_b, scale_q_h, scale_k, scale_k_b, scale_k_h,
    log_amplitude, log_b, log_h, log_n,
    tokens_q, tokens_k, tokens_v, turned_k, turned_roots, K, weights, W,
    mean, mean_b, mean_h, mean_n, stddev, variance, unit, raw,
    H, NQ, N, C, D,
    MASKED: tl.constexpr, QUERY_MASKED: tl.constexpr, AMPLIFIED: tl.constexpr, VARIANCE: tl.constexpr,
    QP: tl.constexpr, NP: tl.constexpr, CP: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Mean, standard deviation, variance and unit variance of every query; keeps K, a K / s_q, W^T."""
    s = tl.program_id(0).to(tl.int64)
    b, h = s // H, s % H
    i = tl.arange(0, QP)
    real = real_tokens(mask + b * mask_b + h * mask_h, mask_n, N, MASKED, NP)
    asked = real_tokens(query_mask + b * query_b + h * query_h, query_n, NQ, QUERY_MASKED, QP)
    s_q = tl.load(scale_q + b * scale_q_b + h * scale_q_h)
    s_k = tl.load(scale_k + b * scale_k_b + h * scale_k_h)
    lifted = tl.zeros((QP,), tl.float32)
    if AMPLIFIED:
        lifted = tl.load(log_amplitude + b * log_b + h * log_h + i * log_n, mask=asked, other=0.0)
    tokens_q += s * QP * CP
    tokens_k += s * NP * CP
    tokens_v += s * NP * DP
    turned_k += s * CP * NP
    K += s * QP * NP
    weights += s * QP * NP
    W += s * QP * NP
    turned_R = turned_roots + s * NP * NP

    q += b * q_b + h * q_h
    k += b * k_b + h * k_h
    centre = centre_of(tokens(k, k_n, real, C, NP, CP), real)
    Q = centred(tokens(q, q_n, asked, C, QP, CP), centre, asked)
    store(tokens_q, Q, QP, CP)
    tl.debug_barrier()
    Y = fetch(tokens_k, NP, CP)
    dot = product(tokens_q, CP, 1, turned_k, NP, 1, QP, NP, CP)
    exponent = exponents(dot, Q, Y, q, q_n, asked, k, k_n, real, C, QP, NP)
    seen = asked[:, None] & real[None, :]
    values = tl.where(seen, s_k * exponential(exponent), 0.0)
    store(K, values, QP, NP)
    if VARIANCE:
        store_turned(W, values, QP, NP)  # until W takes its place
    if AMPLIFIED:
        store(weights, tl.where(seen, s_k * exponential(exponent + lifted[:, None]), 0.0), QP, NP)
    tl.debug_barrier()
    if AMPLIFIED:
        result = product(weights, NP, 1, tokens_v, DP, 1, QP, DP, NP)
    elif VARIANCE:
        result = product(W, 1, QP, tokens_v, DP, 1, QP, DP, NP)  # still the transpose of K
    else:
        result = product(K, NP, 1, tokens_v, DP, 1, QP, DP, NP)
    store_tokens(mean + b * mean_b + h * mean_h, mean_n, s_q * result, NQ, D, QP, DP)
    if VARIANCE:
        reduced = product(turned_R, 1, NP, W, QP, 1, NP, QP, NP)
        tl.debug_barrier()  # the transpose of K has been read
        store(W, reduced, NP, QP)
        sigma = tl.load(noise + b * noise_b + h * noise_h)
        u = 1.0 - tl.sum(reduced * reduced, 0)
        floor = sigma / (tl.sum(real.to(tl.float32)) * s_k * s_k + sigma)
        clamped = tl.minimum(tl.maximum(u, floor, tl.PropagateNan.ALL), 1.0, tl.PropagateNan.ALL)
        deviation = tl.where(asked, s_q * exponential(lifted) * tl.sqrt_rn(clamped), 0.0)
        inside, at = i < NQ, s * NQ + i
        tl.store(stddev + at, deviation, mask=inside)
        tl.store(variance + at, deviation * deviation, mask=inside)
        tl.store(unit + at, clamped, mask=inside)
        tl.store(raw + s * QP + i, u)


@triton.jit
def direct_backward_kernel(
    grad_mean, grad_b, grad_h, grad_n, grad_stddev, grad_variance, grad_unit,
    mean, mean_b, mean_h, mean_n, stddev, variance, raw,
    mask, mask_b, mask_h, mask_n, query_mask, query_b, query_h, query_n,
    noise, noise_b, noise_h, scale_q, scale_q_b, scale_q_h, scale_k, scale_k_b, scale_k_h,
    tokens_q, tokens_k, tokens_v, grams, roots, K, weights, W,
    by_prior, by_prior_b, by_prior_h, by_prior_n, by_explained, grad_key, grad_key_b, grad_key_h,
    X, OX, E, scratch, unit_grad, turned_v,
    grad_q, grad_q_b, grad_q_h, grad_q_n, grad_k, grad_k_b, grad_k_h, grad_k_n,
    grad_v, grad_v_b, grad_v_h, grad_v_n, grad_log, grad_parameters,
    programs, H, NQ, N, C, D,
    MASKED: tl.constexpr, QUERY_MASKED: tl.constexpr, AMPLIFIED: tl.constexpr, FACTORED: tl.constexpr,
    BY_STDDEV: tl.constexpr, BY_VARIANCE: tl.constexpr, BY_UNIT: tl.constexpr,
    PRIOR: tl.constexpr, COVARIANCE: tl.constexpr, KEY_SIGN: tl.constexpr,
    QP: tl.constexpr, NP: tl.constexpr, CP: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """All gradients; PRIOR, COVARIANCE and KEY_SIGN as in `cgp_backward`, FACTORED: there was a root."""
    s = tl.program_id(0).to(tl.int64)
    b, h = s // H, s % H
    i = tl.arange(0, QP)
    real = real_tokens(mask + b * mask_b + h * mask_h, mask_n, N, MASKED, NP)
    asked = real_tokens(query_mask + b * query_b + h * query_h, query_n, NQ, QUERY_MASKED, QP)
    s_q = tl.load(scale_q + b * scale_q_b + h * scale_q_h)
    s_k = tl.load(scale_k + b * scale_k_b + h * scale_k_h)
    sigma = tl.load(noise + b * noise_b + h * noise_h)
    tokens_q += s * QP * CP
    tokens_k += s * NP * CP
    tokens_v += s * NP * DP
    K += s * QP * NP
    weights += s * QP * NP
    W += s * QP * NP
    X += s * QP * NP
    OX += s * QP * NP
    E += s * QP * NP
    scratch += s * NP * (QP if QP > NP else NP)
    by_explained += s * QP * QP
    unit_grad += s * QP * DP
    turned_v += s * DP * NP
    M, R = grams + s * NP * NP, roots + s * NP * NP
    if not AMPLIFIED:
        weights = K
    d_noise, d_scale_q, by_key = 0.0, 0.0, 0.0
    if PRIOR:
        d_noise = tl.load(grad_parameters + s)
        d_scale_q = tl.load(grad_parameters + 2 * programs + s)
    if KEY_SIGN != 0:
        by_key = KEY_SIGN * tl.load(grad_key + b * grad_key_b + h * grad_key_h)

    g = tokens(grad_mean + b * grad_b + h * grad_h, grad_n, asked, D, QP, DP)
    attended = tokens(mean + b * mean_b + h * mean_h, mean_n, asked, D, QP, DP)
    by_log = tl.sum(g * attended, 1)  # [QP]
    if PRIOR:  # whose amplitudes are done
        g += tokens(by_prior + b * by_prior_b + h * by_prior_h, by_prior_n, asked, D, QP, DP)
    store(unit_grad, s_q * g, QP, DP)
    store_turned(turned_v, fetch(tokens_v, NP, DP), NP, DP)
    w = tl.zeros((QP,), tl.float32)
    d_scale_k = 0.0
    if BY_STDDEV or BY_VARIANCE or BY_UNIT:
        at = s * NQ + i
        by_log_variance = tl.zeros((QP,), tl.float32)  # half of what the logarithm of the variance gets
        if BY_STDDEV:
            got = tl.load(grad_stddev + at, mask=asked, other=0.0)
            by_log_variance += 0.5 * got * tl.load(stddev + at, mask=asked, other=0.0)
        if BY_VARIANCE:
            got = tl.load(grad_variance + at, mask=asked, other=0.0)
            by_log_variance += got * tl.load(variance + at, mask=asked, other=0.0)
        by_log += 2.0 * by_log_variance
        u = tl.load(raw + s * QP + i)
        count = tl.sum(real.to(tl.float32))
        whole = count * s_k * s_k + sigma
        floor = sigma / whole
        by_unit = by_log_variance / tl.minimum(tl.maximum(u, floor), 1.0)
        if BY_UNIT:
            by_unit += tl.load(grad_unit + at, mask=i < NQ, other=0.0)
        w = tl.where((u >= floor) & (u <= 1.0), by_unit, 0.0)
        by_floor = tl.sum(tl.where(u < floor, by_unit, 0.0)) * count * s_k / (whole * whole)
        d_noise += by_floor * s_k
        d_scale_k -= 2.0 * sigma * by_floor
    if FACTORED:
        store(X, product(W, 1, QP, R, NP, 1, QP, NP, NP), QP, NP)
    tl.debug_barrier()
    pairs = product(unit_grad, DP, 1, turned_v, NP, 1, QP, NP, DP) * fetch(weights, QP, NP)
    d_scale_k += tl.sum(pairs) / s_k
    if FACTORED:
        weighted = w[:, None] * fetch(X, QP, NP)
        if COVARIANCE:
            weighted -= product(by_explained, 1, QP, X, NP, 1, QP, NP, QP)
        store(OX, weighted, QP, NP)
        d_scale_k -= 2.0 * sigma / s_k * tl.sum(weighted * fetch(X, QP, NP))
        pairs -= 2.0 * weighted * fetch(K, QP, NP)
    store(E, pairs, QP, NP)
    store_turned(scratch, pairs, QP, NP)
    total = tl.sum(pairs, 0)  # [NP]
    tl.debug_barrier()
    moved = product(scratch, 1, QP, tokens_k, CP, 1, QP, CP, NP)
    moved -= tl.sum(fetch(E, QP, NP), 1)[:, None] * fetch(tokens_q, QP, CP)
    grad_q += b * grad_q_b + h * grad_q_h
    d_scale_q += tl.sum(by_log) / s_q
    if PRIOR:
        moved += tokens(grad_q, grad_q_n, i < NQ, C, QP, CP)
        if AMPLIFIED:
            by_log += tl.load(grad_log + s * NQ + i, mask=i < NQ, other=0.0)
        tl.debug_barrier()  # before they are overwritten
    store_tokens(grad_q, grad_q_n, moved, NQ, C, QP, CP)
    if AMPLIFIED:
        tl.store(grad_log + s * NQ + i, by_log, mask=i < NQ)

    moved = product(E, 1, NP, tokens_q, CP, 1, NP, CP, QP)
    if FACTORED:
        by_M = product(X, 1, NP, OX, NP, 1, NP, NP, QP)
        tl.debug_barrier()  # the scratch has been read
        more, rows, by_noise, _, by_scale = key_gram_backward(
            tokens_k, turned_v, M, R, by_M, scratch, by_key, s_k, D, real, KEY_SIGN != 0, NP, CP, DP
        )
        moved += more
        total += rows
        d_scale_k += by_scale
        d_noise += by_noise
    moved -= total[:, None] * fetch(tokens_k, NP, CP)
    store_tokens(grad_k + b * grad_k_b + h * grad_k_h, grad_k_n, moved, N, C, NP, CP)
    by_v = product(weights, 1, NP, unit_grad, DP, 1, NP, DP, QP)
    if KEY_SIGN != 0:
        by_v -= by_key * product(M, 1, NP, tokens_v, DP, 1, NP, DP, NP)
    by_v = tl.where(real[:, None], by_v, 0.0)
    store_tokens(grad_v + b * grad_v_b + h * grad_v_h, grad_v_n, by_v, N, D, NP, DP)
    tl.store(grad_parameters + s, d_noise)
    tl.store(grad_parameters + 2 * programs + s, d_scale_q)
    tl.store(grad_parameters + 4 * programs + s, d_scale_k)
    for part in tl.static_range(3):
        tl.store(grad_parameters + (2 * part + 1) * programs + s, 0.0)
