"""Triton kernels of what SGPA has once per head: inducing inputs and variational covariances (eq. 19-20).

    K_bb + jitter I = L L^T,   R = L^-1,   S_a = s_a s_a^T
    terms_a = 1/2 (tr S_a - m - log det S_a),   terms_D = 1/2 v_b^T K_bb v_b                        (20)

The symmetric S_a are also kept packed: place r (r + 1) / 2 + c holds S_a[r, c] for c = r and twice it for
c < r, so that phi^T S_a phi is a product of what is packed and phi_r phi_c.

Backwards, W = sum over tokens of dphi^T phi gives, because s_a is whitened by L itself,
    dK_bb = -1/2 R^T (W's lower triangle and its reflection) R + c/2 v_b v_b^T
    ds_a  = 2 (sum over tokens of dvar_a phi phi^T) s_a + c (s_a - diag(s_a)^-1)
with c the gradient of the KL, summed over the batch.
"""
# mypy: disable-error-code="import-not-found,import-untyped,misc,no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201

import triton
import triton.language as tl

from gpattention.gp.fused.blocks import centred, fetch, inverse_root, noisy_gram, origin_of, store
from gpattention.gp.fused.tiles import rows_of, store_rows

BATCHES = tl.constexpr(64)


@triton.jit
def lower_factor(s, s_n, M, MP: tl.constexpr):
    """The lower triangle of s_a, 0 elsewhere.  [MP, MP]"""
    r, c = tl.arange(0, MP), tl.arange(0, MP)
    inside = (c[None, :] <= r[:, None]) & (r < M)[:, None]
    return tl.load(s + r[:, None] * s_n + c[None, :], mask=inside, other=0.0)


@triton.jit
def store_turned(to, X, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Write X^T.  [COLUMNS, ROWS]"""
    r, c = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    tl.store(to + c[None, :] * ROWS + r[:, None], X)


@triton.jit
def over_batch(x, x_b, batch):
    """The sum of x over the batch.  []"""
    step = tl.arange(0, BATCHES)
    total = tl.zeros((BATCHES,), tl.float32)
    for start in range(0, batch, BATCHES):
        total += tl.load(x + (start + step) * x_b, mask=start + step < batch, other=0.0)
    return tl.sum(total)


@triton.jit
def over_splits(x, distance, splits, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STRIDE: tl.constexpr):
    """The sum of matrices `distance` apart.  [ROWS, COLUMNS]"""
    i, j = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for _ in range(0, splits):
        total += tl.load(x + i[:, None] * STRIDE + j[None, :])
        x += distance
    return total


@triton.jit(do_not_specialize=["counted"])
def inducing_kernel(
    b, b_h, b_n, v_b, v_h, v_n, s, s_h, s_a, s_n, variance, jitter,
    tokens_b, origin, gram, root, turned, S, packed, terms, info, counter, counted,
    M, C, D,
    SCALED: tl.constexpr, MP: tl.constexpr, CP: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Program (h, a): S_a, packed and not; (h, D): the inducing inputs about their mean and R.

    `turned` are the transposes of inducing inputs, R and v_b, for products that want these.
    """
    h, a = tl.program_id(0), tl.program_id(1)
    r, c = tl.arange(0, MP), tl.arange(0, MP)
    F: tl.constexpr = MP * (MP + 1) // 2
    if a < D:
        factor = lower_factor(s + h * s_h + a * s_a, s_n, M, MP)
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
        B = rows_of(b + h * b_h, b_n, real, C, MP, CP)
        centre = origin_of(B, real)
        B = centred(B, centre, real)
        store(tokens_b + h * MP * CP, B, MP, CP)
        tl.store(origin + h * CP + tl.arange(0, CP), centre)
        amplitude = tl.zeros((MP,), tl.float32) + 1.0
        if SCALED:
            amplitude *= tl.sqrt_rn(tl.load(variance + h))
        gram += h * MP * MP
        noisy = noisy_gram(B, amplitude, jitter, real, MP)
        store(gram, noisy, MP, MP)
        V = rows_of(v_b + h * v_h, v_n, real, D, MP, DP)
        inner = tl.sum(V * tl.dot(noisy, V, input_precision="ieee")) - jitter * tl.sum(V * V)
        tl.store(terms + h * (D + 1) + D, 0.5 * inner)
        turned += h * MP * (CP + MP + DP)
        store_turned(turned, B, MP, CP)
        store_turned(turned + MP * (CP + MP), V, MP, DP)
        tl.debug_barrier()
        _, failed = inverse_root(gram, root + h * MP * MP, MP)
        store_turned(turned + MP * CP, fetch(root + h * MP * MP, MP, MP), MP, MP)
        tl.store(info + h, failed)
        if (failed != 0) & (counted != 0):
            tl.atomic_add(counter, 1)


@triton.jit
def inducing_backward_kernel(
    v_b, v_h, v_n, s, s_h, s_a, s_n, variance, jitter, tokens_b, gram, root,
    sums, grad_kl, kl_b, kl_h, token_variance, grad_b, grad_v, grad_s, grad_variance,
    batch, parts, splits, H, M, C, D,
    SCALED: tl.constexpr, VARIANCE: tl.constexpr,
    RECORD: tl.constexpr, FP: tl.constexpr, WIDTH: tl.constexpr,
    MP: tl.constexpr, CP: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Program (h, a): gradient of s_a; (h, D): of inducing inputs, their values and the kernel's variance."""
    h, a = tl.program_id(0), tl.program_id(1)
    r, c = tl.arange(0, MP), tl.arange(0, MP)
    on_diagonal = r[:, None] == c[None, :]
    by_kl = over_batch(grad_kl + h * kl_h, kl_b, batch)
    sums += h * RECORD
    if a < D:
        factor = lower_factor(s + h * s_h + a * s_a, s_n, M, MP)
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
        V = rows_of(v_b + h * v_h, v_n, real, D, MP, DP)
        by_gram += 0.5 * by_kl * tl.dot(V, tl.trans(V), input_precision="ieee")
        by_gram = tl.where(real[:, None] & real[None, :], by_gram, 0.0)
        noisy = fetch(gram + h * MP * MP, MP, MP)
        weights = tl.where(on_diagonal, 0.0, by_gram * noisy)
        B = fetch(tokens_b + h * MP * CP, MP, CP)
        moved = tl.dot(weights, B, input_precision="ieee") - tl.sum(weights, 1)[:, None] * B
        by_b = 2.0 * moved
        by_b += over_splits(at + 2 * MP * WIDTH, H * RECORD, splits, MP, CP, WIDTH)
        store_rows(grad_b + h * M * C, C, by_b, 0, M, C, MP, CP)
        by_v = over_splits(at + MP * WIDTH, H * RECORD, splits, MP, DP, WIDTH)
        by_v += by_kl * (tl.dot(noisy, V, input_precision="ieee") - jitter * V)
        store_rows(grad_v + h * M * D, D, by_v, 0, M, D, MP, DP)
        if SCALED:
            total = tl.sum(weights) / tl.load(variance + h) + tl.sum(tl.where(on_diagonal, by_gram, 0.0))
            tl.store(grad_variance + h, total + over_batch(token_variance + h, H, parts))
