"""Evaluate runs: every suite of each, the ensemble of those that differ by their seed alone, and means."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gpattention.data.places import StrPath
from gpattention.evaluation.named_predictors import DEFAULT_PREDICTORS
from gpattention.evaluation.records import SuiteResult
from gpattention.experiments.judging.ensembles import NAME, add_ensemble
from gpattention.experiments.judging.one_run import Evaluation, Settings
from gpattention.experiments.judging.session import Progress
from gpattention.experiments.runs import open_run
from gpattention.runs import RunData, group
from gpattention.training import Recipe


def evaluate_run(
    run_folder: StrPath,
    suites: Sequence[str] = ("all",),
    *,
    root: StrPath | None = None,
    device: torch.device | str = "auto",
    samples: int = 10,
    seed: int = 0,
    predictors: Sequence[str] = DEFAULT_PREDICTORS,
    batch_size: int | None = None,
    limit: int | None = None,
    types: Sequence[str] | None = None,
    severities: Sequence[int] | None = None,
    shift_temperature: bool = False,
    fresh: bool = False,
    progress: Progress | None = None,
) -> dict[str, SuiteResult]:
    """Every suite that is asked for, by name; each is written to RUN/evaluation/SUITE.json as it is done.

    Args:
        run_folder: a run with a model.
        suites: of clean, corrupted, ood, selective, oversmoothing, efficiency; or "all".
        root: folder of the datasets; the environment variable GPATTENTION_DATA if not given.
        device: auto, cpu, cuda, ...
        samples: draws of a prediction.
        seed: of the draws.
        predictors: of model, mean, mc_dropout, dropout_draws, laplace, gp_layer; each also with temperature.
        batch_size: items times draws that run at once; 256 on a CPU and 2000 on a GPU if not given.
        limit: at most so many items of each set, evenly spread over those of other kinds (see `run_sets`);
            the results say that they are reduced.
        types: of corruptions; all if not given.
        severities: of corruptions, 1 to 5; all if not given.
        shift_temperature: each also with a temperature fitted under shift (`gpattention.data.shifts`).
        fresh: compute everything anew, also where it is finished or damaged.
        progress: called with what is being done, how much of it is done, and how much there is.
    """
    settings = Settings.of(
        suites, predictors, root=root, device=device, samples=samples, seed=seed, batch_size=batch_size,
        limit=limit, types=types, severities=severities, shift_temperature=shift_temperature, fresh=fresh,
    )  # fmt: skip
    evaluation = Evaluation(run_folder, settings)
    return {name: evaluation.suite(name, progress) for name in settings.suites}


def evaluate_runs(
    folders: Sequence[StrPath],
    suites: Sequence[str] = ("all",),
    *,
    progress: Progress | None = None,
    **settings: Any,
) -> dict[Path, dict[str, SuiteResult]]:
    """`evaluate_run` of each; then, of runs that differ by their seed alone, the ensemble.

    The ensemble's records stand in the results of its first run, under the predictor "ensemble".  Other
    arguments are those of `evaluate_run`; `progress` is told the run's name beside the suite's.
    """
    chosen = Settings.of(suites, **settings)
    recipes = {Path(folder): open_run(folder).recipe for folder in folders}  # a bad folder costs no work
    found: dict[Path, dict[str, SuiteResult]] = {}
    for folder in recipes:
        evaluation = Evaluation(folder, chosen)
        told = _named(progress, folder.name)
        found[folder] = {name: evaluation.suite(name, told) for name in chosen.suites}
    for seeds in same_but_for_the_seed(recipes):
        members = [Evaluation(folder, replace(chosen, fresh=False)) for folder in seeds]
        told = _named(progress, f"{NAME} of {len(seeds)}")
        found[seeds[0]] |= add_ensemble(members, chosen.suites, fresh=chosen.fresh, progress=told)
    return found


def same_but_for_the_seed(recipes: dict[Path, Recipe]) -> list[list[Path]]:
    """Two or more runs that differ by their seed and name alone, by rising seed; of one seed the last."""
    groups = group(RunData(str(folder), recipe.to_dict()) for folder, recipe in recipes.items())
    seeds = [{run.seed: Path(run.name) for run in each.runs} for each in groups]
    return [list(by_seed.values()) for by_seed in seeds if len(by_seed) > 1]


def _named(progress: Progress | None, name: str) -> Progress | None:
    return None if progress is None else lambda what, done, total: progress(f"{name} {what}", done, total)
