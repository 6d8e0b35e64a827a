"""Inducing inputs of sparse attention: learned per head, or pooled from the tokens."""

import math
from typing import Literal, assert_never, get_args

import torch
from torch import Tensor, nn

from gpattention.attention.initialisation import latent_points
from gpattention.checks import check_count
from gpattention.gp.checks import check_choice

InducingKind = Literal["learned", "pooled"]
INDUCING_KINDS: tuple[InducingKind, ...] = get_args(InducingKind)


class LearnedInducing(nn.Module):
    """Parameters in the space and at the scale of the latent inputs, the same for every sequence."""

    def __init__(
        self,
        num_heads: int,
        count: int,
        head_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        points = latent_points(num_heads, count, head_dim)
        self.points = nn.Parameter(points.to(device=device, dtype=dtype))  # [H, m, D]

    def forward(self, tokens: Tensor, latent: Tensor, mask: Tensor | None) -> Tensor:
        """[H, m, D]"""
        return self.points


class PooledInducing(nn.Module):
    """m averages of each sequence's latent inputs, by attention of learned probes.

    Works for any length, ignores padding and does not see the order of tokens.  Averages lie close
    together, so the learned points are added as offsets: coinciding inputs have a singular Gram matrix.
    """

    def __init__(
        self,
        num_heads: int,
        count: int,
        embed_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.count = num_heads, count
        self.probe = nn.Linear(embed_dim, num_heads * count, bias=False, device=device, dtype=dtype)
        nn.init.normal_(self.probe.weight, std=1 / math.sqrt(embed_dim))
        points = latent_points(num_heads, count, embed_dim // num_heads)
        self.offsets = nn.Parameter(points.to(device=device, dtype=dtype))  # [H, m, D]

    def forward(self, tokens: Tensor, latent: Tensor, mask: Tensor | None) -> Tensor:
        """From tokens [B, N, E] and latent inputs [B, H, N, D]: [B, H, m, D]"""
        scores = self.probe(tokens).unflatten(-1, (self.num_heads, self.count)).movedim(1, -1)  # [B, H, m, N]
        if mask is not None:
            real = mask[:, :, None, :]  # [B, 1, 1, N]
            scores = torch.where(real, scores, -torch.inf)
            scores = torch.where(real.any(-1, keepdim=True), scores, 0.0)
            latent = torch.where(mask[..., None], latent, 0.0)
        return scores.softmax(-1) @ latent + self.offsets.to(latent.dtype)


def build_inducing(
    kind: InducingKind,
    num_heads: int,
    count: int,
    embed_dim: int,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> LearnedInducing | PooledInducing:
    """Inducing inputs by name."""
    check_choice("inducing", kind, INDUCING_KINDS)
    count = check_count("num_inducing", count)
    if kind == "learned":
        return LearnedInducing(num_heads, count, embed_dim // num_heads, device=device, dtype=dtype)
    if kind == "pooled":
        return PooledInducing(num_heads, count, embed_dim, device=device, dtype=dtype)
    assert_never(kind)
