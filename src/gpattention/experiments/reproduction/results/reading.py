"""The runs of a plan as they lie in a folder: recipes, events, rows of training and evaluations."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from gpattention.evaluation.records import SuiteResult
from gpattention.experiments.judging.weights import read_noted_suites, recorded_settings
from gpattention.experiments.reproduction.plan import Plan
from gpattention.experiments.reproduction.results.estimates import Estimate
from gpattention.experiments.runs import find_runs, read_recipe, read_rows
from gpattention.reading import read_object
from gpattention.reports.comparable import Basis, judged_items
from gpattention.training import Recipe
from gpattention.training.folder import SHARED
from gpattention.training.records import read_events

Key = tuple[str, str, str, str, str | None]  # suite, set, predictor, metric, score
ORDER = ("model", "mean", "mc_dropout", "dropout_draws", "laplace", "gp_layer", "ensemble")
SEVERITY = "corrupted/severity"  # a set of ours: the mean over all types at one severity


@dataclass(frozen=True, eq=False)
class EvaluatedRun:
    """One seed; of its weights only whether the figures are theirs."""

    folder: Path
    recipe: Recipe
    suites: Mapping[str, SuiteResult]
    rows: tuple[dict[str, Any], ...]
    events: tuple[dict[str, Any], ...]
    planned: Recipe | None = None  # what a plan says of it now

    @property
    def seed(self) -> int:
        """Of the recipe."""
        return self.recipe.seed

    @property
    def failure(self) -> dict[str, Any] | None:
        """The event with which training broke off, if it did and nobody went on."""
        return self.events[-1] if self.events and self.events[-1].get("event") == "failed" else None

    @property
    def shared(self) -> bool:
        """Whether it is a model that was trained elsewhere."""
        return any(event.get("event") == SHARED for event in self.events)

    @cached_property
    def figures(self) -> Mapping[Key, float]:
        """Every finite number, with the means over the types at each severity."""
        found: dict[Key, float] = {}
        at: dict[Key, list[float]] = {}
        for suite, result in self.suites.items():
            for record in result.records:
                if not math.isfinite(record.value):
                    continue
                score = record.detail.get("score")
                found[suite, record.set, record.predictor, record.metric, score] = record.value
                parts = record.set.split("/")
                if suite == "corrupted" and len(parts) == 3:
                    place = f"{SEVERITY}/{parts[2]}"
                    at.setdefault((suite, place, record.predictor, record.metric, score), []).append(
                        record.value
                    )
        return {**found, **{key: fmean(values) for key, values in at.items()}}

    @cached_property
    def judged(self) -> frozenset[tuple[str, str, str]]:
        """Suites, sets and predictors that have any figure."""
        return frozenset(key[:3] for key in self.figures)

    def items(self, suite: str, place: str, predictor: str) -> int | None:
        """How many items a set has; None where the evaluation does not say."""
        if suite not in self.suites:
            return None
        result = self.suites[suite]
        return judged_items(suite, place, predictor, result.curves, recorded_settings(result))


@dataclass(frozen=True, eq=False)
class EvaluatedModel:
    """The seeds of one model."""

    name: str
    runs: tuple[EvaluatedRun, ...]

    @cached_property
    def predictors(self) -> tuple[str, ...]:
        """Whose predictions were judged: the model's own first, each before its temperature."""
        found = {key[2] for run in self.runs for key in run.figures}
        return tuple(sorted(found, key=_predictor_order))

    def estimate(
        self, predictor: str, suite: str, place: str, metric: str, score: str | None = None
    ) -> Estimate | None:
        """One figure over the seeds that have it; None where none has."""
        key = (suite, place, predictor, metric, score)
        values = {run.seed: run.figures[key] for run in self.runs if key in run.figures}
        return Estimate(values) if values else None

    def items(self, predictor: str, suite: str, place: str) -> str:
        """Of each run, in words; nothing where it is not known."""
        counts = {run.items(suite, place, predictor) for run in self._judged(predictor, suite, place)}
        return " or ".join(f"{count:,}" for count in sorted(c for c in counts if c is not None))

    def basis(self, predictor: str, suite: str, place: str) -> Basis:
        """The same, to tell whether figures can be compared."""
        judged = self._judged(predictor, suite, place)
        return Basis.of(((place, run.items(suite, place, predictor)),) for run in judged)

    def _judged(self, predictor: str, suite: str, place: str) -> list[EvaluatedRun]:
        return [run for run in self.runs if (suite, place, predictor) in run.judged]

    def places(self, suite: str) -> tuple[str, ...]:
        """Sets of a suite, in the order of the records."""
        return tuple(dict.fromkeys(key[1] for run in self.runs for key in run.figures if key[0] == suite))


