"""Triton kernels that sum columns in two stages, and put rows side by side while they are read.

Triton kernels around the attention: residual, bias, dropout, LayerNorm, GELU, and their gradients.

y = x + drop(z + bias),  m = mean y,  s = (var y + eps)^-1/2,  u = s (y - m),  n = weight u + shift
dy = by_y + s (g - mean g - u mean(g u)),  g = weight by_n;   dx = dy,  dz = drop(dy)
dweight = sum by_n u,  dshift = sum by_n,  dbias = sum dz over rows, summed in two stages
"""

import triton
import triton.language as tl
from triton.language import constexpr

from gpattention.ops.draws.kernels import mix

# mypy: disable-error-code="import-not-found,import-untyped,misc,no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201


@triton.jit
def part_of(x, stride, to, partial, rows, tiles, total, C, ROWS: constexpr, CP: constexpr):
    """Copies one part's rows to its columns of `to` and sums those that this program reads."""
    r, c = tl.arange(0, ROWS).to(tl.int64), tl.arange(0, CP)
    own = tl.zeros((CP,), tl.float32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        i = tile * ROWS + r
        inside = (i < rows)[:, None] & (c < C)[None, :]
        X = tl.load(x + i[:, None] * stride + c[None, :], mask=inside, other=0.0)
        tl.store(to + i[:, None] * total + c[None, :], X, mask=inside)
        own += tl.sum(X, 0)
    tl.store(partial + tl.program_id(0) * total + c, own, mask=c < C)


@triton.jit
def gather_kernel(
    first, first_n, second, second_n, third, third_n, fourth, fourth_n, to, partial, rows, tiles, total, C,
    PARTS: constexpr, ROWS: constexpr, CP: constexpr,
):  # fmt: skip
    """Rows [rows, C] of two to four parts side by side, and partial column sums [programs, PARTS * C]."""
    part_of(first, first_n, to, partial, rows, tiles, total, C, ROWS, CP)
    part_of(second, second_n, to + C, partial + C, rows, tiles, total, C, ROWS, CP)
    if PARTS > 2:
        part_of(third, third_n, to + 2 * C, partial + 2 * C, rows, tiles, total, C, ROWS, CP)
    if PARTS > 3:
        part_of(fourth, fourth_n, to + 3 * C, partial + 3 * C, rows, tiles, total, C, ROWS, CP)


@triton.jit
def finish_kernel(partial, out, count, C, COUNT: constexpr, COLUMNS: constexpr):
    """The second stage: a few columns of all partial sums [count, C]."""
    r, c = tl.arange(0, COUNT), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (r < count)[:, None] & (c < C)[None, :]
    X = tl.load(partial + r[:, None] * C + c[None, :], mask=inside, other=0.0)
    tl.store(out + c, tl.sum(X, 0), mask=c < C)


_GOLDEN = tl.constexpr(-7046029254386353131)  # as in gp.noise
_MIX_1 = tl.constexpr(-4658895280553007687)
_FIRST = tl.constexpr(0x7FEB352D)  # as in models.seeded_dropout
_SECOND = tl.constexpr(0x846CA68B)
_ROOT_HALF = tl.constexpr(0.7071067811865476)
_NORMAL = tl.constexpr(0.3989422804014327)  # (2 pi)^-1/2


@triton.jit
def scramble(x):
    """The 32-bit hash of the reference."""
    x = (x ^ (x >> 16)) * _FIRST
    x = (x ^ (x >> 15)) * _SECOND
    return x ^ (x >> 16)


@triton.jit
def dropped(X, seed, site, place, THRESHOLD: constexpr, SCALE: constexpr):
    """X times SCALE where it is kept, else 0; X where nothing is dropped."""
    if THRESHOLD > 0:
        key = mix(mix(tl.load(seed) * _MIX_1 + _GOLDEN) + site.to(tl.int64) * _GOLDEN)
        bits = scramble(place.to(tl.uint32) ^ key.to(tl.uint32))
        bits = scramble(bits + (key >> 32).to(tl.uint32))
        X = tl.where((bits >> 8).to(tl.int32) >= THRESHOLD, X * SCALE, 0.0)
    return X


@triton.jit
def standardised(Y, exists, E, EPS: constexpr):
    """u and s of rows of width E, 0 beyond.  [ROWS, EP], [ROWS]"""
    centred = tl.where(exists[None, :], Y - (tl.sum(Y, 1) / E)[:, None], 0.0)
    scale = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(centred * centred, 1) / E + EPS))
    return centred * scale[:, None], scale


