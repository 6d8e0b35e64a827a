"""Triton kernels of what SGPA has once per head: inducing inputs and variational covariances (eq. 19-20).

    K_bb + jitter I = L L^T,   R = L^-1,   S_a = s_a s_a^T
    terms_a = 1/2 (tr S_a - m - log det S_a),   terms_D = 1/2 v_b^T K_bb v_b                        (20)

The symmetric S_a are also kept packed: place r (r + 1) / 2 + c holds S_a[r, c] for c = r and twice it for
c < r, so that phi^T S_a phi is a product of what is packed and phi_r phi_c.

Backwards, W = sum over tokens of dphi^T phi gives, because s_a is whitened by L itself,
    dK_bb = -1/2 R^T (W's lower triangle and its reflection) R + c/2 v_b v_b^T
    ds_a  = 2 (sum over tokens of dvar_a phi phi^T) s_a + c (s_a - diag(s_a)^-1)
with c the gradient of the KL, summed over the batch.

Triton kernels of SGPA's forward pass (eq. 19-20), one program per sequence and head or some of its rows.

    phi = K_qb R^T,   r = K_qq v - phi (phi^T v)
    mean = r + K_qb v_b,   var_ia = [K_ii - |phi_i|^2]_+ + sum over packed places of S_a phi_i phi_i  (19)
    KL = sum of the head's terms + 1/2 v^T r                                                         (20)

Nothing with an axis of channels beside one of inducing inputs leaves a program.  In A B^T the threads read
neighbouring rows of B, which share their banks of memory on chip unless B was turned before it got there:
hence the transposes kept beside matrices (`turned`) and written for tokens (`turn`).

Triton kernels of SGPA's backward pass; see `forward` and `inducing` for the letters.

With g, w the gradients of mean and variance, e that of the KL, u = g + e v and y = g + e/2 v:
    dphi  = 2 sum_a w_a S_a phi - 2 (sum_a w_a) phi - y (phi^T v)^T - v (phi^T y)^T
    dv    = K_qq u - phi (phi^T u)
    dK_qb = dphi R + g v_b^T,   dK_qq + dK_qq^T = u v^T + v g^T
and through every Gram matrix E = dK * K,  dx_i = sum_j E_ij (y_j - x_i).  What belongs to a head is
summed over the batch in parts, which `inducing_backward_kernel` adds in a fixed order.

Triton kernels of triangular factors with a positive diagonal, floor + softplus(raw), and its gradient.
"""

import triton
import triton.language as tl
from triton.language import constexpr

from gpattention.ops.tiles import (
    FAR,
    centre_of,
    centred,
    differences,
    exponential,
    fetch,
    head,
    inverse_root,
    noisy_gram,
    note_failure,
    origin_of,
    program_head,
    real_rows,
    rows_from,
    rows_of,
    scalar_of,
    spread_of,
    store,
    store_rows,
    store_turned,
    turned_exponents,
)

# mypy: disable-error-code="import-not-found,import-untyped,misc,no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201


BATCHES = tl.constexpr(64)


@triton.jit
def lower_factor(s, h, a, M, MP: constexpr):
    """The lower triangle of s_a, 0 elsewhere.  [MP, MP]"""
    r, c = tl.arange(0, MP), tl.arange(0, MP)
    inside = (c[None, :] <= r[:, None]) & (r < M)[:, None]
    return tl.load(s[0] + h * s[1] + a * s[2] + r[:, None] * s[3] + c[None, :], mask=inside, other=0.0)


@triton.jit
def inducing_rows(x, h, real, width, MP: constexpr, WIDTH: constexpr):
    """Inducing inputs or values of one head, which come as [H, m, X].  [MP, WIDTH]"""
    return rows_of((x[0] + h * x[1], x[2]), real, width, MP, WIDTH)


@triton.jit
def variance_of(variance, h):
    """The kernel's variance in one head; 1 for None.  []"""
    found = 1.0
    if variance is not None:
        found = tl.load(variance + h)
    return found


@triton.jit
def over_batch(x, x_b, batch):
    """The sum of x over the batch.  []"""
    step = tl.arange(0, BATCHES)
    total = tl.zeros((BATCHES,), tl.float32)
    for start in range(0, batch, BATCHES):
        total += tl.load(x + (start + step) * x_b, mask=start + step < batch, other=0.0)
    return tl.sum(total)


