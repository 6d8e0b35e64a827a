"""Runs that differ in nothing but their seed are one model, with a mean and a standard deviation."""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from gpattention.reports.inputs import RunData
from gpattention.reports.palette import Style, style_of
from gpattention.reports.words import PREDICTORS


@dataclass(frozen=True)
class Spread:
    """Numbers of several seeds; one seed has no standard deviation."""

    mean: float
    stddev: float | None
    count: int

    def text(self, digits: int = 3) -> str:
        """Mean, and what it varies by."""
        mean = f"{self.mean:.{digits}f}"
        return mean if self.stddev is None else f"{mean} ± {self.stddev:.{digits}f}"


@dataclass(frozen=True)
class Model:
    """One recipe, trained with one or more seeds."""

    label: str
    runs: tuple[RunData, ...]
    style: Style

    def spread(
        self, suite: str, set: str, metric: str, predictor: str = "model", **detail: Any
    ) -> Spread | None:
        """One record over all seeds."""
        return self.spread_of(lambda run: run.value(suite, set, metric, predictor, **detail))

    def spread_of(self, measure: Callable[[RunData], float | None]) -> Spread | None:
        """Any number of a run over all seeds; None where no run has it."""
        return spread_of(measure(run) for run in self.runs)

    def curves(self, suite: str, name: str) -> list[Any]:
        """A curve of each seed that has it."""
        found = (run.curve(suite, name) for run in self.runs)
        return [curve for curve in found if curve]


@dataclass(frozen=True)
class Comparison:
    """The models of one data set."""

    data: str
    models: tuple[Model, ...]

    @property
    def texts(self) -> bool:
        """Whether the models read text."""
        return any(run.texts for model in self.models for run in model.runs)

    @property
    def styles(self) -> dict[str, Style]:
        """How each model is drawn."""
        return {model.label: model.style for model in self.models}

    @property
    def several_seeds(self) -> bool:
        """Whether a number of this comparison may be a mean."""
        return any(len(model.runs) > 1 for model in self.models)

    @property
    def runs(self) -> list[RunData]:
        """All runs of all models."""
        return [run for model in self.models for run in model.runs]

    def predictors(self, suite: str) -> list[str]:
        """Whose predictions a suite judged: the model's own first, each before its temperature."""
        found = {record["predictor"] for run in self.runs for record in run.records(suite)}
        return sorted(found, key=_predictor_order)


def spread_of(values: Iterable[float | None]) -> Spread | None:
    """Mean and standard deviation of what is there."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Spread(fmean(known), stdev(known) if len(known) > 1 else None, len(known))


def compare(runs: Sequence[RunData]) -> list[Comparison]:
    """One comparison per data set, models in the order of their first run.

    A model keeps its place in the palette over the whole report, so equal labels look alike everywhere.
    """
    by_data: dict[str, dict[str, list[RunData]]] = {}
    for run in runs:
        by_data.setdefault(run.data, {}).setdefault(_without_seed(run), []).append(run)
    places: dict[str, int] = {}
    comparisons = []
    for data, groups in by_data.items():
        labels = _labels(list(groups.values()))
        for label in labels:
            places.setdefault(label, len(places))
        models = (
            Model(label, tuple(group), style_of(places[label]))
            for label, group in zip(labels, groups.values(), strict=True)
        )
        comparisons.append(Comparison(data, tuple(models)))
    return comparisons


def _without_seed(run: RunData) -> str:
    recipe = {key: value for key, value in run.recipe.items() if key not in ("name", "seed")}
    if not recipe:  # nothing to compare by
        return f"run {run.name}"
    return json.dumps(recipe, sort_keys=True, default=str)


def _labels(groups: list[list[RunData]]) -> list[str]:
    """The kind of attention where it tells the models apart, else the runs' names, numbered if need be."""
    kinds = [group[0].attention for group in groups]
    if all(kinds) and len(set(kinds)) == len(kinds):
        return kinds
    names = [_shared_name([run.name for run in group]) for group in groups]
    seen: dict[str, int] = {}
    labels = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        labels.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return labels


def _shared_name(names: list[str]) -> str:
    """`cgp-seed0` and `cgp-seed1` are `cgp`."""
    if len(names) == 1:
        return names[0]
    shared = names[0]
    for name in names[1:]:
        while not name.startswith(shared):
            shared = shared[:-1]
    return re.sub(r"[-_ .]*(seed)?[-_ .]*$", "", shared) or names[0]


def _predictor_order(predictor: str) -> tuple[int, str, bool, bool]:
    known = list(PREDICTORS)
    base, _, fitted = predictor.partition("+")
    place = known.index(base) if base in known else len(known)
    return (place, base, bool(fitted), fitted != "temperature")
