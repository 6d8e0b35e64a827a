"""Triton kernels of draws, mean + spread * noise, and of item-keyed numbers: a hash and Box-Muller."""

import triton
import triton.language as tl
from triton.language import constexpr

from gpattention.ops.tiles import head, program_head

# mypy: disable-error-code="import-not-found,import-untyped,misc,no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201


_GOLDEN = tl.constexpr(-7046029254386353131)  # as in `ops.noise`
_MIX_1 = tl.constexpr(-4658895280553007687)
_MIX_2 = tl.constexpr(-7723592293110705685)
_TWO_PI = tl.constexpr(6.283185307179586)


@triton.jit
def shift(x, bits: constexpr):
    """Logical shift right: int64's own copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


@triton.jit
def mix(x):
    """The finaliser of splitmix64."""
    x = (x ^ shift(x, 30)) * _MIX_1
    x = (x ^ shift(x, 27)) * _MIX_2
    return x ^ shift(x, 31)


@triton.jit
def unit(bits):
    """The lower 24 bits as float32 in (0, 1)."""
    return ((bits & 0xFFFFFF).to(tl.float32) + 0.5) * 5.9604644775390625e-08


@triton.jit
def normal(key, i):
    """The standard normal numbers at the places i of a stream; two neighbours share a hash.

    Logarithm, cosine and sine are those of CUDA's library, which torch takes too.
    """
    bits = mix(key + (i >> 1) * _GOLDEN)
    angle = unit(bits) * _TWO_PI
    radius = tl.sqrt_rn(-2.0 * tl.log(unit(bits >> 32)))
    return radius * tl.where((i & 1) == 0, tl.cos(angle), tl.sin(angle))


@triton.jit
def stream_key(key, stream):
    """What the hashes of one draw of one item begin with."""
    return mix(key + tl.cast(stream, tl.int64) * _GOLDEN)


@triton.jit
def uniform(key, i):
    """The numbers in (0, 1) at the places i of a stream."""
    return unit(mix(key + i * _GOLDEN) >> 32)


@triton.jit(do_not_specialize=["stream"])
def noise_kernel(keys, out, stream, batch, count, NORMAL: constexpr, SIZE: constexpr):
    """Program: SIZE numbers of one draw of one item, standard normal or uniform."""
    program, blocks = tl.program_id(0).to(tl.int64), tl.cdiv(count, SIZE)
    row = program // blocks
    key = stream_key(tl.load(keys + row % batch), stream + row // batch)
    i = program % blocks * SIZE + tl.arange(0, SIZE)
    if NORMAL:
        numbers = normal(key, i)
    else:
        numbers = uniform(key, i)
    tl.store(out + row * count + i, numbers, mask=i < count)


@triton.jit
def spread_at(spread, b, h, i, N, D, CHANNELS: constexpr, DP: constexpr):
    """Where the spread of some rows is, and which of it exists.  [ROWS, 1 or DP] each"""
    WIDTH: constexpr = DP if CHANNELS else 1
    c = tl.arange(0, WIDTH)
    own, stride = head(spread, b, h)
    return own + i[:, None] * stride + c[None, :], (i < N)[:, None] & (c < D)[None, :]


@triton.jit
def noise_of(noise, stream, r, s, i, c, inside, S, shared, N, D, KEYED: constexpr):
    """The noise of some rows of draw r: read, or made by the key of the item, which has `shared` heads."""
    if KEYED:
        key = stream_key(tl.load(noise + s // shared), stream + r)
        Z = tl.where(
            inside, normal(key, (i.to(tl.int64) * shared + s % shared)[:, None] * D + c[None, :]), 0.0
        )
    else:
        Z = tl.load(noise + (r * S + s) * N * D + i[:, None] * D + c[None, :], mask=inside, other=0.0)
    return Z


@triton.jit(do_not_specialize=["stream"])
def draw_kernel(
    mean, spread, noise, stream, out, S, shared, H, N, D,
    KEYED: constexpr, CHANNELS: constexpr, SQUARED: constexpr, ROWS: constexpr, DP: constexpr,
):  # fmt: skip
    """Program (s, rows, r): some rows of draw r of one sequence and head."""
    s, b, h = program_head(H)
    r = tl.program_id(2).to(tl.int64)
    i, c = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, DP)
    inside = (i < N)[:, None] & (c < D)[None, :]
    at, there = spread_at(spread, b, h, i, N, D, CHANNELS, DP)
    deviation = tl.load(at, mask=there, other=0.0)
    if SQUARED:
        deviation = tl.sqrt_rn(deviation)
    Z = noise_of(noise, stream, r, s, i, c, inside, S, shared, N, D, KEYED)
    own, stride = head(mean, b, h)
    X = tl.load(own + i[:, None] * stride + c[None, :], mask=inside, other=0.0)
    to = out[0] + r * out[1] + b * out[2] + h * out[3] + i[:, None] * out[4] + c[None, :]
    tl.store(to, X + deviation * Z, mask=inside)


@triton.jit(do_not_specialize=["stream"])
def draw_backward_kernel(
    grad, spread, noise, stream, grad_spread, S, shared, H, N, D, draws,
    KEYED: constexpr, CHANNELS: constexpr, SQUARED: constexpr, ROWS: constexpr, DP: constexpr,
):  # fmt: skip
    """Program (s, rows): gradient of the spread, summed over draws; 0 where the spread is 0."""
    s, b, h = program_head(H)
    i, c = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, DP)
    inside = (i < N)[:, None] & (c < D)[None, :]
    total = tl.zeros((ROWS, DP if CHANNELS else 1), tl.float32)
    for r in range(0, draws):
        Z = noise_of(noise, stream, r, s, i, c, inside, S, shared, N, D, KEYED)
        at = grad[0] + r * grad[1] + b * grad[2] + h * grad[3]
        g = tl.load(at + i[:, None] * grad[4] + c[None, :], mask=inside, other=0.0)
        if CHANNELS:
            total += g * Z
        else:
            total += tl.sum(g * Z, 1)[:, None]
    to, there = spread_at(grad_spread, b, h, i, N, D, CHANNELS, DP)
    if SQUARED:
        at, _ = spread_at(spread, b, h, i, N, D, CHANNELS, DP)
        found = tl.load(at, mask=there, other=0.0)
        positive = found > 0
        total = tl.where(positive, 0.5 * total / tl.sqrt_rn(tl.where(positive, found, 1.0)), 0.0)
    tl.store(to, total, mask=there)
