"""Random numbers that belong to an item, not to a batch: draws that chunking cannot change.

A `torch.Generator` hands out numbers in the order of calls, so splitting a batch changes every draw.
`ItemNoise` is a counter-based generator: each number is a hash of (seed, sample, item, call, place),
the same on every device and for every way of cutting samples and items into chunks.  `ShardNoise` gives a
token the same numbers whichever process holds it.
"""

import math
from typing import Protocol

import torch
from torch import Generator, Tensor

from gpattention.ops.draws import fused_normal, fused_uniform
from gpattention.ops.switch import why_not_fused_on

NOISE_LAYOUT = 1  # one more whenever the same seed comes to give other numbers: stored draws are then void
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit number (splitmix64)
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
_CACHED = 2**18  # pairs of numbers that a CPU makes at once


class NoiseSource(Protocol):
    """Anything `Posterior.sample` can draw its standard normal numbers from."""

    def normal(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Standard normal numbers.

        Args:
            shape: [draws, batch, ...].
            dtype: of the numbers.
            device: where they are made.

        Returns:
            A tensor of that shape.
        """
        ...


def standard_normal(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, source: Generator | NoiseSource | None
) -> Tensor:
    """Standard normal numbers from torch's generator or from a noise source of our own.

    Args:
        shape: [draws, batch, ...].
        dtype: of the numbers.
        device: where they are made.
        source: None is torch's own generator.

    Returns:
        A tensor of that shape.

    Raises:
        ValueError: the source was made for another batch.
    """
    if source is None:  # without naming the generator: only so does randn compile for symbolic sizes
        return torch.randn(shape, dtype=dtype, device=device)
    if isinstance(source, Generator):
        return torch.randn(shape, dtype=dtype, device=device, generator=source)
    return source.normal(shape, dtype, device)


class ItemNoise:
    """Noise for a batch whose row b is sample `samples[b]` of item `items[b]`.

    Every call of `normal` or `uniform` takes the next stream, so that layers differ; a forward pass
    that makes the same calls in the same order gets the same numbers.

    Args:
        seed: a whole number, or a tensor that a captured graph reads anew at every replay.
        items: number of each row's item.  [batch]
        samples: number of each row's sample.  [batch]

    Raises:
        ValueError: items and samples are not of one shape, or the seed is no whole number of 64 bits.

    >>> noise = ItemNoise(seed=0, items=torch.arange(8), samples=torch.zeros(8, dtype=torch.long))
    >>> posterior.sample(generator=noise)
    """

    def __init__(self, seed: int | Tensor, items: Tensor, samples: Tensor) -> None:
        if items.shape != samples.shape or items.ndim != 1:
            raise ValueError(
                f"expected items and samples of one shape [batch], got {tuple(items.shape)} "
                f"and {tuple(samples.shape)}"
            )
        if isinstance(seed, Tensor):  # a captured graph reads it anew at every replay
            seeds = seed.expand_as(items)
        else:
            seeds = torch.full_like(items, _whole(seed), dtype=torch.int64)
        key = seed_key(seeds)
        key = _mix(key + items.to(torch.int64) * _GOLDEN)
        self._keys = _mix(key + samples.to(torch.int64) * _MIX_2)  # [batch]
        self._calls = 0

    @classmethod
    def in_steps(cls, seed: int, step: int, count: int, items: Tensor, samples: Tensor) -> list["ItemNoise"]:
        """Noise of the seeds seed, seed + step, ..., made by the operations of one.

        Args:
            seed: of the first.
            step: from one seed to the next.
            count: how many.
            items: number of each row's item.  [batch]
            samples: number of each row's sample.  [batch]

        Returns:
            That many.

        Raises:
            ValueError: as in `ItemNoise`, of the first seed or the last.
        """
        first, _ = _whole(seed), _whole(seed + (count - 1) * step)
        seeds = torch.arange(count, device=items.device) * step + first
        given = (seeds[:, None].expand(-1, len(items)), items, samples)
        keys = cls(*(x.expand(count, -1).reshape(-1) for x in given))._keys.view(count, -1)
        found = [object.__new__(cls) for _ in range(count)]
        for noise, own in zip(found, keys, strict=True):
            noise._keys, noise._calls = own, 0
        return found

    def uniform(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uniform numbers in (0, 1).

        Args:
            shape: [batch, ...].
            dtype: of the numbers.
            device: where they are made.

        Returns:
            A tensor of that shape.

        Raises:
            ValueError: the noise was made for another batch.
        """
        batch, *rest = shape
        if dtype == torch.float32 and why_not_fused_on(device, dtype) is None:
            return fused_uniform(self._keys_of(batch, device), self._next_stream(), shape)
        bits = self._hash(1, batch, torch.arange(math.prod(rest), device=device))[0]
        return _unit(bits >> 32).to(dtype).reshape(shape)

    def normal(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Standard normal numbers as `Posterior.sample` asks for them (Box-Muller).

        A token has all its numbers, of every head, before the next one: how many tokens follow, padding
        among them, changes none.

        Args:
            shape: [draws, batch, ..., tokens, D].
            dtype: of the numbers.
            device: where they are made.

        Returns:
            A tensor of that shape.

        Raises:
            ValueError: the noise was made for another batch.
        """
        laid = token_major(shape)
        if dtype == torch.float32 and why_not_fused_on(device, dtype) is None:
            numbers = fused_normal(self._keys_of(shape[1], device), self._next_stream(), laid)
        else:
            draws, batch, *rest = laid
            count = math.prod(rest)
            pairs = self._pairs(draws, batch, torch.arange((count + 1) // 2, device=device))
            numbers = pairs[..., :count].reshape(laid).to(dtype)
        return numbers if laid == shape else numbers.movedim(2, -2)

    def next_draws(self, batch: int, device: torch.device) -> tuple[Tensor, int]:
        """What a kernel needs that makes the numbers of the next call of `normal` itself.

        Args:
            batch: rows of the batch.
            device: where the keys are wanted.

        Returns:
            Keys [batch] and first stream.

        Raises:
            ValueError: the noise was made for another batch.
        """
        return self._keys_of(batch, device), self._next_stream()

    def _pairs(self, draws: int, batch: int, pairs: Tensor) -> Tensor:
        """The normal numbers 2 i and 2 i + 1 of each pair i, from one hash.  [draws, batch, 2 pairs]"""
        keys, steps = self._row_keys(draws, batch, pairs.device).flatten(), pairs * _GOLDEN
        found = torch.empty(len(keys), len(pairs), 2, device=pairs.device)
        # on a CPU as many rows at once as stay in its cache
        most = max(1, _CACHED // max(len(pairs), 1)) if pairs.device.type == "cpu" else max(len(keys), 1)
        for some, to in zip(keys.split(most), found.split(most), strict=True):
            bits = _mix(some[:, None] + steps)  # [rows, pairs]
            radius = _unit(bits >> 32).log_().mul_(-2).sqrt_()
            angle = _unit(bits).mul_(2 * math.pi)
            both = angle.cos().mul_(radius), angle.sin_().mul_(radius)
            torch.complex(*both, out=torch.view_as_complex(to))  # side by side in half the time of two writes
        return found.view(draws, batch, -1)

    def _hash(self, draws: int, batch: int, places: Tensor) -> Tensor:
        """64 random bits each.  [draws, batch, places]"""
        return _mix(self._row_keys(draws, batch, places.device)[..., None] + places * _GOLDEN)

    def _row_keys(self, draws: int, batch: int, device: torch.device) -> Tensor:
        """Of the next call.  [draws, batch]"""
        own = self._keys_of(batch, device)
        stream = self._next_stream() + torch.arange(draws, device=device)  # [draws]
        return _mix(own + stream[:, None] * _GOLDEN)

    def _keys_of(self, batch: int, device: torch.device) -> Tensor:
        if batch != len(self._keys):
            raise ValueError(
                f"expected a batch of {len(self._keys)} as the noise was made for, got {batch}: "
                "are batches the first axis of the inputs?"
            )
        return self._keys.to(device)

    def _next_stream(self) -> int:
        """The first stream of this call; a call may make 65537 draws before it meets the next one's."""
        self._calls += 1
        return (self._calls - 1) * 0x10001


def token_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """[draws, batch, ..., tokens, D] with the tokens before everything else of a batch's row."""
    if len(shape) < 4:
        return tuple(shape)
    draws, batch, *lead, tokens, width = shape
    return (draws, batch, tokens, *lead, width)


def _whole(seed: int) -> int:
    """A seed that is a number."""
    if not hasattr(seed, "__index__"):
        raise ValueError(f"expected seed to be a whole number, got {seed!r}")
    if not -(2**63) <= seed < 2**63:  # as `torch.initial_seed()` may be
        raise ValueError(f"expected seed to fit into 64 bits with a sign, got {seed}")
    return seed


def seed_key(seed: Tensor) -> Tensor:
    """64 bits of a seed: neighbours share no more of them than any two seeds do."""
    return _mix(seed.to(torch.int64) * _MIX_1 + _GOLDEN)


def stream_key(key: Tensor, stream: int) -> Tensor:
    """64 bits of one of the streams of a key."""
    step = (stream * _GOLDEN + 2**63) % 2**64 - 2**63  # wrapped around as int64 does
    return _mix(key + step)


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64; int64 products wrap around as unsigned ones do."""
    x = _shift(x, 30).bitwise_xor_(x).mul_(_MIX_1)
    x = _shift(x, 27).bitwise_xor_(x).mul_(_MIX_2)
    return _shift(x, 31).bitwise_xor_(x)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift right: int64's own copies the sign."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _unit(bits: Tensor) -> Tensor:
    """The lower 24 bits, in the place of all, as float32 in (0, 1); normal numbers reach 5.9 deviations."""
    return bits.bitwise_and_(0xFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-24)


class ShardNoise(ItemNoise):
    """`ItemNoise` of the tokens `first_token`, `first_token` + 1, ... out of `tokens`.

    Draws of a shard are the rows that `ItemNoise(seed, items, samples)` would give those tokens in one
    process (section 12).  Seed, items and samples must be the same on every process; the numbers that
    correlate tokens (epsilon_2 of a joint draw) are then the same too, without being sent.

    Args:
        seed: as in `ItemNoise`.
        items: likewise.
        samples: likewise.
        first_token: number of the first token that is here.
        tokens: how many there are on all processes.

    Raises:
        ValueError: there is no such token, or as in `ItemNoise`.

    >>> noise = ShardNoise(seed=0, items=items, samples=samples, first_token=512 * rank, tokens=4096)
    >>> posterior.sample(generator=noise, joint=True)
    """

    def __init__(
        self, seed: int | Tensor, items: Tensor, samples: Tensor, *, first_token: int, tokens: int
    ) -> None:
        if not 0 <= first_token < tokens:
            raise ValueError(
                f"expected first_token in [0, {tokens}), the tokens there are, got {first_token}"
            )
        super().__init__(seed, items, samples)
        self.first_token, self.tokens = first_token, tokens

    def normal(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Standard normal numbers of this shard's tokens.

        Args:
            shape: [draws, batch, ..., tokens here, D].
            dtype: of the numbers.
            device: where they are made.

        Returns:
            A tensor of that shape.

        Raises:
            ValueError: there are not so many tokens, or the noise was made for another batch.
        """
        draws, batch, *lead, rows, width = shape
        if self.first_token + rows > self.tokens:
            raise ValueError(
                f"expected tokens {self.first_token}, ... of {self.tokens}, that is at most "
                f"{self.tokens - self.first_token}, got {rows}"
            )
        each = math.prod(lead) * width  # numbers of a token
        first, count = self.first_token * each, rows * each
        numbers = self._pairs(draws, batch, first // 2 + torch.arange(count // 2 + 1, device=device))
        numbers = numbers[..., first % 2 :][..., :count]  # an odd place begins with the second of its pair
        laid = token_major(shape)
        return numbers.reshape(laid).to(dtype).movedim(2, -2)

    def shared_normal(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Standard normal numbers that all shards have in common.

        Args:
            shape: [draws, batch, ...].
            dtype: of the numbers.
            device: where they are made.

        Returns:
            A tensor of that shape.
        """
        return super().normal(shape, dtype, device)
