"""Items worth looking at, and what the model's layers look like from inside."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from gpattention.evaluation.items import ItemSet
from gpattention.evaluation.layer_variance import padding_of, token_means
from gpattention.evaluation.predicted import Predicted
from gpattention.models import predict
from gpattention.models.rows import Inputs

COUNT = 8  # items of each kind
HEALTH_ITEMS = 256


def gallery(
    model: Any, items: ItemSet, predicted: Predicted, classes: Sequence[str], device: torch.device
) -> dict[str, list[dict[str, Any]]]:
    """The most certain, the least certain and the most wrong items, with the variance at their tokens.

    Certain is by confidence; most wrong are those of the wrongly predicted that give their class the least
    probability.  `uncertainty` is the entropy of the prediction in nats; `token_variance` the mean over
    heads and layers in the mean pass.
    """
    told, labels = predicted.prediction, predicted.known_labels
    right = told.probs.gather(1, labels[:, None])[:, 0]  # [B]
    wrong = (told.label != labels).nonzero()[:, 0]
    chosen = {
        "most_certain": told.confidence.argsort(descending=True, stable=True)[:COUNT],
        "least_certain": told.confidence.argsort(stable=True)[:COUNT],
        "most_wrong": wrong[right[wrong].argsort(stable=True)][:COUNT],
    }
    return {
        kind: _described(model, items, predicted, classes, places.cpu(), device)
        for kind, places in chosen.items()
    }


def health_table(model: Any, items: ItemSet, device: torch.device) -> list[dict[str, Any]]:
    """`model.health` of some items, one entry per layer, with how its variance ranks errors."""
    few = items.first(HEALTH_ITEMS)
    report = model.health(few.inputs(0, len(few), device), few.labels)
    return [
        {"layer": number, **asdict(layer), "variance_correlation": correlation}
        for number, (layer, correlation) in enumerate(
            zip(report.layers, report.variance_correlation, strict=True)
        )
    ]


def _described(
    model: Any,
    items: ItemSet,
    predicted: Predicted,
    classes: Sequence[str],
    places: Tensor,
    device: torch.device,
) -> list[dict[str, Any]]:
    if len(places) == 0:
        return []
    some = items.select(places)
    variances = _token_variances(model, some.inputs(0, len(some), device))
    told, labels = predicted.prediction, predicted.known_labels
    return [
        {
            "index": place,
            "label": classes[int(labels[place])],
            "predicted": classes[int(told.label[place])],
            "confidence": float(told.confidence[place]),
            "uncertainty": float(told.entropy[place]),
            "image": _pixels(some.stored, number),
            "words": None if some.words is None else list(some.words[number]),
            "token_variance": variances[number],
            "grid": _grid(model),
        }
        for number, place in enumerate(places.tolist())
    ]


def _token_variances(model: Any, inputs: Inputs) -> list[list[float] | None]:
    """Of the real tokens of each item; None where no layer has a variance."""
    padding = padding_of(inputs)
    count = len(inputs) if isinstance(inputs, Tensor) else len(next(iter(inputs.values())))
    if not model.draws:
        return [None] * count
    told = predict(model, inputs, samples=0, variances=True).variances or ()
    mean = torch.stack([token_means(v) for v in told if v is not None]).mean(0)  # [B, N]
    if padding is None:
        return [row.tolist() for row in mean]
    return [row[~hidden].tolist() for row, hidden in zip(mean, padding, strict=True)]


def _pixels(stored: Inputs, item: int) -> list[list[list[int]]] | None:
    """An image as rows of pixels of channels, 0 to 255."""
    if not isinstance(stored, Tensor) or stored.ndim != 4:
        return None
    image = stored[item]
    if image.is_floating_point():
        image = (image.clamp(0, 1) * 255).round()
    return image.to(torch.uint8).permute(1, 2, 0).tolist()


def _grid(model: Any) -> list[int] | None:
    """Rows and columns of patches."""
    vision = getattr(model, "vision", None)
    if vision is None:
        return None
    return [side // vision.patch for side in vision.sides]
