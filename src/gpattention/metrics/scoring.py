"""Proper scores of whole predictions: smallest, on average, for the true probabilities."""

import torch
from torch import Tensor

from gpattention.metrics.checks import read_items


def nll(probs: Tensor, labels: Tensor) -> float:
    """Mean negative log-probability of the right class, in nats.

    Probabilities below the smallest positive normal number of their type, 0 among them, count as that
    number: a class held impossible costs 87.3 nats in float32 and in the half precisions, which are read as
    float32, and 708.4 in float64.  `probs` are [B, C] and `labels` [B].
    """
    return float(nll_per_item(*read_items(probs, labels)).mean())


def brier(probs: Tensor, labels: Tensor) -> float:
    """Mean squared distance of the probabilities from the right class, summed over the classes.

    Brier's own definition (1950), in [0, 2]; for two classes it is twice the square of the error in one of
    them.  `probs` are [B, C] and `labels` [B].
    """
    return float(brier_per_item(*read_items(probs, labels)).mean())


def nll_per_item(probs: Tensor, labels: Tensor) -> Tensor:
    """Negative log-probability of each item's class, in float64.  [B]"""
    kind = torch.promote_types(probs.dtype, torch.float32)
    right = probs.gather(1, labels[:, None])[:, 0]  # [B]
    return -right.double().clamp(min=torch.finfo(kind).tiny).log()


def brier_per_item(probs: Tensor, labels: Tensor) -> Tensor:
    """Squared distance of each item's probabilities from its class, in float64.  [B]"""
    off = probs.to(torch.float64, copy=True)  # [B, C]
    off[torch.arange(len(off), device=off.device), labels] -= 1
    return off.square().sum(-1)
