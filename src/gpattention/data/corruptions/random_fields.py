"""Random numbers that belong to an image, not to a batch.

Each number is a hash of (seed, corruption, severity, field, item, place): the same on every device and for
every way of cutting the test set into batches.
"""

import hashlib
import math

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit number (splitmix64)
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


class RandomFields:
    """Random numbers of one corruption at one severity; row b belongs to the item `items[b]`.

    A field is asked for by name, so that the order of the calls does not matter.

    >>> fields = RandomFields(seed=0, items=torch.arange(8), corruption="snow", severity=3)
    >>> fields.normal("flakes", 32, 32).shape
    torch.Size([8, 32, 32])
    """

    def __init__(self, seed: int, items: Tensor, corruption: str, severity: int) -> None:
        self._recipe = f"{seed}/{corruption}/{severity}"
        self._items = items.to(torch.int64)  # [B]

    def uniform(self, field: str, *shape: int) -> Tensor:
        """Uniform numbers in (0, 1), never 0 or 1, float64.  [B, *shape]"""
        digest = hashlib.blake2b(f"{self._recipe}/{field}".encode(), digest_size=8).digest()
        start = int.from_bytes(digest, "little", signed=True)
        keys = _mix(self._items * _MIX_2 + start)  # [B]
        places = torch.arange(math.prod(shape), device=keys.device) * _GOLDEN
        bits = _mix(keys[:, None] + places)  # [B, places]
        unit = _shift(bits, 12).to(torch.float64).add_(0.5).mul_(2.0**-52)  # 52 bits: 1 - 2^-53 is a double
        return unit.reshape(len(keys), *shape)

    def normal(self, field: str, *shape: int) -> Tensor:
        """Standard normal numbers by the inverse of the distribution function, float64.  [B, *shape]"""
        return self.uniform(field, *shape).mul_(2).sub_(1).erfinv_().mul_(math.sqrt(2))


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64; int64 products wrap around as unsigned ones do."""
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift right: int64's own copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
