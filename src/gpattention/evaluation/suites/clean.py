"""Suite `clean`: every metric on labelled items as they are, reliability, a gallery, and the layers' health.

The gallery shows items worth looking at, the health what the model's layers look like from inside.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from gpattention.evaluation.predictions import ItemSet, Predicted
from gpattention.evaluation.suites.examples import gallery
from gpattention.evaluation.suites.findings import (
    PAPER_BATCH,
    Findings,
    Subject,
    classification_records,
    count_items_of,
    item_means,
    item_values,
    reliability_curve,
)
from gpattention.metrics import reliability_bins

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
        if subject.run is None:
            each = {
                place: item_means([item_values(x)]) for place, x in found.items() if place != "validation"
            }
            parts.append(Findings(curves={"by_item": {label: each}}))
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
