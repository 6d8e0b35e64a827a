"""Triton kernels of independent draws: mean + spread * noise, and the gradient of the spread."""
# mypy: disable-error-code="import-not-found,import-untyped,misc,no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201

import triton
import triton.language as tl


@triton.jit
def deviation_of(spread, s, i, N, SQUARED: tl.constexpr):
    """Standard deviations of some rows of sequence and head s.  [ROWS]"""
    deviation = tl.load(spread + s * N + i, mask=i < N, other=0.0)
    if SQUARED:
        deviation = tl.sqrt_rn(deviation)
    return deviation


@triton.jit
def store_draw(mean, mean_b, mean_h, mean_n, out, out_r, out_b, out_h, out_n,
               r, b, h, i, c, inside, deviation, Z):  # fmt: skip
    """Write mean + deviation * Z."""
    X = tl.load(mean + b * mean_b + h * mean_h + i[:, None] * mean_n + c[None, :], mask=inside, other=0.0)
    to = out + r * out_r + b * out_b + h * out_h + i[:, None] * out_n + c[None, :]
    tl.store(to, X + deviation[:, None] * Z, mask=inside)


@triton.jit
def store_gradient(grad_spread, spread, total, s, i, N, SQUARED: tl.constexpr):
    """Write the gradient of the spread from that of the deviation; 0 where the spread is 0."""
    if SQUARED:
        variance = tl.load(spread + s * N + i, mask=i < N, other=0.0)
        real = variance > 0
        total = tl.where(real, 0.5 * total / tl.sqrt_rn(tl.where(real, variance, 1.0)), 0.0)
    tl.store(grad_spread + s * N + i, total, mask=i < N)


@triton.jit
def draw_kernel(
    mean, mean_b, mean_h, mean_n, spread, noise, out, out_r, out_b, out_h, out_n,
    S, H, N, D,
    SQUARED: tl.constexpr, ROWS: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Program (s, rows, r): some rows of draw r of one sequence and head."""
    s, r = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    b, h = s // H, s % H
    i, c = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, DP)
    inside = (i < N)[:, None] & (c < D)[None, :]
    deviation = deviation_of(spread, s, i, N, SQUARED)
    at = i[:, None] * D + c[None, :]
    Z = tl.load(noise + (r * S + s) * N * D + at, mask=inside, other=0.0)
    store_draw(
        mean, mean_b, mean_h, mean_n, out, out_r, out_b, out_h, out_n, r, b, h, i, c, inside, deviation, Z
    )


@triton.jit
def draw_backward_kernel(
    grad, grad_r, grad_b, grad_h, grad_n, spread, noise, grad_spread,
    S, H, N, D, draws,
    SQUARED: tl.constexpr, ROWS: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Program (s, rows): gradient of the spread, summed over draws; 0 where the spread is 0."""
    s = tl.program_id(0).to(tl.int64)
    b, h = s // H, s % H
    i, c = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, DP)
    inside = (i < N)[:, None] & (c < D)[None, :]
    total = tl.zeros((ROWS,), tl.float32)
    for r in range(0, draws):
        place = (r * S + s) * N * D
        Z = tl.load(noise + place + i[:, None] * D + c[None, :], mask=inside, other=0.0)
        at = grad + r * grad_r + b * grad_b + h * grad_h
        g = tl.load(at + i[:, None] * grad_n + c[None, :], mask=inside, other=0.0)
        total += tl.sum(g * Z, 1)
    store_gradient(grad_spread, spread, total, s, i, N, SQUARED)
