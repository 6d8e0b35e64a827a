"""Triton kernels that sum columns in two stages, and put rows side by side while they are read."""
# mypy: disable-error-code="import-not-found,import-untyped,misc,no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201, N803

import triton
import triton.language as tl


@triton.jit
def part_of(x, stride, to, partial, rows, tiles, total, C, ROWS: tl.constexpr, CP: tl.constexpr):
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
    first, first_n, second, second_n, third, third_n, fourth, fourth_n,
    to, partial, rows, tiles, total, C,
    PARTS: tl.constexpr, ROWS: tl.constexpr, CP: tl.constexpr,
):  # fmt: skip
    """Rows [rows, C] of two to four parts side by side, and partial column sums [programs, PARTS * C]."""
    part_of(first, first_n, to, partial, rows, tiles, total, C, ROWS, CP)
    part_of(second, second_n, to + C, partial + C, rows, tiles, total, C, ROWS, CP)
    if PARTS > 2:
        part_of(third, third_n, to + 2 * C, partial + 2 * C, rows, tiles, total, C, ROWS, CP)
    if PARTS > 3:
        part_of(fourth, fourth_n, to + 3 * C, partial + 3 * C, rows, tiles, total, C, ROWS, CP)


@triton.jit
def finish_kernel(partial, out, count, C, COUNT: tl.constexpr, COLUMNS: tl.constexpr):
    """The second stage: a few columns of all partial sums [count, C]."""
    r, c = tl.arange(0, COUNT), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (r < count)[:, None] & (c < C)[None, :]
    X = tl.load(partial + r[:, None] * C + c[None, :], mask=inside, other=0.0)
    tl.store(out + c, tl.sum(X, 0), mask=c < C)
