"""What is measured on images: labels where there are any, and how well strange images are told apart."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gpattention.data.corruptions import CATEGORIES
from gpattention.evaluation.items import ItemSet
from gpattention.evaluation.predicted import Predicted
from gpattention.evaluation.predictor import Predictor
from gpattention.evaluation.records import Record
from gpattention.evaluation.suites.corrupted import corruption_means, set_name
from gpattention.experiments.adoption.methods import Source
from gpattention.experiments.judging.judges import load_outside
from gpattention.experiments.judging.run_sets import RunSets
from gpattention.metrics import auroc, metrics_of

PARTS = ("clean", "corrupted", "ood")
METRICS = ("accuracy", "nll", "ece", "mce", "aurc")
SCORES = ("entropy", "mutual_information", "max_softmax")

Values = dict[str, dict[str, dict[str, float]]]  # by method, set and metric
Logits = Callable[[Predictor, int, ItemSet], Tensor]  # [S, n, C]
Counted = Callable[[int, int], object]


def part_values(
    part: str,
    sets: RunSets,
    sources: Sequence[Source],
    logits: Logits,
    device: torch.device,
    tell: Counted,
) -> tuple[Values, list[str]]:
    """Every number of a part for every method, and what is to be said about the sets."""
    return _PARTS[part](sets, sources, logits, device, tell)


def _clean(
    sets: RunSets, sources: Sequence[Source], logits: Logits, device: torch.device, tell: Counted
) -> tuple[Values, list[str]]:
    found: Values = {}
    for done, items in enumerate((sets.validation, sets.test)):
        for method, predicted in _predictions(sources, logits, items):
            found.setdefault(method, {})[items.name] = _scores(predicted)
        tell(done + 1, 2)
    return found, []


def _corrupted(
    sets: RunSets, sources: Sequence[Source], logits: Logits, device: torch.device, tell: Counted
) -> tuple[Values, list[str]]:
    assert sets.corrupted is not None  # images have corruptions
    source = sets.corrupted(device, None)
    records: list[Record] = []
    places = [(corruption, severity) for corruption in source.types for severity in source.severities]
    for done, (corruption, severity) in enumerate(places):
        items = sets.corrupted_items(source, corruption, severity)
        for method, predicted in _predictions(sources, logits, items):
            name = set_name(corruption, severity)
            records += [Record(name, method, metric, x) for metric, x in _scores(predicted).items()]
        tell(done + 1, len(places))
    found: Values = {}
    for record in (*corruption_means(records, CATEGORIES), *records):
        found.setdefault(record.predictor, {}).setdefault(record.set, {})[record.metric] = record.value
    return found, list(source.notes)


def _ood(
    sets: RunSets, sources: Sequence[Source], logits: Logits, device: torch.device, tell: Counted
) -> tuple[Values, list[str]]:
    outside, notes = load_outside(sets)
    inside = {method: _strangeness(p) for method, p in _predictions(sources, logits, sets.test)}
    found: Values = {method: {} for method in inside}
    for done, items in enumerate(outside):
        for method, predicted in _predictions(sources, logits, items):
            scores = _strangeness(predicted)
            found[method][items.name] = {
                f"auroc_{name}": auroc(inside[method][name], score) for name, score in scores.items()
            }
        tell(done + 1, len(outside))
    return found, list(notes)


_PARTS = {"clean": _clean, "corrupted": _corrupted, "ood": _ood}


def _predictions(sources: Sequence[Source], logits: Logits, items: ItemSet) -> list[tuple[str, Predicted]]:
    """Of all methods; what several share is predicted once."""
    found = []
    for source in sources:
        drawn = logits(source.predictor, source.samples, items)
        labels = None if items.labels is None else items.labels.to(drawn.device)
        found += [(variant.method, variant.predicted(drawn, labels)) for variant in source.variants]
    return found


def _scores(predicted: Predicted) -> dict[str, float]:
    probs, labels = predicted.prediction.probs, predicted.known_labels
    functions = metrics_of("labels")
    return {name: functions[name](probs, labels) for name in METRICS}


def _strangeness(predicted: Predicted) -> dict[str, Tensor]:
    """Scores that are larger for strange images, [n] each; without draws there is nothing to disagree."""
    told = predicted.prediction
    found = {"entropy": told.entropy, "max_softmax": 1 - told.confidence}
    several = told.drawn and told.samples > 1
    return found | ({"mutual_information": told.mutual_information} if several else {})
