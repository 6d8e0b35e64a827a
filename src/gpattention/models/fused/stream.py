"""The residual stream from block to block: what a part of the network adds meets the next LayerNorm.

A plain block adds, then normalises.  Here the sum stays open until the LayerNorm that reads it, across the
borders of blocks too, so that both are one kernel.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import linear

from gpattention.attention import AttentionOutput, SGPAAttention
from gpattention.models.block import Block, FeedForward
from gpattention.models.fused.gelu import gelu_linear
from gpattention.models.fused.residual_norm import Added, residual_norm
from gpattention.models.seeded_dropout import rate_of


@dataclass(frozen=True)
class Stream:
    """Tokens [..., E], and what is still to be added to them."""

    tokens: Tensor
    added: Added | None = None

    def settle(self, norm: nn.LayerNorm, seed: Tensor | None) -> tuple[Tensor, Tensor]:
        """The tokens with what was added, and their LayerNorm.  [..., E] each"""
        return residual_norm(self.tokens, self.added, norm.weight, norm.bias, norm.eps, seed)


def run_block(
    stream: Stream,
    block: Block,
    seed: Tensor | None,
    site: int,
    *,
    before: Block | None,
    **options: Any,
) -> tuple[Stream, AttentionOutput]:
    """What `block(...)` does, with the attention's own options."""
    tokens, normed = stream.settle(block.norm, seed)
    inducing = _inducing(block, before, seed, site + 3)
    told: AttentionOutput = block.attention(normed, inducing=inducing, finish=False, **options)
    output = block.attention.output
    z = linear(told.output.flatten(0, -3), output.weight)  # samples share the batch axis from here on
    added = Added(z, output.bias, rate_of(block.attention.dropout), site)
    return _feed_forward(Stream(tokens, added), block.feed_forward, seed, site + 1), told


def _feed_forward(stream: Stream, part: FeedForward, seed: Tensor | None, site: int) -> Stream:
    tokens, normed = stream.settle(part.norm, seed)
    hidden, rate = linear(normed, part.into.weight), rate_of(part.dropout)
    z = gelu_linear(hidden, part.into.bias, part.back.weight, rate, seed, site)
    return Stream(tokens, Added(z, part.back.bias, rate, site + 1))


def _inducing(block: Block, before: Block | None, seed: Tensor | None, site: int) -> Tensor | None:
    """SGPA's inducing inputs after the feed-forward part below and this layer's LayerNorm.  [H, m, E]"""
    if not isinstance(block.attention, SGPAAttention) or before is None:
        return None
    raw = Stream(block.attention.inducing)
    return _feed_forward(raw, before.feed_forward, seed, site).settle(block.norm, seed)[1]
