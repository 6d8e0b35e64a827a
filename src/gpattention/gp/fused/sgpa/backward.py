"""Triton kernels of SGPA's backward pass; see `forward` and `inducing` for the letters.

With g, w the gradients of mean and variance, e that of the KL, u = g + e v and y = g + e/2 v:
    dphi  = 2 sum_a w_a S_a phi - 2 (sum_a w_a) phi - y (phi^T v)^T - v (phi^T y)^T
    dv    = K_qq u - phi (phi^T u)
    dK_qb = dphi R + g v_b^T,   dK_qq + dK_qq^T = u v^T + v g^T
and through every Gram matrix E = dK * K,  dx_i = sum_j E_ij (y_j - x_i).  What belongs to a head is
summed over the batch in parts, which `inducing_backward_kernel` adds in a fixed order.
"""
# mypy: disable-error-code="import-not-found,import-untyped,misc,no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201

import triton
import triton.language as tl

from gpattention.gp.fused.blocks import FAR, centre_of, centred, fetch, spread_of, store
from gpattention.gp.fused.sgpa.forward import (
    CHUNK,
    inducing_gram,
    packed_places,
    token_gram,
    turn,
    turned_project,
    turned_rows,
)
from gpattention.gp.fused.tiles import real_rows, rows_of, store_rows


