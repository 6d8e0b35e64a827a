"""Triton kernels of the exact CGP's forward pass (eq. 4, 6), one program per sequence and head.

    R = L^-1,  R_k = L_k^-1,  W = K_qo R^T,  A = W R,  G = A K_ok,  F = G R_k^T
    mean_i = a_i W_i (R K_ok V),   var_i = a_i^2 clamp(1 - sigma^2 |A_i|^2 - |F_i|^2)
    key    = -1/2 [V^T M_k V + D (log det M_k + n log 2 pi)]                     (eq. 10, the keys' term)

with a_i = s_q exp(log_amplitude_i).  Of W, A, G and F the transposes are made, whose products want nothing
transposed on the right (see `blocks`).  Inverse triangular roots are as accurate here as substitution
(docs/derivations, "Measured stability"); inverses of M are not, and are never formed.
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
    exponents,
    far_gram,
    fetch,
    inverse_root,
    near_gram,
    product,
    real_tokens,
    spread_of,
    store,
    store_tokens,
    store_turned,
    tokens,
)

_LOG_2_PI = tl.constexpr(1.8378770664093453)


@triton.jit(do_not_specialize=["counted", "programs"])
def roots_kernel(
    k, k_b, k_h, k_n, o, o_b, o_h, o_n, v, v_b, v_h, v_n,
    mask, mask_b, mask_h, mask_n,
    noise, noise_b, noise_h, scale_k, scale_b, scale_h,
    tokens_o, tokens_k, tokens_v, turned, grams, roots, turned_roots, key, info, counter, counted,
    programs, H, N, C, D,
    MASKED: tl.constexpr, LATENT: tl.constexpr, FACTORED: tl.constexpr,
    NP: tl.constexpr, CP: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Program (s, 0): M of the latent inputs; (s, 1): M_k, the values and the keys' log density.

    Writes masked tokens centred on the keys' mean, inputs also turned (latent ones, keys, and latent ones for
    their own Gram), and of the first FACTORED matrices the noisy Gram, its inverse root, also turned, and
    which pivot failed.  Without LATENT inputs M_k is the first and only matrix.
    """
    s, place = tl.program_id(0).to(tl.int64), tl.program_id(1)
    which = place
    if not LATENT:
        which = 1
    b, h = s // H, s % H
    real = real_tokens(mask + b * mask_b + h * mask_h, mask_n, N, MASKED, NP)
    sigma = tl.load(noise + b * noise_b + h * noise_h)
    amplitude = tl.load(scale_k + b * scale_b + h * scale_h)
    k += b * k_b + h * k_h
    o += b * o_b + h * o_h
    X = tokens(k, k_n, real, C, NP, CP)
    centre = centre_of(X, real)
    square = (place * programs + s) * NP * NP
    turned += (place * programs + s) * CP * NP
    V = tl.zeros((NP, DP), tl.float32)
    if which == 0:
        amplitude = 1.0
        X = centred(tokens(o, o_n, real, C, NP, CP), centre, real)
        store(tokens_o + s * NP * CP, X, NP, CP)
        store_turned(turned, X, NP, CP)
        X = centred(X, centre_of(X, real), real)
        turned += 2 * programs * CP * NP  # about their own mean
        store_turned(turned, X, NP, CP)
    else:
        X = centred(X, centre, real)
        store(tokens_k + s * NP * CP, X, NP, CP)
        store_turned(turned, X, NP, CP)
        V = tokens(v + b * v_b + h * v_h, v_n, real, D, NP, DP)
        store(tokens_v + s * NP * DP, V, NP, DP)
    if place < FACTORED:
        tl.debug_barrier()
        amplitudes = amplitude + tl.zeros((NP,), tl.float32)
        store(grams + square, near_gram(turned, X, amplitudes, sigma, real, NP, CP), NP, NP)
        # Written anew rather than chosen on chip: a choice would cost the common case half its speed.
        spread = spread_of(X)
        if spread > FAR:
            tl.debug_barrier()
            if which == 0:
                exponent = differences(o, o_n, real, o, o_n, real, C, NP, NP)
                store(grams + square, far_gram(exponent, spread, amplitudes, sigma, real, NP), NP, NP)
            else:
                exponent = differences(k, k_n, real, k, k_n, real, C, NP, NP)
                store(grams + square, far_gram(exponent, spread, amplitudes, sigma, real, NP), NP, NP)
        tl.debug_barrier()
        log_det, failed = inverse_root(grams + square, roots + square, NP)
        store_turned(turned_roots + square, fetch(roots + square, NP, NP), NP, NP)
        tl.store(info + place * programs + s, failed)
        if (failed != 0) & (counted != 0):
            tl.atomic_add(counter, 1)
        if which == 1:
            MV = product(grams + square, 1, NP, tokens_v + s * NP * DP, DP, 1, NP, DP, NP)
            count = tl.sum(real.to(tl.float32))
            tl.store(key + s, -0.5 * (tl.sum(V * MV) + D * (log_det + count * _LOG_2_PI)))