@triton.jit
def over_splits(x, distance, splits, ROWS: constexpr, COLUMNS: constexpr, STRIDE: constexpr):
    """The sum of matrices `distance` apart.  [ROWS, COLUMNS]"""
    i, j = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for _ in range(0, splits):
        total += tl.load(x + i[:, None] * STRIDE + j[None, :])
        x += distance
    return total


@triton.jit(do_not_specialize=["counted"])
def inducing_kernel(
    b, v_b, s, variance, jitter, tokens_b, origin, gram, root, turned, S, packed, terms, info, counter,
    counted, M, C, D,
    MP: constexpr, CP: constexpr, DP: constexpr,
):  # fmt: skip
    """Program (h, a): S_a, packed and not; (h, D): the inducing inputs about their mean and R.

    `turned` are the transposes of inducing inputs, R and v_b, for products that want these.
    """
    h, a = tl.program_id(0), tl.program_id(1)
    r, c = tl.arange(0, MP), tl.arange(0, MP)
    F: constexpr = MP * (MP + 1) // 2
    if a < D:
        factor = lower_factor(s, h, a, M, MP)
        square = tl.dot(factor, tl.trans(factor), input_precision="ieee")
        store(S + (h * D + a) * MP * MP, square, MP, MP)
        place = r[:, None] * (r[:, None] + 1) // 2 + c[None, :]
        twice = tl.where(r[:, None] == c[None, :], square, 2.0 * square)
        tl.store(packed + (h * F + place) * DP + a, twice, mask=c[None, :] <= r[:, None])
        diagonal = tl.sum(tl.where(r[:, None] == c[None, :], factor, 0.0), 1)
        logarithms = tl.where(r < M, tl.log(tl.where(r < M, diagonal, 1.0)), 0.0)
        tl.store(terms + h * (D + 1) + a, 0.5 * (tl.sum(factor * factor) - M) - tl.sum(logarithms))
    else:
        real = r < M
        B = inducing_rows(b, h, real, C, MP, CP)
        centre = origin_of(B, real)
        B = centred(B, centre, real)
        store(tokens_b + h * MP * CP, B, MP, CP)
        tl.store(origin + h * CP + tl.arange(0, CP), centre)
        amplitude = tl.zeros((MP,), tl.float32) + 1.0
        if variance is not None:
            amplitude *= tl.sqrt_rn(tl.load(variance + h))
        gram += h * MP * MP
        noisy = noisy_gram(B, amplitude, jitter, real, MP)
        store(gram, noisy, MP, MP)
        V = inducing_rows(v_b, h, real, D, MP, DP)
        inner = tl.sum(V * tl.dot(noisy, V, input_precision="ieee")) - jitter * tl.sum(V * V)
        tl.store(terms + h * (D + 1) + D, 0.5 * inner)
        turned += h * MP * (CP + MP + DP)
        store_turned(turned, B, MP, CP)
        store_turned(turned + MP * (CP + MP), V, MP, DP)
        tl.debug_barrier()
        _, failed = inverse_root(gram, root + h * MP * MP, MP)
        store_turned(turned + MP * CP, fetch(root + h * MP * MP, MP, MP), MP, MP)
        note_failure(info + h, counter, counted, failed)