@triton.jit
def norm_moments_kernel(
    x, v, weight, shift, mean, variance, rows, E, EPS: constexpr, ROWS: constexpr, EP: constexpr
):  # fmt: skip
    """Program: some rows.  sum_j (d_ij - (1 + u_i u_j) / E)^2 v_j, its square multiplied out."""
    i, c = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, EP)
    exists = c < E
    inside = (i < rows)[:, None] & exists[None, :]
    at = i[:, None] * E + c[None, :]
    V = tl.load(v + at, mask=inside, other=0.0)
    U, scale = standardised(tl.load(x + at, mask=inside, other=0.0), exists, E, EPS)
    total, first, second = tl.sum(V, 1), tl.sum(U * V, 1), tl.sum(U * U * V, 1)
    rest = total[:, None] + U * (2.0 * first[:, None] + U * second[:, None])
    found = V - (V + U * U * V) * (2.0 / E) + rest / (E * E)
    w = tl.load(weight + c, mask=exists, other=0.0)
    tl.store(mean + at, U * w[None, :] + tl.load(shift + c, mask=exists, other=0.0)[None, :], mask=inside)
    scale = scale[:, None] * w[None, :]
    tl.store(variance + at, tl.maximum(found, 0.0, tl.PropagateNan.ALL) * scale * scale, mask=inside)


@triton.jit(do_not_specialize=["site"])
def residual_norm_kernel(
    x, z, bias, weight, shift, seed, y, n, rows, period, E, site,
    KIND: constexpr, REPEATED: constexpr, BIASED: constexpr, THRESHOLD: constexpr, SCALE: constexpr,
    EPS: constexpr, ROWS: constexpr, EP: constexpr,
):  # fmt: skip
    """Program: some rows.  KIND 0: y = x; 1: y = x + drop(z + bias); 2: y = drop(z + bias + x).

    REPEATED: the rows of x repeat with a period.
    """
    i, c = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, EP)
    exists = c < E
    inside = (i < rows)[:, None] & exists[None, :]
    at = i[:, None] * E + c[None, :]
    if REPEATED:
        Y = tl.load(x + (i % period)[:, None] * E + c[None, :], mask=inside, other=0.0)
    else:
        Y = tl.load(x + at, mask=inside, other=0.0)
    if KIND > 0:
        Z = tl.load(z + at, mask=inside, other=0.0)
        if BIASED:
            Z += tl.load(bias + c, mask=exists, other=0.0)[None, :]
        if KIND == 2:
            Y = dropped(Y + Z, seed, site, at, THRESHOLD, SCALE)
        else:
            Y += dropped(Z, seed, site, at, THRESHOLD, SCALE)
        tl.store(y + at, Y, mask=inside)
    U, _ = standardised(Y, exists, E, EPS)
    w = tl.load(weight + c, mask=exists, other=0.0)
    b = tl.load(shift + c, mask=exists, other=0.0)
    tl.store(n + at, U * w[None, :] + b[None, :], mask=inside)


