"""Suite `corrupted`: every metric on corrupted items, and its means over each category and over all types."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from statistics import fmean
from typing import Any

import torch

from gpattention.data.corruptions import CATEGORIES, SEVERITIES
from gpattention.evaluation.corrupted import MADE, PREFIX, CorruptedSource
from gpattention.evaluation.predictions import ItemSet, Predicted
from gpattention.evaluation.predictors import build_predictor
from gpattention.evaluation.suites.examples import Entry, entries, gallery
from gpattention.evaluation.suites.findings import (
    Findings,
    ItemValues,
    Steps,
    Subject,
    classification_records,
    count_items_of,
    item_means,
    item_values,
    reliability_curve,
)
from gpattention.metrics.classification import BINS, BinSums, reliability, top_sums
from gpattention.runs import Record

TYPES = 4  # types of which items are shown
LADDERS = 2  # items shown under every severity
SMALL = 1000  # test items that are corrupted in a moment
FEW = 2  # items of each group and type
MEAN = f"{PREFIX}/mean"  # the set of means over all types, with the items of one type and severity


def evaluate_corrupted(subject: Subject) -> Findings:
    """Every type at every severity, their means, and the reliability of all their items together."""
    sets, progress = subject.sets, subject.progress
    if sets.corruptions is None:
        return Findings(notes=(f"there are no corruptions of {sets.kind}",))
    source = sets.corruptions.open(subject.device, progress and partial(progress, "regenerating"))
    count = len(source.types) * len(source.severities)
    subject.steps = Steps(progress, "corrupted", count * len(subject.names))
    records: list[Record] = []
    pooled: dict[str, BinSums] = {}
    counted: list[Findings] = []
    examples: dict[str, Any] = {}
    by_item: dict[str, list[ItemValues]] = {}
    for corruption, severity in product(source.types, source.severities):
        items = subject.corrupted(source, corruption, severity)
        for label, predicted in (each for name in subject.names for each in subject.variants(name, items)):
            records += classification_records(items.name, label, predicted, subject.paper_batch)
            if subject.run is None:
                by_item.setdefault(label, []).append(item_values(predicted))
            if label not in pooled:
                counted.append(count_items_of(label, {MEAN: predicted}))
            worst = corruption in source.types[:TYPES] and severity == source.severities[-1]
            if worst and label == "model" and subject.run is not None:
                about = (subject.run.model, items, predicted, sets.classes, subject.device)
                examples[items.name] = gallery(*about, count=FEW)
            # only sums are kept: predictions of a million images would not fit into memory
            pooled[label] = pool_reliability(pooled.get(label), predicted)
    means = corruption_means(records, CATEGORIES)
    curves = {label: reliability_curve(reliability(sums)) for label, sums in pooled.items()}
    shown: dict[str, Any] = {"reliability": curves}
    if by_item:
        shown["by_item"] = {label: {MEAN: item_means(several)} for label, several in by_item.items()}
    if examples:
        shown["gallery"] = {"sets": examples, "ladders": _ladders(subject, source)}
    return Findings.merge([Findings((*means, *records), shown, source.notes), *counted])


def _ladders(subject: Subject, source: CorruptedSource) -> dict[str, dict[str, list[Entry]]]:
    """The first items under some types, by severity, where 0 is the clean image."""
    model, test = subject.run.model, subject.sets.test
    built = build_predictor("model", model, subject.samples, None)
    # all severities where a few images cost a moment
    severities = SEVERITIES if source.name == MADE and len(test) <= SMALL else source.severities

    def step(items: ItemSet) -> list[Entry]:
        few = items.first(LADDERS)
        inputs = few.inputs(0, len(few), subject.device)
        found = built.predictor.predict(inputs, samples=built.samples, seed=subject.seed)
        predicted = Predicted.from_logits(found.logits, few.labels)
        return entries(model, few, predicted, torch.arange(len(few)), subject.sets.classes, subject.device)

    ladders = {}
    for kind in source.types[:TYPES]:
        rungs = {str(s): step(subject.corrupted(source, kind, s)) for s in severities}
        ladders[kind] = {"0": step(test), **rungs}
    return ladders


def pool_reliability(before: BinSums | None, predicted: Predicted) -> BinSums:
    """Sums over sets that are predicted one after the other."""
    more = top_sums(predicted.prediction.probs, predicted.known_labels, BINS)
    if before is None:
        return more
    return BinSums(**{name: sums + getattr(more, name) for name, sums in vars(before).items()})


def corruption_means(
    records: Iterable[Record], categories: Mapping[str, Sequence[str]]
) -> tuple[Record, ...]:
    """Means of the metrics of each predictor over the types of each category, and over all types.

    A type counts with its mean over severities, so that types with more of them do not weigh more.  An
    interval over items is the mean of the intervals of the sets.  It may be too wide but not too narrow, as
    all sets have the same items.

    Args:
        records: of corruptions at severities.
        categories: types by category; categories without records are left out.

    Returns:
        Records of the sets corrupted/CATEGORY and corrupted/mean.
    """
    grouped: dict[tuple[str, str], dict[str, list[Record]]] = {}
    for record in records:
        by_type = grouped.setdefault((record.predictor, record.metric), {})
        by_type.setdefault(record.set.split("/")[1], []).append(record)
    means = []
    for (predictor, metric), by_type in grouped.items():
        of_type = {each: _means(found) for each, found in by_type.items()}
        shared = next(iter(by_type.values()))[0].detail
        for name, types in {**categories, "mean": tuple(of_type)}.items():
            if known := [of_type[each] for each in types if each in of_type]:
                value, *interval = map(fmean, zip(*known, strict=True))
                detail = {**shared, "types": len(known)} | ({"interval": interval} if interval else {})
                means.append(Record(f"{PREFIX}/{name}", predictor, metric, value, detail))
    return tuple(means)


def _means(records: Sequence[Record]) -> list[float]:
    """The mean value and, if all have intervals, the means of their ends."""
    return [fmean(x) for x in zip(*((r.value, *r.detail.get("interval", ())) for r in records), strict=True)]
