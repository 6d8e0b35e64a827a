"""A grid of values times seeds, trained, and the best chosen on the validation split.

The folder of a sweep holds `KEY=VALUE,.../seed-N` (a run each), `sweep.csv` (a row for each run), `sweep.md`
(a row for each setting, the chosen one in bold) and `chosen.toml` (the recipe with the chosen values).
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from gpattention.data.places import StrPath, check_name
from gpattention.experiments.recipe_file import changed_recipe
from gpattention.experiments.runs import chosen_row, open_run
from gpattention.experiments.sweep.files import write_sweep
from gpattention.experiments.sweep.jobs import Job, train_all
from gpattention.experiments.sweep.plan import PlannedRun, plan_sweep
from gpattention.experiments.sweep.result import CRITERIA, Criterion, SweepResult, SweepRow, SweepSetting
from gpattention.reading import read_json
from gpattention.training import CheckpointError, Recipe, load_recipe, recipe_from_dict
from gpattention.training.differences import told_differences
from gpattention.training.folder import check_new

__all__ = ["SweepResult", "SweepRow", "SweepSetting", "choose_setting", "run_sweep"]


def run_sweep(
    recipe: Recipe | Mapping[str, Any] | StrPath,
    over: Mapping[str, Sequence[object]],
    *,
    seeds: int = 1,
    jobs: int = 1,
    folder: StrPath | None = None,
    choose: Criterion = "accuracy",
    resume: bool = False,
    changes: Sequence[str] = (),
    root: StrPath | None = None,
    device: torch.device | str = "cpu",
    on_done: Callable[[SweepRow], object] | None = None,
) -> SweepResult:
    """Train every combination with every seed, choose, and write the tables.

    A setting with a failed run is never chosen.  Equal means are told apart by the other criterion, then
    by their order.

    Args:
        recipe: a recipe, its plain values, or its file.
        over: values by key, as `--set` takes them: {"regularizer.end": [0.01, 0.1]}.
        seeds: how many, from the recipe's own on.
        jobs: runs trained at once, each in a process with one thread.
        folder: of the sweep; runs/sweep-NAME if not given.
        choose: by the mean over seeds of this, on the validation split: "accuracy" or "nll".
        resume: keep finished runs, go on with the others.
        changes: `section.key=value` for every run.
        root: folder of the datasets; the environment variable GPATTENTION_DATA if not given.
        device: where to train; "cuda" alone spreads the jobs over all GPUs.
        on_done: told each run, in the order in which they are done.
    """
    if choose not in CRITERIA:
        raise ValueError(f"expected choose to be one of {', '.join(CRITERIA)}, got {choose!r}")
    if jobs < 1:
        raise ValueError(f"expected jobs >= 1, got {jobs}")
    base = _base(recipe, changes)
    own = check_name("the folder of the sweep", f"sweep-{base.name}") if folder is None else ""
    place = Path("runs") / own if folder is None else Path(folder)
    planned = plan_sweep(base, over, seeds, place)
    ready = {run.folder: row for run in planned if (row := _before(run, resume=resume)) is not None}
    rest = [
        Job(run, None if root is None else Path(root), str(device), resume=_begun(run))
        for run in planned
        if run.folder not in ready
    ]
    rows = {}
    for row in ready.values():
        rows[row.folder] = row
        _tell(on_done, row)
    for run, error in train_all(rest, jobs):
        rows[run.folder] = _row(run, error)
        _tell(on_done, rows[run.folder])
    ordered = tuple(rows[run.folder] for run in planned)
    settings = _settings(ordered)
    result = SweepResult(base, place, choose, ordered, settings, choose_setting(settings, choose))
    write_sweep(result)
    return result


def choose_setting(settings: Sequence[SweepSetting], choose: Criterion) -> SweepSetting | None:
    """The best of those whose runs all finished."""
    whole = [setting for setting in settings if setting.failed == 0]
    if not whole:
        return None
    if choose == "accuracy":
        return min(whole, key=lambda setting: (-setting.accuracy, setting.nll))
    return min(whole, key=lambda setting: (setting.nll, -setting.accuracy))


def _base(recipe: Recipe | Mapping[str, Any] | StrPath, changes: Sequence[str]) -> Recipe:
    if isinstance(recipe, Recipe | Mapping):
        whole = recipe if isinstance(recipe, Recipe) else recipe_from_dict(recipe)
        return changed_recipe(whole, changes) if changes else whole
    return load_recipe(Path(recipe), changes)


def _begun(run: PlannedRun) -> bool:
    return (run.folder / "recipe.json").is_file()


def _before(run: PlannedRun, *, resume: bool) -> SweepRow | None:
    """The row of a run that an earlier sweep finished; another sweep's runs are refused before any work."""
    if not _begun(run):
        check_new(run.folder)
        return None
    if not resume:
        raise FileExistsError(f"{run.folder} holds a run already: resume the sweep, or choose another folder")
    written = run.folder / "recipe.json"
    try:
        begun = recipe_from_dict(read_json(written, nonfinite=True))
    except ValueError as error:
        raise CheckpointError(f"{written} is not a recipe: {error}") from error
    if begun != run.recipe:
        raise CheckpointError(
            f"{written} describes another run than this sweep: {told_differences(begun, run.recipe)}. "
            "Choose another folder"
        )
    try:
        finished = open_run(run.folder).finished
    except (FileNotFoundError, ValueError):  # no model yet, or a broken one: training will tell
        finished = False
    return _row(run, "") if finished else None


def _row(run: PlannedRun, error: str) -> SweepRow:
    if error:
        return SweepRow(run.settings, run.recipe.seed, run.folder, error=" ".join(error.split()))
    try:
        kept = chosen_row(run.recipe, open_run(run.folder).rows)
    except (FileNotFoundError, ValueError) as broken:
        return _row(run, f"{type(broken).__name__}: {broken}")
    return SweepRow(
        run.settings,
        run.recipe.seed,
        run.folder,
        epoch=int(kept["epoch"]),
        accuracy=float(kept["validation_accuracy"]),
        nll=float(kept["validation_nll"]),
    )


def _settings(rows: Sequence[SweepRow]) -> tuple[SweepSetting, ...]:
    groups: dict[tuple[str, ...], list[SweepRow]] = {}
    for row in rows:
        groups.setdefault(tuple(row.settings.values()), []).append(row)
    return tuple(_summary(group) for group in groups.values())


def _summary(rows: Sequence[SweepRow]) -> SweepSetting:
    accuracies = [row.accuracy for row in rows if row.accuracy is not None]
    nlls = [row.nll for row in rows if row.nll is not None]
    return SweepSetting(
        rows[0].settings,
        runs=len(rows),
        failed=sum(1 for row in rows if row.error),
        accuracy=_mean(accuracies),
        accuracy_std=_std(accuracies),
        nll=_mean(nlls),
        nll_std=_std(nlls),
    )


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def _std(values: Sequence[float]) -> float:
    """Of the sample; one run has none."""
    return statistics.stdev(values) if len(values) > 1 else math.nan


def _tell(on_done: Callable[[SweepRow], object] | None, row: SweepRow) -> None:
    if on_done is not None:
        on_done(row)
