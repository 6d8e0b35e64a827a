"""Triton functions that several ops share: rows of a sequence, products, kernel values, Cholesky roots.

Matrices live in padded scratch memory [P, P], row-major, P a power of two and a multiple of BLOCK; what
one program writes it reads back after a barrier, from the caches.  Everything is IEEE float32.  Imported
only when a fused path is taken: Triton is an optional package.

In A B neighbouring threads read neighbouring columns of B on chip, and few rows of A.  Where B's columns are
contiguous instead of its rows, as those of a Y^T read in place, these lie in the same banks and are read one
after the other, ten times slower than the product itself.  So no B is read with an inner stride of 1: what a
product wants transposed on its right is written turned (`store_turned`) where it is made, or X Y^T is taken
as (Y X^T)^T.  For A it is the other way round, by less: columns that are contiguous are read four at a time.

A tensor of [B, H, N, X], [B, H, N] or [B, H] comes with its strides, as `ops.layout.view` gives it, or is
None where there is none.  Its rows of one sequence and head are a pair: where the first one is, and their
stride.
"""

import triton
import triton.language as tl
from triton.language import constexpr

# mypy: disable-error-code="import-not-found,import-untyped,misc,no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201


BLOCK = tl.constexpr(16)  # of the Cholesky factorisation and of the inner axis of products
_LOG2_E = tl.constexpr(1.4426950216293335)  # log2 e as float32, and what that lacks
_LOG2_E_REST = tl.constexpr(1.9259629911266175e-08)
_LN_2 = tl.constexpr(0.6931471805599453)
# squared distances from the centre: to the first float32 products have distances to 1e-5 or 1e-4; beyond
# the second tokens are too far apart for float32 (`gp.kernels`)
FAR = tl.constexpr(256.0)
LOST = tl.constexpr(2.0**30)


@triton.jit
def exponential(x):
    """e^x to one unit in the last place: exp2(x log2 e) alone loses |x| units."""
    high = x * _LOG2_E
    low = tl.fma(x, _LOG2_E, -high) + x * _LOG2_E_REST
    return tl.exp2(high) * (1.0 + low * _LN_2)


@triton.jit
def program_head(H):
    """Which sequence and head this program has: its number, sequence and head."""
    s = tl.program_id(0).to(tl.int64)
    return s, s // H, s % H


@triton.jit
def head(x, b, h):
    """The rows of one sequence and head."""
    return x[0] + b * x[1] + h * x[2], x[3]


@triton.jit
def rows_from(x, first):
    """The same rows from number `first` on."""
    return x[0] + first * x[1], x[1]


@triton.jit
def scalar_of(x, b, h):
    """The number of one sequence and head."""
    return tl.load(x[0] + b * x[1] + h * x[2])


@triton.jit
def each_at(offset, pointers):
    """Several pointers, each moved by the same number of entries."""
    return tl.tuple([pointer + offset for pointer in pointers])


@triton.jit
def product(
    a, a_row: constexpr, a_inner: constexpr, b, b_inner: constexpr, b_column: constexpr,
    ROWS: constexpr, COLUMNS: constexpr, INNER: constexpr,
):  # fmt: skip
    """A B of matrices in memory, by strides; a_row = 1 and b_column = 1 are the fastest.  [ROWS, COLUMNS]"""
    i, j, step = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, BLOCK)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, INNER, BLOCK):
        at = start + step
        A = tl.load(a + i[:, None] * a_row + at[None, :] * a_inner)
        B = tl.load(b + at[:, None] * b_inner + j[None, :] * b_column)
        total = tl.dot(A, B, total, input_precision="ieee")
    return total


@triton.jit
def store(to, X, ROWS: constexpr, COLUMNS: constexpr):
    """Write a padded matrix."""
    i, j = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    tl.store(to + i[:, None] * COLUMNS + j[None, :], X)


