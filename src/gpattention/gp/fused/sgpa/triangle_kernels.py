"""Triton kernels of triangular factors with a positive diagonal, floor + softplus(raw), and its gradient."""
# mypy: disable-error-code="import-not-found,import-untyped,misc,no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201

import triton
import triton.language as tl

from gpattention.gp.fused.blocks import exponential


@triton.jit
def places(M, total, COUNT: tl.constexpr):
    """Of some entries of matrices M x M: place, whether it exists, row's number among all, row and column."""
    at = tl.program_id(0).to(tl.int64) * COUNT + tl.arange(0, COUNT)
    line = at // M
    return at, at < total, line, line % M, at % M


@triton.jit
def triangle_kernel(lower, raw, out, floor, M, total, COUNT: tl.constexpr):
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
def triangle_backward_kernel(grad, raw, grad_lower, grad_raw, M, total, COUNT: tl.constexpr):
    """Program (p,): the gradient below the diagonal, and sigmoid(raw) times that on it."""
    at, inside, line, row, column = places(M, total, COUNT)
    diagonal = inside & (column == row)
    g = tl.load(grad + at, mask=inside & (column <= row), other=0.0)
    tl.store(grad_lower + at, tl.where(diagonal, 0.0, g), mask=inside)
    x = tl.load(raw + line, mask=diagonal, other=0.0)
    small = exponential(tl.maximum(-tl.abs(x), -80.0, tl.PropagateNan.ALL))
    slope = tl.where(x >= 0, 1.0, small) / (1.0 + small)
    tl.store(grad_raw + line, g * slope, mask=diagonal)
