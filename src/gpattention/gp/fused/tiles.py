"""Triton functions on tiles of a sequence: some rows of it, read and written where they exist."""
# mypy: disable-error-code="import-not-found,import-untyped,misc,no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201

import triton
import triton.language as tl


@triton.jit
def rows_of(x, stride, real, width, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Rows of real tokens, everything else 0.  [ROWS, WIDTH]"""
    i, c = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    inside = real[:, None] & (c < width)[None, :]
    return tl.load(x + i[:, None] * stride + c[None, :], mask=inside, other=0.0)


@triton.jit
def store_rows(to, stride, X, first, rows, width, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Write those of the rows `first`, `first` + 1, ... that exist; `to` is where the first one goes."""
    i, c = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    inside = (first + i < rows)[:, None] & (c < width)[None, :]
    tl.store(to + i[:, None] * stride + c[None, :], X, mask=inside)


@triton.jit
def real_rows(mask, stride, first, rows, MASKED: tl.constexpr, ROWS: tl.constexpr):
    """Which of the rows `first`, `first` + 1, ... are inside the sequence and not padding.  [ROWS]"""
    i = first + tl.arange(0, ROWS)
    real = i < rows
    if MASKED:
        real = tl.load(mask + i * stride, mask=real, other=0) != 0
    return real
