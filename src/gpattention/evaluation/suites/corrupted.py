"""Suite `corrupted`: every metric on corrupted items, and its means per category and over all types."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from statistics import fmean

from gpattention.data.corruptions import CATEGORIES
from gpattention.evaluation.corrupted import PREFIX
from gpattention.evaluation.predictions import Predicted
from gpattention.evaluation.suites.findings import (
    PAPER_BATCH,
    Findings,
    Steps,
    Subject,
    classification_records,
    count_items_of,
    reliability_curve,
)
from gpattention.metrics.classification import BINS, BinSums, reliability, top_sums
from gpattention.runs import Record

MEAN = f"{PREFIX}/mean"  # the set of the means over all types; items are those of one type and severity


def evaluate_corrupted(subject: Subject) -> Findings:
    """Every type at every severity, the means, and the reliability of all their items together."""
    sets, progress = subject.sets, subject.progress
    if sets.corruptions is None:
        return Findings(notes=(f"there are no corruptions of {sets.kind}",))
    source = sets.corruptions.open(subject.device, progress and partial(progress, "regenerating"))
    count = len(source.types) * len(source.severities)
    subject.steps = Steps(progress, "corrupted", count * len(subject.names))
    records: list[Record] = []
    pooled: dict[str, BinSums] = {}
    counted: list[Findings] = []
    for corruption, severity in product(source.types, source.severities):
        items = subject.corrupted(source, corruption, severity)
        for label, predicted in (each for name in subject.names for each in subject.variants(name, items)):
            records += classification_records(items.name, label, predicted, PAPER_BATCH[sets.kind])
            if label not in pooled:
                counted.append(count_items_of(label, {MEAN: predicted}))
            # sums alone stay: predictions of a million images would not fit
            pooled[label] = pool_reliability(pooled.get(label), predicted)
    means = corruption_means(records, CATEGORIES)
    curves = {label: reliability_curve(reliability(sums)) for label, sums in pooled.items()}
    found = Findings((*means, *records), {"reliability": curves}, source.notes)
    return Findings.merge([found, *counted])


def pool_reliability(before: BinSums | None, predicted: Predicted) -> BinSums:
    """Sums over sets that come one after the other and need not be kept."""
    more = top_sums(predicted.prediction.probs, predicted.known_labels, BINS)
    if before is None:
        return more
    return BinSums(**{name: sums + getattr(more, name) for name, sums in vars(before).items()})


def corruption_means(
    records: Iterable[Record], categories: Mapping[str, Sequence[str]]
) -> tuple[Record, ...]:
    """Means of each predictor's metrics: of each category over its types and severities, and over the types.

    A type counts by its mean over the severities, so that none weighs more for having more of them.

    Args:
        records: of corruptions at severities.
        categories: types by category; those without any type are left out.

    Returns:
        Records of the sets corrupted/CATEGORY and corrupted/mean.
    """
    grouped: dict[tuple[str, str], dict[str, list[Record]]] = {}
    for record in records:
        by_type = grouped.setdefault((record.predictor, record.metric), {})
        by_type.setdefault(record.set.split("/")[1], []).append(record)
    means = []
    for (predictor, metric), by_type in grouped.items():
        of_type = {each: fmean(record.value for record in found) for each, found in by_type.items()}
        shared = next(iter(by_type.values()))[0].detail
        for name, types in {**categories, "mean": tuple(of_type)}.items():
            if known := [of_type[each] for each in types if each in of_type]:
                detail = {**shared, "types": len(known)}
                means.append(Record(f"{PREFIX}/{name}", predictor, metric, fmean(known), detail))
    return tuple(means)
