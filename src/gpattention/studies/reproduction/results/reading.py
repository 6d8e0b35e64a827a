"""The runs of a plan as they lie in a folder, and the table of their results."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from gpattention.experiments.reporting import read_run
from gpattention.experiments.runs import find_runs
from gpattention.reading import read_object
from gpattention.runs import Group, Results, RunData
from gpattention.runs.results import flat
from gpattention.studies.reproduction.plan import Plan
from gpattention.training import Recipe
from gpattention.training.folder import SHARED


@dataclass(frozen=True, eq=False)
class PlanResults:
    """Everything that a plan's folder holds so far."""

    plan: Plan
    models: tuple[Group, ...]  # with at least one evaluated run, in the plan's order
    missing: tuple[str, ...]  # runs of the plan that are not trained or not evaluated
    failed: tuple[RunData, ...] = ()  # runs whose training broke off: a result too, without figures
    planned: Mapping[str, Recipe] = field(default_factory=dict)  # by run, what the plan says of it now

    @cached_property
    def table(self) -> Results:
        """Of the models by their names in the plan."""
        return Results.of(self.models)

    @property
    def runs(self) -> list[RunData]:
        """Of all models."""
        return [run for model in self.models for run in model.runs]

    @property
    def texts(self) -> bool:
        """Whether the models read text."""
        return self.models[0].runs[0].texts

    def differences(self, run: RunData) -> Iterator[str]:
        """Where the recipe of a run is not the one that the plan has now."""
        if run.name not in self.planned:
            return
        ours, planned = flat(run.parsed.to_dict()), flat(self.planned[run.name].to_dict())
        for key in sorted({*ours, *planned} - {"name"}):
            if ours.get(key) != planned.get(key):
                yield f"{key} = {ours.get(key)}, in the plan {planned.get(key)}"


def is_shared(run: RunData) -> bool:
    """Whether it is a model that was trained elsewhere."""
    return any(event.get("event") == SHARED for event in run.events)


def read_results(plan: Plan, runs: Path) -> PlanResults:
    """The evaluated runs of a plan in a folder, those that broke off, and what is missing."""
    told = find_runs_of(plan, runs)
    if not any(run.suites for run in told.values()):
        raise none_evaluated(plan, str(runs))
    found: dict[str, list[RunData]] = {}
    for training in plan.trainings:
        if training.folder in told and told[training.folder].suites:
            found.setdefault(training.model, []).append(told[training.folder])
    return PlanResults(
        plan,
        models=tuple(Group(name, tuple(of_model)) for name, of_model in found.items()),
        missing=tuple(t.folder for t in plan.trainings if t.folder not in told),
        failed=tuple(run for run in told.values() if not run.suites),
        planned={told[t.folder].name: t.recipe for t in plan.trainings if t.folder in told},
    )


def find_runs_of(plan: Plan, runs: Path) -> dict[str, RunData]:
    """Runs of a plan that are evaluated or broke off, by the folders that the plan names.

    A run that is not there may lie in a folder of another name, known by the name and seed of its recipe.
    """
    others = _others(runs)
    found = {}
    for training in plan.trainings:
        folder = runs / training.folder
        if not (folder / "recipe.json").is_file():
            folder = others.get((training.model, training.seed), folder)
        run = read_run(folder) if (folder / "recipe.json").is_file() else None
        if run is not None and (run.suites or run.failure):
            _ = run.parsed  # a recipe that cannot be read is told before any work
            found[training.folder] = run
    return found


def none_evaluated(plan: Plan, where: str) -> ValueError:
    """The mistake that there is nothing to make results of."""
    return ValueError(
        f"expected evaluated runs of {plan.name} in {where}, got none: "
        "gpattention reproduce PLAN --stage evaluate makes them"
    )


def _others(runs: Path) -> dict[tuple[str, int], Path]:
    """Every run in the folder by the name and the seed of its recipe."""
    found: dict[tuple[str, int], Path] = {}
    for folder in find_runs(runs, unfinished=True):
        recipe = read_object(folder / "recipe.json", nonfinite=True)
        found.setdefault((str(recipe.get("name")), int(recipe.get("seed", 0))), folder)
    return found
