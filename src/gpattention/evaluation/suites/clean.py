"""Suite `clean`: every metric on labelled items as they are, reliability, a gallery, and the layers' health.

The gallery shows items worth looking at, the health what the model's layers look like from inside.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from gpattention.evaluation.predictions import ItemSet, Predicted, padding_of, token_means
from gpattention.evaluation.suites.findings import (
    PAPER_BATCH,
    Findings,
    Subject,
    classification_records,
    count_items_of,
    reliability_curve,
)
from gpattention.metrics import reliability_bins
from gpattention.models import predict
from gpattention.models.predict import Inputs, count_items

COUNT = 8  # items of each kind in the gallery
HEALTH_ITEMS = 256


def evaluate_clean(subject: Subject) -> Findings:
    """Validation, test, and sets of other kinds that have labels, as far as there are items."""
    sets = subject.sets
    # images of other kinds are of no known class
    labelled, notes = sets.load_outside() if sets.kind == "texts" else ([], ())
    parts, own = [], None
    for label, found in subject.predictions("clean", subject.validation, subject.test, *labelled):
        parts += [clean_findings(label, found, batch=PAPER_BATCH[sets.kind]), count_items_of(label, found)]
        own = found["test"] if label == "model" else own
    if subject.run is not None and own is not None:
        model = subject.run.model
        shown = {
            "gallery": gallery(model, sets.test, own, sets.classes, subject.device),
            "health": health_table(model, sets.test, subject.device),
        }
        parts.append(Findings(curves=shown))
    return Findings.merge([*parts, Findings(notes=notes)])


def clean_findings(predictor: str, sets: Mapping[str, Predicted], *, batch: int) -> Findings:
    """Every metric of labelled sets.

    Args:
        predictor: as records name it.
        sets: predictions by the names of their sets.
        batch: items over which the paper averages its calibration errors.

    Returns:
        Records of every set that has labels; the curve "reliability" of the set `test`.
    """
    records = [
        record
        for name, predicted in sets.items()
        if predicted.labels is not None
        for record in classification_records(name, predictor, predicted, batch)
    ]
    if "test" not in sets:
        return Findings(tuple(records))
    bins = reliability_bins(sets["test"].prediction.probs, sets["test"].known_labels)
    return Findings(tuple(records), {"reliability": {predictor: reliability_curve(bins)}})


def gallery(
    model: Any, items: ItemSet, predicted: Predicted, classes: Sequence[str], device: torch.device
) -> dict[str, list[dict[str, Any]]]:
    """The most certain, the least certain and the most wrong items, with the variance at their tokens.

    Certain is by confidence; most wrong are those of the wrongly predicted that give their class the least
    probability.  `uncertainty` is the entropy of the prediction in nats; `token_variance` the mean over
    heads and layers in the mean pass.

    Args:
        model: made the prediction.
        items: with labels.
        predicted: of these items.
        classes: names of them.
        device: the model's.

    Returns:
        Up to eight items of each kind, by kind.
    """
    prediction, labels = predicted.prediction, predicted.known_labels
    right = prediction.probs.gather(1, labels[:, None])[:, 0]  # [B]
    wrong = (prediction.label != labels).nonzero()[:, 0]
    chosen = {
        "most_certain": prediction.confidence.argsort(descending=True, stable=True)[:COUNT],
        "least_certain": prediction.confidence.argsort(stable=True)[:COUNT],
        "most_wrong": wrong[right[wrong].argsort(stable=True)][:COUNT],
    }
    vision = getattr(model, "vision", None)
    grid = None if vision is None else [side // vision.patch for side in vision.sides]  # rows, columns

    def entries(places: Tensor) -> list[dict[str, Any]]:
        if len(places) == 0:
            return []
        some = items.select(places)
        variances = _token_variances(model, some.inputs(0, len(some), device))
        return [
            {
                "index": place, "label": classes[int(labels[place])],
                "predicted": classes[int(prediction.label[place])],
                "confidence": float(prediction.confidence[place]),
                "uncertainty": float(prediction.entropy[place]), "image": _pixels(some.stored, number),
                "words": None if some.words is None else list(some.words[number]),
                "token_variance": variances[number], "grid": grid,
            }
            for number, place in enumerate(places.tolist())
        ]  # fmt: skip

    return {kind: entries(places.cpu()) for kind, places in chosen.items()}


def health_table(model: Any, items: ItemSet, device: torch.device) -> list[dict[str, Any]]:
    """`model.health` of some items, with how each layer's variance ranks errors.

    Args:
        model: a transformer of ours.
        items: of which the first 256 are looked at.
        device: the model's.

    Returns:
        One entry per layer.
    """
    few = items.first(HEALTH_ITEMS)
    report = model.health(few.inputs(0, len(few), device), few.labels)
    layers = zip(report.layers, report.variance_correlation, strict=True)
    return [
        {"layer": number, **asdict(layer), "variance_correlation": correlation}
        for number, (layer, correlation) in enumerate(layers)
    ]


def _token_variances(model: Any, inputs: Inputs) -> list[list[float] | None]:
    """Of the real tokens of each item; None where no layer has a variance."""
    if not model.draws:
        return [None] * count_items(inputs)
    variances = predict(model, inputs, samples=0, variances=True).variances or ()
    mean = torch.stack([token_means(v) for v in variances if v is not None]).mean(0)  # [B, N]
    padding = padding_of(inputs)
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
