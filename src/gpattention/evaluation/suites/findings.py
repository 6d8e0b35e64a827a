"""What suites share: the subject they evaluate, what they find, and its form as records and curves."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from gpattention.evaluation.corrupted import CorruptedSource
from gpattention.evaluation.predictions import ItemSet, Predicted
from gpattention.evaluation.sets import RunSets
from gpattention.metrics import ReliabilityBins, classification_replicates, interval_about, metrics_of
from gpattention.metrics.classification import hits, nll_per_item
from gpattention.metrics.registry import PAPER_BINS
from gpattention.models import Signals
from gpattention.runs import Record
from gpattention.strangeness import Head

Progress = Callable[[str, int, int], object]  # name of the work, amount done, total
Curve = dict[str, list[float | None]]
STEP = 1000  # steps in which the progress of one prediction of one set is counted
POINTS = 200  # of a curve, at most
LIMITS = {"nll": (0.0, math.inf), "brier": (0.0, 2.0), "mcc": (-1.0, 1.0)}  # all others lie in [0, 1]
ItemValues = dict[str, Tensor]  # accuracy and NLL of every item, [B] each
PAPER_BATCH = {"images": 1000, "texts": 32}  # items over which the paper's code averages ECE and MCE


class Steps:
    """All predictions of a suite as one count, for a progress bar."""

    def __init__(self, report: Progress | None = None, what: str = "", total: int = 0) -> None:
        self._report, self._what, self._total, self._done = report, what, STEP * total, 0

    def part(self, done: int, total: int) -> None:
        """Report progress inside a prediction."""
        self._show(self._done + min(STEP - 1, STEP * done // max(total, 1)))

    def finish_one(self) -> None:
        """Report that a prediction is finished."""
        self._done += STEP
        self._show(self._done)

    def _show(self, done: int) -> None:
        if self._report is not None and self._total:
            self._report(self._what, min(done, self._total), self._total)


class Subject(ABC):
    """What suites evaluate: a run, or an ensemble of runs."""

    names: tuple[str, ...]  # of the predictors
    sets: RunSets
    device: torch.device
    run: Any = None  # the run whose model suites measure; None for an ensemble
    samples: int = 0  # draws of a prediction
    seed: int = 0  # of these draws
    head: Head | None = None  # of the model, if it is linear
    heats: tuple[str, ...] = ()  # kinds of temperatures with which predictors are evaluated
    held: tuple[str, ...] = ()  # corruptions that the suite ood takes as sets of other kinds, at severity 5
    progress: Progress | None = None

    def __init__(self) -> None:
        self.steps = Steps()

    @property
    def validation(self) -> ItemSet | None:
        """The items for thresholds and templates; None if there are too few."""
        return self.sets.validation

    @property
    def test(self) -> ItemSet | None:
        """The items to evaluate on; None if there are none."""
        return self.sets.test

    @property
    def paper_batch(self) -> int:
        """How many items the paper's code averages calibration errors over."""
        return PAPER_BATCH[self.sets.kind]

    def corrupted(self, source: CorruptedSource, corruption: str, severity: int) -> ItemSet:
        """The test items under a corruption."""
        return self.sets.corrupted_items(source, corruption, severity)

    def signals(self, items: ItemSet) -> Signals | None:
        """Signals of one pass of the model without draws; None for an ensemble, which has several models."""
        return None

    def logits(self, name: str, items: ItemSet) -> Tensor:
        """Draws of a predictor for a set, without temperature; not for ensembles.  [S, B, C]"""
        raise NotImplementedError(f"{type(self).__name__} has several models")

    @abstractmethod
    def variants(self, name: str, items: ItemSet) -> list[tuple[str, Predicted]]:
        """The prediction of a predictor, unchanged and with its temperatures."""

    def predictions(self, what: str, *sets: ItemSet | None) -> Iterator[tuple[str, dict[str, Predicted]]]:
        """The label of every predictor and temperature, with its predictions by the names of the sets."""
        known = [items for items in sets if items is not None]
        self.steps = Steps(self.progress, what, len(known) * len(self.names))
        for name in self.names:
            by_label: dict[str, dict[str, Predicted]] = {}
            for items in known:
                for label, predicted in self.variants(name, items):
                    by_label.setdefault(label, {})[items.name] = predicted
            yield from by_label.items()


