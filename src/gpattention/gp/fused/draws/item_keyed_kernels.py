"""Triton kernels of draws with item-keyed noise, which is made where it is used and never stored."""
# mypy: disable-error-code="import-not-found,import-untyped,misc,no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201

import triton
import triton.language as tl

from gpattention.gp.fused.draws.independent_kernels import deviation_of, store_draw, store_gradient
from gpattention.gp.fused.draws.noise_kernels import normal, stream_key


@triton.jit(do_not_specialize=["stream"])
def item_draw_kernel(
    mean, mean_b, mean_h, mean_n, spread, keys, stream, out, out_r, out_b, out_h, out_n,
    shared, H, N, D,
    SQUARED: tl.constexpr, ROWS: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Program (s, rows, r): some rows of draw r of one sequence and head, of which an item has `shared`."""
    s, r = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    b, h = s // H, s % H
    i, c = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, DP)
    inside = (i < N)[:, None] & (c < D)[None, :]
    deviation = deviation_of(spread, s, i, N, SQUARED)
    key = stream_key(tl.load(keys + s // shared), stream + r)
    Z = normal(key, (i * shared + s % shared)[:, None] * D + c[None, :])
    store_draw(
        mean, mean_b, mean_h, mean_n, out, out_r, out_b, out_h, out_n, r, b, h, i, c, inside, deviation, Z
    )


@triton.jit(do_not_specialize=["stream"])
def item_draw_backward_kernel(
    grad, grad_r, grad_b, grad_h, grad_n, spread, keys, stream, grad_spread,
    shared, H, N, D, draws,
    SQUARED: tl.constexpr, ROWS: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Program (s, rows): gradient of the spread, summed over draws; 0 where the spread is 0."""
    s = tl.program_id(0).to(tl.int64)
    b, h = s // H, s % H
    i, c = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, DP)
    inside = (i < N)[:, None] & (c < D)[None, :]
    own = tl.load(keys + s // shared)
    total = tl.zeros((ROWS,), tl.float32)
    for r in range(0, draws):
        Z = normal(stream_key(own, stream + r), (i * shared + s % shared)[:, None] * D + c[None, :])
        at = grad + r * grad_r + b * grad_b + h * grad_h
        g = tl.load(at + i[:, None] * grad_n + c[None, :], mask=inside, other=0.0)
        total += tl.sum(g * tl.where(inside, Z, 0.0), 1)
    store_gradient(grad_spread, spread, total, s, i, N, SQUARED)
