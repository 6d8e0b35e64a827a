"""Oversmoothing: how alike tokens become, layer by layer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from gpattention.models.rows import evaluating


@dataclass(frozen=True)
class Similarity:
    """Mean cosine similarity between different real tokens of a sequence, averaged over sequences."""

    embedded: float
    attended: tuple[float, ...]  # after each attention
    tokens: tuple[float, ...]  # after each block


@torch.no_grad()
def token_similarity(model: Any, inputs: Tensor | Mapping[str, Tensor]) -> Similarity:
    """Cosine similarity between tokens after each attention and each block; 1 is total oversmoothing."""
    with evaluating(model):
        embedded, padding = model.embed(inputs)
        layers = model(inputs, need=("logits", "tokens")).layers
    return Similarity(
        embedded=cosine_similarity(embedded, padding),
        attended=tuple(cosine_similarity(layer.attended, padding) for layer in layers),
        tokens=tuple(cosine_similarity(layer.tokens, padding) for layer in layers),
    )


def cosine_similarity(tokens: Tensor, padding: Tensor | None = None) -> float:
    """Of tokens [B, N, E] under a padding mask [B, N] (True = ignore); NaN without any pair."""
    unit = normalize(tokens.double(), dim=-1)
    if padding is not None:
        unit = torch.where(padding[..., None], 0.0, unit)
    count = (
        torch.full(unit.shape[:1], float(unit.shape[1])) if padding is None else (~padding).sum(-1).double()
    )
    count = count.to(unit)
    total = unit.sum(-2).square().sum(-1) - unit.square().sum((-2, -1))  # sum over pairs i != j
    pairs = count * (count - 1)
    some = pairs > 0
    return float((total[some] / pairs[some]).mean())
