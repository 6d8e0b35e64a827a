"""Triton kernels of the amplitudes that normalise rows, one program per sequence and head.

e_ij = -1/2 |q_i - k_j|^2,   s_i = log sum_j exp(e_ij),   log a_i = min(log t - s_i, most)              (25)
With g the gradient of log a, 0 where it is capped:   dt = sum_i g_i / t
P_ij = -g_i exp(e_ij - s_i),  dq_i = sum_j P_ij (k_j - q_i),  dk_j = sum_i P_ij (q_i - k_j)

Triton kernels of log N(X; 0, D_a kappa(x, x) D_a + tau^2 I), one program per sequence and head.

C = D_a kappa D_a + tau^2 I,  R = L^-1,  U = R X,  Y = R^T U
value = -1/2 [|U|^2 + D (log det C + n log 2 pi)]                                     (eq. 10)
dX = -c Y,   dC = c/2 (Y Y^T - D R^T R),   E = dC * C,  dx_i = 2 sum_j E_ij (x_j - x_i)
In the COST of a model X is its mean, which the amplitudes scale as they scale K; through both
d log a_i = -2 tau^2 dC_ii - c D.

Triton kernels of a posterior's KL divergence from its prior (eq. 23), one program per sequence and head.

With C = K_q + tau^2 I, P the covariance that the keys explain, V = C - P and n the padded number:
    R = C's inverse root, R_V = V's, U = R N,  K = 1/2 [|U|^2 + D (tr(R V R^T) - n + log det C - log det V)]
    Y = R^T U,  J = V^-1 - C^-1,  dN = c Y,  dP = c/2 D J,  dC = -c/2 (Y Y^T + D (J - C^-1 + C^-1 V C^-1))
P and C move together where the keys explain much: one rounded J in both gradients cancels, two would not; and
C^-1 P C^-1, which stands here as C^-1 - C^-1 V C^-1, loses a digit if it is formed from P.
Amplitudes a scale N, K_q and P together, so that the divergence depends on tau^2 / a^2 alone: through all
three d log a_i = -2 tau^2 dC_ii, where the parts would cancel.

Triton kernels of the exact CGP's forward pass (eq. 4, 6), one program per sequence and head.

    R = L^-1,  R_k = L_k^-1,  W = K_qo R^T,  A = W R,  G = A K_ok,  F = G R_k^T
    mean_i = a_i W_i (R K_ok V),   var_i = a_i^2 clamp(1 - sigma^2 |A_i|^2 - |F_i|^2)
    key    = -1/2 [V^T M_k V + D (log det M_k + n log 2 pi)]                     (eq. 10, the keys' term)

with a_i = s_q exp(log_amplitude_i).  Of W, A, G and F the transposes are made, whose products want nothing
transposed on the right (see `blocks`).  Inverse triangular roots are as accurate here as substitution
(docs/derivations, "Measured stability"); inverses of M are not, and are never formed.

Triton kernels of the exact CGP's backward pass; see `cgp_forward` and gp/moments for the letters.

With g the gradient of the unit mean, Omega that of the unit covariance (diag(w) of the variances, less what
the KL divergence wants of the explained part), c that of the keys' log density:
    X = F R_k,  T = g V^T - 2 Omega X,  Z = (T K_ko - 2 sigma^2 Omega A) R^T R
    dK_qo = Z,  dM = -A^T Z,  dK_ok = A^T T,  dV = K_ko A^T g - c M_k V
    dM_k = X^T Omega X - c/2 (D R_k^T R_k + V V^T)
and through every Gram matrix E = dK * K,  dx_i = sum_j E_ij (y_j - x_i).  F comes as F^T, and Z is made by
way of T^T, whose products want nothing transposed on the right (see `blocks`).  Gradients of the
noise, s_q and s_k are [3, 2, B, H]: two parts each, of which some are 0.

Triton kernels of the direct model (eq. 2), one program per sequence and head; M_k is `cgp_forward`'s.

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

import triton
import triton.language as tl
from triton.language import constexpr

from gpattention.ops.tiles import (
    FAR,
    centre_of,
    centred,
    differences,
    each_at,
    exponential,
    exponents,
    far_gram,
    fetch,
    head,
    inverse_root,
    near_gram,
    note_failure,
    product,
    program_head,
    real_rows,
    rows_of,
    scalar_of,
    spread_of,
    store,
    store_both,
    store_rows,
    store_turned,
    turned_gram,
)

# mypy: disable-error-code="import-not-found,import-untyped,misc,no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201


_HIDDEN = tl.constexpr(-1e30)  # instead of -inf, whose differences are NaN


@triton.jit
def hidden_exponents(
    q, asked, k, real, C, tokens_q, tokens_k, turned,
    QP: constexpr, NP: constexpr, CP: constexpr,
):  # fmt: skip
    """e, never above 0, hidden at padded keys, which come centred and turned too.  [QP, NP]"""
    Q, K = fetch(tokens_q, QP, CP), fetch(tokens_k, NP, CP)
    dot = product(tokens_q, CP, 1, turned, NP, 1, QP, NP, CP)
    e = exponents(dot, Q, K, q, asked, k, real, C, QP, NP)
    return tl.where(real[None, :], e, _HIDDEN)


@triton.jit
def amplitude_kernel(
    q, k, mask, query_mask, scale, tokens_q, tokens_k, turned, log_sum, log_amplitude, most, H, NQ, N, C,
    QP: constexpr, NP: constexpr, CP: constexpr,
):  # fmt: skip
    """log a of every query, 0 at padding and where there is no real key; keeps the masked tokens and s."""
    s, b, h = program_head(H)
    i = tl.arange(0, QP)
    real = real_rows(mask, b, h, 0, N, NP)
    asked = real_rows(query_mask, b, h, 0, NQ, QP)
    tokens_q += s * QP * CP
    tokens_k, turned = each_at(s * NP * CP, (tokens_k, turned))
    q, k = head(q, b, h), head(k, b, h)
    X = rows_of(k, real, C, NP, CP)
    centre = centre_of(X, real)
    X = centred(X, centre, real)
    store_both(tokens_k, turned, X, NP, CP)
    X = rows_of(q, asked, C, QP, CP)
    store(tokens_q, centred(X, centre, asked), QP, CP)
    tl.debug_barrier()
    e = hidden_exponents(q, asked, k, real, C, tokens_q, tokens_k, turned, QP, NP, CP)
    largest = tl.max(e, 1)
    total = largest + tl.log(tl.sum(exponential(e - largest[:, None]), 1))
    seen = asked & (tl.sum(real.to(tl.int32)) > 0)
    found = tl.log(scalar_of(scale, b, h)) - total
    if most is not None:
        found = tl.minimum(found, most, tl.PropagateNan.ALL)
    tl.store(log_sum + s * NQ + i, tl.where(seen, total, 0.0), mask=i < NQ)
    tl.store(log_amplitude + s * NQ + i, tl.where(seen, found, 0.0), mask=i < NQ)


@triton.jit
def amplitude_backward_kernel(
    grad, q, k, mask, query_mask, scale, tokens_q, tokens_k, turned, log_sum, scratch, most, grad_q, grad_k,
    grad_scale, H, NQ, N, C,
    QP: constexpr, NP: constexpr, CP: constexpr,
):  # fmt: skip
    """Gradients of queries, keys and t."""
    s, b, h = program_head(H)
    i = tl.arange(0, QP)
    real = real_rows(mask, b, h, 0, N, NP)
    asked = real_rows(query_mask, b, h, 0, NQ, QP)
    tokens_q += s * QP * CP
    tokens_k, turned = each_at(s * NP * CP, (tokens_k, turned))
    scratch += s * QP * NP
    q, k = head(q, b, h), head(k, b, h)
    store_turned(turned, fetch(tokens_k, NP, CP), NP, CP)
    tl.debug_barrier()
    total = tl.load(log_sum + s * NQ + i, mask=asked, other=0.0)
    seen = asked & (tl.sum(real.to(tl.int32)) > 0)
    g = tl.where(seen, tl.load(grad + s * NQ + i, mask=asked, other=0.0), 0.0)
    t = scalar_of(scale, b, h)
    if most is not None:
        g = tl.where(tl.log(t) - total <= most, g, 0.0)
    tl.store(grad_scale + s, tl.sum(g) / t)
    e = hidden_exponents(q, asked, k, real, C, tokens_q, tokens_k, turned, QP, NP, CP)
    e = e - total[:, None]
    P = -g[:, None] * exponential(tl.minimum(tl.maximum(e, -200.0), 1.0))  # 0 at most, but for rounding
    P = tl.where(asked[:, None] & real[None, :], P, 0.0)
    store(scratch, P, QP, NP)
    by_row, by_column = tl.sum(P, 1), tl.sum(P, 0)
    tl.debug_barrier()
    moved = product(scratch, NP, 1, tokens_k, CP, 1, QP, CP, NP) - by_row[:, None] * fetch(tokens_q, QP, CP)
    store_rows(head(grad_q, b, h), moved, 0, NQ, C, QP, CP)
    moved = product(scratch, 1, NP, tokens_q, CP, 1, NP, CP, QP)
    moved -= by_column[:, None] * fetch(tokens_k, NP, CP)
    store_rows(head(grad_k, b, h), moved, 0, N, C, NP, CP)


_LOG_2_PI = tl.constexpr(1.8378770664093453)


@triton.jit
def parameters_kernel(found, out, rows, H, ROWS: constexpr, HP: constexpr):
    """Program (parameter): its gradients [P, rows, H] summed over rows."""
    r, c = tl.arange(0, ROWS), tl.arange(0, HP)
    found += tl.program_id(0).to(tl.int64) * rows * H
    S = tl.zeros((ROWS, HP), tl.float32)
    for first in range(0, rows, ROWS):
        inside = (first + r < rows)[:, None] & (c < H)[None, :]
        S += tl.load(found + (first + r).to(tl.int64)[:, None] * H + c[None, :], mask=inside, other=0.0)
    tl.store(out + tl.program_id(0) * H + c, tl.sum(S, 0), mask=c < H)


@triton.jit
def amplitudes(scale, log_amplitude, b, h, real, N: constexpr):
    """s a_i of every token.  [N]"""
    a = scale + tl.zeros((N,), tl.float32)
    if log_amplitude is not None:
        own, stride = head(log_amplitude, b, h)
        a *= tl.exp(tl.load(own + tl.arange(0, N) * stride, mask=real, other=0.0))
    return a


@triton.jit
def prior_of(prior, b, h, N, NP: constexpr):
    """Of one sequence and head: which tokens are real, tau^2, s and s a_i.  [NP], [], [], [NP]"""
    mask, tau, scale, log_amplitude = prior
    real = real_rows(mask, b, h, 0, N, NP)
    factor = scalar_of(scale, b, h)
    return real, scalar_of(tau, b, h), factor, amplitudes(factor, log_amplitude, b, h, real, NP)


@triton.jit
def prior_inputs(x, real, inputs, turned, C, NP: constexpr, CP: constexpr):
    """Inputs about their centre, written as they are and turned; a barrier must follow.  [NP, CP]"""
    X = rows_of(x, real, C, NP, CP)
    X = centred(X, centre_of(X, real), real)
    store_both(inputs, turned, X, NP, CP)
    return X


@triton.jit
def store_prior_gradients(grads, s, by_log, on, factor, N, NP: constexpr):
    """Write what amplitudes, scale and noise get; `on` is the diagonal of dC.  [NP] each"""
    grad_log, grad_scale, grad_tau = grads
    if grad_log is not None:
        i = tl.arange(0, NP)
        tl.store(grad_log + s * N + i, by_log, mask=i < N)
    tl.store(grad_scale + s, tl.sum(by_log) / factor)
    tl.store(grad_tau + s, tl.sum(on))


@triton.jit(do_not_specialize=["counted"])
def density_kernel(
    x, X, prior, inputs, turned, white, gram, root, key, value, info, counter, counted, H, N, C, D,
    NP: constexpr, CP: constexpr, DP: constexpr,
):  # fmt: skip
    """The density, or minus the sum with the keys'; keeps centred inputs, U, C and R.

    `turned` is scratch memory for the transposed inputs.
    """
    s, b, h = program_head(H)
    real, noise, _, amplitude = prior_of(prior, b, h, N, NP)
    inputs, turned = each_at(s * NP * CP, (inputs, turned))
    white += s * NP * DP
    gram, root = each_at(s * NP * NP, (gram, root))
    x = head(x, b, h)
    places = prior_inputs(x, real, inputs, turned, C, NP, CP)
    store(white, rows_of(head(X, b, h), real, D, NP, DP), NP, DP)
    tl.debug_barrier()
    store(gram, turned_gram(turned, places, x, C, amplitude, noise, real, NP, CP), NP, NP)
    tl.debug_barrier()
    log_det, failed = inverse_root(gram, root, NP)
    note_failure(info + s, counter, counted, failed)
    U = product(root, NP, 1, white, DP, 1, NP, DP, NP)
    tl.debug_barrier()  # X has been read
    store(white, U, NP, DP)
    count = tl.sum(real.to(tl.float32))
    cost = 0.5 * (tl.sum(U * U) + D * (log_det + count * _LOG_2_PI))
    if key is not None:
        tl.store(value + s, cost - tl.load(key + s))
    else:
        tl.store(value + s, -cost)


@triton.jit
def density_backward_kernel(
    grad, prior, inputs, white, gram, root, scratch, dual, grad_x, grad_X, grads, H, N, C, D,
    COST: constexpr, NP: constexpr, CP: constexpr, DP: constexpr,
):  # fmt: skip
    """Gradients of inputs, observations, amplitudes and noise, by that of the density or of the COST."""
    s, b, h = program_head(H)
    i = tl.arange(0, NP)
    on_diagonal = i[:, None] == i[None, :]
    real, noise, factor, amplitude = prior_of(prior, b, h, N, NP)
    inputs += s * NP * CP
    white, dual = each_at(s * NP * DP, (white, dual))
    gram, root, scratch = each_at(s * NP * NP, (gram, root, scratch))
    c = scalar_of(grad, b, h)
    if COST:
        c = -c
    Y = product(root, 1, NP, white, DP, 1, NP, DP, NP)
    store_turned(dual, Y, NP, DP)
    store_rows(head(grad_X, b, h), -c * Y, 0, N, D, NP, DP)
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
    store_rows(head(grad_x, b, h), 2.0 * moved, 0, N, C, NP, CP)
    if COST:
        by_log = -2.0 * noise * on - tl.where(real, c * D, 0.0)
    else:
        by_log = 2.0 * (total + on * amplitude * amplitude)
    store_prior_gradients(grads, s, by_log, on, factor, N, NP)


@triton.jit(do_not_specialize=["counted", "programs"])
def divergence_kernel(
    x, X, prior, A, F, inputs, turned, white, gram, rest, roots, value, info, counter, counted, programs, H,
    N, C, D,
    NP: constexpr, KP: constexpr, CP: constexpr, DP: constexpr,
):  # fmt: skip
    """The KL of P = F F^T + tau^2 A A^T, where there is an A; keeps inputs, U, C, V, R and R_V.

    A and F come transposed, [KP, NP]; `turned` is scratch memory for the transposed inputs.
    """
    s, b, h = program_head(H)
    real, noise, _, amplitude = prior_of(prior, b, h, N, NP)
    F += s * KP * NP
    inputs, turned = each_at(s * NP * CP, (inputs, turned))
    white += s * NP * DP
    gram, rest, R = each_at(s * NP * NP, (gram, rest, roots))
    R_V = roots + (programs + s) * NP * NP
    x = head(x, b, h)
    places = prior_inputs(x, real, inputs, turned, C, NP, CP)
    tl.debug_barrier()
    covariance = turned_gram(turned, places, x, C, amplitude, noise, real, NP, CP)
    store(gram, covariance, NP, NP)
    P = product(F, 1, NP, F, NP, 1, NP, NP, KP)
    if A is not None:
        A += s * KP * NP
        P += noise * product(A, 1, NP, A, NP, 1, NP, NP, KP)
    P *= amplitude[:, None] * amplitude[None, :]
    store(rest, covariance - P, NP, NP)
    store(white, rows_of(head(X, b, h), real, D, NP, DP), NP, DP)
    tl.debug_barrier()
    log_det, failed = inverse_root(gram, R, NP)
    log_det_V, failed_V = inverse_root(rest, R_V, NP)
    note_failure(info + s, counter, counted, failed)
    note_failure(info + programs + s, counter, counted, failed_V)
    U = product(R, NP, 1, white, DP, 1, NP, DP, NP)
    tl.debug_barrier()  # N has been read
    store(white, U, NP, DP)
    excess = tl.sum(product(R, NP, 1, rest, NP, 1, NP, NP, NP) * fetch(R, NP, NP), 1) - 1.0  # [NP]
    tl.store(value + s, 0.5 * (tl.sum(U * U) + D * (tl.sum(excess) + log_det - log_det_V)))


@triton.jit(do_not_specialize=["programs"])
def divergence_backward_kernel(
    grad, prior, inputs, white, gram, rest, roots, inverse, scratch, dual, by_explained, grad_x, grad_X,
    grads, programs, H, N, C, D,
    NP: constexpr, CP: constexpr, DP: constexpr,
):  # fmt: skip
    """Gradients of inputs, mean, noise, of P at unit amplitude, and of amplitudes through everything."""
    s, b, h = program_head(H)
    i = tl.arange(0, NP)
    on_diagonal = i[:, None] == i[None, :]
    real, noise, factor, amplitude = prior_of(prior, b, h, N, NP)
    inputs += s * NP * CP
    white, dual = each_at(s * NP * DP, (white, dual))
    gram, rest, R, inverse, scratch, by_explained = each_at(
        s * NP * NP, (gram, rest, roots, inverse, scratch, by_explained)
    )
    R_V = roots + (programs + s) * NP * NP
    c = scalar_of(grad, b, h)
    Y = product(R, 1, NP, white, DP, 1, NP, DP, NP)
    store_turned(dual, Y, NP, DP)
    store_rows(head(grad_X, b, h), c * Y, 0, N, D, NP, DP)
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
    store_rows(head(grad_x, b, h), moved, 0, N, C, NP, CP)
    store_prior_gradients(grads, s, -2.0 * noise * on, on, factor, N, NP)


@triton.jit(do_not_specialize=["counted", "programs"])
def roots_kernel(
    k, o, v, mask, noise, scale_k, tokens_o, tokens_k, tokens_v, turned, grams, roots, turned_roots, key,
    info, counter, counted, programs, H, N, C, D,
    LATENT: constexpr, FACTORED: constexpr, NP: constexpr, CP: constexpr, DP: constexpr,
):  # fmt: skip
    """Program (s, 0): M of the latent inputs; (s, 1): M_k, the values and the keys' log density.

    Writes masked tokens centred on the keys' mean, inputs also turned (latent ones, keys, and latent ones for
    their own Gram), and of the first FACTORED matrices the noisy Gram, its inverse root, also turned, and
    which pivot failed.  Without LATENT inputs M_k is the first and only matrix.
    """
    s, b, h = program_head(H)
    place = tl.program_id(1)
    which = place
    if not LATENT:
        which = 1
    real = real_rows(mask, b, h, 0, N, NP)
    sigma = scalar_of(noise, b, h)
    amplitude = scalar_of(scale_k, b, h)
    k, o = head(k, b, h), head(o, b, h)
    X = rows_of(k, real, C, NP, CP)
    centre = centre_of(X, real)
    square = (place * programs + s) * NP * NP
    turned += (place * programs + s) * CP * NP
    V = tl.zeros((NP, DP), tl.float32)
    if which == 0:
        amplitude = 1.0
        X = centred(rows_of(o, real, C, NP, CP), centre, real)
        store_both(tokens_o + s * NP * CP, turned, X, NP, CP)
        X = centred(X, centre_of(X, real), real)
        turned += 2 * programs * CP * NP  # about their own mean
        store_turned(turned, X, NP, CP)
    else:
        X = centred(X, centre, real)
        store_both(tokens_k + s * NP * CP, turned, X, NP, CP)
        V = rows_of(head(v, b, h), real, D, NP, DP)
        store(tokens_v + s * NP * DP, V, NP, DP)
    if place < FACTORED:
        tl.debug_barrier()
        level = amplitude + tl.zeros((NP,), tl.float32)
        store(grams + square, near_gram(turned, X, level, sigma, real, NP, CP), NP, NP)
        # Written anew rather than chosen on chip: a choice would cost the common case half its speed.
        spread = spread_of(X)
        if spread > FAR:
            tl.debug_barrier()
            if which == 0:
                exponent = differences(o, real, o, real, C, NP, NP)
                store(grams + square, far_gram(exponent, spread, level, sigma, real, NP), NP, NP)
            else:
                exponent = differences(k, real, k, real, C, NP, NP)
                store(grams + square, far_gram(exponent, spread, level, sigma, real, NP), NP, NP)
        tl.debug_barrier()
        log_det, failed = inverse_root(grams + square, roots + square, NP)
        store_turned(turned_roots + square, fetch(roots + square, NP, NP), NP, NP)
        note_failure(info + place * programs + s, counter, counted, failed)
        if which == 1:
            MV = product(grams + square, 1, NP, tokens_v + s * NP * DP, DP, 1, NP, DP, NP)
            count = tl.sum(real.to(tl.float32))
            tl.store(key + s, -0.5 * (tl.sum(V * MV) + D * (log_det + count * _LOG_2_PI)))


@triton.jit
def rows_kernel(
    q, k, o, mask, query_mask, noise, scale_q, scale_k, log_amplitude, tokens_q, tokens_o, tokens_k, tokens_v,
    turned, roots, turned_roots, K_qo, K_ok, A, turned_A, F, scratch, values, mean, variance, unit, programs,
    H, NQ, N, C, D,
    VARIANCE: constexpr, QP: constexpr, NP: constexpr, CP: constexpr, DP: constexpr,
):  # fmt: skip
    """Mean and variance of every query from the roots; keeps K_qo, K_ok, A and F^T."""
    s, b, h = program_head(H)
    i = tl.arange(0, QP)
    real = real_rows(mask, b, h, 0, N, NP)
    asked = real_rows(query_mask, b, h, 0, NQ, QP)
    scale = scalar_of(scale_q, b, h)
    amplitude = amplitudes(scale, log_amplitude, b, h, asked, QP)
    tokens_q += s * QP * CP
    tokens_o, tokens_k, turned_o = each_at(s * NP * CP, (tokens_o, tokens_k, turned))
    turned_k = turned + (programs + s) * CP * NP
    tokens_v, values = each_at(s * NP * DP, (tokens_v, values))
    K_qo, A, turned_A, F = each_at(s * QP * NP, (K_qo, A, turned_A, F))
    K_ok, R, turned_R = each_at(s * NP * NP, (K_ok, roots, turned_roots))
    turned_R_k = turned_roots + (programs + s) * NP * NP
    scratch += s * NP * (QP if QP > NP else NP)

    q, k, o = head(q, b, h), head(k, b, h), head(o, b, h)
    centre = centre_of(rows_of(k, real, C, NP, CP), real)
    Q = centred(rows_of(q, asked, C, QP, CP), centre, asked)
    store(tokens_q, Q, QP, CP)
    tl.debug_barrier()
    O = fetch(tokens_o, NP, CP)  # noqa: E741 - the latent inputs
    dot = product(tokens_q, CP, 1, turned_o, NP, 1, QP, NP, CP)
    between = exponential(exponents(dot, Q, O, q, asked, o, real, C, QP, NP))
    between = tl.where(asked[:, None] & real[None, :], between, 0.0)
    store(K_qo, between, QP, NP)
    store_turned(turned_A, between, QP, NP)  # its place is free for now
    X = fetch(tokens_k, NP, CP)
    dot = product(turned_o, 1, NP, turned_k, NP, 1, NP, NP, CP)
    between = exponential(exponents(dot, O, X, o, real, k, real, C, NP, NP))
    between *= scalar_of(scale_k, b, h)
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
    store_rows(head(mean, b, h), result, 0, NQ, D, QP, DP)
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
        sigma = scalar_of(noise, b, h)
        u = 1.0 - sigma * tl.sum(predictor * predictor, 0) - tl.sum(reduced * reduced, 0)
        floor = sigma / (tl.sum(real.to(tl.float32)) + sigma)
        clamped = tl.minimum(tl.maximum(u, floor, tl.PropagateNan.ALL), 1.0, tl.PropagateNan.ALL)
        tl.store(unit + s * QP + i, u)
        inside = i < NQ
        tl.store(variance + s * NQ + i, tl.where(asked, amplitude * amplitude * clamped, 0.0), mask=inside)


@triton.jit
def mean_backward(grad_mean, mean, by_prior, b, h, asked, D, QP: constexpr, DP: constexpr):
    """The gradient of the mean with the prior's, and what log a_i get of it.  [QP, DP], [QP]"""
    g = rows_of(head(grad_mean, b, h), asked, D, QP, DP)
    attended = rows_of(head(mean, b, h), asked, D, QP, DP)
    by_log = tl.sum(g * attended, 1)
    if by_prior is not None:  # whose amplitudes are done
        g += rows_of(head(by_prior, b, h), asked, D, QP, DP)
    return g, by_log


