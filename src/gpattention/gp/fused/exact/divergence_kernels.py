"""Triton kernels of a posterior's KL divergence from its prior (eq. 23), one program per sequence and head.

With C = K_q + tau^2 I, P the covariance that the keys explain, V = C - P and n the padded number:
    R = C's inverse root, R_V = V's, U = R N,  K = 1/2 [|U|^2 + D (tr(R V R^T) - n + log det C - log det V)]
    Y = R^T U,  J = V^-1 - C^-1,  dN = c Y,  dP = c/2 D J,  dC = -c/2 (Y Y^T + D (J - C^-1 + C^-1 V C^-1))
P and C move together where the keys explain much: one rounded J in both gradients cancels, two would not; and
C^-1 P C^-1, which stands here as C^-1 - C^-1 V C^-1, loses a digit if it is formed from P.
Amplitudes a scale N, K_q and P together, so that the divergence depends on tau^2 / a^2 alone: through all
three d log a_i = -2 tau^2 dC_ii, where the parts would cancel.
"""
# mypy: disable-error-code="import-not-found,import-untyped,misc,no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201

import triton
import triton.language as tl

from gpattention.gp.fused.blocks import (
    centre_of,
    centred,
    fetch,
    inverse_root,
    product,
    real_tokens,
    store,
    store_tokens,
    store_turned,
    tokens,
    turned_gram,
)