@triton.jit
def store_turned(to, X, ROWS: constexpr, COLUMNS: constexpr):
    """Write the transpose of a padded matrix.  [COLUMNS, ROWS]"""
    i, j = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    tl.store(to + j[None, :] * ROWS + i[:, None], X)


@triton.jit
def fetch(source, ROWS: constexpr, COLUMNS: constexpr):
    """Read a padded matrix.  [ROWS, COLUMNS]"""
    i, j = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    return tl.load(source + i[:, None] * COLUMNS + j[None, :])


@triton.jit
def rows_of(x, real, width, ROWS: constexpr, WIDTH: constexpr):
    """Rows of real tokens, everything else 0.  [ROWS, WIDTH]"""
    i, c = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    inside = real[:, None] & (c < width)[None, :]
    return tl.load(x[0] + i[:, None] * x[1] + c[None, :], mask=inside, other=0.0)


@triton.jit
def store_rows(to, X, first, rows, width, ROWS: constexpr, WIDTH: constexpr):
    """Write those of the rows `first`, `first` + 1, ... that exist; `to` begins with the first one."""
    i, c = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    inside = (first + i < rows)[:, None] & (c < width)[None, :]
    tl.store(to[0] + i[:, None] * to[1] + c[None, :], X, mask=inside)


@triton.jit
def real_rows(mask, b, h, first, rows, ROWS: constexpr):
    """Which of the rows `first`, `first` + 1, ... are inside the sequence and not padding.  [ROWS]"""
    i = first + tl.arange(0, ROWS)
    real = i < rows
    if mask is not None:
        real = tl.load(mask[0] + b * mask[1] + h * mask[2] + i * mask[3], mask=real, other=0) != 0
    return real


@triton.jit
def store_both(to, turned, X, ROWS: constexpr, COLUMNS: constexpr):
    """Write a padded matrix and its transpose."""
    store(to, X, ROWS, COLUMNS)
    store_turned(turned, X, ROWS, COLUMNS)


@triton.jit
def note_failure(info, counter, counted, failed):
    """Write which pivot failed; count it where nothing may be read back."""
    tl.store(info, failed)
    if (failed != 0) & (counted != 0):
        tl.atomic_add(counter, 1)


@triton.jit
def centre_of(X, real):
    """Mean over real rows, 0 where there are none; X is 0 elsewhere.  [WIDTH]

    Taken about the first of them: kernels that sum in other orders must find the same centre of tokens that
    lie far from the origin, where one rounding of a plain sum is a part of a length scale.
    """
    i = tl.arange(0, X.shape[0])
    first = tl.min(tl.where(real, i, X.shape[0]))
    origin = tl.sum(tl.where((i == first)[:, None], X, 0.0), 0)
    count = tl.sum(real.to(tl.float32))
    return origin + tl.sum(centred(X, origin, real), 0) / tl.maximum(count, 1.0)


@triton.jit
def centred(X, centre, real):
    """X - centre on real rows, 0 elsewhere.  [ROWS, WIDTH]"""
    return tl.where(real[:, None], X - centre[None, :], 0.0)


@triton.jit
def differences(x, asked, y, real, width, ROWS: constexpr, COLUMNS: constexpr):
    """-1/2 |x_i - y_j|^2 of tokens in memory, of which no centring has rounded any.  [ROWS, COLUMNS]"""
    i, j = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for c in range(0, width):
        a = tl.load(x[0] + i * x[1] + c, mask=asked, other=0.0)
        b = tl.load(y[0] + j * y[1] + c, mask=real, other=0.0)
        apart = a[:, None] - b[None, :]
        total += apart * apart
    return -0.5 * total


@triton.jit
def differences_on_chip(X, Y):
    """The same of X [N, WIDTH] and Y [WIDTH, M] that are nowhere in memory.  [N, M]"""
    c = tl.arange(0, X.shape[1])
    total = tl.zeros((X.shape[0], Y.shape[1]), tl.float32)
    for channel in range(0, X.shape[1]):
        here = c == channel
        a = tl.sum(tl.where(here[None, :], X, 0.0), 1)
        b = tl.sum(tl.where(here[:, None], Y, 0.0), 0)
        apart = a[:, None] - b[None, :]
        total += apart * apart
    return -0.5 * total


