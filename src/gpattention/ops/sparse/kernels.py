"""Triton blocks of the sparse model: tiles of tokens, whitened features, small roots, sums of splits.

E = kappa(x, m),   phi = E W^T,   W = L_m^-1                                             (section 3)
E, phi are zero at padded tokens and in padded columns, W is identity there.

In A B^T the threads read neighbouring rows of B, which share their banks of memory on chip unless B was
turned before it got there: points and W lie in memory beside their transposes.

Triton kernels of the inducing inputs: W = L^-1 of K_mm + delta I = L L^T, and its gradient.

    O = dW W^T = sum over tokens of dphi^T phi, which the small matrices know without looking at tokens
    S = lower triangle of O with half the diagonal,   dK = -1/2 W^T (S + S^T) W
    E = dK * K,   dm_i = 2 sum_j E_ij (m_j - m_i)

All sets are centred on the mean of the first one, as the tokens are.  Points and W lie in memory beside
their transposes, [set, 2, ...], for products that want these.

Triton kernel of the sparse model's roots: R = L^-1 of I + G / sigma^2 = L L^T for G_o, G_k and G_q.

They wait for nothing but the sums over tokens, so each has a program of its own, of few warps: pivots come
one after another, and threads that wait for one another at every pivot make none of them faster.

Triton kernels of the sparse model's sums over tokens (section 12).

    G_o = Phi_o^T Phi_o,  G_k = Psi_k^T Psi_k,  P = Psi_k^T V,  C = Psi_o^T Phi_o,  G_q = Phi_q^T Phi_q

With one set of inducing inputs Psi_o = Phi_o and C = G_o, which is not summed twice.

Triton kernel of the sparse model's small matrices, one program per sequence and head (section 3, 4, 11).

    B = I + G_o / s,  R = L_B^-1,   B_l = I + G_k / s,  R_l = L_Bl^-1,   s = sigma^2  (`roots`)
    T = R_l C R^T / s,   z = R_l P / s ("dual": R_l B_l P),   y = T^T z,   c = R^T y
    N = 2 I - R R^T + T^T T = L_N L_N^T,   R_c = R^T L_N,   R_N = L_N^-1                          (15)

With B_q = I + G_q / s, u = B_q^-1 c and S = R_c R_c^T
    query = -1/2 [quad + D (log det B_q + n log 2 pi s)],   quad = <u, G_q u> / s + |G_q u|^2 / s^2
    key   = -1/2 [|V|^2 / s - |z|^2 + D (log det B_l + n log 2 pi s)]  ("dual": |P|^2 + s |V|^2 first)
    kl    =  1/2 [quad + D (<S - I, I - B_q^-1> + log det B_q - log det(I + R_c^T G_q R_c / s))]  (24)

Kept for the backward pass, per unit of gradient: e = G_q u / s, U_q = d query / d G_q,
U_kl = d kl / d G_q and Q_kl = R (d kl / d S) R^T.  Where the posterior is near the prior the terms of the
last two cancel twice over.  With E = S - I = (T R)^T T R - (I - B^-1)^2, which has no identity left in it,
I - B_q^-1 = B_q^-1 G_q / s and K = (I + G_q S / s)^-1 they are products:
    U_kl = 1/2 [u u^T / s + D B_q^-1 E (I - B_q^-1) E K / s]
    d kl / d S = D/2 (I - B_q^-1) E K G_q / s
where R_I is the inverse root of I + J, J = R_c^T G_q R_c / s, and
    K = R^-1 (R_I R_N)^T R_I R_c^T,   R K G_q R^T / s = R_N^T J R_I^T R_I R_N,   R^-1 = B R^T

A transpose on the right of a product that is written out is another product (`u_t`) or comes turned from
memory; see `blocks`.  Products of larger matrices are all made by one function, which reads both from memory
by rows: for it the transpose of what is at hand is written turned.

Triton kernels of the sparse model's queries: mean and variance from the factors, and their gradients.

h_i = R phi_i,  mean_i = y^T h_i,  var_i = 2 |h_i|^2 - |R^T h_i|^2 + |T h_i|^2 + sigma^2     (15)
dh_i = y dmean_i + 2 dvar_i (2 h_i - R R^T h_i + T^T T h_i),   dphi_i = R^T dh_i + 2 dG_q phi_i
Q = sum_i dvar_i h_i h_i^T,   c = sum_i h_i dmean_i^T     for `small_backward`
INDEPENDENT adds s_q^2 a_i^2 - |phi_i|^2 to var_i, what the inducing values leave open of a query.

Triton kernel of the gradients of the sparse model's small matrices; `small` has the letters.

From the queries come M = sum_i dvar_i phi_i f_i^T and dc = sum_i phi_i dmean_i^T.  (INDEPENDENT: the first is
Y = sum_i dvar_i phi_i phi_i^T, M = Y R_c, and O below has -2 Y more.)  With Q = R M R_N
(= sum_i dvar_i h_i h_i^T for h = R phi) and c' = R dc, both plus the objectives' own,
    X = Q N + N Q - 2 Q + (c' y^T + y c'^T) / 2,   dB = -R^T X R
    dC = R_l^T (2 T Q + z c'^T) R / s,   dP = R_l^T T c' / s ("dual": C R^T c' / s)
    X_l = T Q T^T + (T c' z^T + z c'^T T^T) / 2 ("dual": the first alone),   dB_l = -R_l^T X_l R_l
so that nothing is differentiated through a Cholesky factor.  And what W's gradient needs (`inducing`)
    O = c dc^T + 2 R_c M^T + 2 dG_q G_q + 2 dG_o G_o + dC^T C,   O_l = 2 dG_k G_k + dP P^T + dC C^T
whose traces, queries and keys apart, are the gradients of log s_q and log s_k.  They are summed transposed,
because the transposes on the right of their products then are those that memory holds (`blocks`).  The keys'
trace would be a small difference of terms that grow with the sequence; with R_l G_k R_l^T = s (I - R_l R_l^T)
and P = s R_l^-1 z it is
    2 <X_l R_l, R_l> - 2 <T Q, T> - g_key D l - <T c', z>   ("dual": + <dP, P> instead of the last)

Triton kernel of the gradients of latent inputs, keys and values through the sums over tokens.

    dE_om = Phi_o A_o + Psi_o (dC W_m),   dE_ol = Phi_o (dC^T W_l),   A_o = 2 dG_o W_m
    dE_kl = s_k [Psi_k A_k + V (dP^T W_l)],   dV = Psi_k dP + 2 V d|V|^2,   A_k = 2 dG_k W_l

With one set of inducing inputs the gradient of C = G_o is inside dG_o.

Triton kernels of the Nystrom row sums that normalise sparse attention (section 13).

total_j = sum over keys of kappa(k, l_j),   w = W^T W total,   row_i = kappa(q_i, l) w
d_i = g_i / row_i where it is not clamped,  E_ij = d_i w_j kappa(q_i, l_j),  dw_j = sum_i d_i kappa(q_i, l_j)
dtotal = W^T W dw,   O = (W dw) (W total)^T + its transpose     for `inducing`
"""

import triton
import triton.language as tl
from triton.language import constexpr

from gpattention.ops.tiles import (
    BLOCK,
    FAR,
    centre_of,
    centred,
    exponential,
    fetch,
    head,
    noisy_gram,
    note_failure,
    origin_of,
    rows_of,
    scalar_of,
    spread_of,
    store,
    store_both,
    store_turned,
    turned_exponents,
)

# mypy: disable-error-code="import-not-found,import-untyped,misc,no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201


@triton.jit
def tile(x, i, real, width, WIDTH: constexpr):
    """Rows of real tokens, everything else 0.  [ROWS, WIDTH]"""
    c = tl.arange(0, WIDTH)
    inside = real[:, None] & (c < width)[None, :]
    return tl.load(x[0] + i[:, None] * x[1] + c[None, :], mask=inside, other=0.0)


