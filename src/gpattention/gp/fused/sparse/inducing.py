"""Triton kernels of the inducing inputs: W = L^-1 of K_mm + delta I = L L^T, and its gradient.

    O = dW W^T = sum over tokens of dphi^T phi, which the small matrices know without looking at tokens
    S = lower triangle of O with half the diagonal,   dK = -1/2 W^T (S + S^T) W
    E = dK * K,   dm_i = 2 sum_j E_ij (m_j - m_i)

All sets are centred on the mean of the first one, as the tokens are.  Points and W lie in memory beside
their transposes, [set, 2, ...], for products that want these.
"""
# mypy: disable-error-code="import-not-found,import-untyped,misc,no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201

import triton
import triton.language as tl

from gpattention.gp.fused.blocks import (
    FAR,
    centre_of,
    centred,
    fetch,
    noisy_gram,
    origin_of,
    spread_of,
    store,
    tokens,
)
from gpattention.gp.fused.sparse.blocks import mul, note_failure, root_of, store_turned, turn


@triton.jit
def inducing_root(
    x, x_n, centre, points, W, info, counter, counted, delta, count, C,
    MP: tl.constexpr, CP: tl.constexpr,
):  # fmt: skip
    """Write one set's centred points and W, and behind each its transpose."""
    real = tl.arange(0, MP) < count
    X = centred(tokens(x, x_n, real, C, MP, CP), centre, real)
    store(points, X, MP, CP)
    store_turned(points + MP * CP, X, MP, CP)
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
    m, m_b, m_h, m_n, l, l_b, l_h, l_n,  # noqa: E741
    centres, points_m, points_l, W_m, W_l, info, counter, counted, delta,
    programs, H, count_m, count_l, C,
    MP: tl.constexpr, LP: tl.constexpr, CP: tl.constexpr,
):  # fmt: skip
    """Program (i, 0): set i of the first kind; (i, 1): of the second, where there is one."""
    i, which = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, h = i // H, i % H
    m += b * m_b + h * m_h
    l += b * l_b + h * l_h  # noqa: E741
    first, second = tl.arange(0, MP) < count_m, tl.arange(0, LP) < count_l
    points = tokens(m, m_n, first, C, MP, CP)
    centre = shared_origin(points, first, tokens(l, l_n, second, C, LP, CP), second)
    info += which * programs + i
    if which == 0:
        tl.store(centres + i * CP + tl.arange(0, CP), centre)
        inducing_root(
            m, m_n, centre, points_m + 2 * i * MP * CP, W_m + 2 * i * MP * MP,
            info, counter, counted, delta, count_m, C, MP, CP,
        )  # fmt: skip
    else:
        inducing_root(
            l, l_n, centre, points_l + 2 * i * LP * CP, W_l + 2 * i * LP * LP,
            info, counter, counted, delta, count_l, C, LP, CP,
        )  # fmt: skip


@triton.jit
def points_backward(
    points, W, moved, turned, grad, scratch, delta, count, C, MP: tl.constexpr, CP: tl.constexpr,
):  # fmt: skip
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
    SHARED: tl.constexpr, BATCH: tl.constexpr, MP: tl.constexpr, LP: tl.constexpr, CP: tl.constexpr,
    SCRATCH: tl.constexpr,
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