@triton.jit
def rows_kernel(
    q, q_b, q_h, q_n, k, k_b, k_h, k_n, o, o_b, o_h, o_n,
    mask, mask_b, mask_h, mask_n, query_mask, query_b, query_h, query_n,
    noise, noise_b, noise_h, scale_q, scale_q_b, scale_q_h, scale_k, scale_k_b, scale_k_h,
    log_amplitude, log_b, log_h, log_n,
    tokens_q, tokens_o, tokens_k, tokens_v, turned, roots, turned_roots,
    K_qo, K_ok, A, turned_A, F, scratch, values,
    mean, mean_b, mean_h, mean_n, variance, unit,
    programs, H, NQ, N, C, D,
    MASKED: tl.constexpr, QUERY_MASKED: tl.constexpr, AMPLIFIED: tl.constexpr, VARIANCE: tl.constexpr,
    QP: tl.constexpr, NP: tl.constexpr, CP: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Mean and variance of every query from the roots; keeps K_qo, K_ok, A and F^T."""
    s = tl.program_id(0).to(tl.int64)
    b, h = s // H, s % H
    i = tl.arange(0, QP)
    real = real_tokens(mask + b * mask_b + h * mask_h, mask_n, N, MASKED, NP)
    asked = real_tokens(query_mask + b * query_b + h * query_h, query_n, NQ, QUERY_MASKED, QP)
    amplitude = tl.load(scale_q + b * scale_q_b + h * scale_q_h) + tl.zeros((QP,), tl.float32)
    if AMPLIFIED:
        amplitude *= tl.exp(tl.load(log_amplitude + b * log_b + h * log_h + i * log_n, mask=asked, other=0.0))
    tokens_q += s * QP * CP
    tokens_o += s * NP * CP
    tokens_k += s * NP * CP
    tokens_v += s * NP * DP
    K_qo += s * QP * NP
    K_ok += s * NP * NP
    A += s * QP * NP
    turned_A += s * NP * QP
    F += s * NP * QP
    scratch += s * NP * (QP if QP > NP else NP)
    values += s * NP * DP
    turned_o = turned + s * CP * NP
    turned_k = turned + (programs + s) * CP * NP
    R = roots + s * NP * NP
    turned_R = turned_roots + s * NP * NP
    turned_R_k = turned_roots + (programs + s) * NP * NP

    q += b * q_b + h * q_h
    k += b * k_b + h * k_h
    o += b * o_b + h * o_h
    centre = centre_of(tokens(k, k_n, real, C, NP, CP), real)
    Q = centred(tokens(q, q_n, asked, C, QP, CP), centre, asked)
    store(tokens_q, Q, QP, CP)
    tl.debug_barrier()
    O = fetch(tokens_o, NP, CP)  # noqa: E741 - the latent inputs
    dot = product(tokens_q, CP, 1, turned_o, NP, 1, QP, NP, CP)
    between = exponential(exponents(dot, Q, O, q, q_n, asked, o, o_n, real, C, QP, NP))
    between = tl.where(asked[:, None] & real[None, :], between, 0.0)
    store(K_qo, between, QP, NP)
    store_turned(turned_A, between, QP, NP)  # its place is free for now
    X = fetch(tokens_k, NP, CP)
    dot = product(turned_o, 1, NP, turned_k, NP, 1, NP, NP, CP)
    between = exponential(exponents(dot, O, X, o, o_n, real, k, k_n, real, C, NP, NP))
    between *= tl.load(scale_k + b * scale_k_b + h * scale_k_h)
    between = tl.where(real[:, None] & real[None, :], between, 0.0)
    store(K_ok, between, NP, NP)
    store_turned(scratch, between, NP, NP)
    tl.debug_barrier()
    weighted = product(scratch, 1, NP, tokens_v, DP, 1, NP, DP, NP)
    store(values, weighted, NP, DP)
    whitening = product(turned_R, 1, NP, turned_A, QP, 1, NP, QP, NP)  # W^T
    tl.debug_barrier()  # the transpose of K_ok has been read
    store(scratch, whitening, NP, QP)
    whitened = product(turned_R, 1, NP, values, DP, 1, NP, DP, NP)
    tl.debug_barrier()  # before it takes the place of what it was made from
    store(values, whitened, NP, DP)
    tl.debug_barrier()
    result = amplitude[:, None] * product(scratch, 1, QP, values, DP, 1, QP, DP, NP)
    store_tokens(mean + b * mean_b + h * mean_h, mean_n, result, NQ, D, QP, DP)
    predictor = product(R, 1, NP, scratch, QP, 1, NP, QP, NP)  # A^T
    store_turned(A, predictor, NP, QP)
    if VARIANCE:
        store(turned_A, predictor, NP, QP)
        tl.debug_barrier()  # all of W has been read
        explained = product(K_ok, 1, NP, turned_A, QP, 1, NP, QP, NP)
        store(scratch, explained, NP, QP)  # G^T
        tl.debug_barrier()
        reduced = product(turned_R_k, 1, NP, scratch, QP, 1, NP, QP, NP)
        store(F, reduced, NP, QP)
        sigma = tl.load(noise + b * noise_b + h * noise_h)
        u = 1.0 - sigma * tl.sum(predictor * predictor, 0) - tl.sum(reduced * reduced, 0)
        floor = sigma / (tl.sum(real.to(tl.float32)) + sigma)
        clamped = tl.minimum(tl.maximum(u, floor, tl.PropagateNan.ALL), 1.0, tl.PropagateNan.ALL)
        tl.store(unit + s * QP + i, u)
        inside = i < NQ
        tl.store(variance + s * NQ + i, tl.where(asked, amplitude * amplitude * clamped, 0.0), mask=inside)