@triton.jit
def spread_of(X):
    """The largest squared distance from the origin."""
    return tl.max(tl.sum(X * X, 1))


@triton.jit
def origin_of(X, real):
    """An origin near the real rows, to which moving them rounds none where they are far apart.  [WIDTH]

    Moving is exact in a channel whose mean is twice as far as any row is from it; the others stay.
    """
    centre = centre_of(X, real)
    moved = centred(X, centre, real)
    stays = 2.0 * tl.max(tl.abs(moved), 0) > tl.abs(centre)
    return tl.where(stays, tl.where(spread_of(moved) > FAR, 0.0, centre), centre)


@triton.jit
def exponents(dot, X, Y, x, asked, y, real, width, ROWS: constexpr, COLUMNS: constexpr):
    """-1/2 |x_i - y_j|^2, never above 0, from the products of centred tokens.  [ROWS, COLUMNS]

    Where both sets are spread far, near tokens of theirs may be far from the centre, and only differences
    have their distances.  Every sequence decides for itself, and its program branches as a whole.
    """
    e = dot - 0.5 * tl.sum(X * X, 1)[:, None] - 0.5 * tl.sum(Y * Y, 1)[None, :]
    if tl.minimum(spread_of(X), spread_of(Y)) > FAR:
        e = differences(x, asked, y, real, width, ROWS, COLUMNS)
    return tl.minimum(e, 0.0)


@triton.jit
def noisy(exponent, amplitude, diagonal, real, N: constexpr):
    """a_i a_j kappa(x_i, x_j) + diagonal I with an exact diagonal, identity at padding.  [N, N]"""
    i = tl.arange(0, N)
    K = exponential(exponent)
    on_diagonal = i[:, None] == i[None, :]
    K = tl.where(on_diagonal, 1.0, K) * (amplitude[:, None] * amplitude[None, :])
    K = K + tl.where(on_diagonal, diagonal, 0.0)
    return tl.where(real[:, None] & real[None, :], K, tl.where(on_diagonal, 1.0, 0.0))


@triton.jit
def noisy_gram(X, amplitude, diagonal, real, N: constexpr):
    """`noisy` of a few points about an origin of theirs, nowhere in memory; NaN if too far apart.  [N, N]"""
    exponent = turned_exponents(X, tl.trans(X), spread_of(X) > 0.25 * FAR)
    return far_gram(exponent, spread_of(X), amplitude, diagonal, real, N)


@triton.jit
def turned_exponents(X, Y, far):
    """-1/2 |x - y|^2, never above 0, where Y is [WIDTH, M]; by differences if far.  [N, M]"""
    e = tl.dot(X, Y, input_precision="ieee")
    e = e - 0.5 * tl.sum(X * X, 1)[:, None] - 0.5 * tl.sum(Y * Y, 0)[None, :]
    if far:
        e = differences_on_chip(X, Y)
    return tl.minimum(e, 0.0)


@triton.jit
def turned_gram(turned, X, x, width, amplitude, diagonal, real, N: constexpr, WIDTH: constexpr):
    """`noisy` of x, whose transpose was written centred before a barrier; NaN if too far apart.  [N, N]"""
    dot = product(turned, 1, N, turned, N, 1, N, N, WIDTH)
    exponent = exponents(dot, X, X, x, real, x, real, width, N, N)
    return far_gram(exponent, spread_of(X), amplitude, diagonal, real, N)


@triton.jit
def near_gram(turned, X, amplitude, diagonal, real, N: constexpr, WIDTH: constexpr):
    """The same of points that are not far apart; `far_gram` has the others.  [N, N]"""
    e = product(turned, 1, N, turned, N, 1, N, N, WIDTH)
    e = e - 0.5 * tl.sum(X * X, 1)[:, None] - 0.5 * tl.sum(X * X, 1)[None, :]
    return noisy(tl.minimum(e, 0.0), amplitude, diagonal, real, N)


