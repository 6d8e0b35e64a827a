"""Triton blocks of the sparse model: tiles of tokens, whitened features, small roots, sums of splits.

E = kappa(x, m),   phi = E W^T,   W = L_m^-1                                             (section 3)
E, phi are zero at padded tokens and in padded columns, W is identity there.

In A B^T the threads read neighbouring rows of B, which share their banks of memory on chip unless B was
turned before it got there: points and W lie in memory beside their transposes, and so do factors.
"""
# mypy: disable-error-code="import-not-found,import-untyped,misc,no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201

import triton
import triton.language as tl

from gpattention.gp.fused.blocks import (
    BLOCK,
    FAR,
    exponential,
    fetch,
    product,
    store,
    turned_exponents,
)

_SHORT = tl.constexpr(32 * 32 * 32)  # multiplications of a product that is written out


@triton.jit
def tile_rows(start, stop, mask, mask_n, MASKED: tl.constexpr, ROWS: tl.constexpr):
    """Places of a tile's tokens in the sequence, and which of them are real.  [ROWS] each"""
    i = start + tl.arange(0, ROWS).to(tl.int64)
    real = i < stop
    if MASKED:
        real = tl.load(mask + i * mask_n, mask=real, other=0) != 0
    return i, real


@triton.jit
def tile(x, x_n, i, real, width, WIDTH: tl.constexpr):
    """Rows of real tokens, everything else 0.  [ROWS, WIDTH]"""
    c = tl.arange(0, WIDTH)
    return tl.load(x + i[:, None] * x_n + c[None, :], mask=real[:, None] & (c < width)[None, :], other=0.0)


@triton.jit
def store_tile(to, to_n, X, i, stop, width, WIDTH: tl.constexpr):
    """Write the rows and channels that exist."""
    c = tl.arange(0, WIDTH)
    tl.store(to + i[:, None] * to_n + c[None, :], X, mask=(i < stop)[:, None] & (c < width)[None, :])