@triton.jit(do_not_specialize=["counted", "programs"])
def divergence_kernel(
    x, x_b, x_h, x_n, X, X_b, X_h, X_n, mask, mask_b, mask_h, mask_n,
    tau, tau_b, tau_h, scale, scale_b, scale_h, log_amplitude, log_b, log_h, log_n,
    A, F, inputs, turned, white, gram, rest, roots, value, info, counter, counted,
    programs, H, N, C, D,
    LATENT: tl.constexpr, MASKED: tl.constexpr, AMPLIFIED: tl.constexpr,
    NP: tl.constexpr, KP: tl.constexpr, CP: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """The KL of P = F F^T, LATENT with tau^2 A A^T; keeps inputs, U, C, V, R, R_V for the backward pass.

    A and F come transposed, [KP, NP]; `turned` is scratch memory for the transposed inputs.
    """
    s = tl.program_id(0).to(tl.int64)
    b, h = s // H, s % H
    i = tl.arange(0, NP)
    real = real_tokens(mask + b * mask_b + h * mask_h, mask_n, N, MASKED, NP)
    amplitude = tl.load(scale + b * scale_b + h * scale_h) + tl.zeros((NP,), tl.float32)
    if AMPLIFIED:
        amplitude *= tl.exp(tl.load(log_amplitude + b * log_b + h * log_h + i * log_n, mask=real, other=0.0))
    A += s * KP * NP
    F += s * KP * NP
    inputs += s * NP * CP
    turned += s * CP * NP
    white += s * NP * DP
    gram += s * NP * NP
    rest += s * NP * NP
    R, R_V = roots + s * NP * NP, roots + (programs + s) * NP * NP
    x += b * x_b + h * x_h
    places = tokens(x, x_n, real, C, NP, CP)
    places = centred(places, centre_of(places, real), real)
    store(inputs, places, NP, CP)
    store_turned(turned, places, NP, CP)
    tl.debug_barrier()
    noise = tl.load(tau + b * tau_b + h * tau_h)
    covariance = turned_gram(turned, places, x, x_n, C, amplitude, noise, real, NP, CP)
    store(gram, covariance, NP, NP)
    P = product(F, 1, NP, F, NP, 1, NP, NP, KP)
    if LATENT:
        P += noise * product(A, 1, NP, A, NP, 1, NP, NP, KP)
    P *= amplitude[:, None] * amplitude[None, :]
    store(rest, covariance - P, NP, NP)
    store(white, tokens(X + b * X_b + h * X_h, X_n, real, D, NP, DP), NP, DP)
    tl.debug_barrier()
    log_det, failed = inverse_root(gram, R, NP)
    log_det_V, failed_V = inverse_root(rest, R_V, NP)
    tl.store(info + s, failed)
    tl.store(info + programs + s, failed_V)
    if (failed != 0) & (counted != 0):
        tl.atomic_add(counter, 1)
    if (failed_V != 0) & (counted != 0):
        tl.atomic_add(counter, 1)
    U = product(R, NP, 1, white, DP, 1, NP, DP, NP)
    tl.debug_barrier()  # N has been read
    store(white, U, NP, DP)
    excess = tl.sum(product(R, NP, 1, rest, NP, 1, NP, NP, NP) * fetch(R, NP, NP), 1) - 1.0  # [NP]
    tl.store(value + s, 0.5 * (tl.sum(U * U) + D * (tl.sum(excess) + log_det - log_det_V)))


@triton.jit(do_not_specialize=["programs"])
def divergence_backward_kernel(
    grad, grad_b, grad_h, mask, mask_b, mask_h, mask_n,
    tau, tau_b, tau_h, scale, scale_b, scale_h, log_amplitude, log_b, log_h, log_n,
    inputs, white, gram, rest, roots, inverse, scratch, dual, by_explained,
    grad_x, grad_x_b, grad_x_h, grad_x_n, grad_X, grad_X_b, grad_X_h, grad_X_n,
    grad_log, grad_scale, grad_tau,
    programs, H, N, C, D,
    MASKED: tl.constexpr, AMPLIFIED: tl.constexpr,
    NP: tl.constexpr, CP: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Gradients of inputs, mean, noise, of P at unit amplitude, and of amplitudes through everything."""
    s = tl.program_id(0).to(tl.int64)
    b, h = s // H, s % H
    i = tl.arange(0, NP)
    on_diagonal = i[:, None] == i[None, :]
    real = real_tokens(mask + b * mask_b + h * mask_h, mask_n, N, MASKED, NP)
    factor = tl.load(scale + b * scale_b + h * scale_h)
    amplitude = factor + tl.zeros((NP,), tl.float32)
    if AMPLIFIED:
        amplitude *= tl.exp(tl.load(log_amplitude + b * log_b + h * log_h + i * log_n, mask=real, other=0.0))
    inputs += s * NP * CP
    white += s * NP * DP
    gram += s * NP * NP
    rest += s * NP * NP
    inverse += s * NP * NP
    scratch += s * NP * NP
    by_explained += s * NP * NP
    dual += s * DP * NP
    R, R_V = roots + s * NP * NP, roots + (programs + s) * NP * NP
    c = tl.load(grad + b * grad_b + h * grad_h)
    Y = product(R, 1, NP, white, DP, 1, NP, DP, NP)
    store_turned(dual, Y, NP, DP)
    store_tokens(grad_X + b * grad_X_b + h * grad_X_h, grad_X_n, c * Y, N, D, NP, DP)
    store(inverse, product(R, 1, NP, R, NP, 1, NP, NP, NP), NP, NP)
    tl.debug_barrier()
    J = product(R_V, 1, NP, R_V, NP, 1, NP, NP, NP) - fetch(inverse, NP, NP)
    store(by_explained, J, NP, NP)
    tl.debug_barrier()
    store_turned(scratch, product(inverse, 1, NP, rest, NP, 1, NP, NP, NP), NP, NP)
    tl.debug_barrier()
    by_C = product(scratch, 1, NP, inverse, NP, 1, NP, NP, NP)
    by_C += fetch(by_explained, NP, NP) - fetch(inverse, NP, NP)
    by_C = product(dual, 1, NP, dual, NP, 1, NP, NP, DP) + D * by_C
    by_C = -0.5 * c * tl.where(real[:, None] & real[None, :], by_C, 0.0)
    J = fetch(by_explained, NP, NP)
    tl.debug_barrier()  # the scratch has been read, and J
    store(by_explained, (0.5 * c * D) * J * (amplitude[:, None] * amplitude[None, :]), NP, NP)
    on = tl.sum(tl.where(on_diagonal, by_C, 0.0), 1)  # [NP]
    weights = tl.where(on_diagonal, 0.0, by_C * fetch(gram, NP, NP))
    weights += tl.trans(weights)  # dC is symmetric but for rounding, which is not small
    store(scratch, weights, NP, NP)
    total = tl.sum(weights, 0)
    tl.debug_barrier()
    moved = product(scratch, 1, NP, inputs, CP, 1, NP, CP, NP)
    moved -= total[:, None] * fetch(inputs, NP, CP)
    store_tokens(grad_x + b * grad_x_b + h * grad_x_h, grad_x_n, moved, N, C, NP, CP)
    by_log = -2.0 * tl.load(tau + b * tau_b + h * tau_h) * on
    if AMPLIFIED:
        tl.store(grad_log + s * N + i, by_log, mask=i < N)
    tl.store(grad_scale + s, tl.sum(by_log) / factor)
    tl.store(grad_tau + s, tl.sum(on))
