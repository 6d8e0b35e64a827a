"""What a plan is measured against: figures to beat, and rivals of one's own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from gpattention.evaluation.named_predictors import PREDICTORS
from gpattention.evaluation.suites import SUITES
from gpattention.reports.words import LARGER_IS_BETTER, METRICS

AGGREGATIONS = ("pooled", "batch-mean")
BATCHED = ("ece", "mce")  # measures that the paper averages over batches; the others are the same both ways
SETS = {"clean": "test", "corrupted": "corrupted/mean"}  # what a suite's goal is about unless it says so


@dataclass(frozen=True)
class Goal:
    """A figure that the chosen model is to beat."""

    name: str
    suite: str
    measure: str  # accuracy, nll, ece, ...
    value: float
    source: str  # whose figure it is
    better: str  # higher or lower
    aggregation: str = "pooled"
    set: str = ""  # of the suite

    @property
    def metric(self) -> str:
        """As records call it."""
        batched = self.aggregation == "batch-mean" and self.measure in BATCHED
        return f"batch_{self.measure}" if batched else self.measure

    @property
    def larger(self) -> bool:
        """Whether larger is better."""
        return self.better == "higher"


@dataclass(frozen=True)
class Candidate:
    """A model of a plan with one way to predict, written MODEL:PREDICTOR."""

    model: str
    predictor: str

    @staticmethod
    def parse(text: Any) -> "Candidate":
        """The inverse of `str`."""
        model, colon, predictor = str(text).rpartition(":")
        if not (model and colon and predictor):
            raise ValueError(f"expected MODEL:PREDICTOR, got {text!r}")
        return Candidate(model, predictor)

    def __str__(self) -> str:
        return f"{self.model}:{self.predictor}"

    @property
    def is_ensemble(self) -> bool:
        """Whether it takes several runs to predict."""
        return self.predictor.partition("+")[0] == "ensemble"


def read_goals(entries: Sequence[Mapping[str, Any]], where: str) -> tuple[Goal, ...]:
    """The `[[goals]]` of a plan file, checked."""
    known = {field.name for field in fields(Goal)}
    optional = {"aggregation", "set"}
    found = []
    for entry in entries:
        unknown, missing = sorted(set(entry) - known), sorted(known - optional - set(entry))
        if unknown:
            raise ValueError(f"unknown key {unknown[0]!r} in {where}; known: {', '.join(sorted(known))}")
        if missing:
            raise ValueError(f"expected {missing[0]} in {where}, got {dict(entry)!r}")
        found.append(_goal(entry, where))
    return tuple(found)


def read_rivals(entries: Sequence[Any], models: Sequence[str], where: str) -> tuple[Candidate, ...]:
    """The `rivals` of a plan file; their models must be of the plan."""
    found = tuple(Candidate.parse(entry) for entry in entries)
    for rival in found:
        if rival.model not in models:
            raise ValueError(f"{where}: expected rivals among {', '.join(models)}, got {rival.model!r}")
    return found


def read_choose(entries: Sequence[Any], where: str) -> tuple[str, ...]:
    """The predictors that may be chosen, each with a temperature or without."""
    for entry in entries:
        base, plus, more = str(entry).partition("+")
        if base not in PREDICTORS or (plus and more not in ("temperature", "shift_temperature")):
            known = ", ".join(PREDICTORS)
            raise ValueError(
                f"{where}: expected choose among {known}, or with +temperature or +shift_temperature, "
                f"got {entry!r}"
            )
    return tuple(entries)


def _goal(entry: Mapping[str, Any], where: str) -> Goal:
    suite, measure = entry["suite"], entry["measure"]
    if suite not in SUITES:
        raise ValueError(f"{where}: expected suite to be one of {', '.join(SUITES)}, got {suite!r}")
    if measure not in METRICS or measure.startswith("batch_"):
        raise ValueError(f"{where}: expected measure to be a metric, e.g. nll, got {measure!r}")
    if entry.get("aggregation", "pooled") not in AGGREGATIONS:
        known = ", ".join(AGGREGATIONS)
        raise ValueError(f"{where}: expected aggregation to be one of {known}, got {entry['aggregation']!r}")
    right = "higher" if measure in LARGER_IS_BETTER else "lower"
    if entry["better"] != right:
        raise ValueError(f"{where}: expected better = {right!r} for {measure}, got {entry['better']!r}")
    place = entry.get("set", SETS.get(suite))
    if place is None:
        raise ValueError(f"{where}: expected set, as {suite} has several, got none")
    return Goal(**{**entry, "value": float(entry["value"]), "set": place})