@dataclass(frozen=True, eq=False)
class PlanResults:
    """Everything that a plan's folder holds so far."""

    plan: Plan
    models: tuple[EvaluatedModel, ...]  # with at least one evaluated run, in the plan's order
    missing: tuple[str, ...]  # runs of the plan that are not trained or not evaluated
    failed: tuple[EvaluatedRun, ...] = ()  # runs whose training broke off: a result too, without figures

    def model(self, name: str) -> EvaluatedModel | None:
        """By name; None where it has no evaluated run."""
        return next((model for model in self.models if model.name == name), None)

    @property
    def runs(self) -> list[EvaluatedRun]:
        """Of all models."""
        return [run for model in self.models for run in model.runs]

    @property
    def texts(self) -> bool:
        """Whether the models read text."""
        return self.models[0].runs[0].recipe.model.type == "text"

    def places(self, suite: str) -> list[str]:
        """Sets of a suite that any model has."""
        return list(dict.fromkeys(place for model in self.models for place in model.places(suite)))


def read_results(plan: Plan, runs: Path) -> PlanResults:
    """The evaluated runs of a plan in a folder, those that broke off, and what is missing."""
    told = find_runs_of(plan, runs)
    if not any(run.suites for run in told.values()):
        raise none_evaluated(plan, str(runs))
    found: dict[str, list[EvaluatedRun]] = {}
    for training in plan.trainings:
        if training.folder in told and told[training.folder].suites:
            found.setdefault(training.model, []).append(told[training.folder])
    models = tuple(EvaluatedModel(name, tuple(of_model)) for name, of_model in found.items())
    missing = tuple(t.folder for t in plan.trainings if t.folder not in told)
    return PlanResults(plan, models, missing, tuple(run for run in told.values() if not run.suites))


def find_runs_of(plan: Plan, runs: Path) -> dict[str, EvaluatedRun]:
    """Runs of a plan that are evaluated or broke off, by the folders that the plan names.

    A run that is not there may lie in a folder of another name, known by the name and seed of its recipe.
    """
    others = _others(runs)
    found = {}
    for training in plan.trainings:
        folder = runs / training.folder
        if not (folder / "recipe.json").is_file():
            folder = others.get((training.model, training.seed), folder)
        run = read_run(folder, training.recipe) if (folder / "recipe.json").is_file() else None
        if run is not None and (run.suites or run.failure):
            found[training.folder] = run
    return found


def none_evaluated(plan: Plan, where: str) -> ValueError:
    """The mistake that there is nothing to make results of."""
    return ValueError(
        f"expected evaluated runs of {plan.name} in {where}, got none: "
        "gpattention reproduce PLAN --stage evaluate makes them"
    )


def read_run(folder: Path, planned: Recipe | None = None) -> EvaluatedRun:
    """Everything of a run but its weights."""
    return EvaluatedRun(
        folder=folder,
        recipe=read_recipe(folder),
        suites=read_noted_suites(folder),
        rows=read_rows(folder / "metrics.csv"),
        events=read_events(folder),
        planned=planned,
    )


def _others(runs: Path) -> dict[tuple[str, int], Path]:
    """Every run in the folder by the name and the seed of its recipe."""
    found: dict[tuple[str, int], Path] = {}
    for folder in find_runs(runs, unfinished=True):
        recipe = read_object(folder / "recipe.json", nonfinite=True)
        found.setdefault((str(recipe.get("name")), int(recipe.get("seed", 0))), folder)
    return found


def _predictor_order(predictor: str) -> tuple[int, str, bool, bool]:
    base, _, fitted = predictor.partition("+")
    place = ORDER.index(base) if base in ORDER else len(ORDER)
    return (place, base, bool(fitted), fitted != "temperature")


def differences(run: EvaluatedRun) -> Iterator[str]:
    """Where the recipe of a run is not the one that the plan has now."""
    if run.planned is None:
        return
    ours, planned = _flat(run.recipe.to_dict()), _flat(run.planned.to_dict())
    for key in sorted({*ours, *planned} - {"name"}):
        if ours.get(key) != planned.get(key):
            yield f"{key} = {ours.get(key)}, in the plan {planned.get(key)}"


def _flat(plain: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in plain.items():
        flat |= _flat(value, f"{above}{key}.") if isinstance(value, Mapping) else {f"{above}{key}": value}
    return flat