@triton.jit
def inducing_backward_kernel(
    v_b, s, variance, jitter, tokens_b, gram, root, sums, grad_kl, token_variance, grad_b, grad_v, grad_s,
    grad_variance, batch, parts, splits, H, M, C, D,
    VARIANCE: constexpr, RECORD: constexpr, FP: constexpr, WIDTH: constexpr, MP: constexpr, CP: constexpr,
    DP: constexpr,
):  # fmt: skip
    """Program (h, a): gradient of s_a; (h, D): of inducing inputs, their values and the kernel's variance."""
    h, a = tl.program_id(0), tl.program_id(1)
    r, c = tl.arange(0, MP), tl.arange(0, MP)
    on_diagonal = r[:, None] == c[None, :]
    by_kl = over_batch(grad_kl[0] + h * grad_kl[2], grad_kl[1], batch)
    sums += h * RECORD
    if a < D:
        factor = lower_factor(s, h, a, M, MP)
        diagonal = tl.where(on_diagonal & (r < M)[:, None], factor, 1.0)
        gradient = by_kl * (factor - tl.where(on_diagonal, 1.0 / diagonal, 0.0))
        if VARIANCE:
            low, high = tl.minimum(r[:, None], c[None, :]), tl.maximum(r[:, None], c[None, :])
            places = sums + a * FP + high * (high + 1) // 2 + low
            square = tl.zeros((MP, MP), tl.float32)
            for _ in range(0, splits):
                square += tl.load(places)
                places += H * RECORD
            gradient += 2.0 * tl.dot(square, factor, input_precision="ieee")
        gradient = tl.where(c[None, :] <= r[:, None], gradient, 0.0)
        to = grad_s + (h * D + a) * M * M + r[:, None] * M + c[None, :]
        tl.store(to, gradient, mask=(r < M)[:, None] & (c < M)[None, :])
    else:
        real = r < M
        at = sums
        if VARIANCE:
            at += DP * FP
        W = over_splits(at, H * RECORD, splits, MP, MP, WIDTH)
        half = -0.5 * tl.where(c[None, :] <= r[:, None], W, tl.trans(W))
        R = fetch(root + h * MP * MP, MP, MP)
        half = tl.dot(half, R, input_precision="ieee")
        by_gram = tl.dot(tl.trans(R), half, input_precision="ieee")
        V = inducing_rows(v_b, h, real, D, MP, DP)
        by_gram += 0.5 * by_kl * tl.dot(V, tl.trans(V), input_precision="ieee")
        by_gram = tl.where(real[:, None] & real[None, :], by_gram, 0.0)
        noisy = fetch(gram + h * MP * MP, MP, MP)
        weights = tl.where(on_diagonal, 0.0, by_gram * noisy)
        B = fetch(tokens_b + h * MP * CP, MP, CP)
        moved = tl.dot(weights, B, input_precision="ieee") - tl.sum(weights, 1)[:, None] * B
        by_b = 2.0 * moved
        by_b += over_splits(at + 2 * MP * WIDTH, H * RECORD, splits, MP, CP, WIDTH)
        store_rows((grad_b + h * M * C, C), by_b, 0, M, C, MP, CP)
        by_v = over_splits(at + MP * WIDTH, H * RECORD, splits, MP, DP, WIDTH)
        by_v += by_kl * (tl.dot(noisy, V, input_precision="ieee") - jitter * V)
        store_rows((grad_v + h * M * D, D), by_v, 0, M, D, MP, DP)
        if variance is not None:
            total = tl.sum(weights) / tl.load(variance + h) + tl.sum(tl.where(on_diagonal, by_gram, 0.0))
            tl.store(grad_variance + h, total + over_batch(token_variance + h, H, parts))


CHUNK = tl.constexpr(32)  # of keys, and of packed places


@triton.jit
def inducing_gram(x, first, real, M, C, turned, origin, amplitude,
                  ROWS: constexpr, MP: constexpr, CP: constexpr):  # fmt: skip
    """K_qb of some rows, 0 at padding, and the rows about the inducing inputs' origin."""
    X = rows_of(rows_from(x, first), real, C, ROWS, CP)
    X = X - tl.load(origin + tl.arange(0, CP))[None, :]
    points = fetch(turned, CP, MP)
    far = tl.max(tl.sum(points * points, 0)) > 0.25 * FAR  # as in `sparse.blocks.kernel_values`
    K = amplitude * exponential(turned_exponents(X, points, far))
    exists = tl.arange(0, MP) < M
    return tl.where(real[:, None] & exists[None, :], K, 0.0), X


@triton.jit
def token_gram(X, Y, far, x, real, beside, C, first, start, amplitude, ROWS: constexpr):
    """K_qq between two tiles about the first one's centre, the second turned, its diagonal exact.

    By differences of the tokens in memory where those of the first tile are far apart.  [ROWS, CHUNK]
    """
    e = tl.dot(X, Y, input_precision="ieee")
    e = e - 0.5 * tl.sum(X * X, 1)[:, None] - 0.5 * tl.sum(Y * Y, 0)[None, :]
    if far:
        e = differences(rows_from(x, first), real, rows_from(x, start), beside, C, ROWS, CHUNK)
    same = (first + tl.arange(0, ROWS))[:, None] == (start + tl.arange(0, CHUNK))[None, :]
    return amplitude * tl.where(same, 1.0, exponential(tl.minimum(e, 0.0)))