@triton.jit
def far_gram(exponent, spread, amplitude, diagonal, real, N: constexpr):
    """`noisy` of points from their exponents; NaN if their spread is too large.  [N, N]"""
    exponent = tl.where(spread > LOST, float("nan"), exponent)
    return noisy(exponent, amplitude, diagonal, real, N)


@triton.jit
def block_root(D, first, log_det, failed):
    """L^-T of one diagonal block D = L L^T by elimination, column after column.  [BLOCK, BLOCK]

    Adds to the log determinant and notes the first pivot that is not positive (1 is the matrix's first).
    """
    r = tl.arange(0, BLOCK)
    X = tl.where(r[:, None] == r[None, :], 1.0, 0.0)
    for j in range(0, BLOCK):
        here = r == j
        row = tl.sum(tl.where(here[:, None], D, 0.0), 0)  # D is symmetric where it is still used
        column = tl.sum(tl.where(here[None, :], D, 0.0), 1)
        solved = tl.sum(tl.where(here[None, :], X, 0.0), 1)
        pivot = tl.sum(tl.where(here, row, 0.0))
        good = pivot > 0  # false for NaN
        failed = tl.where((failed == 0) & (good == 0), first + j + 1, failed)
        scale = tl.where(good, tl.div_rn(1.0, tl.sqrt_rn(pivot)), float("nan"))
        log_det += tl.log(pivot)
        row = tl.where(r > j, row * scale, 0.0)
        solved = solved * scale
        D = D - (column * scale)[:, None] * row[None, :]
        X = tl.where(here[None, :], solved[:, None], X - solved[:, None] * row[None, :])
    return X, log_det, failed


@triton.jit
def inverse_root(M, R, N: constexpr):
    """R = L^-1 for M = L L^T, both in memory; returns log det M and the pivot that failed, 0 for none.

    Left-looking by blocks.  Right of the finished rows of R stand those of L^T, each column until it is
    reached, so that one buffer serves both.  M must have been written before a barrier; so is R when this
    returns.
    """
    i, b = tl.arange(0, N), tl.arange(0, BLOCK)
    log_det, failed = 0.0, 0
    for J in range(0, N // BLOCK):
        at = J * BLOCK + b
        panel = tl.load(M + i[:, None] * N + at[None, :])  # [N, b] becomes L[:, J], of which what is below
        D = tl.load(M + at[:, None] * N + at[None, :])  # [b, b]
        row = tl.zeros((BLOCK, N), tl.float32)  # [b, N] becomes R[J, :], of which what is left
        for K in range(0, J):
            before = K * BLOCK + b
            both = tl.load(R + before[:, None] * N + i[None, :])  # [b, N] R[K, :] left of J, then L[:, K]^T
            L_JK = tl.load(R + before[:, None] * N + at[None, :])  # [b, b] transposed
            panel -= tl.dot(tl.trans(both), L_JK, input_precision="ieee")
            D -= tl.dot(tl.trans(L_JK), L_JK, input_precision="ieee")
            row += tl.dot(tl.trans(L_JK), both, input_precision="ieee")
        X, log_det, failed = block_root(D, J * BLOCK, log_det, failed)
        panel = tl.dot(panel, X, input_precision="ieee")
        row = -tl.dot(tl.trans(X), row, input_precision="ieee")
        tl.debug_barrier()
        left, below = i < J * BLOCK, i >= (J + 1) * BLOCK
        tl.store(R + i[:, None] * N + at[None, :], tl.zeros((N, BLOCK), tl.float32), mask=left[:, None])
        tl.store(R + at[None, :] * N + i[:, None], panel, mask=below[:, None])
        tl.store(R + at[:, None] * N + i[None, :], row, mask=left[None, :])
        tl.store(R + at[:, None] * N + at[None, :], tl.trans(X))
        tl.debug_barrier()
    return log_det, failed
