"""Suite `corrupted`: every metric on corrupted items, and its means per category and over all types."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from gpattention.evaluation.predicted import Predicted
from gpattention.evaluation.records import Record
from gpattention.evaluation.suites.classification import classification_records

PREFIX = "corrupted"
MEAN = f"{PREFIX}/mean"  # the set of the means over all types; items are those of one type and severity


def set_name(corruption: str, severity: int) -> str:
    """As records call it."""
    return f"{PREFIX}/{corruption}/{severity}"


def corrupted_records(
    corruption: str, severity: int, predictor: str, predicted: Predicted, *, batch: int
) -> tuple[Record, ...]:
    """Every metric of one corruption at one severity."""
    return classification_records(set_name(corruption, severity), predictor, predicted, batch)


def corruption_means(
    records: Iterable[Record], categories: Mapping[str, Sequence[str]]
) -> tuple[Record, ...]:
    """Means of each predictor's metrics: of each category over its types and severities, and over the types.

    A type counts by its mean over the severities, so that none weighs more for having more of them.
    Categories without any type are left out.
    """
    grouped: dict[tuple[str, str], dict[str, list[Record]]] = {}
    for record in records:
        _, corruption, _ = record.set.split("/")
        by_type = grouped.setdefault((record.predictor, record.metric), {})
        by_type.setdefault(corruption, []).append(record)
    means = []
    for (predictor, metric), by_type in grouped.items():
        of_type = {each: fmean(record.value for record in found) for each, found in by_type.items()}
        shared = next(iter(by_type.values()))[0].detail
        for name, types in (*categories.items(), ("mean", tuple(of_type))):
            known = [of_type[each] for each in types if each in of_type]
            if known:
                detail: dict[str, Any] = {**shared, "types": len(known)}
                means.append(Record(f"{PREFIX}/{name}", predictor, metric, fmean(known), detail))
    return tuple(means)