@triton.jit
def turn(to, x, mask, b, h, N, width, NP: constexpr, WIDTH: constexpr):
    """Write the transpose of a sequence's real tokens, 0 elsewhere; a barrier must follow.  [WIDTH, NP]"""
    step, c = tl.arange(0, CHUNK), tl.arange(0, WIDTH)
    for start in range(0, NP, CHUNK):
        real = real_rows(mask, b, h, start, N, CHUNK)
        X = rows_of(rows_from(x, start), real, width, CHUNK, WIDTH)
        tl.store(to + c[None, :] * NP + (start + step)[:, None], X)


@triton.jit
def turned_rows(turned, start, NP: constexpr, WIDTH: constexpr):
    """Some of the tokens that `turn` wrote.  [WIDTH, CHUNK]"""
    step, c = tl.arange(0, CHUNK), tl.arange(0, WIDTH)
    return tl.load(turned + c[:, None] * NP + (start + step)[None, :])


@triton.jit
def packed_places(start, F: constexpr, COUNT: constexpr):
    """Row and column of the places `start`, `start` + 1, ...; those past the end are the last.  [COUNT]"""
    f = tl.minimum(start + tl.arange(0, COUNT), F - 1)
    row = ((tl.sqrt_rn((8 * f + 1).to(tl.float32)) - 1.0) * 0.5).to(tl.int32)  # exact below 2^20 places
    return row, f - row * (row + 1) // 2


@triton.jit
def features_kernel(
    x, mask, variance, turned, origin, packed, phi, columns, spread, H, N, M, C, D,
    VARIANCE: constexpr, T: constexpr, NP: constexpr, MP: constexpr, CP: constexpr, DP: constexpr,
):  # fmt: skip
    """Program (s, tile): phi and, with VARIANCE, the variance of every channel, of some rows.

    Threads read neighbouring rows of one column of phi, which lie together in `columns`, its transpose.
    """
    s, b, h = program_head(H)
    first = tl.program_id(1) * T
    real = real_rows(mask, b, h, first, N, T)
    amplitude = variance_of(variance, h)
    turned += h * MP * (CP + MP + DP)
    K_qb, _ = inducing_gram(head(x, b, h), first, real, M, C, turned, origin + h * CP, amplitude, T, MP, CP)
    features = tl.dot(K_qb, fetch(turned + MP * CP, MP, MP), input_precision="ieee")
    i, j = tl.arange(0, T), tl.arange(0, MP)
    tl.store(phi + (s * NP + first) * MP + i[:, None] * MP + j[None, :], features)
    if VARIANCE:
        columns += s * NP * MP + first
        tl.store(columns + i[:, None] + j[None, :] * NP, features)
        tl.debug_barrier()
        F: constexpr = MP * (MP + 1) // 2
        packed += h * F * DP
        a, step = tl.arange(0, DP), tl.arange(0, CHUNK)
        form = tl.zeros((T, DP), tl.float32)
        for start in range(0, F, CHUNK):
            row, column = packed_places(start, F, CHUNK)
            pairs = tl.load(columns + i[:, None] + row[None, :] * NP)
            pairs *= tl.load(columns + i[:, None] + column[None, :] * NP)
            inside = (start + step < F)[:, None] & (a < D)[None, :]
            factors = tl.load(packed + (start + step)[:, None] * DP + a[None, :], mask=inside, other=0.0)
            form = tl.dot(pairs, factors, form, input_precision="ieee")
        prior = amplitude - tl.sum(features * features, 1)
        prior = tl.maximum(prior, 0.0, tl.PropagateNan.ALL)
        found = prior[:, None] + tl.maximum(form, 0.0, tl.PropagateNan.ALL)
        found = tl.where(real[:, None], found, 0.0)
        to = rows_from(head(spread, b, h), first.to(tl.int64))
        store_rows(to, found, first, N, D, T, DP)


