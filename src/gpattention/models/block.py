"""One pre-LayerNorm transformer block around any kind of attention."""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from gpattention.attention import Attention, AttentionOutput, SGPAAttention
from gpattention.attention.output import Draw
from gpattention.gp import NoiseSource
from gpattention.models.seeded_dropout import drop


@dataclass(frozen=True)
class BlockOutput:
    """Tokens after the block, after its attention, and what the attention told."""

    tokens: Tensor  # [B, N, E] or [S, B, N, E] where several samples were drawn
    attended: Tensor  # the same before the feed-forward part
    attention: AttentionOutput


class FeedForward(nn.Module):
    """LayerNorm, two linear maps with GELU between, dropout: what is added to the tokens."""

    def __init__(self, width: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.into = nn.Linear(width, hidden)
        self.back = nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, seed: Tensor | None = None, site: int = 0) -> Tensor:
        """[..., E] -> [..., E]; a seed makes the masks of the two sites (see `seeded_dropout`)."""
        hidden = drop(self.dropout, nn.functional.gelu(self.into(self.norm(x))), seed, site)
        return drop(self.dropout, self.back(hidden), seed, site + 1)


class Block(nn.Module):
    """x + attention(LN x), then x + feed-forward(x)."""

    def __init__(self, attention: Attention, *, mlp_width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(attention.embed_dim)
        self.attention = attention
        self.feed_forward = FeedForward(attention.embed_dim, mlp_width, dropout)

    def forward(
        self,
        x: Tensor,  # [B, N, E]
        *,
        padding: Tensor | None = None,  # [B, N] True = ignore
        draw: Draw = "none",
        samples: int = 1,
        generator: Generator | NoiseSource | None = None,
        need: tuple[str, ...] = ("output",),
        before: "Block | None" = None,
        seed: Tensor | None = None,
        site: int = 0,
    ) -> BlockOutput:
        """One layer; `before` is the layer below, through which SGPA's inducing inputs travel.

        `seed` makes the dropout masks of the block's sites, the first of which is `site`.
        """
        seeded = seed is not None and type(self.attention).forward is Attention.forward
        told = self.attention(
            self.norm(x),
            key_padding_mask=padding,
            draw=draw if self.attention.draws else "none",
            samples=samples,
            generator=generator,
            need=need,
            inducing=self._inducing(before, seed, site + 3),
            **({"finish": False} if seeded else {}),  # kinds of others need not know it
        )
        output = told.output
        if seeded:
            output = drop(self.attention.dropout, self.attention.output(output), seed, site)
        attended = x + output
        return BlockOutput(attended + self.feed_forward(attended, seed, site + 1), attended, told)

    def _inducing(self, before: "Block | None", seed: Tensor | None, site: int) -> Tensor | None:
        """Raw inducing inputs after the feed-forward part below and this layer's LayerNorm.  [H, m, E]"""
        if not isinstance(self.attention, SGPAAttention) or before is None:
            return None
        raw = self.attention.inducing
        return self.norm(raw + before.feed_forward(raw, seed, site))


def masked_mean(tokens: Tensor, padding: Tensor | None) -> Tensor:
    """Mean over real tokens, zero where there are none.  [..., N, E] -> [..., E]"""
    if padding is None:
        return tokens.mean(-2)
    real = ~padding[..., None]
    return torch.where(real, tokens, 0.0).sum(-2) / real.sum(-2).clamp_min(1)
