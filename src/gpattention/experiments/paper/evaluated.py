"""Runs and their evaluations as a folder holds them, gathered by the name of their recipe."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from gpattention.evaluation.records import SuiteResult
from gpattention.experiments.judging.weights import read_noted_suites
from gpattention.experiments.runs import find_runs
from gpattention.reading import read_json
from gpattention.training import Recipe, recipe_from_dict


@dataclass(frozen=True)
class EvaluatedRun:
    """A run's recipe and what was evaluated; of its weights only whether they are those."""

    folder: Path
    recipe: Recipe
    suites: dict[str, SuiteResult]


@dataclass(frozen=True)
class RunGroup:
    """Runs of one recipe with several seeds."""

    name: str
    runs: tuple[EvaluatedRun, ...]

    @property
    def seeds(self) -> tuple[int, ...]:
        """In the order of the runs."""
        return tuple(run.recipe.seed for run in self.runs)

    @property
    def recipe(self) -> Recipe:
        """Of the first run."""
        return self.runs[0].recipe

    def evaluated(self, suites: tuple[str, ...]) -> "RunGroup":
        """Only the runs that have any of these suites; all where none has."""
        having = tuple(run for run in self.runs if any(suite in run.suites for suite in suites))
        return RunGroup(self.name, having or self.runs)

    def has(self, suites: tuple[str, ...]) -> bool:
        """Whether any run has any of these suites."""
        return any(suite in run.suites for run in self.runs for suite in suites)


def read_groups(folder: str | Path, only: Collection[Path] | None = None) -> tuple[RunGroup, ...]:
    """Every run in or below a folder, or `only` some, by its recipe's name without a seed at its end."""
    found: dict[str, list[EvaluatedRun]] = {}
    for place in find_runs(folder, unfinished=True):
        if only is not None and place not in only:
            continue
        run = EvaluatedRun(place, _recipe(place / "recipe.json"), read_noted_suites(place))
        found.setdefault(re.sub(r"-seed-?\d+$", "", run.recipe.name), []).append(run)
    if not found:
        raise FileNotFoundError(f"expected runs in {folder}, got none: a run has a file recipe.json")
    return tuple(
        RunGroup(name, tuple(sorted(runs, key=lambda run: (run.recipe.seed, str(run.folder)))))
        for name, runs in sorted(found.items())
    )


def _recipe(file: Path) -> Recipe:
    plain = read_json(file, nonfinite=True)
    try:
        return recipe_from_dict(plain)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} is not the recipe of a run: {error}") from error