@triton.jit
def store_query_gradients(grad_q, grad_log, s, moved, by_log, by_prior, NQ, C, QP: constexpr, CP: constexpr):
    """Write the gradients of queries and amplitudes, with what a prior has written of them before."""
    i = tl.arange(0, QP)
    if by_prior is not None:
        moved += rows_of(grad_q, i < NQ, C, QP, CP)
        if grad_log is not None:
            by_log += tl.load(grad_log + s * NQ + i, mask=i < NQ, other=0.0)
        tl.debug_barrier()  # before they are overwritten
    store_rows(grad_q, moved, 0, NQ, C, QP, CP)
    if grad_log is not None:
        tl.store(grad_log + s * NQ + i, by_log, mask=i < NQ)


@triton.jit
def rows_backward_kernel(
    grad_mean, grad_variance, mean, variance, unit, mask, query_mask, noise, scale_q, log_amplitude, tokens_q,
    tokens_o, tokens_v, roots, K_qo, K_ok, A, F, by_prior, by_explained, X, OX, T, Z, E, scratch, unit_grad,
    turned_v, grad_q, grad_log, grad_parameters, programs, H, NQ, N, C, D,
    VARIANCE: constexpr, QP: constexpr, NP: constexpr, CP: constexpr, DP: constexpr,
):  # fmt: skip
    """All that belongs to query rows: X, Omega X, T, Z, E = Z * K_qo, and gradients of q and its amplitudes.

    A density or divergence may have written its part of the gradients of q, amplitudes and noise, and
    `by_prior` of the mean, `by_explained` of P.  Also writes V^T.
    """
    s, b, h = program_head(H)
    i = tl.arange(0, QP)
    real = real_rows(mask, b, h, 0, N, NP)
    asked = real_rows(query_mask, b, h, 0, NQ, QP)
    scale = scalar_of(scale_q, b, h)
    amplitude = amplitudes(scale, log_amplitude, b, h, asked, QP)
    sigma = scalar_of(noise, b, h)
    tokens_q += s * QP * CP
    tokens_o += s * NP * CP
    tokens_v, turned_v = each_at(s * NP * DP, (tokens_v, turned_v))
    K_qo, A, F, X, OX, T, Z, E, scratch = each_at(s * QP * NP, (K_qo, A, F, X, OX, T, Z, E, scratch))
    K_ok, R = each_at(s * NP * NP, (K_ok, roots))
    R_k = roots + (programs + s) * NP * NP
    unit_grad += s * QP * DP

    g, by_log = mean_backward(grad_mean, mean, by_prior, b, h, asked, D, QP, DP)
    store(unit_grad, amplitude[:, None] * g, QP, DP)
    store_turned(turned_v, fetch(tokens_v, NP, DP), NP, DP)
    d_noise, d_scale = 0.0, 0.0
    if by_prior is not None:  # read well before they are overwritten
        d_noise = tl.load(grad_parameters + s)
        d_scale = tl.load(grad_parameters + 2 * programs + s)
    w = tl.zeros((QP,), tl.float32)
    if grad_variance is not None:
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
        if by_explained is not None:
            weighted -= product(by_explained + s * QP * QP, 1, QP, X, NP, 1, QP, NP, QP)
        store(OX, weighted, QP, NP)
        outer -= 2.0 * weighted
    store(T, outer, QP, NP)
    store_turned(E, outer, QP, NP)  # its place is free until the end
    tl.debug_barrier()
    by_A = product(K_ok, NP, 1, E, QP, 1, NP, QP, NP)  # transposed, as is `half`
    if VARIANCE:
        predictor = tl.load(A + tl.arange(0, NP)[:, None] + i[None, :] * NP)  # A^T
        weighted = w[None, :] * predictor
        if by_explained is not None:
            weighted -= product(A, 1, NP, by_explained + s * QP * QP, QP, 1, NP, QP, QP)
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
    d_scale += tl.sum(by_log) / scale
    store_query_gradients(head(grad_q, b, h), grad_log, s, moved, by_log, by_prior, NQ, C, QP, CP)
    tl.store(grad_parameters + s, d_noise)
    tl.store(grad_parameters + 2 * programs + s, d_scale)
    tl.store(grad_parameters + 3 * programs + s, 0.0)