@triton.jit
def mean_kernel(
    x, v, inducing_v, mask, variance, turned, origin, phi, terms, tokens, mean, kl, H, N, M, C, D,
    T: constexpr, NP: constexpr, MP: constexpr, CP: constexpr, DP: constexpr,
):  # fmt: skip
    """Program (s,): mean of every token, and the KL of one sequence and head."""
    s, b, h = program_head(H)
    x, v = head(x, b, h), head(v, b, h)
    phi += s * NP * MP
    mean = head(mean, b, h)
    amplitude = variance_of(variance, h)
    tokens += s * CP * NP
    turn(tokens, x, mask, b, h, N, C, NP, CP)
    tl.debug_barrier()
    projected = project(phi, v, mask, b, h, N, D, False, NP, MP, DP)  # phi^T v
    V_b = inducing_rows(inducing_v, h, tl.arange(0, MP) < M, D, MP, DP)
    i, j = tl.arange(0, T), tl.arange(0, MP)
    energy = 0.0
    for first in range(0, NP, T):
        real = real_rows(mask, b, h, first, N, T)
        X = rows_of(rows_from(x, first), real, C, T, CP)
        centre = centre_of(X, real)
        X = centred(X, centre, real)
        far = spread_of(X) > FAR
        features = tl.load(phi + (first + i)[:, None] * MP + j[None, :])
        attended = -tl.dot(features, projected, input_precision="ieee")
        for start in range(0, NP, CHUNK):
            beside = real_rows(mask, b, h, start, N, CHUNK)
            Y = turned_rows(tokens, start, NP, CP) - centre[:, None]
            V = rows_of(rows_from(v, start), beside, D, CHUNK, DP)
            K = token_gram(X, Y, far, x, real, beside, C, first, start, amplitude, T)
            attended = tl.dot(K, V, attended, input_precision="ieee")
        energy += tl.sum(attended * rows_of(rows_from(v, first), real, D, T, DP))
        turned_b = turned + h * MP * (CP + MP + DP)
        K_qb, _ = inducing_gram(x, first, real, M, C, turned_b, origin + h * CP, amplitude, T, MP, CP)
        attended = tl.dot(K_qb, V_b, attended, input_precision="ieee")
        attended = tl.where(real[:, None], attended, 0.0)
        store_rows(rows_from(mean, first), attended, first, N, D, T, DP)
    a = tl.arange(0, 2 * DP)  # D + 1 of them
    total = tl.sum(tl.load(terms + h * (D + 1) + a, mask=a < D + 1, other=0.0))
    tl.store(kl + s, total + 0.5 * energy)


@triton.jit
def project(phi, v, mask, b, h, N, D, TURNED: constexpr, NP: constexpr, MP: constexpr, DP: constexpr):
    """phi^T v of one sequence and head, or v^T phi.  [MP, DP] or [DP, MP]"""
    j, step = tl.arange(0, MP), tl.arange(0, CHUNK)
    total = tl.zeros((DP, MP) if TURNED else (MP, DP), tl.float32)
    for start in range(0, NP, CHUNK):
        real = real_rows(mask, b, h, start, N, CHUNK)
        V = rows_of(rows_from(v, start), real, D, CHUNK, DP)
        if TURNED:
            features = tl.load(phi + j[None, :] + (start + step)[:, None] * MP)
            total = tl.dot(tl.trans(V), features, total, input_precision="ieee")
        else:
            features = tl.load(phi + j[:, None] + (start + step)[None, :] * MP)
            total = tl.dot(features, V, total, input_precision="ieee")
    return total


@triton.jit
def features_backward_kernel(
    grad, mask, variance, S, columns, grad_phi, H, N, D,
    T: constexpr, NP: constexpr, MP: constexpr, DP: constexpr,
):  # fmt: skip
    """Program (s, tile): what the variance adds to dphi, of some rows; `columns` are those of phi."""
    s, b, h = program_head(H)
    first = tl.program_id(1) * T
    i, j = tl.arange(0, T), tl.arange(0, MP)
    real = real_rows(mask, b, h, first, N, T)
    grad = rows_from(head(grad, b, h), first.to(tl.int64))
    w = rows_of(grad, real, D, T, DP)
    features = tl.load(columns + s * NP * MP + first + i[:, None] + j[None, :] * NP)
    amplitude = variance_of(variance, h)
    unclamped = tl.sum(features * features, 1) <= amplitude
    total = -tl.where(unclamped, tl.sum(w, 1), 0.0)[:, None] * features
    S += h * D * MP * MP
    for a in range(0, D):
        by_channel = tl.load(grad[0] + i * grad[1] + a, mask=real, other=0.0)
        total += tl.dot(features, fetch(S, MP, MP), input_precision="ieee") * by_channel[:, None]
        S += MP * MP
    tl.store(grad_phi + (s * NP + first) * MP + i[:, None] * MP + j[None, :], 2.0 * total)


