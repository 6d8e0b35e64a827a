"""Triton kernels of the Nystrom row sums that normalise sparse attention (section 13).

total_j = sum over keys of kappa(k, l_j),   w = W^T W total,   row_i = kappa(q_i, l) w
d_i = g_i / row_i where it is not clamped,  E_ij = d_i w_j kappa(q_i, l_j),  dw_j = sum_i d_i kappa(q_i, l_j)
dtotal = W^T W dw,   O = (W dw) (W total)^T + its transpose     for `inducing`
"""
# mypy: disable-error-code="import-not-found,import-untyped,misc,no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201

import triton
import triton.language as tl

from gpattention.gp.fused.blocks import fetch, store
from gpattention.gp.fused.sparse.blocks import (
    features_backward,
    fetch_turned,
    kernel_values,
    store_tile,
    tile,
    tile_rows,
)


@triton.jit
def whitened(W, x, LP: tl.constexpr):
    """W x and W^T W x.  [LP] each"""
    half = tl.sum(fetch(W, LP, LP) * x[None, :], 1)
    return half, tl.sum(fetch(W, LP, LP) * half[:, None], 0)


@triton.jit(do_not_specialize=["splits"])
def totals_kernel(
    k, k_b, k_h, k_n, mask, mask_b, mask_h, mask_n, centres, points, totals,
    splits, length, H, N, count, C,
    MASKED: tl.constexpr, POOLED: tl.constexpr, ROWS: tl.constexpr, LP: tl.constexpr, CP: tl.constexpr,
):  # fmt: skip
    """Program (s, split): the kernel values of one split's keys, summed."""
    s, split = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    b, h = s // H, s % H
    e = h
    if POOLED:
        e = s
    centre = tl.load(centres + e * CP + tl.arange(0, CP))
    k += b * k_b + h * k_h
    mask += b * mask_b + h * mask_h
    total = tl.zeros((LP,), tl.float32)
    begin = split * length
    stop = tl.minimum(begin + length, N)
    for start in range(begin, stop, ROWS):
        i, real = tile_rows(start, stop, mask, mask_n, MASKED, ROWS)
        X = tile(k, k_n, i, real, C, CP) - centre[None, :]
        total += tl.sum(kernel_values(X, fetch_turned(points + 2 * e * LP * CP, LP, CP), real, count, LP), 0)
    tl.store(totals + (s * splits + split) * LP + tl.arange(0, LP), total)


@triton.jit
def row_sums_kernel(
    q, q_b, q_h, q_n, mask, mask_b, mask_h, mask_n, centres, points, W, totals, row_sum,
    length, H, NQ, count, C,
    MASKED: tl.constexpr, POOLED: tl.constexpr, ROWS: tl.constexpr, LP: tl.constexpr, CP: tl.constexpr,
):  # fmt: skip
    """Program (s, split): row sums of one split's queries, 1 at padded ones."""
    s, split = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    b, h = s // H, s % H
    e = h
    if POOLED:
        e = s
    centre = tl.load(centres + e * CP + tl.arange(0, CP))
    q += b * q_b + h * q_h
    mask += b * mask_b + h * mask_h
    _, w = whitened(W + 2 * e * LP * LP, tl.load(totals + s * LP + tl.arange(0, LP)), LP)
    begin = split * length
    stop = tl.minimum(begin + length, NQ)
    for start in range(begin, stop, ROWS):
        i, real = tile_rows(start, stop, mask, mask_n, MASKED, ROWS)
        X = tile(q, q_n, i, real, C, CP) - centre[None, :]
        E = kernel_values(X, fetch_turned(points + 2 * e * LP * CP, LP, CP), real, count, LP)
        found = tl.sum(E * w[None, :], 1)
        tl.store(row_sum + s * NQ + i, tl.where(real, found, 1.0), mask=i < stop)