@triton.jit(do_not_specialize=["site"])
def residual_norm_backward_kernel(
    y, weight, by_y, by_n, seed, by_x, by_z, partial, rows, tiles, E, site,
    KIND: constexpr, BIASED: constexpr, THRESHOLD: constexpr, SCALE: constexpr, EPS: constexpr,
    USED: constexpr, ROWS: constexpr, EP: constexpr,
):  # fmt: skip
    """Program: every so many tiles of rows, and partial sums [programs, 3, E] of weight, shift and bias.

    USED: y itself was used, so that it has a gradient.  Without dropout dz is dx and written once.
    """
    r, c = tl.arange(0, ROWS).to(tl.int64), tl.arange(0, EP)
    exists = c < E
    w = tl.load(weight + c, mask=exists, other=0.0)
    d_weight, d_shift = tl.zeros((EP,), tl.float32), tl.zeros((EP,), tl.float32)
    d_bias = tl.zeros((EP,), tl.float32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        i = tile * ROWS + r
        inside = (i < rows)[:, None] & exists[None, :]
        at = i[:, None] * E + c[None, :]
        U, scale = standardised(tl.load(y + at, mask=inside, other=0.0), exists, E, EPS)
        G = tl.load(by_n + at, mask=inside, other=0.0)
        d_weight += tl.sum(G * U, 0)
        d_shift += tl.sum(G, 0)
        G = G * w[None, :]
        D = (G - (tl.sum(G, 1) / E)[:, None] - U * (tl.sum(G * U, 1) / E)[:, None]) * scale[:, None]
        if USED:
            D += tl.load(by_y + at, mask=inside, other=0.0)
        if KIND < 2:
            tl.store(by_x + at, D, mask=inside)
        if KIND > 0:
            Z = dropped(D, seed, site, at, THRESHOLD, SCALE)
            if THRESHOLD > 0 or KIND == 2:
                tl.store(by_z + at, Z, mask=inside)
            if BIASED:
                d_bias += tl.sum(Z, 0)
    partial += tl.program_id(0) * 3 * E
    tl.store(partial + c, d_weight, mask=exists)
    tl.store(partial + E + c, d_shift, mask=exists)
    tl.store(partial + 2 * E + c, d_bias, mask=exists)


@triton.jit
def cumulative(X):
    """The standard normal distribution function."""
    return 0.5 * (1.0 + tl.erf(X * _ROOT_HALF))


@triton.jit(do_not_specialize=["site"])
def gelu_kernel(
    h, bias, seed, a, rows, F, site,
    BIASED: constexpr, THRESHOLD: constexpr, SCALE: constexpr, ROWS: constexpr, FP: constexpr,
):  # fmt: skip
    """Program (rows, columns): a = drop(gelu(h + bias))."""
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * FP + tl.arange(0, FP)
    inside = (i < rows)[:, None] & (c < F)[None, :]
    at = i[:, None] * F + c[None, :]
    X = tl.load(h + at, mask=inside, other=0.0)
    if BIASED:
        X += tl.load(bias + c, mask=c < F, other=0.0)[None, :]
    tl.store(a + at, dropped(X * cumulative(X), seed, site, at, THRESHOLD, SCALE), mask=inside)


@triton.jit(do_not_specialize=["site"])
def gelu_backward_kernel(
    h, bias, seed, by_a, by_h, a, partial, rows, tiles, F, site,
    BIASED: constexpr, THRESHOLD: constexpr, SCALE: constexpr, ROWS: constexpr, FP: constexpr,
):  # fmt: skip
    """Program (every so many tiles of rows, columns): dh, a once more, and partial sums of dbias."""
    r, c = tl.arange(0, ROWS).to(tl.int64), tl.program_id(1) * FP + tl.arange(0, FP)
    exists = c < F
    d_bias = tl.zeros((FP,), tl.float32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        i = tile * ROWS + r
        inside = (i < rows)[:, None] & exists[None, :]
        at = i[:, None] * F + c[None, :]
        X = tl.load(h + at, mask=inside, other=0.0)
        if BIASED:
            X += tl.load(bias + c, mask=exists, other=0.0)[None, :]
        below = cumulative(X)
        kept = dropped(tl.full((ROWS, FP), 1.0, tl.float32), seed, site, at, THRESHOLD, SCALE)
        tl.store(a + at, X * below * kept, mask=inside)
        slope = below + X * _NORMAL * tl.exp(-0.5 * X * X)
        D = tl.load(by_a + at, mask=inside, other=0.0) * kept * slope
        tl.store(by_h + at, D, mask=inside)
        d_bias += tl.sum(D, 0)
    if BIASED:
        tl.store(partial + tl.program_id(0) * F + c, d_bias, mask=exists)
