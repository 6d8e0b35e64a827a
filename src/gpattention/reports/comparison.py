"""What a report compares: runs that differ by seed alone are one model, with one colour on the whole page."""

import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gpattention.evaluation import predictor_order
from gpattention.evaluation.suites import SUITES
from gpattention.metrics import Metric, metric_of
from gpattention.reports.style import Style, style_of
from gpattention.runs import OTHER_WEIGHTS, Group, OverSeeds, Results, RunData, group

MANY = 4  # folders in a command; more are three dots


def heading(text: str) -> str:
    """The text with a capital at its beginning, other letters as they are."""
    return text[:1].upper() + text[1:]


def listed(words: Sequence[str]) -> str:
    """`a, b and c`."""
    *most, last = words or [""]
    return f"{', '.join(most)} and {last}" if most else last


def number(value: Any) -> float | None:
    """A finite number, or None: files hold null and NaN where there was nothing to measure."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def ends_of(found: OverSeeds, metric: Metric) -> tuple[float, float] | None:
    """The interval of 95 % as it is shown: in the metric's unit, within what a share can be."""
    if found.interval is None:
        return None
    low, high = found.interval
    if metric.unit == "%" and metric.name != "mcc":
        low, high = max(low, 0.0), min(high, 1.0)
    elif metric.larger is False:  # errors and costs
        low = max(low, 0.0)
    return low * metric.scale, high * metric.scale


def figure_text(found: OverSeeds | None, metric: Metric | None = None) -> str | None:
    """A number with its interval of 95 %, in the metric's unit; four digits where there is no metric."""
    if found is None:
        return None
    if metric is None:
        ends, shape = found.interval, "#.4g"
    else:
        ends, shape, found = ends_of(found, metric), f".{metric.digits}f", found.times(metric.scale)
    return f"{found.mean:{shape}}" + ("" if ends is None else f" [{ends[0]:{shape}}, {ends[1]:{shape}}]")


@dataclass(frozen=True)
class Table:
    """Heads and rows; the first column names the row."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str | float | None]]


@dataclass(frozen=True, eq=False)
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

    def curves(self, suite: str, name: str, *path: str) -> list[Any]:
        """The curve of each seed that has it, or what is in it under these keys."""
        found = [run.curve(suite, name) for run in self.runs]
        for key in path:
            found = [(curve or {}).get(key) for curve in found]
        return [curve for curve in found if curve]


@dataclass(frozen=True)
class Comparison:
    """The models of one data set."""

    data: str
    models: tuple[Model, ...]
    results: Results

    @property
    def runs(self) -> list[RunData]:
        """All runs of all models."""
        return [run for model in self.models for run in model.runs]

    @property
    def labels(self) -> list[str]:
        """The models' labels, in order."""
        return [model.label for model in self.models]

    @property
    def texts(self) -> bool:
        """Whether the models read text."""
        return any(run.texts for run in self.runs)

    @property
    def styles(self) -> dict[str, Style]:
        """How each model is drawn."""
        return {model.label: model.style for model in self.models}

    @property
    def several_seeds(self) -> bool:
        """Whether a number of this comparison may be a mean."""
        return any(len(model.runs) > 1 for model in self.models)

    def has(self, suite: str) -> bool:
        """Whether any run was evaluated so."""
        return any(suite in run.suites for run in self.runs)

    def predictors(self, suite: str) -> list[str]:
        """The predictors that a suite evaluated: the model's own first, each before its temperature."""
        return sorted(self.results.predictors(suite=suite), key=predictor_order)

    def curves(self, suite: str, name: str, *path: str) -> dict[str, list[Any]]:
        """The curve of each seed, of each model that has it."""
        found = {model.label: model.curves(suite, name, *path) for model in self.models}
        return {label: seeds for label, seeds in found.items() if seeds}

    def numbers(
        self, suite: str, head: str, named: Callable[[dict[str, Any]], str | None], **wanted: str
    ) -> Table:
        """Numbers of a suite, a column per model; `named` gives each its row, or None to leave it out."""
        rows: dict[str, dict[str, str]] = {}
        for what, figure in self.results.figures(suite=suite, **wanted):
            if name := named(what):
                text = figure_text(figure, metric_of(what["metric"]))
                rows.setdefault(name, {}).setdefault(what["recipe"], text or "")
        return Table([head, *self.labels], [[name, *map(of.get, self.labels)] for name, of in rows.items()])

    def what_is_missing(self, suite: str, what: str | None = None) -> tuple[str, str]:
        """Why there is nothing to show, and the command that changes it; `what` is a part of the suite."""
        what = SUITES[suite].label if what is None else what
        if self.texts and SUITES[suite].images:
            return f"Nothing to show for {what}: this suite needs images.", ""
        return f"These runs have no {what} yet. This command adds it: ", evaluate_command(self.runs, suite)

    def remarks(self, suite: str, beside: Sequence[str] = ()) -> list[tuple[str, str]]:
        """Runs that were left out and the suite's own notes, each with a command or "".

        Of suites `beside` it, whose numbers stand there too, only which are not of the run's weights.
        """
        without = [run for run in self.runs if suite not in run.suites]
        lines = []
        if without:
            names = listed([run.name for run in without])
            lines.append((f"Not evaluated: {names}. ", evaluate_command(without, suite)))
        lines += [(note, "") for note in self._notes(suite)]
        for other in beside:
            replaced = (note for note in self._notes(other) if note.endswith(OTHER_WEIGHTS))
            lines += [(f"{other}: {note}", "") for note in replaced]
        return lines

    def _notes(self, suite: str) -> list[str]:
        """Each note once; with the runs it belongs to where it is not all of them."""
        evaluated = [run for run in self.runs if suite in run.suites]
        owners: dict[str, list[str]] = {}
        for run in evaluated:
            for note in run.suites[suite].notes:
                owners.setdefault(str(note), []).append(run.name)
        return [
            note if len(names) == len(evaluated) else f"{listed(names)}: {note}"
            for note, names in owners.items()
        ]


def compare(runs: Sequence[RunData]) -> list[Comparison]:
    """One comparison per data set, models in the order of their first run.

    A model keeps its place in the palette over the whole report, so equal labels look alike everywhere.
    """
    by_data: dict[str, list[RunData]] = {}
    for run in runs:
        by_data.setdefault(run.data, []).append(run)
    # one count over all data sets, so that a model keeps its colour on the whole page
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
    """Groups named by their kind of attention, where it distinguishes them."""
    kinds = [each.runs[0].attention for each in groups]
    if all(kinds) and len(set(kinds)) == len(kinds):
        return [Group(kind, each.runs) for kind, each in zip(kinds, groups, strict=True)]
    return groups


def evaluate_command(runs: Sequence[RunData], suite: str) -> str:
    """What evaluates these runs so, of many with dots for the rest."""
    folders = [shlex.quote(run.folder or run.name) for run in runs[:MANY]]
    dots = " ..." if len(runs) > MANY else ""
    return f"gpattention evaluate {' '.join(folders)}{dots} --suite {suite}"
