"""The models of a report: runs that differ in nothing but their seed are one, with a colour of its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpattention.evaluation.named_predictors import predictor_order
from gpattention.reports.palette import Style, style_of
from gpattention.runs import Group, OverSeeds, Results, RunData, group


@dataclass(frozen=True)
class Model:
    """One recipe, trained with one or more seeds."""

    label: str
    runs: tuple[RunData, ...]
    style: Style
    results: Results

    def find(
        self, suite: str, set: str, metric: str, predictor: str = "model", **detail: Any
    ) -> OverSeeds | None:
        """One number over all seeds; see `Results.find`."""
        return self.results.find(self.label, suite, set, metric, predictor, **detail)

    def curves(self, suite: str, name: str) -> list[Any]:
        """A curve of each seed that has it."""
        found = (run.curve(suite, name) for run in self.runs)
        return [curve for curve in found if curve]


@dataclass(frozen=True)
class Comparison:
    """The models of one data set."""

    data: str
    models: tuple[Model, ...]
    results: Results

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
        return sorted(self.results.predictors(suite=suite), key=predictor_order)

    def numbers(self, suite: str) -> list[dict[str, Any]]:
        """What there is of a suite, each once: set, predictor, metric and detail."""
        found = (what for what, _ in self.results.figures(suite=suite))
        return list({str(what | {"recipe": ""}): what for what in found}.values())


def compare(runs: Sequence[RunData]) -> list[Comparison]:
    """One comparison per data set, models in the order of their first run.

    A model keeps its place in the palette over the whole report, so equal labels look alike everywhere.
    """
    by_data: dict[str, list[RunData]] = {}
    for run in runs:
        by_data.setdefault(run.data, []).append(run)
    places: dict[str, int] = {}
    comparisons = []
    for data, of_data in by_data.items():
        groups = _labelled(group(of_data))
        results = Results.of(groups)
        for each in groups:
            places.setdefault(each.name, len(places))
        models = (Model(each.name, each.runs, style_of(places[each.name]), results) for each in groups)
        comparisons.append(Comparison(data, tuple(models), results))
    return comparisons


def _labelled(groups: list[Group]) -> list[Group]:
    """By the kind of attention where it tells the models apart."""
    kinds = [each.runs[0].attention for each in groups]
    if all(kinds) and len(set(kinds)) == len(kinds):
        return [Group(kind, each.runs) for kind, each in zip(kinds, groups, strict=True)]
    return groups
