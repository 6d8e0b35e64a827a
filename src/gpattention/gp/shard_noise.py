"""Random numbers for tokens spread over processes: a token has the same ones whichever process holds it."""

import math

import torch
from torch import Tensor

from gpattention.gp.noise import ItemNoise, token_major


class ShardNoise(ItemNoise):
    """`ItemNoise` of the tokens `first_token`, `first_token` + 1, ... out of `tokens`.

    Draws of a shard are the rows that `ItemNoise(seed, items, samples)` would give those tokens in one
    process.  Seed, items and samples must be the same on every process; the numbers that correlate
    tokens (epsilon_2 of a joint draw) are then the same too, without being sent.

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
        """Standard normal numbers of this shard's tokens, [draws, batch, ..., tokens here, D]."""
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
        """Standard normal numbers that all shards have in common."""
        return super().normal(shape, dtype, device)
