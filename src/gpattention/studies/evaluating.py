"""Evaluations of many sets in many processes: shards predict, then every suite is made of what they kept.

A shard is one corruption of one run at all severities, or the other suites of one run.  Predictions are kept
in the run's folder by whoever makes them, so that the figures are those of one process, to the bit.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from gpattention.checks import check_count
from gpattention.data.corruptions import CORRUPTIONS
from gpattention.evaluation import SOURCES, EvaluationSettings, evaluate_run, evaluate_runs
from gpattention.evaluation.run import open_corruptions, predict_corruption
from gpattention.files import StrPath
from gpattention.runs import SuiteResult, open_run
from gpattention.studies.scheduler import Engine, side_by_side

CORRUPTED = "corrupted"
SHARDS = "shards"  # what the progress counts


class ShardError(ChildProcessError):
    """A shard of an evaluation failed; the message says which and why."""


@dataclass(frozen=True)
class Shard:
    """A part of an evaluation that needs no other of its stage."""

    runs: tuple[Path, ...]
    work: Literal["images", "corruption", "suites", "all"]
    of: tuple[str, ...] = ()  # the corruption, or the suites

    def __str__(self) -> str:
        return " ".join((self.work, *self.of, "of", *(run.name for run in self.runs)))


def evaluate_many(
    folders: Sequence[StrPath],
    settings: EvaluationSettings,
    *,
    jobs: int,
    engine: Engine | None = None,
    progress: Callable[[str, int, int], object] | None = None,
) -> dict[Path, dict[str, SuiteResult]]:
    """Evaluate runs as `evaluate_runs` does, with the same results, in several processes.

    Predictors that are fitted to training items are fitted anew by every shard.

    Args:
        folders: runs with models.
        settings: what is evaluated and how.
        jobs: processes at once.
        engine: where; on this machine if not given.
        progress: called with "shards", how many are done, and how many there are.

    Returns:
        The results by folder and suite.

    Raises:
        ValueError: the settings ask for everything anew: shards would compute again what others just made.
        FileNotFoundError: no run there.
        ShardError: a shard failed; what the others made is kept.
        TrainingStoppedError: SIGTERM or Ctrl-C came.
    """
    jobs = check_count("jobs", jobs)
    if settings.fresh:
        raise ValueError("expected fresh evaluations in one process (jobs 1, no engine), got several")
    given = {Path(folder).absolute(): Path(folder) for folder in folders}
    root = None if settings.root is None else Path(settings.root).absolute()
    stages = _stages(tuple(given), settings)
    total, done = sum(map(len, stages)), 0
    answer: Any = None
    for stage in stages:
        work = partial(_work, replace(settings, root=root))
        for shard, answer, _ in side_by_side(
            work, stage, jobs, fresh=True, when_stopped="what is finished is kept", engine=engine
        ):
            if not isinstance(answer, Mapping):
                raise ShardError(f"{shard}: {answer}")
            done += 1
            if progress is not None:
                progress(SHARDS, done, total)
    return {given[folder]: results for folder, results in answer.items()}


def _stages(folders: tuple[Path, ...], settings: EvaluationSettings) -> list[list[Shard]]:
    """Images that must be made, then all predictions, then the runs, then their ensembles."""
    recipes = {folder: open_run(folder).recipe for folder in folders}
    types = settings.corruptions or tuple(CORRUPTIONS)
    others = tuple(suite for suite in settings.suites if suite != CORRUPTED)
    images: dict[str, Shard] = {}
    predictions, alone = list[Shard](), [Shard((folder,), "all") for folder in folders]
    for folder, recipe in recipes.items():
        if others:
            predictions.append(Shard((folder,), "suites", others))
        if CORRUPTED in settings.suites and recipe.model.type != "text":
            if (
                recipe.data.name in SOURCES and settings.limit is None
            ):  # they are kept: one process makes them
                images.setdefault(str(recipe.data), Shard((folder,), "images"))
            predictions += [Shard((folder,), "corruption", (each,)) for each in types]
    stages = [list(images.values()), predictions, alone, [Shard(folders, "all")]]
    return [stage for stage in stages if stage]


def _work(settings: EvaluationSettings, shard: Shard, slot: int) -> Any:
    """A mapping of results, or why there are none."""
    try:
        if shard.work == "all":
            return evaluate_runs(shard.runs, settings)
        (run,) = shard.runs
        if shard.work == "suites":
            evaluate_run(run, replace(settings, suites=shard.of))
        elif shard.work == "corruption":
            predict_corruption(run, settings, *shard.of)
        else:
            open_corruptions(run, settings)
    except Exception as error:  # of any kind: not all of them can be sent
        return f"{type(error).__name__}: {error}"
    return {}
