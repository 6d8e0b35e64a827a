"""A grid of values times seeds: planned, trained, and the best chosen on the validation split.

The folder of a sweep holds `KEY=VALUE,.../seed-N` (a run each), `sweep.csv` (a row for each run), `sweep.md`
(a row for each setting, the chosen one in bold) and `chosen.toml` (the recipe with the chosen values).
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch

from gpattention.data.places import StrPath, check_name
from gpattention.experiments.recipe_file import changed_recipe, toml_value, write_recipe
from gpattention.experiments.runs import chosen_row, open_run, train_recipe
from gpattention.experiments.side_by_side import Died, side_by_side
from gpattention.models.storage import make_folder, remove_leftovers, write_atomically
from gpattention.reading import read_json
from gpattention.runs import OverSeeds
from gpattention.runs.tables import Bold, csv_text, markdown, markdown_code, markdown_table
from gpattention.training import (
    CheckpointError,
    Recipe,
    TrainingStoppedError,
    load_recipe,
    recipe_from_dict,
    with_seed,
)
from gpattention.training.differences import told_differences
from gpattention.training.folder import check_new

LONGEST = 120  # characters of a folder's name
AS_IT_IS = "recipe"  # the folder of the only setting when nothing varies
Criterion = Literal["accuracy", "nll"]
CRITERIA: tuple[Criterion, ...] = ("accuracy", "nll")


@dataclass(frozen=True)
class PlannedRun:
    """One setting with one seed."""

    settings: Mapping[str, str]  # key to value, as --set takes them
    recipe: Recipe
    folder: Path


@dataclass(frozen=True)
class Job:
    """One run to train, or to go on with."""

    run: PlannedRun
    root: str | Path | None
    device: str
    resume: bool


@dataclass(frozen=True)
class SweepRow:
    """One run; numbers are those of the weights it chose, on its validation split."""

    settings: Mapping[str, str]
    seed: int
    folder: Path
    epoch: int | None = None
    accuracy: float | None = None
    nll: float | None = None
    error: str = ""  # why it failed; empty if it did not


@dataclass(frozen=True)
class SweepSetting:
    """All seeds of one setting, of the runs that finished."""

    settings: Mapping[str, str]
    runs: int
    failed: int
    accuracy: OverSeeds | None  # None where no run finished
    nll: OverSeeds | None


@dataclass(frozen=True)
class SweepResult:
    """All runs, what they say of each setting, and the setting that was chosen."""

    recipe: Recipe
    folder: Path
    choose: Criterion
    rows: tuple[SweepRow, ...]
    settings: tuple[SweepSetting, ...]
    chosen: SweepSetting | None  # None: no setting finished all its runs

    @property
    def chosen_recipe(self) -> Recipe | None:
        """The recipe with the chosen values, under its own name and seed."""
        if self.chosen is None:
            return None
        return changed_recipe(self.recipe, [f"{k}={v}" for k, v in self.chosen.settings.items()])


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

    def order(setting: SweepSetting) -> tuple[float, float]:
        assert setting.accuracy is not None
        assert setting.nll is not None
        right, sure = -setting.accuracy.mean, setting.nll.mean
        return (right, sure) if choose == "accuracy" else (sure, right)

    return min(whole, key=order) if whole else None


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
    return SweepSetting(
        rows[0].settings,
        runs=len(rows),
        failed=sum(1 for row in rows if row.error),
        accuracy=OverSeeds.of(row.accuracy for row in rows),
        nll=OverSeeds.of(row.nll for row in rows),
    )


def _tell(on_done: Callable[[SweepRow], object] | None, row: SweepRow) -> None:
    if on_done is not None:
        on_done(row)


def plan_sweep(
    recipe: Recipe, over: Mapping[str, Sequence[object]], seeds: int, folder: Path
) -> tuple[PlannedRun, ...]:
    """All runs, setting by setting; a value that the recipe refuses is told before anything is trained."""
    if isinstance(seeds, bool) or seeds < 1:
        raise ValueError(f"expected seeds >= 1, got {seeds}")
    texts = {key: _texts(key, values) for key, values in over.items()}
    if "seed" in texts:
        raise ValueError("expected keys other than seed to sweep over: seeds are what --seeds is for")
    runs = []
    for values in product(*texts.values()):
        settings = dict(zip(texts, values, strict=True))
        label = label_of(settings)
        changed = changed_recipe(recipe, [f"{key}={value}" for key, value in settings.items()])
        named = replace(changed, name=f"{recipe.name}-{label}") if settings else changed
        for seed in range(recipe.seed, recipe.seed + seeds):
            runs.append(PlannedRun(settings, with_seed(named, seed), folder / label / f"seed-{seed}"))
    return tuple(runs)


def parse_over(texts: Sequence[str]) -> dict[str, list[str]]:
    """`key=v1,v2` as often as given; commas inside brackets and quotes belong to a value."""
    over: dict[str, list[str]] = {}
    for text in texts:
        key, equals, values = (part.strip() for part in text.partition("="))
        if not equals or not key or not values:
            raise ValueError(f"expected --over to be of the form section.key=value,value, got {text!r}")
        if key in over:
            raise ValueError(f"expected every key once, got --over {key} twice")
        over[key] = split_values(values)
    return over


def split_values(text: str) -> list[str]:
    """The parts between commas at the top level.

    >>> split_values('1e-3, [1, 2], "a,b"')
    ['1e-3', '[1, 2]', '"a,b"']
    """
    parts, depth, quote, start = [], 0, "", 0
    for i, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "[{":
            depth += 1
        elif letter in "]}":
            depth -= 1
        elif letter == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [part.strip() for part in (*parts, text[start:])]


def label_of(settings: Mapping[str, str]) -> str:
    """`key=value,key=value` as the name of a folder; a digest tells apart what a name cannot hold."""
    whole = ",".join(f"{key}={value}" for key, value in settings.items()) or AS_IT_IS
    safe = re.sub(r"[^A-Za-z0-9._+=,-]", "_", whole)
    if safe == whole and len(safe) <= LONGEST:
        return safe
    digest = hashlib.sha256(whole.encode()).hexdigest()[:8]
    return f"{safe[: LONGEST - 9]}-{digest}"


def _texts(key: str, values: Sequence[object]) -> list[str]:
    if isinstance(values, str) or len(values) == 0:
        raise ValueError(f"expected a list of values for {key}, got {values!r}")
    texts = [value if isinstance(value, str) else toml_value(value) for value in values]
    for text in texts:
        if not text:
            raise ValueError(f"expected values for {key} between the commas, got an empty one")
        if texts.count(text) > 1:
            raise ValueError(f"expected every value of {key} once, got {text} twice")
    return texts


def train_all(jobs: Sequence[Job], at_once: int) -> Iterator[tuple[PlannedRun, str]]:
    """Each run when it is done, with the reason if it failed.

    One at a time, they train in this process.  More have a process each, with one thread: then a run
    that is killed, for want of memory perhaps, does not take the others with it.
    """
    if at_once == 1:
        for job in jobs:
            yield job.run, train_one(job)
        return
    for job, answer in side_by_side(train_in_process, jobs, at_once, when_stopped="resume to go on"):
        yield job.run, answer.how if isinstance(answer, Died) else answer


def train_one(job: Job) -> str:
    """Train to the end; empty, or why that failed.  A request to stop is no failure and goes through."""
    try:
        train_recipe(
            job.run.recipe, job.run.folder, root=job.root, resume=job.resume, device=job.device
        )  # fmt: skip
    except TrainingStoppedError:
        raise
    except Exception as error:  # of any kind: the sweep goes on, and its table tells
        return f"{type(error).__name__}: {error}".rstrip(": ")
    return ""


def train_in_process(job: Job, slot: int) -> str:
    """`train_one` in one of several processes, where a request to stop is an answer."""
    try:
        return train_one(replace(job, device=device_of(job.device, slot)))
    except TrainingStoppedError as stopped:
        return str(stopped)


def device_of(name: str, slot: int) -> str:
    """`cuda` alone means all GPUs: the jobs take turns."""
    count = torch.cuda.device_count() if name == "cuda" else 0
    return f"cuda:{slot % count}" if count > 1 else name


def write_sweep(result: SweepResult) -> None:
    """All three; without a choice there is no `chosen.toml`, also none of an earlier time."""
    remove_leftovers(make_folder(result.folder))
    write_atomically(result.folder / "sweep.csv", sweep_csv(result).encode())
    write_atomically(result.folder / "sweep.md", sweep_markdown(result).encode())
    chosen = result.chosen_recipe
    if chosen is None:
        (result.folder / "chosen.toml").unlink(missing_ok=True)
        return
    comment = f"Chosen by {how_chosen(result)}; see sweep.md."
    write_recipe(result.folder / "chosen.toml", chosen, comment)


def sweep_csv(result: SweepResult) -> str:
    """One row for each run."""
    keys = list(result.rows[0].settings)
    heads = [*keys, "seed", "status", "epoch", "validation_accuracy", "validation_nll", "folder", "error"]
    lines = []
    for row in result.rows:
        status, folder = "failed" if row.error else "finished", row.folder.relative_to(result.folder)
        values = [row.settings[key] for key in keys]
        lines.append([*values, row.seed, status, row.epoch, row.accuracy, row.nll, folder, row.error])
    return csv_text(heads, lines)


def sweep_markdown(result: SweepResult) -> str:
    """One row for each setting, the chosen one in bold, then the runs that failed."""
    keys = list(result.rows[0].settings)
    heads = [*keys, "validation accuracy", "validation NLL", "runs"]
    rows = []
    for setting in result.settings:
        cells = [*setting.settings.values(), *numbers(setting)]
        rows.append([Bold(cell) for cell in cells] if setting is result.chosen else cells)
    error = "± is the standard error over seeds." if any(s.runs > 1 for s in result.settings) else ""
    lines = [f"# Sweep of {markdown(result.recipe.name)}", ""]
    lines += [f"Chosen by {how_chosen(result)}. {error}".rstrip(), "", markdown_table(heads, rows, left=None)]
    if result.chosen is None:
        lines += ["None was chosen: every setting has a run that failed.", ""]
    failed = [row for row in result.rows if row.error]
    if failed:
        lines += ["Failed runs:", ""]
        lines += [
            f"- {markdown_code(row.folder.relative_to(result.folder))}: {markdown(row.error)}"
            for row in failed
        ]
    return "\n".join(lines).rstrip("\n") + "\n"


def numbers(setting: SweepSetting) -> tuple[str, str, str]:
    """Accuracy and NLL, with their standard error where there is one, and how many runs finished."""
    finished = setting.runs - setting.failed
    accuracy, nll = ("-" if x is None else x.text(4) for x in (setting.accuracy, setting.nll))
    return accuracy, nll, f"{finished}/{setting.runs}" if setting.failed else f"{setting.runs}"


def how_chosen(result: SweepResult) -> str:
    """In words."""
    measure = "accuracy (highest)" if result.choose == "accuracy" else "NLL (lowest)"
    runs = max(setting.runs for setting in result.settings)
    over = f", mean over {runs} seeds" if runs > 1 else ""
    return f"{measure} on the validation split{over}"