@triton.jit
def latent_backward(
    tokens_q, tokens_o, tokens_k, M, K_ok, A, T, Z, E, scratch,
    QP: constexpr, NP: constexpr, CP: constexpr,
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
    KEYED: constexpr, NP: constexpr, CP: constexpr, DP: constexpr,
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
    tokens_o, tokens_k, turned_v, M, R, K_ok, A, X, OX, T, scratch, by_key, scale, D, real,
    VARIANCE: constexpr, KEYED: constexpr, QP: constexpr, NP: constexpr, CP: constexpr, DP: constexpr,
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
    mask, scale_k, tokens_q, tokens_o, tokens_k, tokens_v, grams, roots, K_ok, A, X, OX, T, Z, E, unit_grad,
    turned_v, grad_key, scratch, values, grad_o, grad_k, grad_v, grad_parameters, programs, H, N, C, D,
    VARIANCE: constexpr, KEY_SIGN: constexpr, QP: constexpr, NP: constexpr, CP: constexpr, DP: constexpr,
):  # fmt: skip
    """Program (s, 0): gradients of the latent inputs; (s, 1): of keys, values and s_k; both: the noise.

    KEY_SIGN is 1 for gradients of the keys' log density, -1 for those of its negative, 0 for none.
    """
    s, b, h = program_head(H)
    which = tl.program_id(1)
    tokens_q += s * QP * CP
    tokens_o, tokens_k = each_at(s * NP * CP, (tokens_o, tokens_k))
    tokens_v += s * NP * DP
    K_ok += s * NP * NP
    A, X, OX, T, Z, E = each_at(s * QP * NP, (A, X, OX, T, Z, E))
    square = (which * programs + s) * NP * NP
    M, R, scratch = each_at(square, (grams, roots, scratch))
    if which == 0:
        moved, d_noise = latent_backward(
            tokens_q, tokens_o, tokens_k, M, K_ok, A, T, Z, E, scratch, QP, NP, CP
        )
        store_rows(head(grad_o, b, h), moved, 0, N, C, NP, CP)
        tl.store(grad_parameters + programs + s, d_noise)
        tl.store(grad_parameters + 5 * programs + s, 0.0)
    else:
        real = real_rows(mask, b, h, 0, N, NP)
        scale = scalar_of(scale_k, b, h)
        by_rows = tl.load(grad_parameters + s)
        by_key = 0.0
        if KEY_SIGN != 0:
            by_key = KEY_SIGN * scalar_of(grad_key, b, h)
        moved, d_scale, d_noise = key_backward(
            tokens_o, tokens_k, turned_v + s * DP * NP, M, R, K_ok, A, X, OX, T, scratch, by_key, scale, D,
            real, VARIANCE, KEY_SIGN != 0, QP, NP, CP, DP,
        )  # fmt: skip
        store_rows(head(grad_k, b, h), moved, 0, N, C, NP, CP)
        tl.store(grad_parameters + s, by_rows + d_noise)
        tl.store(grad_parameters + 4 * programs + s, d_scale)
        values += s * NP * DP
        store(values, product(A, 1, NP, unit_grad + s * QP * DP, DP, 1, NP, DP, QP), NP, DP)
        tl.debug_barrier()
        by_v = product(K_ok, 1, NP, values, DP, 1, NP, DP, NP)
        if KEY_SIGN != 0:
            by_v -= by_key * product(M, 1, NP, tokens_v, DP, 1, NP, DP, NP)
        by_v = tl.where(real[:, None], by_v, 0.0)
        store_rows(head(grad_v, b, h), by_v, 0, N, D, NP, DP)