@dataclass(frozen=True)
class Findings:
    """Parts of a `SuiteResult`, joined by `Findings.merge`.

    Attributes:
        records: figures.
        curves: by name, for JSON.
        notes: for readers of the figures.
    """

    records: tuple[Record, ...] = ()
    curves: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @staticmethod
    def merge(parts: Iterable["Findings"]) -> "Findings":
        """Records and notes in order, each note once; curves of the same name joined by their keys."""
        parts = tuple(parts)
        records = tuple(record for part in parts for record in part.records)
        notes = tuple(dict.fromkeys(note for part in parts for note in part.notes))
        return Findings(records, reduce(_joined, (part.curves for part in parts), {}), notes)


def _joined(one: Any, other: Any) -> Any:
    """Mappings joined key by key, without changing them; of anything else the last."""
    if not isinstance(other, Mapping):
        return other
    one = one if isinstance(one, Mapping) else {}
    return {**one, **{key: _joined(one.get(key), value) for key, value in other.items()}}


def detail_of(predicted: Predicted, **more: Any) -> dict[str, Any]:
    """The detail of a record: the temperature, if any (the geometric mean of several), and `more`."""
    heat = predicted.temperature
    if isinstance(heat, Tensor):
        heat = float(heat.double().log().mean().exp())
    return more if heat is None else {"temperature": heat, **more}


def numbers(x: Tensor) -> list[float | None]:
    """Numbers for JSON, with None for NaN and infinity, which it does not have."""
    return [value if math.isfinite(value) else None for value in x.double().tolist()]


def rounded(values: Iterable[float]) -> list[float]:
    """Numbers with six digits, which are enough to look at."""
    return [float(f"{value:.6g}") for value in values]


def item_values(predicted: Predicted) -> ItemValues:
    """Accuracy and NLL of every labelled item, by which ensembles are compared."""
    probs, labels = predicted.prediction.probs, predicted.known_labels
    return {"accuracy": hits(probs, labels).double(), "nll": nll_per_item(probs, labels)}


def item_means(several: Sequence[ItemValues]) -> dict[str, list[float | None]]:
    """The curve "by_item": the mean of each item over sets with the same items in the same order."""
    stacked = {metric: torch.stack([values[metric] for values in several]) for metric in several[0]}
    return {metric: numbers(values.mean(0)) for metric, values in stacked.items()}


def thinned(count: int, points: int = POINTS) -> list[int]:
    """Indices of at most `points` of `count` points, evenly spaced, with the first and the last."""
    if count <= points:
        return list(range(count))
    return [round(i * (count - 1) / (points - 1)) for i in range(points)]


def count_items_of(label: str, sets: Mapping[str, Predicted]) -> Findings:
    """The curve "items": the number of items in each set that a predictor was evaluated on."""
    return Findings(curves={"items": {label: {name: len(predicted) for name, predicted in sets.items()}}})


def classification_records(name: str, predictor: str, predicted: Predicted, batch: int) -> tuple[Record, ...]:
    """Every metric of one labelled set.

    Args:
        name: of the set.
        predictor: its name in records.
        predicted: with labels.
        batch: number of items in the batches over which the paper averages its calibration errors.

    Returns:
        Metrics of all items together, with 15 bins and, where there is one, the bootstrap interval over
        items; and calibration errors as in the paper, with 10 bins and averaged over batches.
    """
    probs, labels = predicted.prediction.probs, predicted.known_labels
    detail, paper = detail_of(predicted), detail_of(predicted, bins=PAPER_BINS, batch=batch)
    values = {m: (f(probs, labels), detail) for m, f in metrics_of("labels").items()}
    for metric, drawn in classification_replicates(probs, labels).items():
        value, ends = values[metric][0], LIMITS.get(metric, (0.0, 1.0))
        values[metric] = (value, {**detail, "interval": rounded(interval_about(value, drawn, *ends))})
    values |= {m: (f(probs, labels, batch_size=batch), paper) for m, f in metrics_of("batches").items()}
    return tuple(Record(name, predictor, metric, *found) for metric, found in values.items())


def reliability_curve(bins: ReliabilityBins) -> Curve:
    """A reliability diagram in the form that files have."""
    curve = {name: numbers(getattr(bins, name)) for name in ("edges", "confidence", "accuracy")}
    return {**curve, "count": bins.counts.tolist()}