@triton.jit
def features_backward_kernel(
    grad, grad_b, grad_h, grad_n, mask, mask_b, mask_h, mask_n, variance, S, columns, grad_phi,
    H, N, D,
    SCALED: tl.constexpr, MASKED: tl.constexpr,
    T: tl.constexpr, NP: tl.constexpr, MP: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Program (s, tile): what the variance adds to dphi, of some rows; `columns` are those of phi."""
    s, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * T
    b, h = s // H, s % H
    i, j = tl.arange(0, T), tl.arange(0, MP)
    real = real_rows(mask + b * mask_b + h * mask_h, mask_n, first, N, MASKED, T)
    grad += b * grad_b + h * grad_h + first.to(tl.int64) * grad_n
    w = rows_of(grad, grad_n, real, D, T, DP)
    features = tl.load(columns + s * NP * MP + first + i[:, None] + j[None, :] * NP)
    amplitude = 1.0
    if SCALED:
        amplitude = tl.load(variance + h)
    unclamped = tl.sum(features * features, 1) <= amplitude
    total = -tl.where(unclamped, tl.sum(w, 1), 0.0)[:, None] * features
    S += h * D * MP * MP
    for a in range(0, D):
        by_channel = tl.load(grad + i * grad_n + a, mask=real, other=0.0)
        total += tl.dot(features, fetch(S, MP, MP), input_precision="ieee") * by_channel[:, None]
        S += MP * MP
    tl.store(grad_phi + (s * NP + first) * MP + i[:, None] * MP + j[None, :], 2.0 * total)


@triton.jit
def turns_kernel(
    grad, grad_b, grad_h, grad_n, grad_kl, kl_b, kl_h, x, x_b, x_h, x_n, v, v_b, v_h, v_n,
    mask, mask_b, mask_h, mask_n, phi, tokens, values, projections,
    H, N, C, D,
    MASKED: tl.constexpr,
    NP: tl.constexpr, MP: tl.constexpr, CP: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Program (s,): what `tokens_backward_kernel` wants of a whole sequence.

    Transposes of tokens, of values and of their gradients; v^T phi, y^T phi and phi^T u.
    """
    s = tl.program_id(0).to(tl.int64)
    b, h = s // H, s % H
    grad += b * grad_b + h * grad_h
    x += b * x_b + h * x_h
    v += b * v_b + h * v_h
    mask += b * mask_b + h * mask_h
    phi += s * NP * MP
    values += s * 2 * DP * NP
    projections += s * 3 * DP * MP
    turn(tokens + s * CP * NP, x, x_n, mask, mask_n, N, C, MASKED, NP, CP)
    turn(values, v, v_n, mask, mask_n, N, D, MASKED, NP, DP)
    turn(values + DP * NP, grad, grad_n, mask, mask_n, N, D, MASKED, NP, DP)
    by_kl = tl.load(grad_kl + b * kl_b + h * kl_h)
    by_v = turned_project(phi, v, v_n, mask, mask_n, N, D, MASKED, NP, MP, DP)
    by_g = turned_project(phi, grad, grad_n, mask, mask_n, N, D, MASKED, NP, MP, DP)
    store(projections, by_v, DP, MP)
    store(projections + DP * MP, by_g + 0.5 * by_kl * by_v, DP, MP)
    a, j = tl.arange(0, DP), tl.arange(0, MP)
    tl.store(projections + 2 * DP * MP + j[None, :] * DP + a[:, None], by_g + by_kl * by_v)


@triton.jit
def tokens_backward_kernel(
    grad, grad_b, grad_h, grad_n, grad_spread, spread_b, spread_h, spread_n, grad_kl, kl_b, kl_h,
    x, x_b, x_h, x_n, v, v_b, v_h, v_n,
    mask, mask_b, mask_h, mask_n, variance, tokens_b, turned, origin, root, phi,
    tokens, values, projections, grad_phi, grad_gram, gram, grad_variance,
    grad_x, grad_x_b, grad_x_h, grad_x_n, grad_v, grad_v_b, grad_v_h, grad_v_n,
    H, N, M, C, D,
    SCALED: tl.constexpr, MASKED: tl.constexpr, VARIANCE: tl.constexpr,
    T: tl.constexpr, NP: tl.constexpr, MP: tl.constexpr, CP: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Program (s, tile): gradients of some tokens and values; dphi, E_qb and K_qb for sums over the batch."""
    s, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, h, first = s // H, s % H, tile * T
    grad += b * grad_b + h * grad_h
    grad_spread += b * spread_b + h * spread_h
    x += b * x_b + h * x_h
    v += b * v_b + h * v_h
    mask += b * mask_b + h * mask_h
    tokens += s * CP * NP
    values += s * 2 * DP * NP
    projections += s * 3 * DP * MP
    turned += h * MP * (CP + MP + DP)
    by_kl = tl.load(grad_kl + b * kl_b + h * kl_h)
    amplitude = 1.0
    if SCALED:
        amplitude = tl.load(variance + h)
    i, j = tl.arange(0, T), tl.arange(0, MP)
    real = real_rows(mask, mask_n, first, N, MASKED, T)
    at = (s * NP + first + i)[:, None] * MP + j[None, :]
    g = rows_of(grad + first * grad_n, grad_n, real, D, T, DP)
    V = rows_of(v + first * v_n, v_n, real, D, T, DP)
    # through phi and K_qb
    by_phi = tl.dot(g + 0.5 * by_kl * V, fetch(projections, DP, MP), input_precision="ieee")
    by_phi = -tl.dot(V, fetch(projections + DP * MP, DP, MP), by_phi, input_precision="ieee")
    if VARIANCE:
        by_phi += tl.load(grad_phi + at)
    tl.store(grad_phi + at, by_phi)
    by_gram = tl.dot(by_phi, fetch(root + h * MP * MP, MP, MP), input_precision="ieee")
    by_gram = tl.dot(g, fetch(turned + MP * (CP + MP), DP, MP), by_gram, input_precision="ieee")
    K_qb, shifted = inducing_gram(x, x_n, first, real, M, C, turned, origin + h * CP, amplitude, T, MP, CP)
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
    X = rows_of(x + first * x_n, x_n, real, C, T, CP)
    centre = centre_of(X, real)
    X = centred(X, centre, real)
    far = spread_of(X) > FAR
    by_row = tl.zeros((T,), tl.float32)
    for start in range(0, NP, CHUNK):
        beside = real_rows(mask, mask_n, start, N, MASKED, CHUNK)
        g_j = rows_of(grad + start * grad_n, grad_n, beside, D, CHUNK, DP)
        V_j = rows_of(v + start * v_n, v_n, beside, D, CHUNK, DP)
        Y = turned_rows(tokens, start, NP, CP) - centre[:, None]
        K = token_gram(X, Y, far, x, x_n, real, beside, C, first, start, amplitude, T)
        by_v = tl.dot(K, g_j + by_kl * V_j, by_v, input_precision="ieee")
        pairs = tl.dot(g + by_kl * V, turned_rows(values, start, NP, DP), input_precision="ieee")
        pairs = tl.dot(V, turned_rows(values + DP * NP, start, NP, DP), pairs, input_precision="ieee") * K
        if SCALED:
            by_variance += 0.5 * tl.sum(pairs) / amplitude
        same = (first + i)[:, None] == (start + tl.arange(0, CHUNK))[None, :]
        pairs = tl.where(same, 0.0, pairs)
        Y_j = rows_of(x + start * x_n, x_n, beside, C, CHUNK, CP) - centre[None, :]
        moved = tl.dot(pairs, Y_j, moved, input_precision="ieee")
        by_row += tl.sum(pairs, 1)
    moved = tl.where(real[:, None], moved - by_row[:, None] * X, 0.0)
    to = grad_x + b * grad_x_b + h * grad_x_h + first * grad_x_n
    store_rows(to, grad_x_n, moved, first, N, C, T, CP)
    by_v = tl.where(real[:, None], by_v, 0.0)
    to_v = grad_v + b * grad_v_b + h * grad_v_h + first * grad_v_n
    store_rows(to_v, grad_v_n, by_v, first, N, D, T, DP)
    if SCALED:
        if VARIANCE:
            w = tl.sum(rows_of(grad_spread + first * spread_n, spread_n, real, D, T, DP), 1)
            by_variance += tl.sum(tl.where(tl.sum(features * features, 1) <= amplitude, w, 0.0))
        tl.store(grad_variance + (b * tl.num_programs(1) + tile) * H + h, by_variance)


@triton.jit
def batch_product(
    left, right, right_b, right_n, centre, mask, mask_b, mask_n, begin, end, H, N, width,
    MASKED: tl.constexpr, NP: tl.constexpr, MP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A^T (X - centre) and the sums of A's columns, over some of the batch.  [MP, WIDTH], [MP]"""
    step, j = tl.arange(0, CHUNK), tl.arange(0, MP)
    total = tl.zeros((MP, WIDTH), tl.float32)
    by_column = tl.zeros((MP,), tl.float32)
    for b in range(begin, end):
        for start in range(0, NP, CHUNK):
            real = real_rows(mask + b * mask_b, mask_n, start, N, MASKED, CHUNK)
            A = tl.load(left + b * H * NP * MP + j[:, None] + (start + step)[None, :] * MP)
            X = rows_of(right + b * right_b + start * right_n, right_n, real, width, CHUNK, WIDTH)
            total = tl.dot(A, X - centre[None, :], total, input_precision="ieee")
            by_column += tl.sum(A, 1)
    return total, by_column


@triton.jit
def sums_kernel(
    grad, grad_b, grad_h, grad_n, grad_spread, spread_b, spread_h, spread_n, x, x_b, x_h, x_n,
    mask, mask_b, mask_h, mask_n, tokens_b, origin, phi, grad_phi, grad_gram, gram, sums,
    batch, per_split, H, N, C, D,
    MASKED: tl.constexpr, TILES: tl.constexpr, PLACES: tl.constexpr,
    RECORD: tl.constexpr, FP: tl.constexpr, WIDTH: tl.constexpr,
    NP: tl.constexpr, MP: tl.constexpr, CP: tl.constexpr, DP: tl.constexpr,
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
            w_at = grad_spread + b * spread_b + h * spread_h
            for start in range(0, NP, CHUNK):
                real = real_rows(mask + b * mask_b + h * mask_h, mask_n, start, N, MASKED, CHUNK)
                w = rows_of(w_at + start * spread_n, spread_n, real, D, CHUNK, DP)
                pairs = tl.load(phi_at + row[:, None] + (start + step)[None, :] * MP)
                pairs *= tl.load(phi_at + column[:, None] + (start + step)[None, :] * MP)
                packed = tl.dot(tl.trans(w), tl.trans(pairs), packed, input_precision="ieee")
        a, place = tl.arange(0, DP), task * PLACES + tl.arange(0, PLACES)
        tl.store(sums + a[:, None] * FP + place[None, :], packed)
    else:
        sums += TILES * PLACES * DP
        mask += h * mask_h
        h64 = h.to(tl.int64)
        first = h64 * NP * MP
        nowhere = tl.zeros((WIDTH,), tl.float32)
        c = tl.arange(0, WIDTH)
        if task == TILES:
            total, _ = batch_product(
                grad_phi + first, phi + first, H * NP * MP, MP, nowhere, mask, mask_b, mask_n,
                begin, end, H, N, MP, MASKED, NP, MP, WIDTH,
            )  # fmt: skip
            tl.store(sums + j[:, None] * WIDTH + c[None, :], total)
        elif task == TILES + 1:
            total, _ = batch_product(
                gram + first, grad + h64 * grad_h, grad_b, grad_n, nowhere, mask, mask_b, mask_n,
                begin, end, H, N, D, MASKED, NP, MP, WIDTH,
            )  # fmt: skip
            tl.store(sums + (MP + j)[:, None] * WIDTH + c[None, :], total)
        else:
            centre = tl.load(origin + h * CP + c, mask=c < C, other=0.0)
            total, by_row = batch_product(
                grad_gram + first, x + h64 * x_h, x_b, x_n, centre, mask, mask_b, mask_n,
                begin, end, H, N, C, MASKED, NP, MP, WIDTH,
            )  # fmt: skip
            at = tokens_b + h * MP * CP + j[:, None] * CP + c[None, :]
            total -= by_row[:, None] * tl.load(at, mask=(c < CP)[None, :] & (j < MP)[:, None], other=0.0)
            tl.store(sums + (2 * MP + j)[:, None] * WIDTH + c[None, :], total)