@triton.jit
def direct_kernel(
    q, k, mask, query_mask, noise, scale_q, scale_k, log_amplitude, tokens_q, tokens_k, tokens_v, turned_k,
    turned_roots, K, weights, W, mean, stddev, variance, unit, raw, H, NQ, N, C, D,
    VARIANCE: constexpr, QP: constexpr, NP: constexpr, CP: constexpr, DP: constexpr,
):  # fmt: skip
    """Mean, standard deviation, variance and unit variance of every query; keeps K, a K / s_q, W^T."""
    s, b, h = program_head(H)
    i = tl.arange(0, QP)
    real = real_rows(mask, b, h, 0, N, NP)
    asked = real_rows(query_mask, b, h, 0, NQ, QP)
    s_q = scalar_of(scale_q, b, h)
    s_k = scalar_of(scale_k, b, h)
    lifted = tl.zeros((QP,), tl.float32)
    if log_amplitude is not None:
        own, stride = head(log_amplitude, b, h)
        lifted = tl.load(own + i * stride, mask=asked, other=0.0)
    tokens_q += s * QP * CP
    tokens_k, turned_k = each_at(s * NP * CP, (tokens_k, turned_k))
    tokens_v += s * NP * DP
    K, weights, W = each_at(s * QP * NP, (K, weights, W))
    turned_R = turned_roots + s * NP * NP

    q, k = head(q, b, h), head(k, b, h)
    centre = centre_of(rows_of(k, real, C, NP, CP), real)
    Q = centred(rows_of(q, asked, C, QP, CP), centre, asked)
    store(tokens_q, Q, QP, CP)
    tl.debug_barrier()
    Y = fetch(tokens_k, NP, CP)
    dot = product(tokens_q, CP, 1, turned_k, NP, 1, QP, NP, CP)
    exponent = exponents(dot, Q, Y, q, asked, k, real, C, QP, NP)
    seen = asked[:, None] & real[None, :]
    values = tl.where(seen, s_k * exponential(exponent), 0.0)
    store(K, values, QP, NP)
    if VARIANCE:
        store_turned(W, values, QP, NP)  # until W takes its place
    if log_amplitude is not None:
        store(weights, tl.where(seen, s_k * exponential(exponent + lifted[:, None]), 0.0), QP, NP)
    tl.debug_barrier()
    if log_amplitude is not None:
        result = product(weights, NP, 1, tokens_v, DP, 1, QP, DP, NP)
    elif VARIANCE:
        result = product(W, 1, QP, tokens_v, DP, 1, QP, DP, NP)  # still the transpose of K
    else:
        result = product(K, NP, 1, tokens_v, DP, 1, QP, DP, NP)
    store_rows(head(mean, b, h), s_q * result, 0, NQ, D, QP, DP)
    if VARIANCE:
        reduced = product(turned_R, 1, NP, W, QP, 1, NP, QP, NP)
        tl.debug_barrier()  # the transpose of K has been read
        store(W, reduced, NP, QP)
        sigma = scalar_of(noise, b, h)
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
    grad_mean, grad_stddev, grad_variance, grad_unit, mean, stddev, variance, raw, mask, query_mask, noise,
    scale_q, scale_k, tokens_q, tokens_k, tokens_v, grams, roots, K, weights, W, by_prior, by_explained,
    grad_key, X, OX, E, scratch, unit_grad, turned_v, grad_q, grad_k, grad_v, grad_log, grad_parameters,
    programs, H, NQ, N, C, D,
    FACTORED: constexpr, KEY_SIGN: constexpr, QP: constexpr, NP: constexpr, CP: constexpr, DP: constexpr,
):  # fmt: skip
    """All gradients, as `rows_backward_kernel` and `inputs_backward_kernel`; FACTORED: there was a root."""
    s, b, h = program_head(H)
    i = tl.arange(0, QP)
    real = real_rows(mask, b, h, 0, N, NP)
    asked = real_rows(query_mask, b, h, 0, NQ, QP)
    s_q = scalar_of(scale_q, b, h)
    s_k = scalar_of(scale_k, b, h)
    sigma = scalar_of(noise, b, h)
    tokens_q += s * QP * CP
    tokens_k += s * NP * CP
    tokens_v, turned_v = each_at(s * NP * DP, (tokens_v, turned_v))
    K, weights, W, X, OX, E = each_at(s * QP * NP, (K, weights, W, X, OX, E))
    M, R = each_at(s * NP * NP, (grams, roots))
    scratch += s * NP * (QP if QP > NP else NP)
    unit_grad += s * QP * DP
    if grad_log is None:  # amplitudes of 1
        weights = K
    d_noise, d_scale_q, by_key = 0.0, 0.0, 0.0
    if by_prior is not None:
        d_noise = tl.load(grad_parameters + s)
        d_scale_q = tl.load(grad_parameters + 2 * programs + s)
    if KEY_SIGN != 0:
        by_key = KEY_SIGN * scalar_of(grad_key, b, h)

    g, by_log = mean_backward(grad_mean, mean, by_prior, b, h, asked, D, QP, DP)
    store(unit_grad, s_q * g, QP, DP)
    store_turned(turned_v, fetch(tokens_v, NP, DP), NP, DP)
    w = tl.zeros((QP,), tl.float32)
    d_scale_k = 0.0
    if (grad_stddev is not None) or (grad_variance is not None) or (grad_unit is not None):
        at = s * NQ + i
        by_log_variance = tl.zeros((QP,), tl.float32)  # half of what the logarithm of the variance gets
        if grad_stddev is not None:
            got = tl.load(grad_stddev + at, mask=asked, other=0.0)
            by_log_variance += 0.5 * got * tl.load(stddev + at, mask=asked, other=0.0)
        if grad_variance is not None:
            got = tl.load(grad_variance + at, mask=asked, other=0.0)
            by_log_variance += got * tl.load(variance + at, mask=asked, other=0.0)
        by_log += 2.0 * by_log_variance
        u = tl.load(raw + s * QP + i)
        count = tl.sum(real.to(tl.float32))
        whole = count * s_k * s_k + sigma
        floor = sigma / whole
        by_unit = by_log_variance / tl.minimum(tl.maximum(u, floor), 1.0)
        if grad_unit is not None:
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
        if by_explained is not None:
            weighted -= product(by_explained + s * QP * QP, 1, QP, X, NP, 1, QP, NP, QP)
        store(OX, weighted, QP, NP)
        d_scale_k -= 2.0 * sigma / s_k * tl.sum(weighted * fetch(X, QP, NP))
        pairs -= 2.0 * weighted * fetch(K, QP, NP)
    store(E, pairs, QP, NP)
    store_turned(scratch, pairs, QP, NP)
    total = tl.sum(pairs, 0)  # [NP]
    tl.debug_barrier()
    moved = product(scratch, 1, QP, tokens_k, CP, 1, QP, CP, NP)
    moved -= tl.sum(fetch(E, QP, NP), 1)[:, None] * fetch(tokens_q, QP, CP)
    d_scale_q += tl.sum(by_log) / s_q
    store_query_gradients(head(grad_q, b, h), grad_log, s, moved, by_log, by_prior, NQ, C, QP, CP)

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
    store_rows(head(grad_k, b, h), moved, 0, N, C, NP, CP)
    by_v = product(weights, 1, NP, unit_grad, DP, 1, NP, DP, QP)
    if KEY_SIGN != 0:
        by_v -= by_key * product(M, 1, NP, tokens_v, DP, 1, NP, DP, NP)
    by_v = tl.where(real[:, None], by_v, 0.0)
    store_rows(head(grad_v, b, h), by_v, 0, N, D, NP, DP)
    tl.store(grad_parameters + s, d_noise)
    tl.store(grad_parameters + 2 * programs + s, d_scale_q)
    tl.store(grad_parameters + 4 * programs + s, d_scale_k)
    for part in tl.static_range(3):
        tl.store(grad_parameters + (2 * part + 1) * programs + s, 0.0)