@triton.jit
def tile_of(x, start, stop, mask, b, h, centre, width, ROWS: constexpr, WIDTH: constexpr):
    """Places of a tile's tokens in the sequence, which of them are real, and the tokens about the centre."""
    i = start + tl.arange(0, ROWS).to(tl.int64)
    real = i < stop
    if mask is not None:
        own, stride = head(mask, b, h)
        real = tl.load(own + i * stride, mask=real, other=0) != 0
    return i, real, tile(x, i, real, width, WIDTH) - centre[None, :]


@triton.jit
def program_place(centres, length, H, N, POOLED: constexpr, CP: constexpr):
    """Of program (s, split): s, split, sequence, head, inducing set and its centre, first token and end."""
    s, split = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    b, h = s // H, s % H
    e = h
    if POOLED:
        e = s
    begin = split * length
    centre = tl.load(centres + e * CP + tl.arange(0, CP))
    return s, split, b, h, e, centre, begin, tl.minimum(begin + length, N)


@triton.jit
def inducing_of(points, W, e, MP: constexpr, CP: constexpr):
    """Points and W of inducing set e, each with its transpose behind it."""
    return points + 2 * e * MP * CP, W + 2 * e * MP * MP


@triton.jit
def store_tile(to, X, i, stop, width, WIDTH: constexpr):
    """Write the rows and channels that exist."""
    c = tl.arange(0, WIDTH)
    inside = (i < stop)[:, None] & (c < width)[None, :]
    tl.store(to[0] + i[:, None] * to[1] + c[None, :], X, mask=inside)


@triton.jit
def fetch_turned(source, ROWS: constexpr, COLUMNS: constexpr):
    """The transpose that lies behind a padded [ROWS, COLUMNS] matrix.  [COLUMNS, ROWS]"""
    return fetch(source + ROWS * COLUMNS, COLUMNS, ROWS)


@triton.jit
def dot(a, b):
    """A B in IEEE float32."""
    return tl.dot(a, b, input_precision="ieee")


@triton.jit(noinline=True)
def product_apart(a, ROWS: constexpr, COLUMNS: constexpr, INNER: constexpr, STEP: constexpr):
    """A B of two matrices in memory, written behind them, by one function however often it is called."""
    b = a + ROWS * INNER
    i, j, step = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, STEP)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, INNER, STEP):
        at = start + step
        A = tl.load(a + i[:, None] * INNER + at[None, :])
        B = tl.load(b + at[:, None] * COLUMNS + j[None, :])
        total = tl.dot(A, B, total, input_precision="ieee")
    store(b + INNER * COLUMNS, total, ROWS, COLUMNS)
    tl.debug_barrier()


@triton.jit
def mul(a, b, scratch):
    """A B of small matrices: written out where all but one of its axes are one block, else apart from here.

    A product of 32 x 32 matrices is half a thousand instructions where it is written out.  Two dozen of them
    are more than a multiprocessor keeps at hand, and their operands more than there are registers.
    """
    M: constexpr = a.shape[0]
    K: constexpr = a.shape[1]
    N: constexpr = b.shape[1]
    if (M <= BLOCK) + (K <= BLOCK) + (N <= BLOCK) >= 2:
        found = dot(a, b)
    else:
        tl.debug_barrier()  # what was here has been read
        store(scratch, a, M, K)
        store(scratch + M * K, b, K, N)
        tl.debug_barrier()
        product_apart(scratch, M, N, K, min(K, 2 * BLOCK))
        found = fetch(scratch + M * K + K * N, M, N)
    return found


@triton.jit
def mul_turned(found, b_t, a_t, scratch):
    """(A B)^T of an A B that was found: where products are written out another one, B^T A^T.

    There it would be read by columns.  Where they are apart, it is written turned to where that reads it.
    """
    M: constexpr = b_t.shape[0]
    K: constexpr = b_t.shape[1]
    N: constexpr = a_t.shape[1]
    if (M <= BLOCK) + (K <= BLOCK) + (N <= BLOCK) >= 2:
        turned = mul(b_t, a_t, scratch)
    else:
        turned = tl.trans(found)
    return turned


@triton.jit
def kernel_values(X, points_t, real, count, MP: constexpr):
    """kappa(x, m), zero at padding.  [ROWS, MP]"""
    # A token near a point is as far from the origin as that: only where points are far do tokens matter.
    far = tl.max(tl.sum(points_t * points_t, 0)) > 0.25 * FAR
    inside = real[:, None] & (tl.arange(0, MP) < count)[None, :]
    return tl.where(inside, exponential(turned_exponents(X, points_t, far)), 0.0)


@triton.jit
def amplitudes(scale, log_amplitude, b, h, i, real, ROWS: constexpr):
    """s_q a_i of a tile's queries.  [ROWS]"""
    a = scale + tl.zeros((ROWS,), tl.float32)
    if log_amplitude is not None:
        own, stride = head(log_amplitude, b, h)
        a *= exponential(tl.load(own + i * stride, mask=real, other=0.0))
    return a


@triton.jit
def features_backward(X, weights, points, MP: constexpr, CP: constexpr):
    """From dE * E: gradients of x [ROWS, CP] and of the points [MP, CP]."""
    m = fetch(points, MP, CP)
    by_x = dot(weights, m) - tl.sum(weights, 1)[:, None] * X
    by_points = dot(tl.trans(weights), X) - tl.sum(weights, 0)[:, None] * m
    return by_x, by_points


@triton.jit
def one_plus(G, noise, N: constexpr):
    """I + G / sigma^2.  [N, N]"""
    i = tl.arange(0, N)
    return G / noise + tl.where(i[:, None] == i[None, :], 1.0, 0.0)


@triton.jit
def eliminated(D):
    """L^-T of one block D = L L^T by elimination, column after column, and the pivots.

    The diagonal is carried beside the matrix so that a pivot does not wait for its row; logarithms and
    failures are looked at once, in `checked_pivots`.
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
def checked_pivots(pivots, first, log_det, failed):
    """Add a block's pivots to the log determinant; the first that is not positive fails (1 is the first)."""
    place = first + tl.arange(0, BLOCK) + 1
    bad = tl.min(tl.where(pivots > 0, 2147483647, place))  # false for NaN
    failed = tl.where((failed == 0) & (bad < 2147483647), bad, failed)
    return log_det + tl.sum(tl.log(pivots)), failed


@triton.jit
def root_in_place(R, N: constexpr):
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
        log_det, failed = checked_pivots(pivots, J * BLOCK, log_det, failed)
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
def root_of(B, R, N: constexpr):
    """Write L^-1 of B = L L^T, which may be read when this returns; log det B and the failed pivot, or 0."""
    tl.debug_barrier()  # what was here has been read
    if N == BLOCK:
        X, pivots = eliminated(B)
        log_det, failed = checked_pivots(pivots, 0, tl.full((), 0.0, tl.float32), tl.full((), 0, tl.int32))
        store_turned(R, X, N, N)
        tl.debug_barrier()
    else:
        store(R, B, N, N)
        tl.debug_barrier()
        log_det, failed = root_in_place(R, N)
    return log_det, failed


@triton.jit
def turn(to, source, ROWS: constexpr, COLUMNS: constexpr):
    """Write the transpose of a matrix in memory, which may be read when this returns."""
    store_turned(to, fetch(source, ROWS, COLUMNS), ROWS, COLUMNS)
    tl.debug_barrier()


@triton.jit
def factor_turned(source, scratch, ROWS: constexpr, COLUMNS: constexpr):
    """The transpose of a factor, for the right of a product with as many rows.  [COLUMNS, ROWS]"""
    if ROWS <= BLOCK:  # which is written out
        tl.debug_barrier()  # what was here has been read
        turn(scratch, source, ROWS, COLUMNS)
        found = fetch(scratch, COLUMNS, ROWS)
    else:
        found = tl.trans(fetch(source, ROWS, COLUMNS))
    return found


