"""Dropout whose masks are a hash of (seed, site, place): fused and plain paths drop the same entries.

The seed is a tensor, so that a captured graph reads it anew at every replay; a site is one call of dropout
in a forward pass; a place is an entry of what it drops.  Seed and site make the two halves of a key of
`gp.noise`; two rounds of a 32-bit hash turn them and the place into bits.
"""

import torch
from torch import Tensor, nn

from gpattention.attention.projections import is_plain
from gpattention.gp.noise import seed_key, stream_key

EMBEDDING_SITE = 0
SITES = 5  # of a block: attention, GELU, feed-forward, and the last two of SGPA's inducing inputs
_WORD = 0xFFFFFFFF
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B  # multipliers of the 32-bit hash


def first_site(block: int) -> int:
    """The first of the `SITES` of a block, counted from 0."""
    return EMBEDDING_SITE + 1 + SITES * block


def rate_of(dropout: nn.Dropout) -> float:
    """The rate in force: 0 outside training."""
    return float(dropout.p) if dropout.training else 0.0


def threshold(rate: float) -> int:
    """An entry is dropped where its 24 random bits are below this."""
    return round(rate * 2**24)


def keep_mask(shape: torch.Size, rate: float, seed: Tensor, site: int) -> Tensor:
    """True where an entry is kept.  [*shape]"""
    key = stream_key(seed_key(seed), site)  # []
    place = torch.arange(shape.numel(), device=seed.device) & _WORD
    bits = _scramble(place ^ (key & _WORD))
    bits = _scramble((bits + ((key >> 32) & _WORD)) & _WORD)
    return ((bits >> 8) >= threshold(rate)).view(shape)


def seeded_dropout(x: Tensor, rate: float, seed: Tensor, site: int) -> Tensor:
    """x / (1 - rate) where it is kept, else 0."""
    if rate == 0:
        return x
    if rate >= 1:
        return torch.zeros_like(x)
    return torch.where(keep_mask(x.shape, rate, seed, site), x * (1 / (1 - rate)), 0.0)


def drop(dropout: nn.Module, x: Tensor, seed: Tensor | None, site: int) -> Tensor:
    """What the module does; with a seed its mask is that of the site, unless somebody watches the module."""
    if seed is None or not is_plain(dropout, nn.Dropout):
        return dropout(x)
    return seeded_dropout(x, rate_of(dropout), seed, site)


def _scramble(x: Tensor) -> Tensor:
    """A bijection of 32-bit words, held in int64: shifts, exclusive ors and two products (lowbias32)."""
    x = ((x ^ (x >> 16)) * _FIRST) & _WORD
    x = ((x ^ (x >> 15)) * _SECOND) & _WORD
    return x ^ (x >> 16)
