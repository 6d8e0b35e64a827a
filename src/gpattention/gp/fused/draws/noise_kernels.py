"""Triton kernels of item-keyed numbers: the hash of `gp.noise`, and Box-Muller, in one launch."""
# mypy: disable-error-code="import-not-found,import-untyped,misc,no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201

import triton
import triton.language as tl

_GOLDEN = tl.constexpr(-7046029254386353131)  # as in gp.noise
_MIX_1 = tl.constexpr(-4658895280553007687)
_MIX_2 = tl.constexpr(-7723592293110705685)
_TWO_PI = tl.constexpr(6.283185307179586)


@triton.jit
def shift(x, bits: tl.constexpr):
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
def noise_kernel(keys, out, stream, batch, count, NORMAL: tl.constexpr, SIZE: tl.constexpr):
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