@triton.jit
def sum_columns(
    source, target, i, columns, first, outer, outer_stride, inner,
    ROWS: constexpr, COLUMNS: constexpr,
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
def splits_kernel(source, target, columns, inner, ROWS: constexpr, COLUMNS: constexpr):
    """Program (s, j): some columns of the sum of a sequence's splits."""
    sum_columns(
        source, target, tl.program_id(0).to(tl.int64), columns, tl.program_id(1) * COLUMNS, 1, 0, inner, ROWS,
        COLUMNS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["outer", "few", "inner"])
def shares_kernel(
    shares, moved, width, outer, outer_stride, inner, squares, turned, side, few, few_stride,
    ROWS: constexpr, COLUMNS: constexpr,
):  # fmt: skip
    """Program (set, j): some columns of the sums of the tokens' and of the small matrices' shares."""
    i, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS
    if first < width:
        sum_columns(shares, moved, i, width, first, outer, outer_stride, inner, ROWS, COLUMNS)
    else:
        sum_columns(squares, turned, i, side, first - width, few, few_stride, 1, ROWS, COLUMNS)


@triton.jit
def inducing_root(
    x, centre, points, W, info, counter, counted, delta, count, C,
    MP: constexpr, CP: constexpr,
):  # fmt: skip
    """Write one set's centred points and W, and behind each its transpose."""
    real = tl.arange(0, MP) < count
    X = centred(rows_of(x, real, C, MP, CP), centre, real)
    store_both(points, points + MP * CP, X, MP, CP)
    X = centred(X, origin_of(X, real), real)
    K = noisy_gram(X, tl.full((MP,), 1.0, tl.float32), delta, real, MP)
    _, failed = root_of(K, W, MP)
    turn(W + MP * MP, W, MP, MP)
    note_failure(info, counter, counted, failed)


@triton.jit
def shared_origin(X, first, Y, second):
    """`origin_of` the first set, to which moving the second rounds nothing either.  [WIDTH]"""
    centre = centre_of(X, first)
    X, Y = centred(X, centre, first), centred(Y, centre, second)
    most = tl.maximum(tl.max(tl.abs(X), 0), tl.max(tl.abs(Y), 0))
    far = tl.maximum(spread_of(X), spread_of(Y)) > FAR
    return tl.where(2.0 * most > tl.abs(centre), tl.where(far, 0.0, centre), centre)


@triton.jit(do_not_specialize=["counted", "programs"])
def inducing_kernel(
    m, l,  # noqa: E741
    centres, points_m, points_l, W_m, W_l, info, counter, counted, delta,
    programs, H, count_m, count_l, C,
    MP: constexpr, LP: constexpr, CP: constexpr,
):  # fmt: skip
    """Program (i, 0): set i of the first kind; (i, 1): of the second, where there is one."""
    i, which = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, h = i // H, i % H
    m, l = head(m, b, h), head(l, b, h)  # noqa: E741
    first, second = tl.arange(0, MP) < count_m, tl.arange(0, LP) < count_l
    points = rows_of(m, first, C, MP, CP)
    centre = shared_origin(points, first, rows_of(l, second, C, LP, CP), second)
    info += which * programs + i
    if which == 0:
        tl.store(centres + i * CP + tl.arange(0, CP), centre)
        inducing_root(
            m, centre, points_m + 2 * i * MP * CP, W_m + 2 * i * MP * MP, info, counter, counted, delta,
            count_m, C, MP, CP,
        )  # fmt: skip
    else:
        inducing_root(
            l, centre, points_l + 2 * i * LP * CP, W_l + 2 * i * LP * LP, info, counter, counted, delta,
            count_l, C, LP, CP,
        )  # fmt: skip


@triton.jit
def points_backward(points, W, moved, turned, grad, scratch, delta, count, C, MP: constexpr, CP: constexpr):
    """Write one set's gradient: the features' own part, summed over tokens, and that through W."""
    i, c = tl.arange(0, MP), tl.arange(0, CP)
    real = i < count
    S = fetch(turned, MP, MP)
    S = tl.where(i[:, None] > i[None, :], S, tl.where(i[:, None] == i[None, :], 0.5 * S, 0.0))
    root = fetch(W, MP, MP)
    by_K = mul(tl.trans(root), mul(S + tl.trans(S), root, scratch), scratch)
    X = fetch(points, MP, CP)
    X = centred(X, origin_of(X, real), real)
    K = noisy_gram(X, tl.full((MP,), 1.0, tl.float32), delta, real, MP)
    weights = tl.where((i[:, None] != i[None, :]) & real[:, None] & real[None, :], -by_K * K, 0.0)
    found = fetch(moved, MP, CP) + mul(weights, X, scratch) - tl.sum(weights, 1)[:, None] * X
    tl.store(grad + i[:, None] * C + c[None, :], found, mask=real[:, None] & (c < C)[None, :])


@triton.jit(do_not_specialize=["batch"])
def inducing_backward_kernel(
    points_m, points_l, W_m, W_l, moved_m, moved_l, turned_m, turned_l, grad_m, grad_l, scratch, delta,
    scalars, totals, batch, H, count_m, count_l, C,
    SHARED: constexpr, BATCH: constexpr, MP: constexpr, LP: constexpr, CP: constexpr, SCRATCH: constexpr,
):  # fmt: skip
    """Program (i, which) as forward; with SHARED also head i's sums of scalars [3, B, H] over the batch."""
    i, which = tl.program_id(0).to(tl.int64), tl.program_id(1)
    scratch += (2 * i + which) * SCRATCH
    if which == 0:
        points_backward(
            points_m + 2 * i * MP * CP, W_m + 2 * i * MP * MP, moved_m + i * MP * CP, turned_m + i * MP * MP,
            grad_m + i * count_m * C, scratch, delta, count_m, C, MP, CP,
        )  # fmt: skip
        if SHARED:
            for which_scalar in range(0, 3):
                total = tl.zeros((BATCH,), tl.float32)
                for start in range(0, batch, BATCH):
                    b = start + tl.arange(0, BATCH)
                    at = (which_scalar * batch + b).to(tl.int64) * H + i
                    total += tl.load(scalars + at, mask=b < batch, other=0.0)
                tl.store(totals + which_scalar * H + i, tl.sum(total))
    else:
        points_backward(
            points_l + 2 * i * LP * CP, W_l + 2 * i * LP * LP, moved_l + i * LP * CP, turned_l + i * LP * LP,
            grad_l + i * count_l * C, scratch, delta, count_l, C, LP, CP,
        )  # fmt: skip


@triton.jit(do_not_specialize=["counted", "programs"])
def roots_kernel(
    sums, noise, factors, info, counter, counted, programs, H,
    MP: constexpr, LP: constexpr, SUM: constexpr, FACTOR: constexpr,
):  # fmt: skip
    """Program (i, which): root and log determinant for G_o (0), G_k (1) or G_q (2)."""
    i, which = tl.program_id(0).to(tl.int64), tl.program_id(1)
    s = scalar_of(noise, i // H, i % H)
    sums += i * SUM.SIZE
    factors += i * FACTOR.SIZE
    info += i
    if which == 1:
        log_det, failed = root_of(one_plus(fetch(sums + SUM.K, LP, LP), s, LP), factors + FACTOR.RL, LP)
        info += programs
    else:
        at, to = 0, 0
        if which == 2:
            at, to = SUM.Q, FACTOR.RQ
            info += 3 * programs
        log_det, failed = root_of(one_plus(fetch(sums + at, MP, MP), s, MP), factors + to, MP)
    tl.store(factors + FACTOR.DET + which, log_det)
    note_failure(info, counter, counted, failed)


@triton.jit
def latent_sums(
    o, mask, b, h, begin, stop, centre, points_m, points_l, W_m, W_l, out, count_m, count_l, C,
    TWO: constexpr, ROWS: constexpr, MP: constexpr, LP: constexpr, CP: constexpr, SUM_C: constexpr,
):  # fmt: skip
    """G_o and, for two sets, C of the tokens from begin to stop."""
    G_o = tl.zeros((MP, MP), tl.float32)
    C_lm = tl.zeros((LP, MP), tl.float32)
    for start in range(begin, stop, ROWS):
        _, real, X = tile_of(o, start, stop, mask, b, h, centre, C, ROWS, CP)
        E = kernel_values(X, fetch_turned(points_m, MP, CP), real, count_m, MP)
        phi = dot(E, fetch_turned(W_m, MP, MP))
        G_o += dot(tl.trans(phi), phi)
        if TWO:
            E_l = kernel_values(X, fetch_turned(points_l, LP, CP), real, count_l, LP)
            C_lm += dot(tl.trans(dot(E_l, fetch_turned(W_l, LP, LP))), phi)
    store(out, G_o, MP, MP)
    if TWO:
        store(out + SUM_C, C_lm, LP, MP)


@triton.jit
def key_sums(
    k, v, mask, b, h, begin, stop, centre, points, W, scale, out, count, C, D,
    ROWS: constexpr, LP: constexpr, CP: constexpr, DP: constexpr, SUM_K: constexpr, SUM_P: constexpr,
    SUM_N: constexpr,
):  # fmt: skip
    """G_k, P, |V|^2 and the number of real keys from begin to stop."""
    G_k = tl.zeros((LP, LP), tl.float32)
    P = tl.zeros((LP, DP), tl.float32)
    squares = tl.zeros((ROWS,), tl.float32)
    found = tl.zeros((ROWS,), tl.float32)
    for start in range(begin, stop, ROWS):
        i, real, X = tile_of(k, start, stop, mask, b, h, centre, C, ROWS, CP)
        E = kernel_values(X, fetch_turned(points, LP, CP), real, count, LP)
        psi = scale * dot(E, fetch_turned(W, LP, LP))
        V = tile(v, i, real, D, DP)
        psi_t = tl.trans(psi)
        G_k += dot(psi_t, psi)
        P += dot(psi_t, V)
        squares += tl.sum(V * V, 1)
        found += real.to(tl.float32)
    store(out + SUM_K, G_k, LP, LP)
    store(out + SUM_P, P, LP, DP)
    tl.store(out + SUM_N, tl.sum(squares))
    tl.store(out + SUM_N + 1, tl.sum(found))


@triton.jit
def query_sums(
    q, mask, b, h, begin, stop, centre, points, W, scale, log_amplitude, out, count, C,
    ROWS: constexpr, MP: constexpr, CP: constexpr, SUM_Q: constexpr, SUM_N: constexpr,
):  # fmt: skip
    """G_q and the number of real queries from begin to stop."""
    G_q = tl.zeros((MP, MP), tl.float32)
    found = tl.zeros((ROWS,), tl.float32)
    for start in range(begin, stop, ROWS):
        i, real, X = tile_of(q, start, stop, mask, b, h, centre, C, ROWS, CP)
        a = amplitudes(scale, log_amplitude, b, h, i, real, ROWS)
        E = kernel_values(X, fetch_turned(points, MP, CP), real, count, MP)
        phi = a[:, None] * dot(E, fetch_turned(W, MP, MP))
        G_q += dot(tl.trans(phi), phi)
        found += real.to(tl.float32)
    store(out + SUM_Q, G_q, MP, MP)
    tl.store(out + SUM_N + 2, tl.sum(found))


@triton.jit(do_not_specialize=["splits"])
def sums_kernel(
    q, k, o, v, mask, query_mask, scale_q, scale_k, log_amplitude, centres, points_m, points_l, W_m, W_l,
    sums, splits, length, query_length, H, NQ, N, count_m, count_l, C, D,
    TWO: constexpr, POOLED: constexpr, ROWS: constexpr, MP: constexpr, LP: constexpr, CP: constexpr,
    DP: constexpr, SUM: constexpr,
):  # fmt: skip
    """Program (s, split, role): the sums of latent inputs (0), keys (1) or queries (2) of one split."""
    s, split, b, h, e, centre, begin, stop = program_place(centres, length, H, N, POOLED, CP)
    role = tl.program_id(2)
    out = sums + (s * splits + split) * SUM.SIZE
    points_m, W_m = inducing_of(points_m, W_m, e, MP, CP)
    points_l, W_l = inducing_of(points_l, W_l, e, LP, CP)
    if role == 0:
        latent_sums(
            head(o, b, h), mask, b, h, begin, stop, centre, points_m, points_l, W_m, W_l, out, count_m,
            count_l, C, TWO, ROWS, MP, LP, CP, SUM.C,
        )  # fmt: skip
    elif role == 1:
        key_sums(
            head(k, b, h), head(v, b, h), mask, b, h, begin, stop, centre, points_l, W_l,
            scalar_of(scale_k, b, h), out, count_l, C, D, ROWS, LP, CP, DP, SUM.K, SUM.P, SUM.N,
        )  # fmt: skip
    else:
        begin = split * query_length
        query_sums(
            head(q, b, h), query_mask, b, h, begin, tl.minimum(begin + query_length, NQ), centre, points_m,
            W_m, scalar_of(scale_q, b, h), log_amplitude, out, count_m, C, ROWS, MP, CP, SUM.Q, SUM.N,
        )  # fmt: skip


_LOG_2_PI = tl.constexpr(1.8378770664093453)


@triton.jit
def covariance_root(R, R_t, T, to_N, to_R_N, scratch, N: constexpr):
    """Write N and R_N; R_c, its transpose and the failed pivot.  [N, N], [N, N], []"""
    i = tl.arange(0, N)
    inner = mul(tl.trans(T), T, scratch) - mul(R, R_t, scratch) + tl.where(i[:, None] == i[None, :], 2.0, 0.0)
    store(to_N, inner, N, N)
    _, failed = root_of(inner, to_R_N, N)
    turn(scratch, to_R_N, N, N)
    L_N = mul(inner, fetch(scratch, N, N), scratch)  # N L_N^-T
    R_c = mul(tl.trans(R), L_N, scratch)
    return R_c, mul_turned(R_c, tl.trans(L_N), R, scratch), failed


@triton.jit
def divergence(
    G, G_o, R, R_t, R_q, R_c, R_c_t, R_N, T, u, u_t, s, quadratic, log_det, D, scratch, N: constexpr
):  # fmt: skip
    """kl, U_kl, Q_kl, and the failed pivot.  [], [N, N], [N, N], []"""
    i = tl.arange(0, N)
    eye = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    J = mul(tl.trans(R_c), mul(G, R_c, scratch), scratch) / s
    log_det_inner, failed = root_of(J + eye, scratch, N)
    turn(scratch + N * N, scratch, N, N)
    R_I, R_I_t = fetch(scratch, N, N), fetch(scratch + N * N, N, N)
    shrink = mul(tl.trans(R_q), mul(R_q, G, scratch), scratch) / s  # I - B_q^-1
    X = mul(tl.trans(R), mul(R, G_o, scratch), scratch) / s  # I - B^-1
    half = mul(T, R, scratch)
    excess = mul(tl.trans(half), half, scratch) - mul(X, X, scratch)  # E
    kl = 0.5 * (quadratic + D * (tl.sum(excess * shrink) + log_det - log_det_inner))
    L_B = mul(one_plus(G_o, s, N), R_t, scratch)  # R^-1
    inverse = mul(tl.trans(R_N), R_I_t, scratch)  # (R_I R_N)^T
    seen = mul(mul(L_B, inverse, scratch), mul(R_I, R_c_t, scratch), scratch)  # (I + G_q S / s)^-1
    moved = mul(shrink, excess, scratch)
    by_G = mul(mul(tl.trans(R_q), mul(R_q, excess, scratch), scratch), mul(moved, seen, scratch), scratch)
    by_G = 0.5 * (D * by_G + mul(u, u_t, scratch)) / s
    by_S = mul(tl.trans(R_N), mul(mul(J, R_I_t, scratch), mul(R_I, R_N, scratch), scratch), scratch)
    by_S = mul(mul(R, mul(moved, L_B, scratch), scratch), by_S, scratch)
    return kl, 0.5 * (by_G + tl.trans(by_G)), 0.25 * D * (by_S + tl.trans(by_S)), failed


@triton.jit(do_not_specialize=["counted", "programs"])
def small_kernel(
    sums, W, noise, factors, query, key, kl, scratch, info, counter, counted, programs, H, D,
    TWO: constexpr, POOLED: constexpr, DUAL: constexpr, DENSITY: constexpr, KL: constexpr, TRAIN: constexpr,
    MP: constexpr, LP: constexpr, DP: constexpr, SCRATCH: constexpr, SUM: constexpr, FACTOR: constexpr,
):  # fmt: skip
    """Mean coefficients, covariance root and objectives of one sequence and head from its sums and roots."""
    i = tl.program_id(0).to(tl.int64)
    s = scalar_of(noise, i // H, i % H)
    sums += i * SUM.SIZE
    factors += i * FACTOR.SIZE
    scratch += i * SCRATCH
    if POOLED:
        W += 2 * i * MP * MP
    else:
        W += 2 * (i % H) * MP * MP
    R, R_t = fetch(factors, MP, MP), factor_turned(factors, scratch, MP, MP)
    R_l = fetch(factors + FACTOR.RL, LP, LP)
    P = fetch(sums + SUM.P, LP, DP)
    if DUAL:
        z = mul(R_l, P + mul(fetch(sums + SUM.K, LP, LP), P, scratch) / s, scratch)
    else:
        z = mul(R_l, P, scratch) / s
    if TWO:
        C = fetch(sums + SUM.C, LP, MP)
    else:
        C = fetch(sums, MP, MP)
    T = mul(R_l, mul(C, R_t, scratch), scratch) / s
    y = mul(tl.trans(T), z, scratch)
    c = mul(tl.trans(R), y, scratch)
    if TRAIN:
        store(factors + FACTOR.T, T, LP, MP)
        store_turned(factors + FACTOR.YT, y, MP, DP)
        store(factors + FACTOR.Z, z, LP, DP)
        store(factors + FACTOR.CW, mul(tl.trans(c), fetch(W, MP, MP), scratch), DP, MP)
    R_c, R_c_t, failed = covariance_root(R, R_t, T, factors + FACTOR.N, factors + FACTOR.RN, scratch, MP)
    note_failure(info + 2 * programs + i, counter, counted, failed)
    store(factors + FACTOR.C, c, MP, DP)
    store(factors + FACTOR.RC, R_c, MP, MP)
    if TRAIN:
        store(factors + FACTOR.RW, mul(R_c_t, fetch(W, MP, MP), scratch), MP, MP)
    if DENSITY | KL:
        G_q, R_q = fetch(sums + SUM.Q, MP, MP), fetch(factors + FACTOR.RQ, MP, MP)
        log_det = tl.load(factors + FACTOR.DET + 2)
        half = mul(R_q, c, scratch)
        u = mul(tl.trans(R_q), half, scratch)
        u_t = mul_turned(u, tl.trans(half), R_q, scratch)
        e = mul(G_q, u, scratch) / s
        quadratic = tl.sum(u * e) + tl.sum(e * e)
        store(factors + FACTOR.E, e, MP, DP)
        if DENSITY:
            constant = _LOG_2_PI + tl.log(s)
            keys, queries = tl.load(sums + SUM.N + 1), tl.load(sums + SUM.N + 2)
            squares = tl.load(sums + SUM.N)
            if DUAL:
                cost = tl.sum(P * P) + s * squares
            else:
                cost = squares / s - tl.sum(z * z)
            log_det_l = tl.load(factors + FACTOR.DET + 1)
            tl.store(query + i, -0.5 * (quadratic + D * (log_det + queries * constant)))
            tl.store(key + i, -0.5 * (cost + D * (log_det_l + keys * constant)))
            if TRAIN:
                by_G = -0.5 * (mul(u, u_t, scratch) + D * mul(tl.trans(R_q), R_q, scratch)) / s
                tl.debug_barrier()  # R_q has been read
                store(factors + FACTOR.UQ, by_G, MP, MP)
                store(factors + FACTOR.UQW, mul(by_G, fetch(W, MP, MP), scratch), MP, MP)
        if KL:
            R_N = fetch(factors + FACTOR.RN, MP, MP)
            value, by_G, by_S, failed = divergence(
                G_q, fetch(sums, MP, MP), R, R_t, R_q, R_c, R_c_t, R_N, T, u, u_t, s, quadratic, log_det, D,
                scratch, MP,
            )  # fmt: skip
            note_failure(info + 4 * programs + i, counter, counted, failed)
            tl.store(kl + i, value)
            if TRAIN:
                tl.debug_barrier()  # R_q has been read
                store(factors + FACTOR.UK, by_G, MP, MP)
                store(factors + FACTOR.UKW, mul(by_G, fetch(W, MP, MP), scratch), MP, MP)
                store(factors + FACTOR.QK, by_S, MP, MP)


@triton.jit
def rows_kernel(
    q, query_mask, noise, scale_q, log_amplitude, centres, points, W, factors, mean, variance, length, H, NQ,
    count, C, D,
    POOLED: constexpr, INCLUDE: constexpr, INDEPENDENT: constexpr, ROWS: constexpr, MP: constexpr,
    CP: constexpr, DP: constexpr, FACTOR: constexpr,
):  # fmt: skip
    """Program (s, split): mean and variance of the queries of one split."""
    s, _, b, h, e, centre, begin, stop = program_place(centres, length, H, NQ, POOLED, CP)
    scale, sigma = scalar_of(scale_q, b, h), scalar_of(noise, b, h)
    q, mean = head(q, b, h), head(mean, b, h)
    factors += s * FACTOR.SIZE
    points, W = inducing_of(points, W, e, MP, CP)
    for start in range(begin, stop, ROWS):
        i, real, X = tile_of(q, start, stop, query_mask, b, h, centre, C, ROWS, CP)
        a = amplitudes(scale, log_amplitude, b, h, i, real, ROWS)
        E = kernel_values(X, fetch_turned(points, MP, CP), real, count, MP)
        phi = a[:, None] * dot(E, fetch_turned(W, MP, MP))
        store_tile(mean, dot(phi, fetch(factors + FACTOR.C, MP, DP)), i, stop, D, DP)
        f = dot(phi, fetch(factors + FACTOR.RC, MP, MP))
        found = tl.sum(f * f, 1)
        if INCLUDE:
            found += sigma
        if INDEPENDENT:  # never negative but for rounding
            found += tl.maximum(a * a - tl.sum(phi * phi, 1), 0.0)
        tl.store(variance + s * NQ + i, tl.where(real, found, 0.0), mask=i < stop)


@triton.jit(do_not_specialize=["splits"])
def rows_backward_kernel(
    q, query_mask, scale_q, log_amplitude, centres, points, W, factors, by_mean, by_variance, by_query, by_kl,
    grad_q, grad_log, sums, shares, splits, length, H, NQ, count, C, D,
    POOLED: constexpr, INDEPENDENT: constexpr, ROWS: constexpr, MP: constexpr, CP: constexpr, DP: constexpr,
    FACTOR: constexpr, ROW: constexpr,
):  # fmt: skip
    """Program (s, split): gradients of one split's queries and amplitudes, and its sums."""
    s, split, b, h, e, centre, begin, stop = program_place(centres, length, H, NQ, POOLED, CP)
    scale = scalar_of(scale_q, b, h)
    q, grad_q = head(q, b, h), head(grad_q, b, h)
    factors += s * FACTOR.SIZE
    points, W = inducing_of(points, W, e, MP, CP)
    g_query, g_kl = 0.0, 0.0
    if by_query is not None:
        g_query = scalar_of(by_query, b, h)
    if by_kl is not None:
        g_kl = scalar_of(by_kl, b, h)
    M, by_c = tl.zeros((MP, MP), tl.float32), tl.zeros((MP, DP), tl.float32)
    by_m, weight = tl.zeros((MP, CP), tl.float32), tl.zeros((ROWS,), tl.float32)
    prior = tl.zeros((ROWS,), tl.float32)
    for start in range(begin, stop, ROWS):
        i, real, X = tile_of(q, start, stop, query_mask, b, h, centre, C, ROWS, CP)
        a = amplitudes(scale, log_amplitude, b, h, i, real, ROWS)
        E = kernel_values(X, fetch_turned(points, MP, CP), real, count, MP)
        phi = a[:, None] * dot(E, fetch_turned(W, MP, MP))
        by_E, by_log = tl.zeros((ROWS, MP), tl.float32), tl.zeros((ROWS,), tl.float32)
        if by_mean is not None:
            g = tile(head(by_mean, b, h), i, real, D, DP)
            by_c += dot(tl.trans(phi), g)
            by_E += dot(g, fetch(factors + FACTOR.CW, DP, MP))
            if grad_log is not None:
                by_log += tl.sum(g * dot(phi, fetch(factors + FACTOR.C, MP, DP)), 1)
        if by_variance is not None:
            w = tl.load(by_variance + s * NQ + i, mask=real, other=0.0)
            f = dot(phi, fetch(factors + FACTOR.RC, MP, MP))
            weight += w
            by_log += 2.0 * w * tl.sum(f * f, 1)
            f = w[:, None] * f
            by_E += 2.0 * dot(f, fetch(factors + FACTOR.RW, MP, MP))
            if INDEPENDENT:
                by_log += 2.0 * w * (a * a - tl.sum(phi * phi, 1))
                prior += w * a * a
                weighted = w[:, None] * phi
                M += dot(tl.trans(phi), weighted)  # before R_c, which `small_backward` puts to it
                by_E -= 2.0 * dot(weighted, fetch(W, MP, MP))
            else:
                M += dot(tl.trans(phi), f)
        if by_query is not None:
            by_E += 2.0 * g_query * dot(phi, fetch(factors + FACTOR.UQW, MP, MP))
            if grad_log is not None:
                by_log += 2.0 * g_query * tl.sum(phi * dot(phi, fetch(factors + FACTOR.UQ, MP, MP)), 1)
        if by_kl is not None:
            by_E += 2.0 * g_kl * dot(phi, fetch(factors + FACTOR.UKW, MP, MP))
            if grad_log is not None:
                by_log += 2.0 * g_kl * tl.sum(phi * dot(phi, fetch(factors + FACTOR.UK, MP, MP)), 1)
        if grad_log is not None:
            tl.store(grad_log + s * NQ + i, by_log, mask=i < stop)
        by_x, moved = features_backward(X, a[:, None] * by_E * E, points, MP, CP)
        by_m += moved
        store_tile(grad_q, by_x, i, stop, C, CP)
    sums += (s * splits + split) * ROW.SIZE
    if by_variance is not None:
        store(sums, M, MP, MP)
    if by_mean is not None:
        store(sums + ROW.C, by_c, MP, DP)
    tl.store(sums + ROW.N, tl.sum(weight))
    if INDEPENDENT:
        tl.store(sums + ROW.N + 1, tl.sum(prior))
    store(shares + (s * splits + split) * MP * CP, by_m, MP, CP)


@triton.jit
def trace(X, N: constexpr):
    """Sum of the diagonal.  []"""
    i = tl.arange(0, N)
    return tl.sum(tl.where(i[:, None] == i[None, :], X, 0.0))


@triton.jit
def small_backward_kernel(
    sums, factors, rows, W_m, W_l, noise, scale_q, scale_k, by_query, by_key, by_kl, adjoints, turned_m,
    turned_l, grad_noise, grad_scale_q, grad_scale_k, scratch, H, D,
    TWO: constexpr, POOLED: constexpr, DUAL: constexpr, INCLUDE: constexpr, INDEPENDENT: constexpr,
    MEAN: constexpr, VARIANCE: constexpr, MP: constexpr, LP: constexpr, DP: constexpr, SCRATCH: constexpr,
    SUM: constexpr, FACTOR: constexpr, ROW: constexpr, BACK: constexpr,
):  # fmt: skip
    """Gradients of the sums over tokens, times W, and of sigma^2 and the amplitudes."""
    i = tl.program_id(0).to(tl.int64)
    b, h = i // H, i % H
    e = h
    if POOLED:
        e = i
    s = scalar_of(noise, b, h)
    sums += i * SUM.SIZE
    factors += i * FACTOR.SIZE
    rows += i * ROW.SIZE
    adjoints += i * BACK.SIZE
    scratch += i * SCRATCH
    W_m += 2 * e * MP * MP
    W_l += 2 * e * LP * LP
    R = fetch(factors, MP, MP)
    T, z = fetch(factors + FACTOR.T, LP, MP), fetch(factors + FACTOR.Z, LP, DP)
    by_noise, g_query, g_key, g_kl = 0.0, 0.0, 0.0, 0.0
    Q, by_c = tl.zeros((MP, MP), tl.float32), tl.zeros((MP, DP), tl.float32)
    turned = tl.zeros((MP, MP), tl.float32)  # O^T
    by_prior = 0.0
    if MEAN:
        by_c += fetch(rows + ROW.C, MP, DP)
        turned += mul(by_c, factor_turned(factors + FACTOR.C, scratch, MP, DP), scratch)
    if VARIANCE:
        M = fetch(rows, MP, MP)
        if INDEPENDENT:
            turned -= 2.0 * M
            by_prior += 2.0 * tl.load(rows + ROW.N + 1)
            M = mul(M, fetch(factors + FACTOR.RC, MP, MP), scratch)
        turned += 2.0 * mul(M, factor_turned(factors + FACTOR.RC, scratch, MP, MP), scratch)
        half = mul(mul(R, M, scratch), fetch(factors + FACTOR.RN, MP, MP), scratch)
        Q += 0.5 * (half + tl.trans(half))
        if INCLUDE:
            by_noise += tl.load(rows + ROW.N)
    if by_query is not None:
        g_query = scalar_of(by_query, b, h)
        turn = mul(fetch(sums + SUM.Q, MP, MP), fetch(factors + FACTOR.UQ, MP, MP), scratch)
        turned += 2.0 * g_query * turn
        by_noise -= g_query * (trace(turn, MP) + 0.5 * D * tl.load(sums + SUM.N + 2)) / s
    if by_kl is not None:
        g_kl = scalar_of(by_kl, b, h)
        turn = mul(fetch(sums + SUM.Q, MP, MP), fetch(factors + FACTOR.UK, MP, MP), scratch)
        turned += 2.0 * g_kl * turn
        by_noise -= g_kl * trace(turn, MP) / s
        Q += g_kl * fetch(factors + FACTOR.QK, MP, MP)
    if (by_query is not None) or (by_kl is not None):
        by_c += (g_kl - g_query) * fetch(factors + FACTOR.E, MP, DP)
    if by_key is not None:
        g_key = scalar_of(by_key, b, h)
    by_log_scale = trace(turned, MP) + by_prior
    tl.store(grad_scale_q + i, by_log_scale / scalar_of(scale_q, b, h))

    c = mul(R, by_c, scratch)
    c_t = mul_turned(c, tl.trans(by_c), factor_turned(factors, scratch, MP, MP), scratch)
    half = mul(c, fetch(factors + FACTOR.YT, DP, MP), scratch)
    X = 0.5 * (half + tl.trans(half))
    white = mul(z, c_t, scratch)  # [LP, MP]
    u = mul(T, c, scratch)  # [LP, DP]
    X_l = tl.zeros((LP, LP), tl.float32)
    by_scale, held = 0.0, tl.zeros((LP,), tl.float32) + 0.5 * g_key * D  # taken off row by row, below
    if VARIANCE or (by_kl is not None):
        QN = mul(Q, fetch(factors + FACTOR.N, MP, MP), scratch)
        X += QN + tl.trans(QN) - 2.0 * Q
        TQ = mul(T, Q, scratch)
        white += 2.0 * TQ
        X_l += mul(TQ, factor_turned(factors + FACTOR.T, scratch, LP, MP), scratch)
        held += tl.sum(TQ * T, axis=1)
    G_o = fetch(sums, MP, MP)
    if TWO:
        C = fetch(sums + SUM.C, LP, MP)
    else:
        C = G_o
    by_G = -mul(tl.trans(R), mul(X, R, scratch), scratch) / s
    R_l = fetch(factors + FACTOR.RL, LP, LP)
    by_C = mul(tl.trans(R_l), mul(white, R, scratch), scratch) / s
    by_noise -= (tl.sum(by_G * G_o) + tl.sum(by_C * C)) / s
    if TWO:
        turned_latent = mul(C, tl.trans(by_C), scratch)
        turned += mul(tl.trans(C), by_C, scratch)
        store(adjoints + BACK.CM, mul(by_C, fetch(W_m, MP, MP), scratch), LP, MP)
        store(adjoints + BACK.CL, mul(tl.trans(by_C), fetch(W_l, LP, LP), scratch), MP, LP)
    else:
        by_G += 0.5 * (by_C + tl.trans(by_C))
    turned += 2.0 * mul(G_o, by_G, scratch)
    store(adjoints, 2.0 * mul(by_G, fetch(W_m, MP, MP), scratch), MP, MP)

    P, squares, keys = fetch(sums + SUM.P, LP, DP), tl.load(sums + SUM.N), tl.load(sums + SUM.N + 1)
    j = tl.arange(0, LP)
    eye = tl.where(j[:, None] == j[None, :], 1.0, 0.0)
    if DUAL:
        by_P = mul(C, mul(tl.trans(R), c, scratch), scratch) / s - g_key * P
        by_P_t = tl.trans(by_P)
        by_scale += tl.sum(by_P * P)
        by_noise -= 0.5 * g_key * (squares + D * keys / s)
    else:
        by_z = u + g_key * z
        by_P = mul(tl.trans(R_l), by_z, scratch)
        by_P_t = mul_turned(by_P, tl.trans(by_z), R_l, scratch) / s
        by_P = by_P / s
        half_l = mul(u + 0.5 * g_key * z, factor_turned(factors + FACTOR.Z, scratch, LP, DP), scratch)
        X_l += 0.5 * (half_l + tl.trans(half_l))
        by_scale -= tl.sum(u * z)
        by_noise += g_key * (0.5 * squares / s - tl.sum(z * z) - 0.5 * D * keys) / s - tl.sum(u * z) / s
    X_l += 0.5 * g_key * D * eye
    white_l = mul(X_l, R_l, scratch)
    by_scale += 2.0 * tl.sum(tl.sum(white_l * R_l, axis=1) - held)  # 0 in rows of padding
    by_G_l = -mul(tl.trans(R_l), white_l, scratch) / s
    G_k = fetch(sums + SUM.K, LP, LP)
    by_noise -= tl.sum(by_G_l * G_k) / s
    turned_key = 2.0 * mul(G_k, by_G_l, scratch) + mul(P, by_P_t, scratch)
    tl.store(grad_scale_k + i, by_scale / scalar_of(scale_k, b, h))
    store(adjoints + BACK.K, 2.0 * mul(by_G_l, fetch(W_l, LP, LP), scratch), LP, LP)
    store(adjoints + BACK.P, by_P, LP, DP)
    store(adjoints + BACK.PW, mul(tl.trans(by_P), fetch(W_l, LP, LP), scratch), DP, LP)
    if TWO:
        store_turned(turned_m + i * MP * MP, turned, MP, MP)
        store_turned(turned_l + i * LP * LP, turned_key + turned_latent, LP, LP)
    else:
        store_turned(turned_m + i * MP * MP, turned + turned_key, MP, MP)
    tl.store(grad_noise + i, by_noise)


@triton.jit
def latent_backward(
    o, mask, b, h, begin, stop, centre, points_m, points_l, W_m, W_l, adjoints, grad, out_m, out_l, count_m,
    count_l, C,
    TWO: constexpr, ROWS: constexpr, MP: constexpr, LP: constexpr, CP: constexpr, BACK_CM: constexpr,
    BACK_CL: constexpr,
):  # fmt: skip
    """Gradients of the latent inputs from begin to stop, and their share of the points'."""
    by_m, by_l = tl.zeros((MP, CP), tl.float32), tl.zeros((LP, CP), tl.float32)
    for start in range(begin, stop, ROWS):
        i, real, X = tile_of(o, start, stop, mask, b, h, centre, C, ROWS, CP)
        E = kernel_values(X, fetch_turned(points_m, MP, CP), real, count_m, MP)
        phi = dot(E, fetch_turned(W_m, MP, MP))
        by_E = dot(phi, fetch(adjoints, MP, MP))
        if TWO:
            E_l = kernel_values(X, fetch_turned(points_l, LP, CP), real, count_l, LP)
            by_E += dot(dot(E_l, fetch_turned(W_l, LP, LP)), fetch(adjoints + BACK_CM, LP, MP))
            by_x, moved = features_backward(X, by_E * E, points_m, MP, CP)
            by_E_l = dot(phi, fetch(adjoints + BACK_CL, MP, LP))
            by_x_l, moved_l = features_backward(X, by_E_l * E_l, points_l, LP, CP)
            by_x += by_x_l
            by_l += moved_l
        else:
            by_x, moved = features_backward(X, by_E * E, points_m, MP, CP)
        by_m += moved
        store_tile(grad, by_x, i, stop, C, CP)
    store(out_m, by_m, MP, CP)
    if TWO:
        store(out_l, by_l, LP, CP)


@triton.jit
def key_backward(
    k, v, mask, b, h, begin, stop, centre, points, W, scale, adjoints, by_square, grad_k, grad_v, out, count,
    C, D,
    ROWS: constexpr, LP: constexpr, CP: constexpr, DP: constexpr, BACK_K: constexpr, BACK_P: constexpr,
    BACK_PW: constexpr,
):  # fmt: skip
    """Gradients of keys and values from begin to stop, and their share of the points'."""
    by_l = tl.zeros((LP, CP), tl.float32)
    for start in range(begin, stop, ROWS):
        i, real, X = tile_of(k, start, stop, mask, b, h, centre, C, ROWS, CP)
        V = tile(v, i, real, D, DP)
        E = kernel_values(X, fetch_turned(points, LP, CP), real, count, LP)
        psi = scale * dot(E, fetch_turned(W, LP, LP))
        by_v = dot(psi, fetch(adjoints + BACK_P, LP, DP)) + 2.0 * by_square * V
        store_tile(grad_v, by_v, i, stop, D, DP)
        by_E = dot(psi, fetch(adjoints + BACK_K, LP, LP)) + dot(V, fetch(adjoints + BACK_PW, DP, LP))
        by_x, moved = features_backward(X, scale * by_E * E, points, LP, CP)
        by_l += moved
        store_tile(grad_k, by_x, i, stop, C, CP)
    store(out, by_l, LP, CP)


@triton.jit(do_not_specialize=["splits", "programs"])
def keys_backward_kernel(
    k, o, v, mask, noise, scale_k, by_key, centres, points_m, points_l, W_m, W_l, adjoints, grad_k, grad_o,
    grad_v, shares_m, shares_l, splits, length, programs, H, N, count_m, count_l, C, D,
    TWO: constexpr, POOLED: constexpr, DUAL: constexpr, ROWS: constexpr, MP: constexpr, LP: constexpr,
    CP: constexpr, DP: constexpr, BACK: constexpr,
):  # fmt: skip
    """Program (s, split, 0): the latent inputs of one split; (s, split, 1): its keys and values.

    Shares [role, S, splits, M, C] of the first set: queries, latent inputs; of the second, or next of the
    only one: keys, and latent inputs again.
    """
    s, split, b, h, e, centre, begin, stop = program_place(centres, length, H, N, POOLED, CP)
    role = tl.program_id(2)
    adjoints += s * BACK.SIZE
    points_m, W_m = inducing_of(points_m, W_m, e, MP, CP)
    points_l, W_l = inducing_of(points_l, W_l, e, LP, CP)
    here = s * splits + split
    every = programs.to(tl.int64) * splits
    if role == 0:
        latent_backward(
            head(o, b, h), mask, b, h, begin, stop, centre, points_m, points_l, W_m, W_l, adjoints,
            head(grad_o, b, h), shares_m + (every + here) * MP * CP, shares_l + (every + here) * LP * CP,
            count_m, count_l, C, TWO, ROWS, MP, LP, CP, BACK.CM, BACK.CL,
        )  # fmt: skip
    else:
        by_square = 0.0
        if by_key is not None:
            sigma = scalar_of(noise, b, h)
            by_square = -0.5 * scalar_of(by_key, b, h)
            if DUAL:
                by_square = by_square * sigma
            else:
                by_square = by_square / sigma
        key_backward(
            head(k, b, h), head(v, b, h), mask, b, h, begin, stop, centre, points_l, W_l,
            scalar_of(scale_k, b, h), adjoints, by_square, head(grad_k, b, h), head(grad_v, b, h),
            shares_l + here * LP * CP, count_l, C, D, ROWS, LP, CP, DP, BACK.K, BACK.P, BACK.PW,
        )  # fmt: skip


@triton.jit
def whitened(W, x, LP: constexpr):
    """W x and W^T W x.  [LP] each"""
    half = tl.sum(fetch(W, LP, LP) * x[None, :], 1)
    return half, tl.sum(fetch(W, LP, LP) * half[:, None], 0)


@triton.jit(do_not_specialize=["splits"])
def totals_kernel(
    k, mask, centres, points, totals, splits, length, H, N, count, C,
    POOLED: constexpr, ROWS: constexpr, LP: constexpr, CP: constexpr,
):  # fmt: skip
    """Program (s, split): the kernel values of one split's keys, summed."""
    s, split, b, h, e, centre, begin, stop = program_place(centres, length, H, N, POOLED, CP)
    k = head(k, b, h)
    total = tl.zeros((LP,), tl.float32)
    for start in range(begin, stop, ROWS):
        _, real, X = tile_of(k, start, stop, mask, b, h, centre, C, ROWS, CP)
        total += tl.sum(kernel_values(X, fetch_turned(points + 2 * e * LP * CP, LP, CP), real, count, LP), 0)
    tl.store(totals + (s * splits + split) * LP + tl.arange(0, LP), total)


@triton.jit
def row_sums_kernel(
    q, mask, centres, points, W, totals, row_sum, length, H, NQ, count, C,
    POOLED: constexpr, ROWS: constexpr, LP: constexpr, CP: constexpr,
):  # fmt: skip
    """Program (s, split): row sums of one split's queries, 1 at padded ones."""
    s, _, b, h, e, centre, begin, stop = program_place(centres, length, H, NQ, POOLED, CP)
    q = head(q, b, h)
    points, W = inducing_of(points, W, e, LP, CP)
    _, w = whitened(W, tl.load(totals + s * LP + tl.arange(0, LP)), LP)
    for start in range(begin, stop, ROWS):
        i, real, X = tile_of(q, start, stop, mask, b, h, centre, C, ROWS, CP)
        E = kernel_values(X, fetch_turned(points, LP, CP), real, count, LP)
        found = tl.sum(E * w[None, :], 1)
        tl.store(row_sum + s * NQ + i, tl.where(real, found, 1.0), mask=i < stop)


@triton.jit(do_not_specialize=["splits"])
def row_sums_backward_kernel(
    q, mask, centres, points, W, totals, by_row, grad_q, by_weights, shares, splits, length, H, NQ, count, C,
    POOLED: constexpr, ROWS: constexpr, LP: constexpr, CP: constexpr,
):  # fmt: skip
    """Program (s, split): gradients of one split's queries, its sums dw and its share of the points'."""
    s, split, b, h, e, centre, begin, stop = program_place(centres, length, H, NQ, POOLED, CP)
    q, grad_q = head(q, b, h), head(grad_q, b, h)
    points, W = inducing_of(points, W, e, LP, CP)
    _, w = whitened(W, tl.load(totals + s * LP + tl.arange(0, LP)), LP)
    by_w, by_l = tl.zeros((LP,), tl.float32), tl.zeros((LP, CP), tl.float32)
    for start in range(begin, stop, ROWS):
        i, real, X = tile_of(q, start, stop, mask, b, h, centre, C, ROWS, CP)
        E = kernel_values(X, fetch_turned(points, LP, CP), real, count, LP)
        d = tl.load(by_row + s * NQ + i, mask=real, other=0.0)
        E = d[:, None] * E
        by_w += tl.sum(E, 0)
        by_x, moved = features_backward(X, E * w[None, :], points, LP, CP)
        by_l += moved
        store_tile(grad_q, by_x, i, stop, C, CP)
    here = s * splits + split
    tl.store(by_weights + here * LP + tl.arange(0, LP), by_w)
    store(shares + here * LP * CP, by_l, LP, CP)


@triton.jit(do_not_specialize=["splits"])
def totals_backward_kernel(
    k, mask, centres, points, W, totals, by_weights, grad_k, shares, turned, splits, length, H, N, count, C,
    POOLED: constexpr, ROWS: constexpr, LP: constexpr, CP: constexpr,
):  # fmt: skip
    """Program (s, split): gradients of one split's keys and its share of the points'; split 0 writes O."""
    s, split, b, h, e, centre, begin, stop = program_place(centres, length, H, N, POOLED, CP)
    j = tl.arange(0, LP)
    k, grad_k = head(k, b, h), head(grad_k, b, h)
    points, W = inducing_of(points, W, e, LP, CP)
    by_half, by_total = whitened(W, tl.load(by_weights + s * LP + j), LP)
    if split == 0:
        half, _ = whitened(W, tl.load(totals + s * LP + j), LP)
        both = by_half[:, None] * half[None, :] + half[:, None] * by_half[None, :]
        store(turned + s * LP * LP, both, LP, LP)
    by_l = tl.zeros((LP, CP), tl.float32)
    for start in range(begin, stop, ROWS):
        i, real, X = tile_of(k, start, stop, mask, b, h, centre, C, ROWS, CP)
        E = kernel_values(X, fetch_turned(points, LP, CP), real, count, LP)
        by_x, moved = features_backward(X, E * by_total[None, :], points, LP, CP)
        by_l += moved
        store_tile(grad_k, by_x, i, stop, C, CP)
    store(shares + (s * splits + split) * LP * CP, by_l, LP, CP)
