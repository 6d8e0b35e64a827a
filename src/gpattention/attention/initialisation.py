"""Projections that make attention say something at step 0.

With nn.Linear's own initialisation kappa(q, k) is about 1e-4 at head width 32: kernel attention is
switched off and its posterior is the prior.  Spreading queries and keys evenly over all d dimensions
cannot help: a distance in many dimensions concentrates, so kappa is the same for every pair.  Instead a
few `ACTIVE` dimensions per head carry standard deviation `SPREAD`, the rest a little, which training may
raise.  For LayerNorm'ed tokens then, whatever the width of the head:
    E kappa = (1 + 2 s^2)^(-r/2) = 0.11,   E kappa^2 / (E kappa)^2 = ((1 + 2 s^2)^2 / (1 + 4 s^2))^(r/2) = 3.2
"""

import math

import torch
from torch import nn

ACTIVE = 4
SPREAD = 1.0
BACKGROUND = 0.1  # squared distance the other dimensions add, in all


@torch.no_grad()
def spread_(linear: nn.Linear, num_heads: int, *, scale: float = 1.0) -> None:
    """Initialise a projection to queries, keys or latent inputs of all heads; the bias is zero."""
    width, head_dim = linear.in_features, linear.out_features // num_heads
    weight = torch.randn(num_heads, head_dim, width) / math.sqrt(width)
    weight = scale * _deviation(head_dim)[:, None] * weight  # [H, D, E]
    linear.weight.copy_(weight.reshape(-1, width))
    if linear.bias is not None:
        linear.bias.zero_()


@torch.no_grad()
def latent_points(num_heads: int, count: int, head_dim: int) -> torch.Tensor:
    """Random inducing inputs where the projections of `spread_` put the tokens.  [H, m, D]"""
    return _deviation(head_dim) * torch.randn(num_heads, count, head_dim)


def _deviation(head_dim: int) -> torch.Tensor:
    """Standard deviations of a head's dimensions: few active ones, a little in the rest.  [D]"""
    active = min(ACTIVE, head_dim)
    deviation = torch.full((head_dim,), math.sqrt(BACKGROUND / (2 * head_dim)))
    deviation[:active] = SPREAD * math.sqrt(ACTIVE / active)
    return deviation


@torch.no_grad()
def preserve_(linear: nn.Linear) -> None:
    """Initialise a projection of values or outputs to keep the size of LayerNorm'ed tokens."""
    nn.init.normal_(linear.weight, std=1 / math.sqrt(linear.in_features))
    if linear.bias is not None:
        linear.bias.zero_()
