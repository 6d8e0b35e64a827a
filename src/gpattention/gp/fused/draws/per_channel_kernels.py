"""Triton kernels of draws with a variance per channel: mean + sqrt(variance) * noise, and its gradient."""
# mypy: disable-error-code="import-not-found,import-untyped,misc,no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201

import triton
import triton.language as tl


@triton.jit
def channel_draw_kernel(
    mean, mean_b, mean_h, mean_n, variance, var_b, var_h, var_n, noise, out, out_r, out_b, out_h, out_n,
    apart, H, N, D, draws,
    ROWS: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Program (s, rows): some rows of every draw of one sequence and head; draws of noise are `apart`."""
    s = tl.program_id(0).to(tl.int64)
    b, h = s // H, s % H
    i, c = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, DP)
    inside = (i < N)[:, None] & (c < D)[None, :]
    spread = variance + b * var_b + h * var_h + i[:, None] * var_n + c[None, :]
    deviation = tl.sqrt_rn(tl.load(spread, mask=inside, other=0.0))
    X = tl.load(mean + b * mean_b + h * mean_h + i[:, None] * mean_n + c[None, :], mask=inside, other=0.0)
    noise += s * N * D + i[:, None] * D + c[None, :]
    out += b * out_b + h * out_h + i[:, None] * out_n + c[None, :]
    for _ in range(0, draws):
        tl.store(out, X + deviation * tl.load(noise, mask=inside, other=0.0), mask=inside)
        noise += apart
        out += out_r


@triton.jit
def channel_draw_backward_kernel(
    grad, grad_r, grad_b, grad_h, grad_n, variance, var_b, var_h, var_n, noise,
    grad_variance, to_b, to_h, to_n,
    apart, H, N, D, draws,
    ROWS: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Program (s, rows): gradient of the variance, summed over draws; 0 where the variance is 0."""
    s = tl.program_id(0).to(tl.int64)
    b, h = s // H, s % H
    i, c = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, DP)
    inside = (i < N)[:, None] & (c < D)[None, :]
    total = tl.zeros((ROWS, DP), tl.float32)
    noise += s * N * D + i[:, None] * D + c[None, :]
    grad += b * grad_b + h * grad_h + i[:, None] * grad_n + c[None, :]
    for _ in range(0, draws):
        total += tl.load(grad, mask=inside, other=0.0) * tl.load(noise, mask=inside, other=0.0)
        noise += apart
        grad += grad_r
    spread = tl.load(
        variance + b * var_b + h * var_h + i[:, None] * var_n + c[None, :], mask=inside, other=0.0
    )
    positive = spread > 0
    total = tl.where(positive, 0.5 * total / tl.sqrt_rn(tl.where(positive, spread, 1.0)), 0.0)
    tl.store(grad_variance + b * to_b + h * to_h + i[:, None] * to_n + c[None, :], total, mask=inside)
