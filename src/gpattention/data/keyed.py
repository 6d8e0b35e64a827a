"""Random numbers that belong to an item: the same for every batch, device, number of ranks and version.

The generators of torch and NumPy hand out numbers in the order of calls, and their algorithms may change
between versions.  Here every number is a hash (splitmix64) of an item's index and of some keys, such as
(purpose, seed, epoch), so splits, batches and augmentation can be told by those keys alone.
"""

import torch
from torch import Tensor

# purposes: the first key, so that one seed can serve all of them
SPLIT, BATCHES, CROP, FLIP, GENERATED = range(1, 6)

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def keyed(items: Tensor, *keys: int) -> Tensor:
    """One number from 0 to 2**63 - 1 for each item, [n] int64, on the device of `items`."""
    state = 0
    for key in keys:
        state = _mix_int((state + _GOLDEN) ^ (key & _MASK))
    mixed = _mix(_mix(items.to(torch.int64) * _signed(_GOLDEN) + _signed(state)))
    return mixed & ((1 << 63) - 1)


def integers(items: Tensor, bound: int, *keys: int) -> Tensor:
    """One number from 0 to `bound` - 1 for each item, [n] int64; even for bounds far below 2**63."""
    return keyed(items, *keys) % bound


def permutation(n: int, *keys: int) -> Tensor:
    """The numbers 0 to n - 1 in an order that the keys decide, [n] int64."""
    return keyed(torch.arange(n), *keys).argsort(stable=True)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x


def _mix_int(x: int) -> int:
    x &= _MASK
    x = ((x ^ (x >> 30)) * _MIX_1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX_2) & _MASK
    return x ^ (x >> 31)


def _mix(x: Tensor) -> Tensor:
    """`_mix_int` on int64 tensors, whose product wraps around and whose shift drags the sign along."""
    x = (x ^ _shifted(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shifted(x, 27)) * _signed(_MIX_2)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, places: int) -> Tensor:
    return (x >> places) & ((1 << (64 - places)) - 1)
