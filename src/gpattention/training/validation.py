"""How a run judges its model between epochs."""

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import nll_loss

from gpattention.models import Transformer
from gpattention.models.rows import count_items, take
from gpattention.training.results import TrainingData

HEALTH_ITEMS = 64  # validation items the floor is watched on


@dataclass(frozen=True)
class Validation:
    """Of the mean prediction, over all validation items."""

    accuracy: float
    nll: float


@torch.no_grad()
def validate(fabric: Any, model: Transformer, data: TrainingData) -> Validation:
    """Every process predicts its share of the items; the sums are added, so that no share weighs more."""
    items = torch.arange(count_items(data.validation)).tensor_split(fabric.world_size)[fabric.global_rank]
    sums = torch.zeros(3, dtype=torch.float64)  # right, negative log-likelihood, items
    if len(items):
        sums = _sums(model, data, items)
    if fabric.world_size > 1:
        sums = fabric.all_reduce(sums.to(fabric.device), reduce_op="sum").cpu()
    right, nll, count = sums.tolist()
    return Validation(right / count, nll / count)


def floor_share(model: Transformer, data: TrainingData, step: int, limit: float) -> float | None:
    """How near the density of the layers' outputs is to its floor; warns of a collapse."""
    device = next(model.parameters()).device
    count = min(count_items(data.validation), HEALTH_ITEMS)
    health = model.health(take(data.validation, torch.arange(count), device))
    shares = [layer.floor_share for layer in health.layers if layer.floor_share is not None]
    if not shares:
        return None
    if max(shares) > limit:
        warnings.warn(
            f"a layer reaches {max(shares):.2f} of its noise floor at step {step}: the regulariser "
            "is collapsing the model, lower regularizer.end",
            RuntimeWarning,
            stacklevel=2,
        )
    return max(shares)


def _sums(model: Transformer, data: TrainingData, items: Tensor) -> Tensor:
    device = next(model.parameters()).device
    prediction = model.predict(take(data.validation, items, device), samples=0)
    labels = data.validation_labels[items].to(prediction.label.device)
    right = (prediction.label == labels).double().sum()
    nll = nll_loss(prediction.log_probs.double(), labels, reduction="sum")
    return torch.stack([right, nll, torch.full_like(nll, len(items))]).cpu()