@triton.jit(do_not_specialize=["splits"])
def row_sums_backward_kernel(
    q, q_b, q_h, q_n, mask, mask_b, mask_h, mask_n, centres, points, W, totals, by_row,
    grad_q, grad_b, grad_h, grad_n, by_weights, shares,
    splits, length, H, NQ, count, C,
    MASKED: tl.constexpr, POOLED: tl.constexpr, ROWS: tl.constexpr, LP: tl.constexpr, CP: tl.constexpr,
):  # fmt: skip
    """Program (s, split): gradients of one split's queries, its sums dw and its share of the points'."""
    s, split = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    b, h = s // H, s % H
    e = h
    if POOLED:
        e = s
    centre = tl.load(centres + e * CP + tl.arange(0, CP))
    q += b * q_b + h * q_h
    mask += b * mask_b + h * mask_h
    grad_q += b * grad_b + h * grad_h
    points += 2 * e * LP * CP
    _, w = whitened(W + 2 * e * LP * LP, tl.load(totals + s * LP + tl.arange(0, LP)), LP)
    by_w, by_l = tl.zeros((LP,), tl.float32), tl.zeros((LP, CP), tl.float32)
    begin = split * length
    stop = tl.minimum(begin + length, NQ)
    for start in range(begin, stop, ROWS):
        i, real = tile_rows(start, stop, mask, mask_n, MASKED, ROWS)
        X = tile(q, q_n, i, real, C, CP) - centre[None, :]
        E = kernel_values(X, fetch_turned(points, LP, CP), real, count, LP)
        d = tl.load(by_row + s * NQ + i, mask=real, other=0.0)
        E = d[:, None] * E
        by_w += tl.sum(E, 0)
        by_x, moved = features_backward(X, E * w[None, :], points, LP, CP)
        by_l += moved
        store_tile(grad_q, grad_n, by_x, i, stop, C, CP)
    here = s * splits + split
    tl.store(by_weights + here * LP + tl.arange(0, LP), by_w)
    store(shares + here * LP * CP, by_l, LP, CP)


@triton.jit(do_not_specialize=["splits"])
def totals_backward_kernel(
    k, k_b, k_h, k_n, mask, mask_b, mask_h, mask_n, centres, points, W, totals, by_weights,
    grad_k, grad_b, grad_h, grad_n, shares, turned,
    splits, length, H, N, count, C,
    MASKED: tl.constexpr, POOLED: tl.constexpr, ROWS: tl.constexpr, LP: tl.constexpr, CP: tl.constexpr,
):  # fmt: skip
    """Program (s, split): gradients of one split's keys and its share of the points'; split 0 writes O."""
    s, split = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    b, h = s // H, s % H
    e = h
    if POOLED:
        e = s
    j = tl.arange(0, LP)
    centre = tl.load(centres + e * CP + tl.arange(0, CP))
    k += b * k_b + h * k_h
    mask += b * mask_b + h * mask_h
    grad_k += b * grad_b + h * grad_h
    points += 2 * e * LP * CP
    by_half, by_total = whitened(W + 2 * e * LP * LP, tl.load(by_weights + s * LP + j), LP)
    if split == 0:
        half, _ = whitened(W + 2 * e * LP * LP, tl.load(totals + s * LP + j), LP)
        both = by_half[:, None] * half[None, :] + half[:, None] * by_half[None, :]
        store(turned + s * LP * LP, both, LP, LP)
    by_l = tl.zeros((LP, CP), tl.float32)
    begin = split * length
    stop = tl.minimum(begin + length, N)
    for start in range(begin, stop, ROWS):
        i, real = tile_rows(start, stop, mask, mask_n, MASKED, ROWS)
        X = tile(k, k_n, i, real, C, CP) - centre[None, :]
        E = kernel_values(X, fetch_turned(points, LP, CP), real, count, LP)
        by_x, moved = features_backward(X, E * by_total[None, :], points, LP, CP)
        by_l += moved
        store_tile(grad_k, grad_n, by_x, i, stop, C, CP)
    store(shares + (s * splits + split) * LP * CP, by_l, LP, CP)
