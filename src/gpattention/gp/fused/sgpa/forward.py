"""Triton kernels of SGPA's forward pass (eq. 19-20), one program per sequence and head or some of its rows.

    phi = K_qb R^T,   r = K_qq v - phi (phi^T v)
    mean = r + K_qb v_b,   var_ia = [K_ii - |phi_i|^2]_+ + sum over packed places of S_a phi_i phi_i  (19)
    KL = sum of the head's terms + 1/2 v^T r                                                         (20)

Nothing with an axis of channels beside one of inducing inputs leaves a program.  In A B^T the threads read
neighbouring rows of B, which share their banks of memory on chip unless B was turned before it got there:
hence the transposes kept beside matrices (`turned`) and written for tokens (`turn`).
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
    fetch,
    spread_of,
    turned_exponents,
)
from gpattention.gp.fused.tiles import real_rows, rows_of, store_rows

CHUNK = tl.constexpr(32)  # of keys, and of packed places


@triton.jit
def inducing_gram(x, x_n, first, real, M, C, turned, origin, amplitude,
                  ROWS: tl.constexpr, MP: tl.constexpr, CP: tl.constexpr):  # fmt: skip
    """K_qb of some rows, 0 at padding, and the rows about the inducing inputs' origin."""
    X = rows_of(x + first * x_n, x_n, real, C, ROWS, CP)
    X = X - tl.load(origin + tl.arange(0, CP))[None, :]
    points = fetch(turned, CP, MP)
    far = tl.max(tl.sum(points * points, 0)) > 0.25 * FAR  # as in `sparse.blocks.kernel_values`
    K = amplitude * exponential(turned_exponents(X, points, far))
    exists = tl.arange(0, MP) < M
    return tl.where(real[:, None] & exists[None, :], K, 0.0), X


@triton.jit
def token_gram(X, Y, far, x, x_n, real, beside, C, first, start, amplitude, ROWS: tl.constexpr):
    """K_qq between two tiles about the first one's centre, the second turned, its diagonal exact.

    By differences of the tokens in memory where those of the first tile are far apart.  [ROWS, CHUNK]
    """
    e = tl.dot(X, Y, input_precision="ieee")
    e = e - 0.5 * tl.sum(X * X, 1)[:, None] - 0.5 * tl.sum(Y * Y, 0)[None, :]
    if far:
        e = differences(x + first * x_n, x_n, real, x + start * x_n, x_n, beside, C, ROWS, CHUNK)
    same = (first + tl.arange(0, ROWS))[:, None] == (start + tl.arange(0, CHUNK))[None, :]
    return amplitude * tl.where(same, 1.0, exponential(tl.minimum(e, 0.0)))


@triton.jit
def turn(to, x, x_n, mask, mask_n, N, width, MASKED: tl.constexpr, NP: tl.constexpr, WIDTH: tl.constexpr):
    """Write the transpose of a sequence's real tokens, 0 elsewhere; a barrier must follow.  [WIDTH, NP]"""
    step, c = tl.arange(0, CHUNK), tl.arange(0, WIDTH)
    for start in range(0, NP, CHUNK):
        real = real_rows(mask, mask_n, start, N, MASKED, CHUNK)
        X = rows_of(x + start * x_n, x_n, real, width, CHUNK, WIDTH)
        tl.store(to + c[None, :] * NP + (start + step)[:, None], X)


@triton.jit
def turned_rows(turned, start, NP: tl.constexpr, WIDTH: tl.constexpr):
    """Some of the tokens that `turn` wrote.  [WIDTH, CHUNK]"""
    step, c = tl.arange(0, CHUNK), tl.arange(0, WIDTH)
    return tl.load(turned + c[:, None] * NP + (start + step)[None, :])


@triton.jit
def packed_places(start, F: tl.constexpr, COUNT: tl.constexpr):
    """Row and column of the places `start`, `start` + 1, ...; those past the end are the last.  [COUNT]"""
    f = tl.minimum(start + tl.arange(0, COUNT), F - 1)
    row = ((tl.sqrt_rn((8 * f + 1).to(tl.float32)) - 1.0) * 0.5).to(tl.int32)  # exact below 2^20 places
    return row, f - row * (row + 1) // 2


