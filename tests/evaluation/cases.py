"""Seeded predictions, and what NumPy makes of their logits."""

import numpy as np
import torch
from torch import Tensor

from gpattention.evaluation.predictions import Predicted


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draws(items: int = 60, classes: int = 4, samples: int = 5, seed: int = 0, scale: float = 2.0) -> Tensor:
    """[S, B, C]: a common part, and what differs between the draws."""
    common = scale * torch.randn(1, items, classes, generator=seeded(seed))
    return common + torch.randn(samples, items, classes, generator=seeded(seed + 1))


def some_labels(logits: Tensor, seed: int = 2) -> Tensor:
    """Often the most probable class."""
    items, classes = logits.shape[1:]
    other = torch.randint(classes, (items,), generator=seeded(seed))
    keep = torch.rand(items, generator=seeded(seed + 1)) < 0.6
    return torch.where(keep, logits.mean(0).argmax(-1), other)


def predicted(
    items: int = 60, classes: int = 4, samples: int = 5, seed: int = 0, layers: int | None = 3
) -> Predicted:
    logits = draws(items, classes, samples, seed)
    variance = None if layers is None else torch.rand(items, layers, generator=seeded(seed + 5))
    return Predicted.from_logits(logits, some_labels(logits, seed + 2), variance)


def softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis."""
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def mean_probs(found: Predicted) -> np.ndarray:
    """Of the draws, by NumPy.  [B, C]"""
    return softmax(found.prediction.logits.double().numpy()).mean(0)
