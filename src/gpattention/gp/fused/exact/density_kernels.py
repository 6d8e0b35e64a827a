"""Triton kernels of log N(X; 0, D_a kappa(x, x) D_a + tau^2 I), one program per sequence and head.

C = D_a kappa D_a + tau^2 I,  R = L^-1,  U = R X,  Y = R^T U
value = -1/2 [|U|^2 + D (log det C + n log 2 pi)]                                     (eq. 10)
dX = -c Y,   dC = c/2 (Y Y^T - D R^T R),   E = dC * C,  dx_i = 2 sum_j E_ij (x_j - x_i)
In the COST of a model X is its mean, which the amplitudes scale as they scale K; through both
d log a_i = -2 tau^2 dC_ii - c D.
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

_LOG_2_PI = tl.constexpr(1.8378770664093453)


@triton.jit(do_not_specialize=["counted"])
def density_kernel(
    x, x_b, x_h, x_n, X, X_b, X_h, X_n, mask, mask_b, mask_h, mask_n,
    tau, tau_b, tau_h, scale, scale_b, scale_h, log_amplitude, log_b, log_h, log_n,
    inputs, turned, white, gram, root, key, value, info, counter, counted,
    H, N, C, D,
    COST: tl.constexpr, MASKED: tl.constexpr, AMPLIFIED: tl.constexpr,
    NP: tl.constexpr, CP: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """The density, or the COST of both with the keys'; keeps centred inputs, U, C and R.

    `turned` is scratch memory for the transposed inputs.
    """
    s = tl.program_id(0).to(tl.int64)
    b, h = s // H, s % H
    i = tl.arange(0, NP)
    real = real_tokens(mask + b * mask_b + h * mask_h, mask_n, N, MASKED, NP)
    amplitude = tl.load(scale + b * scale_b + h * scale_h) + tl.zeros((NP,), tl.float32)
    if AMPLIFIED:
        amplitude *= tl.exp(tl.load(log_amplitude + b * log_b + h * log_h + i * log_n, mask=real, other=0.0))
    inputs += s * NP * CP
    turned += s * CP * NP
    white += s * NP * DP
    gram += s * NP * NP
    root += s * NP * NP
    x += b * x_b + h * x_h
    places = tokens(x, x_n, real, C, NP, CP)
    places = centred(places, centre_of(places, real), real)
    store(inputs, places, NP, CP)
    store_turned(turned, places, NP, CP)
    store(white, tokens(X + b * X_b + h * X_h, X_n, real, D, NP, DP), NP, DP)
    tl.debug_barrier()
    noise = tl.load(tau + b * tau_b + h * tau_h)
    store(gram, turned_gram(turned, places, x, x_n, C, amplitude, noise, real, NP, CP), NP, NP)
    tl.debug_barrier()
    log_det, failed = inverse_root(gram, root, NP)
    tl.store(info + s, failed)
    if (failed != 0) & (counted != 0):
        tl.atomic_add(counter, 1)
    U = product(root, NP, 1, white, DP, 1, NP, DP, NP)
    tl.debug_barrier()  # X has been read
    store(white, U, NP, DP)
    count = tl.sum(real.to(tl.float32))
    cost = 0.5 * (tl.sum(U * U) + D * (log_det + count * _LOG_2_PI))
    if COST:
        tl.store(value + s, cost - tl.load(key + s))
    else:
        tl.store(value + s, -cost)


@triton.jit
def density_backward_kernel(
    grad, grad_b, grad_h, mask, mask_b, mask_h, mask_n,
    tau, tau_b, tau_h, scale, scale_b, scale_h, log_amplitude, log_b, log_h, log_n,
    inputs, white, gram, root, scratch, dual,
    grad_x, grad_x_b, grad_x_h, grad_x_n, grad_X, grad_X_b, grad_X_h, grad_X_n,
    grad_log, grad_scale, grad_tau,
    H, N, C, D,
    COST: tl.constexpr, MASKED: tl.constexpr, AMPLIFIED: tl.constexpr,
    NP: tl.constexpr, CP: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Gradients of inputs, observations, amplitudes and noise, by that of the density or of the COST."""
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
    root += s * NP * NP
    scratch += s * NP * NP
    dual += s * DP * NP
    c = tl.load(grad + b * grad_b + h * grad_h)
    if COST:
        c = -c
    Y = product(root, 1, NP, white, DP, 1, NP, DP, NP)
    store_turned(dual, Y, NP, DP)
    store_tokens(grad_X + b * grad_X_b + h * grad_X_h, grad_X_n, -c * Y, N, D, NP, DP)
    tl.debug_barrier()
    by_C = product(dual, 1, NP, dual, NP, 1, NP, NP, DP)
    by_C -= D * product(root, 1, NP, root, NP, 1, NP, NP, NP)
    by_C = 0.5 * c * tl.where(real[:, None] & real[None, :], by_C, 0.0)
    on = tl.sum(tl.where(on_diagonal, by_C, 0.0), 1)  # [NP]
    weights = tl.where(on_diagonal, 0.0, by_C * fetch(gram, NP, NP))
    store_turned(scratch, weights, NP, NP)
    total = tl.sum(weights, 1)
    tl.debug_barrier()
    moved = product(scratch, 1, NP, inputs, CP, 1, NP, CP, NP) - total[:, None] * fetch(inputs, NP, CP)
    store_tokens(grad_x + b * grad_x_b + h * grad_x_h, grad_x_n, 2.0 * moved, N, C, NP, CP)
    if COST:
        by_log = -2.0 * tl.load(tau + b * tau_b + h * tau_h) * on - tl.where(real, c * D, 0.0)
    else:
        by_log = 2.0 * (total + on * amplitude * amplitude)
    if AMPLIFIED:
        tl.store(grad_log + s * N + i, by_log, mask=i < N)
    tl.store(grad_scale + s, tl.sum(by_log) / factor)
    tl.store(grad_tau + s, tl.sum(on))