@triton.jit
def turns_kernel(
    grad, grad_kl, x, v, mask, phi, tokens, values, projections, H, N, C, D,
    NP: constexpr, MP: constexpr, CP: constexpr, DP: constexpr,
):  # fmt: skip
    """Program (s,): what `tokens_backward_kernel` wants of a whole sequence.

    Transposes of tokens, of values and of their gradients; v^T phi, y^T phi and phi^T u.
    """
    s, b, h = program_head(H)
    grad, x, v = head(grad, b, h), head(x, b, h), head(v, b, h)
    phi += s * NP * MP
    values += s * 2 * DP * NP
    projections += s * 3 * DP * MP
    turn(tokens + s * CP * NP, x, mask, b, h, N, C, NP, CP)
    turn(values, v, mask, b, h, N, D, NP, DP)
    turn(values + DP * NP, grad, mask, b, h, N, D, NP, DP)
    by_kl = scalar_of(grad_kl, b, h)
    by_v = project(phi, v, mask, b, h, N, D, True, NP, MP, DP)
    by_g = project(phi, grad, mask, b, h, N, D, True, NP, MP, DP)
    store(projections, by_v, DP, MP)
    store(projections + DP * MP, by_g + 0.5 * by_kl * by_v, DP, MP)
    a, j = tl.arange(0, DP), tl.arange(0, MP)
    tl.store(projections + 2 * DP * MP + j[None, :] * DP + a[:, None], by_g + by_kl * by_v)


@triton.jit
def tokens_backward_kernel(
    grad, grad_spread, grad_kl, x, v, mask, variance, tokens_b, turned, origin, root, phi, tokens, values,
    projections, grad_phi, grad_gram, gram, grad_variance, grad_x, grad_v, H, N, M, C, D,
    VARIANCE: constexpr, T: constexpr, NP: constexpr, MP: constexpr, CP: constexpr, DP: constexpr,
):  # fmt: skip
    """Program (s, tile): gradients of some tokens and values; dphi, E_qb and K_qb for sums over the batch."""
    s, b, h = program_head(H)
    tile = tl.program_id(1)
    first = tile * T
    grad, x, v = head(grad, b, h), head(x, b, h), head(v, b, h)
    tokens += s * CP * NP
    values += s * 2 * DP * NP
    projections += s * 3 * DP * MP
    turned += h * MP * (CP + MP + DP)
    by_kl = scalar_of(grad_kl, b, h)
    amplitude = variance_of(variance, h)
    i, j = tl.arange(0, T), tl.arange(0, MP)
    real = real_rows(mask, b, h, first, N, T)
    at = (s * NP + first + i)[:, None] * MP + j[None, :]
    g = rows_of(rows_from(grad, first), real, D, T, DP)
    V = rows_of(rows_from(v, first), real, D, T, DP)
    # through phi and K_qb
    by_phi = tl.dot(g + 0.5 * by_kl * V, fetch(projections, DP, MP), input_precision="ieee")
    by_phi = -tl.dot(V, fetch(projections + DP * MP, DP, MP), by_phi, input_precision="ieee")
    if VARIANCE:
        by_phi += tl.load(grad_phi + at)
    tl.store(grad_phi + at, by_phi)
    by_gram = tl.dot(by_phi, fetch(root + h * MP * MP, MP, MP), input_precision="ieee")
    by_gram = tl.dot(g, fetch(turned + MP * (CP + MP), DP, MP), by_gram, input_precision="ieee")
    K_qb, shifted = inducing_gram(x, first, real, M, C, turned, origin + h * CP, amplitude, T, MP, CP)
    tl.store(gram + at, K_qb)
    weights = by_gram * K_qb
    tl.store(grad_gram + at, weights)
    by_row_b = tl.sum(weights, 1)
    by_variance = tl.sum(by_row_b) / amplitude
    B = fetch(tokens_b + h * MP * CP, MP, CP)
    moved = tl.dot(weights, B, input_precision="ieee") - by_row_b[:, None] * shifted
    # through K_qq
    features = tl.load(phi + at)
    by_v = -tl.dot(features, fetch(projections + 2 * DP * MP, MP, DP), input_precision="ieee")
    X = rows_of(rows_from(x, first), real, C, T, CP)
    centre = centre_of(X, real)
    X = centred(X, centre, real)
    far = spread_of(X) > FAR
    by_row = tl.zeros((T,), tl.float32)
    for start in range(0, NP, CHUNK):
        beside = real_rows(mask, b, h, start, N, CHUNK)
        g_j = rows_of(rows_from(grad, start), beside, D, CHUNK, DP)
        V_j = rows_of(rows_from(v, start), beside, D, CHUNK, DP)
        Y = turned_rows(tokens, start, NP, CP) - centre[:, None]
        K = token_gram(X, Y, far, x, real, beside, C, first, start, amplitude, T)
        by_v = tl.dot(K, g_j + by_kl * V_j, by_v, input_precision="ieee")
        pairs = tl.dot(g + by_kl * V, turned_rows(values, start, NP, DP), input_precision="ieee")
        pairs = tl.dot(V, turned_rows(values + DP * NP, start, NP, DP), pairs, input_precision="ieee") * K
        if variance is not None:
            by_variance += 0.5 * tl.sum(pairs) / amplitude
        same = (first + i)[:, None] == (start + tl.arange(0, CHUNK))[None, :]
        pairs = tl.where(same, 0.0, pairs)
        Y_j = rows_of(rows_from(x, start), beside, C, CHUNK, CP) - centre[None, :]
        moved = tl.dot(pairs, Y_j, moved, input_precision="ieee")
        by_row += tl.sum(pairs, 1)
    moved = tl.where(real[:, None], moved - by_row[:, None] * X, 0.0)
    store_rows(rows_from(head(grad_x, b, h), first), moved, first, N, C, T, CP)
    by_v = tl.where(real[:, None], by_v, 0.0)
    store_rows(rows_from(head(grad_v, b, h), first), by_v, first, N, D, T, DP)
    if variance is not None:
        if VARIANCE:
            w = tl.sum(rows_of(rows_from(head(grad_spread, b, h), first), real, D, T, DP), 1)
            by_variance += tl.sum(tl.where(tl.sum(features * features, 1) <= amplitude, w, 0.0))
        tl.store(grad_variance + (b * tl.num_programs(1) + tile) * H + h, by_variance)


