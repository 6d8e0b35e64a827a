"""Suite `clean`: every metric on unchanged labelled items, reliability, a gallery, and the health of layers.

The gallery shows items worth a look, the health what the layers of the model look like from inside.
"""

from collections.abc import Mapping
from dataclasses import asdict
from itertools import chain
from typing import Any

import torch

from gpattention.evaluation.predictions import ItemSet, Predicted
from gpattention.evaluation.suites.examples import gallery
from gpattention.evaluation.suites.findings import (
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
# of tokens, in each head; all pairs are held at once, half a GiB in eight heads
HEALTH_PAIRS = 2**24


def evaluate_clean(subject: Subject) -> Findings:
    """Validation items, test items, and sets of other kinds that have labels."""
    sets, run = subject.sets, subject.run
    # images of other kinds belong to no known class
    labelled, notes = sets.load_outside() if sets.kind == "texts" else ([], ())
    parts = [Findings(notes=notes)]
    for label, found in subject.predictions("clean", subject.validation, subject.test, *labelled):
        parts += [clean_findings(label, found, batch=subject.paper_batch), count_items_of(label, found)]
        shown: dict[str, Any] = {}
        if run is None:
            each = {name: item_means([item_values(x)]) for name, x in found.items() if name != "validation"}
            shown["by_item"] = {label: each}
        elif label == "model":
            shown["gallery"] = gallery(run.model, sets.test, found["test"], sets.classes, subject.device)
            shown["health"] = health_table(run.model, sets.test, subject.device)
        parts.append(Findings(curves=shown))
    return Findings.merge(parts)


def clean_findings(predictor: str, sets: Mapping[str, Predicted], *, batch: int) -> Findings:
    """Every metric of labelled sets.

    Args:
        predictor: its name in records.
        sets: predictions by the names of their sets.
        batch: number of items in the batches over which the paper averages its calibration errors.

    Returns:
        Records of every set with labels, and the curve "reliability" of the set `test`.
    """
    labelled = {name: predicted for name, predicted in sets.items() if predicted.labels is not None}
    each = (classification_records(name, predictor, found, batch) for name, found in labelled.items())
    curves = {}
    if "test" in sets:
        bins = reliability_bins(sets["test"].prediction.probs, sets["test"].known_labels)
        curves["reliability"] = {predictor: reliability_curve(bins)}
    return Findings(tuple(chain.from_iterable(each)), curves)


def health_table(model: Any, items: ItemSet, device: torch.device) -> list[dict[str, Any]]:
    """`model.health` for some items, with how well the variance of each layer ranks errors.

    Args:
        model: one of our transformers.
        items: the first 256 of them are used, fewer where sequences may be longer than 256 tokens.
        device: of the model.

    Returns:
        One entry for each layer.
    """
    few = items.first(min(HEALTH_ITEMS, max(1, HEALTH_PAIRS // (model.config.longest or 1) ** 2)))
    report = model.health(few.inputs(0, len(few), device), few.labels)
    layers = zip(report.layers, report.variance_correlation, strict=True)
    return [
        {"layer": number, **asdict(layer), "variance_correlation": correlation}
        for number, (layer, correlation) in enumerate(layers)
    ]