@triton.jit
def store_turned(to, X, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Write X^T of a padded X.  [COLUMNS, ROWS]"""
    i, j = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    tl.store(to + j[None, :] * ROWS + i[:, None], X)


@triton.jit
def fetch_turned(source, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The transpose that lies behind a padded [ROWS, COLUMNS] matrix.  [COLUMNS, ROWS]"""
    return fetch(source + ROWS * COLUMNS, COLUMNS, ROWS)


@triton.jit
def dot(a, b):
    """A B in IEEE float32."""
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def mul(a, b, scratch):
    """A B of small matrices: at once while it is short, else in steps through scratch memory.

    Unrolled, products of larger matrices take minutes to compile and more registers than there are.
    """
    M: tl.constexpr = a.shape[0]
    K: tl.constexpr = a.shape[1]
    N: tl.constexpr = b.shape[1]
    if M * K * N <= _SHORT:
        found = dot(a, b)
    else:
        tl.debug_barrier()  # what was here has been read
        store(scratch, a, M, K)
        store(scratch + M * K, b, K, N)
        tl.debug_barrier()
        found = product(scratch, K, 1, scratch + M * K, N, 1, M, N, K)
    return found


@triton.jit
def kernel_values(X, points_t, real, count, MP: tl.constexpr):
    """kappa(x, m), zero at padding.  [ROWS, MP]"""
    # A token near a point is as far from the origin as that: only where points are far do tokens matter.
    far = tl.max(tl.sum(points_t * points_t, 0)) > 0.25 * FAR
    inside = real[:, None] & (tl.arange(0, MP) < count)[None, :]
    return tl.where(inside, exponential(turned_exponents(X, points_t, far)), 0.0)


@triton.jit
def amplitudes(
    scale, log_amplitude, log_n, i, real, AMPLIFIED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """s_q a_i of a tile's queries.  [ROWS]"""
    a = scale + tl.zeros((ROWS,), tl.float32)
    if AMPLIFIED:
        a *= exponential(tl.load(log_amplitude + i * log_n, mask=real, other=0.0))
    return a


@triton.jit
def features_backward(X, weights, points, MP: tl.constexpr, CP: tl.constexpr):
    """From dE * E: gradients of x [ROWS, CP] and of the points [MP, CP]."""
    m = fetch(points, MP, CP)
    by_x = dot(weights, m) - tl.sum(weights, 1)[:, None] * X
    by_points = dot(tl.trans(weights), X) - tl.sum(weights, 0)[:, None] * m
    return by_x, by_points


@triton.jit
def one_plus(G, noise, N: tl.constexpr):
    """I + G / sigma^2.  [N, N]"""
    i = tl.arange(0, N)
    return G / noise + tl.where(i[:, None] == i[None, :], 1.0, 0.0)


@triton.jit
def eliminated(D):
    """L^-T of one block D = L L^T by elimination, column after column, and the pivots.

    The diagonal is carried beside the matrix so that a pivot does not wait for its row; logarithms and
    failures are looked at once, in `judged`.
    """
    r = tl.arange(0, BLOCK)
    X = tl.where(r[:, None] == r[None, :], 1.0, 0.0)
    diagonal = tl.sum(tl.where(r[:, None] == r[None, :], D, 0.0), 0)
    pivots = tl.full((BLOCK,), 1.0, tl.float32)
    for j in range(0, BLOCK):
        here = r == j
        row = tl.sum(tl.where(here[:, None], D, 0.0), 0)  # D is symmetric where it is still used
        column = tl.sum(tl.where(here[None, :], D, 0.0), 1)
        solved = tl.sum(tl.where(here[None, :], X, 0.0), 1)
        pivot = tl.sum(tl.where(here, diagonal, 0.0))
        pivots = tl.where(here, pivot, pivots)
        scale = tl.where(pivot > 0, tl.div_rn(1.0, tl.sqrt_rn(pivot)), float("nan"))
        row = tl.where(r > j, row * scale, 0.0)
        solved = solved * scale
        diagonal = diagonal - row * row
        D = D - (column * scale)[:, None] * row[None, :]
        X = tl.where(here[None, :], solved[:, None], X - solved[:, None] * row[None, :])
    return X, pivots


@triton.jit
def judged(pivots, first, log_det, failed):
    """Add a block's pivots to the log determinant; the first that is not positive fails (1 is the first)."""
    place = first + tl.arange(0, BLOCK) + 1
    bad = tl.min(tl.where(pivots > 0, 2147483647, place))  # false for NaN
    failed = tl.where((failed == 0) & (bad < 2147483647), bad, failed)
    return log_det + tl.sum(tl.log(pivots)), failed


@triton.jit
def root_in_place(R, N: tl.constexpr):
    """A matrix in memory becomes R = L^-1 of its L L^T; returns its log determinant and failed pivot.

    Left-looking by blocks as `inverse_root`: rows of R that are not finished hold columns of L, and what
    is above the diagonal of the matrix is not read again.  A barrier must come before; one is the last.
    """
    i, b = tl.arange(0, N), tl.arange(0, BLOCK)
    log_det, failed = tl.full((), 0.0, tl.float32), tl.full((), 0, tl.int32)
    for J in range(0, N // BLOCK):
        at = J * BLOCK + b
        panel = tl.load(R + i[:, None] * N + at[None, :])  # [N, b] becomes L[:, J]
        D = tl.load(R + at[:, None] * N + at[None, :])  # [b, b]
        row = tl.zeros((BLOCK, N), tl.float32)  # [b, N] becomes R[J, :]
        for K in range(0, J):
            before = K * BLOCK + b
            L_K = tl.load(R + i[:, None] * N + before[None, :], mask=(i >= J * BLOCK)[:, None], other=0.0)
            L_JK = tl.load(R + at[:, None] * N + before[None, :])  # [b, b]
            R_K = tl.load(R + before[:, None] * N + i[None, :])  # [b, N]
            panel -= dot(L_K, tl.trans(L_JK))
            D -= dot(L_JK, tl.trans(L_JK))
            row += dot(L_JK, R_K)
        X, pivots = eliminated(D)
        log_det, failed = judged(pivots, J * BLOCK, log_det, failed)
        panel = dot(panel, X)
        row = -dot(tl.trans(X), row)
        tl.debug_barrier()
        left, right = i < J * BLOCK, i >= (J + 1) * BLOCK
        tl.store(R + i[:, None] * N + at[None, :], panel, mask=right[:, None])
        tl.store(
            R + at[:, None] * N + i[None, :], tl.where(left[None, :], row, 0.0), mask=(left | right)[None, :]
        )
        tl.store(R + at[:, None] * N + at[None, :], tl.trans(X))
        tl.debug_barrier()
    return log_det, failed


@triton.jit
def root_of(B, R, N: tl.constexpr):
    """Write L^-1 of B = L L^T, which may be read when this returns; log det B and the failed pivot, or 0."""
    tl.debug_barrier()  # what was here has been read
    if N == BLOCK:
        X, pivots = eliminated(B)
        log_det, failed = judged(pivots, 0, tl.full((), 0.0, tl.float32), tl.full((), 0, tl.int32))
        store_turned(R, X, N, N)
        tl.debug_barrier()
    else:
        store(R, B, N, N)
        tl.debug_barrier()
        log_det, failed = root_in_place(R, N)
    return log_det, failed


@triton.jit
def turn(to, source, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Write the transpose of a matrix in memory, which may be read when this returns."""
    store_turned(to, fetch(source, ROWS, COLUMNS), ROWS, COLUMNS)
    tl.debug_barrier()


@triton.jit
def note_failure(info, counter, counted, failed):
    """Write which pivot failed; count it where nothing may be read back."""
    tl.store(info, failed)
    if (failed != 0) & (counted != 0):
        tl.atomic_add(counter, 1)


@triton.jit
def sum_columns(
    source, target, i, columns, first, outer, outer_stride, inner,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Columns from `first` on of `outer` times `inner` rows, added in a fixed order, into row i."""
    c = first + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    rows = outer * inner
    for start in range(0, rows, ROWS):
        r = start + tl.arange(0, ROWS)
        at = (
            i * inner * columns
            + (r // inner).to(tl.int64) * outer_stride
            + (r % inner).to(tl.int64) * columns
        )
        inside = (r < rows)[:, None] & (c < columns)[None, :]
        total += tl.sum(tl.load(source + at[:, None] + c[None, :], mask=inside, other=0.0), 0)
    tl.store(target + i * columns + c, total, mask=c < columns)


@triton.jit(do_not_specialize=["inner"])
def splits_kernel(source, target, columns, inner, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Program (s, j): some columns of the sum of a sequence's splits."""
    sum_columns(
        source, target, tl.program_id(0).to(tl.int64), columns, tl.program_id(1) * COLUMNS, 1, 0, inner,
        ROWS, COLUMNS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["outer", "few", "inner"])
def shares_kernel(
    shares, moved, width, outer, outer_stride, inner, squares, turned, side, few, few_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program (set, j): some columns of the sums of the tokens' and of the small matrices' shares."""
    i, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS
    if first < width:
        sum_columns(shares, moved, i, width, first, outer, outer_stride, inner, ROWS, COLUMNS)
    else:
        sum_columns(squares, turned, i, side, first - width, few, few_stride, 1, ROWS, COLUMNS)
