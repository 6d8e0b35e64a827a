"""Triton kernels of the exact CGP's backward pass; see `cgp_forward` and gp/moments for the letters.

With g the gradient of the unit mean, Omega that of the unit covariance (diag(w) of the variances, less what
the KL divergence wants of the explained part), c that of the keys' log density:
    X = F R_k,  T = g V^T - 2 Omega X,  Z = (T K_ko - 2 sigma^2 Omega A) R^T R
    dK_qo = Z,  dM = -A^T Z,  dK_ok = A^T T,  dV = K_ko A^T g - c M_k V
    dM_k = X^T Omega X - c/2 (D R_k^T R_k + V V^T)
and through every Gram matrix E = dK * K,  dx_i = sum_j E_ij (y_j - x_i).  F comes as F^T, and Z is made by
way of T^T, whose products want nothing transposed on the right (see `blocks`).  Gradients of the
noise, s_q and s_k are [3, 2, B, H]: two parts each, of which some are 0.
"""
# mypy: disable-error-code="import-not-found,import-untyped,misc,no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201

import triton
import triton.language as tl

from gpattention.gp.fused.blocks import (
    fetch,
    product,
    real_tokens,
    store,
    store_tokens,
    store_turned,
    tokens,
)


@triton.jit
def rows_backward_kernel(
    grad_mean, grad_b, grad_h, grad_n, grad_variance,
    mean, mean_b, mean_h, mean_n, variance, unit,
    mask, mask_b, mask_h, mask_n, query_mask, query_b, query_h, query_n,
    noise, noise_b, noise_h, scale_q, scale_q_b, scale_q_h,
    log_amplitude, log_b, log_h, log_n,
    tokens_q, tokens_o, tokens_v, roots, K_qo, K_ok, A, F,
    by_prior, by_prior_b, by_prior_h, by_prior_n, by_explained,
    X, OX, T, Z, E, scratch, unit_grad, turned_v,
    grad_q, grad_q_b, grad_q_h, grad_q_n, grad_log, grad_parameters,
    programs, H, NQ, N, C, D,
    MASKED: tl.constexpr, QUERY_MASKED: tl.constexpr, AMPLIFIED: tl.constexpr,
    VARIANCE: tl.constexpr, WEIGHTED: tl.constexpr, PRIOR: tl.constexpr, COVARIANCE: tl.constexpr,
    QP: tl.constexpr, NP: tl.constexpr, CP: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """All that belongs to query rows: X, Omega X, T, Z, E = Z * K_qo, and gradients of q and its amplitudes.

    WEIGHTED: there are gradients of the variance.  PRIOR: a density or divergence has written its part of
    the gradients of q, amplitudes and noise, and `by_prior` of the mean; COVARIANCE: of P too.  Also writes
    V^T.
    """
    s = tl.program_id(0).to(tl.int64)
    b, h = s // H, s % H
    i = tl.arange(0, QP)
    real = real_tokens(mask + b * mask_b + h * mask_h, mask_n, N, MASKED, NP)
    asked = real_tokens(query_mask + b * query_b + h * query_h, query_n, NQ, QUERY_MASKED, QP)
    scale = tl.load(scale_q + b * scale_q_b + h * scale_q_h)
    amplitude = scale + tl.zeros((QP,), tl.float32)
    if AMPLIFIED:
        amplitude *= tl.exp(tl.load(log_amplitude + b * log_b + h * log_h + i * log_n, mask=asked, other=0.0))
    sigma = tl.load(noise + b * noise_b + h * noise_h)
    tokens_q += s * QP * CP
    tokens_o += s * NP * CP
    tokens_v += s * NP * DP
    K_qo += s * QP * NP
    K_ok += s * NP * NP
    A += s * QP * NP
    F += s * QP * NP
    by_explained += s * QP * QP
    X += s * QP * NP
    OX += s * QP * NP
    T += s * QP * NP
    Z += s * QP * NP
    E += s * QP * NP
    scratch += s * NP * QP
    unit_grad += s * QP * DP
    turned_v += s * DP * NP
    R = roots + s * NP * NP
    R_k = roots + (programs + s) * NP * NP

    g = tokens(grad_mean + b * grad_b + h * grad_h, grad_n, asked, D, QP, DP)
    attended = tokens(mean + b * mean_b + h * mean_h, mean_n, asked, D, QP, DP)
    by_log = tl.sum(g * attended, 1)  # [QP]
    if PRIOR:  # whose amplitudes are done
        g += tokens(by_prior + b * by_prior_b + h * by_prior_h, by_prior_n, asked, D, QP, DP)
    store(unit_grad, amplitude[:, None] * g, QP, DP)
    store_turned(turned_v, fetch(tokens_v, NP, DP), NP, DP)
    d_noise, d_scale = 0.0, 0.0
    if PRIOR:  # read well before they are overwritten
        d_noise = tl.load(grad_parameters + s)
        d_scale = tl.load(grad_parameters + 2 * programs + s)
    w = tl.zeros((QP,), tl.float32)
    if WEIGHTED:
        by_variance = tl.load(grad_variance + s * NQ + i, mask=asked, other=0.0)
        by_log += 2.0 * by_variance * tl.load(variance + s * NQ + i, mask=asked, other=0.0)
        by_unit = amplitude * amplitude * by_variance
        u = tl.load(unit + s * QP + i)
        count = tl.sum(real.to(tl.float32))
        floor = sigma / (count + sigma)
        w = tl.where((u >= floor) & (u <= 1.0), by_unit, 0.0)
        d_noise += tl.sum(tl.where(u < floor, by_unit, 0.0)) * count / ((count + sigma) * (count + sigma))
    if VARIANCE:
        store(X, product(F, 1, QP, R_k, NP, 1, QP, NP, NP), QP, NP)
    tl.debug_barrier()
    outer = product(unit_grad, DP, 1, turned_v, NP, 1, QP, NP, DP)
    if VARIANCE:
        weighted = w[:, None] * fetch(X, QP, NP)
        if COVARIANCE:
            weighted -= product(by_explained, 1, QP, X, NP, 1, QP, NP, QP)
        store(OX, weighted, QP, NP)
        outer -= 2.0 * weighted
    store(T, outer, QP, NP)
    store_turned(E, outer, QP, NP)  # its place is free until the end
    tl.debug_barrier()
    by_A = product(K_ok, NP, 1, E, QP, 1, NP, QP, NP)  # transposed, as is `half`
    if VARIANCE:
        predictor = tl.load(A + tl.arange(0, NP)[:, None] + i[None, :] * NP)  # A^T
        weighted = w[None, :] * predictor
        if COVARIANCE:
            weighted -= product(A, 1, NP, by_explained, QP, 1, NP, QP, QP)
        by_A -= 2.0 * sigma * weighted
        d_noise -= tl.sum(weighted * predictor)
    store(scratch, by_A, NP, QP)
    tl.debug_barrier()
    half = product(R, NP, 1, scratch, QP, 1, NP, QP, NP)
    store(E, half, NP, QP)
    tl.debug_barrier()
    by_K_qo = product(E, 1, QP, R, NP, 1, QP, NP, NP)
    store(Z, by_K_qo, QP, NP)
    tl.debug_barrier()  # all of the first half has been read
    weights = by_K_qo * fetch(K_qo, QP, NP)
    store(E, weights, QP, NP)
    store_turned(scratch, weights, QP, NP)
    tl.debug_barrier()
    moved = product(scratch, 1, QP, tokens_o, CP, 1, QP, CP, NP)
    moved -= tl.sum(weights, 1)[:, None] * fetch(tokens_q, QP, CP)
    grad_q += b * grad_q_b + h * grad_q_h
    d_scale += tl.sum(by_log) / scale
    if PRIOR:
        moved += tokens(grad_q, grad_q_n, i < NQ, C, QP, CP)
        if AMPLIFIED:
            by_log += tl.load(grad_log + s * NQ + i, mask=i < NQ, other=0.0)
        tl.debug_barrier()  # before they are overwritten
    store_tokens(grad_q, grad_q_n, moved, NQ, C, QP, CP)
    if AMPLIFIED:
        tl.store(grad_log + s * NQ + i, by_log, mask=i < NQ)
    tl.store(grad_parameters + s, d_noise)
    tl.store(grad_parameters + 2 * programs + s, d_scale)
    tl.store(grad_parameters + 3 * programs + s, 0.0)


@triton.jit
def latent_backward(
    tokens_q, tokens_o, tokens_k, M, K_ok, A, T, Z, E, scratch,
    QP: tl.constexpr, NP: tl.constexpr, CP: tl.constexpr,
):  # fmt: skip
    """Gradients of the latent inputs and, through M, of the noise.  [NP, CP], []"""
    j = tl.arange(0, NP)
    on_diagonal = j[:, None] == j[None, :]
    O = fetch(tokens_o, NP, CP)  # noqa: E741
    by_M = -product(A, 1, NP, Z, NP, 1, NP, NP, QP)
    d_noise = tl.sum(tl.where(on_diagonal, by_M, 0.0))
    weights = tl.where(on_diagonal, 0.0, by_M * fetch(M, NP, NP))
    weights += tl.trans(weights)
    store(scratch, weights, NP, NP)
    total = tl.sum(weights, 0)
    tl.debug_barrier()
    moved = product(scratch, 1, NP, tokens_o, CP, 1, NP, CP, NP)
    total += tl.sum(fetch(E, QP, NP), 0)
    moved += product(E, 1, NP, tokens_q, CP, 1, NP, CP, QP)
    weights = product(A, 1, NP, T, NP, 1, NP, NP, QP) * fetch(K_ok, NP, NP)
    tl.debug_barrier()  # the scratch has been read
    store_turned(scratch, weights, NP, NP)
    total += tl.sum(weights, 1)
    tl.debug_barrier()
    moved += product(scratch, 1, NP, tokens_k, CP, 1, NP, CP, NP)
    return moved - total[:, None] * O, d_noise


@triton.jit
def key_gram_backward(
    tokens_k, turned_v, M, R, by_M, scratch, by_key, scale, D, real,
    KEYED: tl.constexpr, NP: tl.constexpr, CP: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """dM_k and the keys' density to sum_j E_ij x_j, sum_j E_ij and d sigma^2.  [NP, CP], [NP], []

    And to d s_k, all of it and the part of the density alone.  [], []
    """
    j = tl.arange(0, NP)
    on_diagonal = j[:, None] == j[None, :]
    by_density = 0.0
    if KEYED:
        more = D * product(R, 1, NP, R, NP, 1, NP, NP, NP)
        more += product(turned_v, 1, NP, turned_v, NP, 1, NP, NP, DP)
        more = -0.5 * by_key * tl.where(real[:, None] & real[None, :], more, 0.0)
        K_k = tl.where(on_diagonal, scale * scale, fetch(M, NP, NP))
        by_density = 2.0 * tl.sum(more * K_k) / scale
        by_M += more
    by_M = tl.where(real[:, None] & real[None, :], by_M, 0.0)
    trace = tl.sum(tl.where(on_diagonal, by_M, 0.0))
    weights = tl.where(on_diagonal, 0.0, by_M * fetch(M, NP, NP))
    store_turned(scratch, weights, NP, NP)
    rows = tl.sum(weights, 1)
    tl.debug_barrier()
    moved = product(scratch, 1, NP, tokens_k, CP, 1, NP, CP, NP)
    return 2.0 * moved, 2.0 * rows, trace, 2.0 * (tl.sum(rows) / scale + scale * trace), by_density


@triton.jit
def key_backward(
    tokens_o, tokens_k, turned_v, M, R, K_ok, A, X, OX, T, scratch,
    by_key, scale, D, real,
    VARIANCE: tl.constexpr, KEYED: tl.constexpr,
    QP: tl.constexpr, NP: tl.constexpr, CP: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Gradients of keys, s_k and the noise, through M_k and K_ok.  [NP, CP], [], []"""
    weights = product(A, 1, NP, T, NP, 1, NP, NP, QP) * fetch(K_ok, NP, NP)
    store(scratch, weights, NP, NP)
    total = tl.sum(weights, 0)
    d_scale = tl.sum(total) / scale
    d_noise = 0.0
    tl.debug_barrier()
    moved = product(scratch, 1, NP, tokens_o, CP, 1, NP, CP, NP)
    if VARIANCE:
        by_M = product(X, 1, NP, OX, NP, 1, NP, NP, QP)
        tl.debug_barrier()  # the scratch has been read
        more, rows, d_noise, by_scale, _ = key_gram_backward(
            tokens_k, turned_v, M, R, by_M, scratch, by_key, scale, D, real, KEYED, NP, CP, DP
        )
        moved += more
        total += rows
        d_scale += by_scale
    return moved - total[:, None] * fetch(tokens_k, NP, CP), d_scale, d_noise


@triton.jit
def inputs_backward_kernel(
    mask, mask_b, mask_h, mask_n, scale_k, scale_b, scale_h,
    tokens_q, tokens_o, tokens_k, tokens_v, grams, roots, K_ok, A,
    X, OX, T, Z, E, unit_grad, turned_v, grad_key, grad_key_b, grad_key_h, scratch, values,
    grad_o, grad_o_b, grad_o_h, grad_o_n, grad_k, grad_k_b, grad_k_h, grad_k_n,
    grad_v, grad_v_b, grad_v_h, grad_v_n, grad_parameters,
    programs, H, N, C, D,
    MASKED: tl.constexpr, VARIANCE: tl.constexpr, KEY_SIGN: tl.constexpr,
    QP: tl.constexpr, NP: tl.constexpr, CP: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Program (s, 0): gradients of the latent inputs; (s, 1): of keys, values and s_k; both: the noise.

    KEY_SIGN is 1 for gradients of the keys' log density, -1 for those of its negative, 0 for none.
    """
    s, which = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, h = s // H, s % H
    tokens_q += s * QP * CP
    tokens_o += s * NP * CP
    tokens_k += s * NP * CP
    tokens_v += s * NP * DP
    K_ok += s * NP * NP
    A += s * QP * NP
    X += s * QP * NP
    OX += s * QP * NP
    T += s * QP * NP
    Z += s * QP * NP
    E += s * QP * NP
    square = (which * programs + s) * NP * NP
    M, R = grams + square, roots + square
    scratch += square
    if which == 0:
        moved, d_noise = latent_backward(
            tokens_q, tokens_o, tokens_k, M, K_ok, A, T, Z, E, scratch, QP, NP, CP
        )
        store_tokens(grad_o + b * grad_o_b + h * grad_o_h, grad_o_n, moved, N, C, NP, CP)
        tl.store(grad_parameters + programs + s, d_noise)
        tl.store(grad_parameters + 5 * programs + s, 0.0)
    else:
        real = real_tokens(mask + b * mask_b + h * mask_h, mask_n, N, MASKED, NP)
        scale = tl.load(scale_k + b * scale_b + h * scale_h)
        by_rows = tl.load(grad_parameters + s)
        by_key = 0.0
        if KEY_SIGN != 0:
            by_key = KEY_SIGN * tl.load(grad_key + b * grad_key_b + h * grad_key_h)
        moved, d_scale, d_noise = key_backward(
            tokens_o, tokens_k, turned_v + s * DP * NP, M, R, K_ok, A, X, OX, T, scratch,
            by_key, scale, D, real, VARIANCE, KEY_SIGN != 0, QP, NP, CP, DP,
        )  # fmt: skip
        store_tokens(grad_k + b * grad_k_b + h * grad_k_h, grad_k_n, moved, N, C, NP, CP)
        tl.store(grad_parameters + s, by_rows + d_noise)
        tl.store(grad_parameters + 4 * programs + s, d_scale)
        values += s * NP * DP
        store(values, product(A, 1, NP, unit_grad + s * QP * DP, DP, 1, NP, DP, QP), NP, DP)
        tl.debug_barrier()
        by_v = product(K_ok, 1, NP, values, DP, 1, NP, DP, NP)
        if KEY_SIGN != 0:
            by_v -= by_key * product(M, 1, NP, tokens_v, DP, 1, NP, DP, NP)
        by_v = tl.where(real[:, None], by_v, 0.0)
        store_tokens(grad_v + b * grad_v_b + h * grad_v_h, grad_v_n, by_v, N, D, NP, DP)