@triton.jit
def batch_product(
    left, right, centre, mask, h, begin, end, H, N, width,
    NP: constexpr, MP: constexpr, WIDTH: constexpr,
):  # fmt: skip
    """A^T (X - centre) and the sums of A's columns, over some of the batch.  [MP, WIDTH], [MP]"""
    step, j = tl.arange(0, CHUNK), tl.arange(0, MP)
    total = tl.zeros((MP, WIDTH), tl.float32)
    by_column = tl.zeros((MP,), tl.float32)
    for b in range(begin, end):
        for start in range(0, NP, CHUNK):
            real = real_rows(mask, b, h, start, N, CHUNK)
            A = tl.load(left + (b * H + h) * NP * MP + j[:, None] + (start + step)[None, :] * MP)
            X = rows_of(rows_from(head(right, b, h), start), real, width, CHUNK, WIDTH)
            total = tl.dot(A, X - centre[None, :], total, input_precision="ieee")
            by_column += tl.sum(A, 1)
    return total, by_column


@triton.jit
def sums_kernel(
    grad, grad_spread, x, mask, tokens_b, origin, phi, grad_phi, grad_gram, gram, sums, batch, per_split, H,
    N, C, D,
    TILES: constexpr, PLACES: constexpr, RECORD: constexpr, FP: constexpr, WIDTH: constexpr, NP: constexpr,
    MP: constexpr, CP: constexpr, DP: constexpr,
):  # fmt: skip
    """Program (h, task, split): one sum over some of the batch.

    Task t < TILES: w^T (phi_r phi_c) of PLACES packed places; then dphi^T phi, K_qb^T g and E_qb^T x.
    Products of one token lie along the first axis, along which threads read: within a row of phi.
    """
    h, task, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin = split.to(tl.int64) * per_split
    end = tl.minimum(begin + per_split, batch)
    step, j = tl.arange(0, CHUNK), tl.arange(0, MP)
    sums += (split * H + h) * RECORD
    if task < TILES:
        row, column = packed_places(task * PLACES, MP * (MP + 1) // 2, PLACES)
        packed = tl.zeros((DP, PLACES), tl.float32)
        for b in range(begin, end):
            phi_at = phi + (b * H + h) * NP * MP
            w_at = head(grad_spread, b, h)
            for start in range(0, NP, CHUNK):
                real = real_rows(mask, b, h, start, N, CHUNK)
                w = rows_of(rows_from(w_at, start), real, D, CHUNK, DP)
                pairs = tl.load(phi_at + row[:, None] + (start + step)[None, :] * MP)
                pairs *= tl.load(phi_at + column[:, None] + (start + step)[None, :] * MP)
                packed = tl.dot(tl.trans(w), tl.trans(pairs), packed, input_precision="ieee")
        a, place = tl.arange(0, DP), task * PLACES + tl.arange(0, PLACES)
        tl.store(sums + a[:, None] * FP + place[None, :], packed)
    else:
        sums += TILES * PLACES * DP
        h64 = h.to(tl.int64)
        nowhere = tl.zeros((WIDTH,), tl.float32)
        c = tl.arange(0, WIDTH)
        if task == TILES:
            features = (phi, H * NP * MP, NP * MP, MP)
            total, _ = batch_product(
                grad_phi, features, nowhere, mask, h64, begin, end, H, N, MP, NP, MP, WIDTH,
            )  # fmt: skip
            tl.store(sums + j[:, None] * WIDTH + c[None, :], total)
        elif task == TILES + 1:
            total, _ = batch_product(gram, grad, nowhere, mask, h64, begin, end, H, N, D, NP, MP, WIDTH)
            tl.store(sums + (MP + j)[:, None] * WIDTH + c[None, :], total)
        else:
            centre = tl.load(origin + h * CP + c, mask=c < C, other=0.0)
            total, by_row = batch_product(grad_gram, x, centre, mask, h64, begin, end, H, N, C, NP, MP, WIDTH)
            at = tokens_b + h * MP * CP + j[:, None] * CP + c[None, :]
            total -= by_row[:, None] * tl.load(at, mask=(c < CP)[None, :] & (j < MP)[:, None], other=0.0)
            tl.store(sums + (2 * MP + j)[:, None] * WIDTH + c[None, :], total)


@triton.jit
def places(M, total, COUNT: constexpr):
    """Of some entries of matrices M x M: place, whether it exists, row's number among all, row and column."""
    at = tl.program_id(0).to(tl.int64) * COUNT + tl.arange(0, COUNT)
    line = at // M
    return at, at < total, line, line % M, at % M


@triton.jit
def triangle_kernel(lower, raw, out, floor, M, total, COUNT: constexpr):
    """Program (p,): COUNT entries, from what lies below the diagonal and softplus of what is on it."""
    at, inside, line, row, column = places(M, total, COUNT)
    below, diagonal = inside & (column < row), inside & (column == row)
    x = tl.load(raw + line, mask=diagonal, other=0.0)
    small = exponential(tl.maximum(-tl.abs(x), -80.0, tl.PropagateNan.ALL))
    whole = 1.0 + small
    lost = whole - 1.0  # the digits of `small` that are left in `whole`
    log1p = tl.where(lost == 0, small, tl.log(whole) * (small / tl.where(lost == 0, 1.0, lost)))
    positive = floor + (tl.maximum(x, 0.0, tl.PropagateNan.ALL) + log1p)
    found = tl.load(lower + at, mask=below, other=0.0)
    tl.store(out + at, tl.where(diagonal, positive, found), mask=inside)


@triton.jit
def triangle_backward_kernel(grad, raw, grad_lower, grad_raw, M, total, COUNT: constexpr):
    """Program (p,): the gradient below the diagonal, and sigmoid(raw) times that on it."""
    at, inside, line, row, column = places(M, total, COUNT)
    diagonal = inside & (column == row)
    g = tl.load(grad + at, mask=inside & (column <= row), other=0.0)
    tl.store(grad_lower + at, tl.where(diagonal, 0.0, g), mask=inside)
    x = tl.load(raw + line, mask=diagonal, other=0.0)
    small = exponential(tl.maximum(-tl.abs(x), -80.0, tl.PropagateNan.ALL))
    slope = tl.where(x >= 0, 1.0, small) / (1.0 + small)
    tl.store(grad_raw + line, g * slope, mask=diagonal)