@triton.jit
def features_kernel(
    x, x_b, x_h, x_n, mask, mask_b, mask_h, mask_n, variance,
    turned, origin, packed, phi, columns, spread, spread_b, spread_h, spread_n,
    H, N, M, C, D,
    SCALED: tl.constexpr, MASKED: tl.constexpr, VARIANCE: tl.constexpr,
    T: tl.constexpr, NP: tl.constexpr, MP: tl.constexpr, CP: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Program (s, tile): phi and, with VARIANCE, the variance of every channel, of some rows.

    Threads read neighbouring rows of one column of phi, which lie together in `columns`, its transpose.
    """
    s, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * T
    b, h = s // H, s % H
    real = real_rows(mask + b * mask_b + h * mask_h, mask_n, first, N, MASKED, T)
    amplitude = 1.0
    if SCALED:
        amplitude = tl.load(variance + h)
    turned += h * MP * (CP + MP + DP)
    K_qb, _ = inducing_gram(
        x + b * x_b + h * x_h, x_n, first, real, M, C, turned, origin + h * CP, amplitude, T, MP, CP
    )
    features = tl.dot(K_qb, fetch(turned + MP * CP, MP, MP), input_precision="ieee")
    i, j = tl.arange(0, T), tl.arange(0, MP)
    tl.store(phi + (s * NP + first) * MP + i[:, None] * MP + j[None, :], features)
    if VARIANCE:
        columns += s * NP * MP + first
        tl.store(columns + i[:, None] + j[None, :] * NP, features)
        tl.debug_barrier()
        F: tl.constexpr = MP * (MP + 1) // 2
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
        to = spread + b * spread_b + h * spread_h + first.to(tl.int64) * spread_n
        store_rows(to, spread_n, found, first, N, D, T, DP)


@triton.jit
def mean_kernel(
    x, x_b, x_h, x_n, v, v_b, v_h, v_n, inducing_v, inducing_h, inducing_n,
    mask, mask_b, mask_h, mask_n, variance, turned, origin, phi, terms, tokens,
    mean, mean_b, mean_h, mean_n, kl,
    H, N, M, C, D,
    SCALED: tl.constexpr, MASKED: tl.constexpr,
    T: tl.constexpr, NP: tl.constexpr, MP: tl.constexpr, CP: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Program (s,): mean of every token, and the KL of one sequence and head."""
    s = tl.program_id(0).to(tl.int64)
    b, h = s // H, s % H
    x += b * x_b + h * x_h
    v += b * v_b + h * v_h
    mask += b * mask_b + h * mask_h
    phi += s * NP * MP
    mean += b * mean_b + h * mean_h
    amplitude = 1.0
    if SCALED:
        amplitude = tl.load(variance + h)
    tokens += s * CP * NP
    turn(tokens, x, x_n, mask, mask_n, N, C, MASKED, NP, CP)
    tl.debug_barrier()
    projected = project(phi, v, v_n, mask, mask_n, N, D, MASKED, NP, MP, DP)  # phi^T v
    V_b = rows_of(inducing_v + h * inducing_h, inducing_n, tl.arange(0, MP) < M, D, MP, DP)
    i, j = tl.arange(0, T), tl.arange(0, MP)
    energy = 0.0
    for first in range(0, NP, T):
        real = real_rows(mask, mask_n, first, N, MASKED, T)
        X = rows_of(x + first * x_n, x_n, real, C, T, CP)
        centre = centre_of(X, real)
        X = centred(X, centre, real)
        far = spread_of(X) > FAR
        features = tl.load(phi + (first + i)[:, None] * MP + j[None, :])
        attended = -tl.dot(features, projected, input_precision="ieee")
        for start in range(0, NP, CHUNK):
            beside = real_rows(mask, mask_n, start, N, MASKED, CHUNK)
            Y = turned_rows(tokens, start, NP, CP) - centre[:, None]
            V = rows_of(v + start * v_n, v_n, beside, D, CHUNK, DP)
            K = token_gram(X, Y, far, x, x_n, real, beside, C, first, start, amplitude, T)
            attended = tl.dot(K, V, attended, input_precision="ieee")
        energy += tl.sum(attended * rows_of(v + first * v_n, v_n, real, D, T, DP))
        turned_b = turned + h * MP * (CP + MP + DP)
        K_qb, _ = inducing_gram(x, x_n, first, real, M, C, turned_b, origin + h * CP, amplitude, T, MP, CP)
        attended = tl.dot(K_qb, V_b, attended, input_precision="ieee")
        attended = tl.where(real[:, None], attended, 0.0)
        store_rows(mean + first * mean_n, mean_n, attended, first, N, D, T, DP)
    a = tl.arange(0, 2 * DP)  # D + 1 of them
    total = tl.sum(tl.load(terms + h * (D + 1) + a, mask=a < D + 1, other=0.0))
    tl.store(kl + s, total + 0.5 * energy)


@triton.jit
def project(
    phi, v, v_n, mask, mask_n, N, D,
    MASKED: tl.constexpr, NP: tl.constexpr, MP: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """phi^T v of one sequence and head.  [MP, DP]"""
    j, step = tl.arange(0, MP), tl.arange(0, CHUNK)
    total = tl.zeros((MP, DP), tl.float32)
    for start in range(0, NP, CHUNK):
        real = real_rows(mask, mask_n, start, N, MASKED, CHUNK)
        V = rows_of(v + start * v_n, v_n, real, D, CHUNK, DP)
        features = tl.load(phi + j[:, None] + (start + step)[None, :] * MP)
        total = tl.dot(features, V, total, input_precision="ieee")
    return total


@triton.jit
def turned_project(
    phi, v, v_n, mask, mask_n, N, D,
    MASKED: tl.constexpr, NP: tl.constexpr, MP: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """v^T phi of one sequence and head.  [DP, MP]"""
    j, step = tl.arange(0, MP), tl.arange(0, CHUNK)
    total = tl.zeros((DP, MP), tl.float32)
    for start in range(0, NP, CHUNK):
        real = real_rows(mask, mask_n, start, N, MASKED, CHUNK)
        V = rows_of(v + start * v_n, v_n, real, D, CHUNK, DP)
        features = tl.load(phi + j[None, :] + (start + step)[:, None] * MP)
        total = tl.dot(tl.trans(V), features, total, input_precision="ieee")
    return total
