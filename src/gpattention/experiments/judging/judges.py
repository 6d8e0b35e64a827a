"""The suites of predictions, over whatever predicts: a run with its competitors, or an ensemble of runs."""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from gpattention.data.corruptions import CATEGORIES
from gpattention.evaluation.items import ItemSet
from gpattention.evaluation.predicted import Predicted
from gpattention.evaluation.records import Record
from gpattention.evaluation.suites import (
    Findings,
    clean_findings,
    corrupted_records,
    corruption_means,
    ood_findings,
    selective_findings,
)
from gpattention.evaluation.suites.classification import PAPER_BATCH
from gpattention.evaluation.suites.corrupted import MEAN
from gpattention.evaluation.suites.reliability import PooledReliability
from gpattention.experiments.judging.corrupted_source import CorruptedSource
from gpattention.experiments.judging.run_sets import RunSets
from gpattention.experiments.judging.session import Progress, Steps


class Judged(Protocol):
    """What can be judged: some sets, and predictions of them by name."""

    names: tuple[str, ...]  # of the predictors
    sets: RunSets
    device: torch.device
    steps: Steps

    @property
    def validation(self) -> ItemSet | None:
        """What thresholds and templates come from; None where there are too few items."""
        ...

    @property
    def test(self) -> ItemSet | None:
        """What they are judged on; None where there is none."""
        ...

    def corrupted(self, source: CorruptedSource, corruption: str, severity: int) -> ItemSet:
        """The test items under a corruption."""
        ...

    def variants(self, name: str, items: ItemSet) -> list[tuple[str, Predicted]]:
        """A predictor's prediction, as it is and with temperature."""
        ...


def judge_clean(judged: Judged, progress: Progress | None = None) -> Findings:
    """Validation, test, and sets of other kinds that have labels, as far as there are items."""
    texts = judged.sets.kind == "texts"  # images of other kinds are of no known class
    labelled, notes = load_outside(judged.sets) if texts else ([], ())
    sets = [items for items in (judged.validation, judged.test, *labelled) if items is not None]
    judged.steps = Steps(progress, "clean", len(sets) * len(judged.names))
    batch = PAPER_BATCH[judged.sets.kind]
    parts = []
    for name in judged.names:
        by_label: dict[str, dict[str, Predicted]] = {}
        for items in sets:
            for label, predicted in judged.variants(name, items):
                by_label.setdefault(label, {})[items.name] = predicted
        parts += [clean_findings(label, found, batch=batch) for label, found in by_label.items()]
        parts += [_counted(label, found) for label, found in by_label.items()]
    return Findings.merge([*parts, Findings(notes=notes)])


def judge_corrupted(judged: Judged, progress: Progress | None = None) -> Findings:
    """Every type at every severity, the means, and the reliability of all their items together."""
    if judged.sets.corrupted is None:
        return Findings(notes=(f"there are no corruptions of {judged.sets.kind}",))
    source = judged.sets.corrupted(judged.device, _named(progress, "regenerating"))
    count = len(source.types) * len(source.severities)
    judged.steps = Steps(progress, "corrupted", count * len(judged.names))
    batch = PAPER_BATCH[judged.sets.kind]
    records: list[Record] = []
    pooled: dict[str, PooledReliability] = {}
    counted: list[Findings] = []
    for corruption in source.types:
        for severity in source.severities:
            items = judged.corrupted(source, corruption, severity)
            for name in judged.names:
                for label, predicted in judged.variants(name, items):
                    records += corrupted_records(corruption, severity, label, predicted, batch=batch)
                    if label not in pooled:
                        counted.append(_counted(label, {MEAN: predicted}))
                    pooled.setdefault(label, PooledReliability()).add(predicted)
    means = corruption_means(records, CATEGORIES)
    curves = {"reliability": {label: each.curve() for label, each in pooled.items()}}
    return Findings.merge([Findings((*means, *records), curves, source.notes), *counted])


def judge_ood(judged: Judged, progress: Progress | None = None) -> Findings:
    """Every set of another kind that is here against the test set."""
    loaded, notes = load_outside(judged.sets)
    fitted_on = [] if judged.validation is None else [judged.validation]
    judged.steps = Steps(progress, "ood", (len(fitted_on) + 1 + len(loaded)) * len(judged.names))
    parts = []
    for name in judged.names:
        validation = dict(pair for items in fitted_on for pair in judged.variants(name, items))
        test = dict(judged.variants(name, _needed(judged.test, "test")))
        outside: dict[str, dict[str, Predicted]] = {}
        for items in loaded:
            for label, predicted in judged.variants(name, items):
                outside.setdefault(label, {})[items.name] = predicted
        for label, others in outside.items():
            curves = label == "model"
            parts.append(ood_findings(label, validation.get(label), test[label], others, curves=curves))
            parts.append(_counted(label, others))
    return Findings.merge([*parts, Findings(notes=notes)])


def judge_selective(judged: Judged, progress: Progress | None = None) -> Findings:
    """Thresholds of the validation set, judged on the test set."""
    judged.steps = Steps(progress, "selective", 2 * len(judged.names))
    parts = []
    for name in judged.names:
        sets = _needed(judged.validation, "validation"), _needed(judged.test, "test")
        validation, test = (dict(judged.variants(name, items)) for items in sets)
        parts += [selective_findings(label, validation[label], test[label]) for label in test]
    return Findings.merge(parts)


def _needed(items: ItemSet | None, name: str) -> ItemSet:
    if items is None:
        raise ValueError(f"expected {name} items to judge with, got none")
    return items


def load_outside(sets: RunSets) -> tuple[list[ItemSet], tuple[str, ...]]:
    """Every set of another kind that can be read, and what is to be said about the others."""
    loaded, notes = [], list(sets.outside_notes)
    for name, bring in sets.outside.items():
        try:
            loaded.append(bring())
        except (ValueError, OSError, ImportError) as error:
            notes.append(f"{name} could not be read: {error}")
    return loaded, tuple(notes)


def _counted(label: str, sets: Mapping[str, Predicted]) -> Findings:
    """The curve "items": how many items of each set a predictor was judged on."""
    return Findings(curves={"items": {label: {name: len(predicted) for name, predicted in sets.items()}}})


def _named(progress: Progress | None, what: str) -> Callable[[int, int], object] | None:
    return None if progress is None else lambda done, total: progress(what, done, total)


JUDGES: dict[str, Callable[[Judged, Progress | None], Findings]] = {
    "clean": judge_clean,
    "corrupted": judge_corrupted,
    "ood": judge_ood,
    "selective": judge_selective,
}
