"""A grid of values times seeds: planned, trained, and the best chosen on the validation split.

The folder of a sweep holds `KEY=VALUE,.../seed-N` (a run each), `sweep.csv` (a row for each run), `sweep.md`
(a row for each setting, the chosen one in bold) and `chosen.toml` (the recipe with the chosen values).
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Literal

import torch

from gpattention.checks import check_choice, check_count, check_name
from gpattention.files import StrPath, make_folder, remove_leftovers, write_atomically
from gpattention.runs import OverSeeds, Recipe, change_recipe, chosen_row, load_recipe, open_run, with_seed
from gpattention.runs.recipe import toml_value, write_recipe
from gpattention.runs.tables import Bold, csv_text, markdown, markdown_code, markdown_table
from gpattention.studies.scheduler import Engine, side_by_side
from gpattention.training import TrainingStoppedError, check_new, train_recipe
from gpattention.training.folder import check_resumed

LONGEST = 120  # characters of a folder's name
AS_IT_IS = "recipe"  # the folder of the only setting when nothing varies
Criterion = Literal["accuracy", "nll"]
CRITERIA: tuple[Criterion, ...] = ("accuracy", "nll")


@dataclass(frozen=True)
class SweepRow:
    """One setting with one seed: what is trained, and then its results.

    Attributes:
        settings: values by key, as --set takes them.
        recipe: with these values.
        folder: folder of the run.
        epoch: epoch of the weights that the run chose, as all numbers are; None until it is trained.
        accuracy: on its validation split.
        nll: the same.
        error: why it failed; empty if it did not.
    """

    settings: Mapping[str, str]
    recipe: Recipe
    folder: Path
    epoch: int | None = None
    accuracy: float | None = None
    nll: float | None = None
    error: str = ""

    def ended(self, error: str = "") -> "SweepRow":
        """The row with the results in its folder, or with the error."""
        if error:
            return replace(self, error=" ".join(error.split()))
        try:
            kept = chosen_row(self.recipe, open_run(self.folder).rows)
        except (FileNotFoundError, ValueError) as broken:
            return self.ended(f"{type(broken).__name__}: {broken}")
        accuracy, nll = (float(kept[f"validation_{name}"]) for name in ("accuracy", "nll"))
        return replace(self, epoch=int(kept["epoch"]), accuracy=accuracy, nll=nll)


@dataclass(frozen=True)
class SweepSetting:
    """All seeds of one setting, of the runs that finished."""

    settings: Mapping[str, str]
    runs: int
    failed: int
    accuracy: OverSeeds | None  # None where no run finished
    nll: OverSeeds | None

    @property
    def numbers(self) -> tuple[str, str, str]:
        """Accuracy and NLL, with their standard error where there is one, and how many runs finished."""
        accuracy, nll = ("-" if x is None else x.text(4) for x in (self.accuracy, self.nll))
        return accuracy, nll, f"{self.runs - self.failed}/{self.runs}" if self.failed else f"{self.runs}"


@dataclass(frozen=True)
class SweepResult:
    """All runs, the figures of each setting, and the setting that was chosen."""

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
        return change_recipe(self.recipe, [f"{k}={v}" for k, v in self.chosen.settings.items()])

    @property
    def how_chosen(self) -> str:
        """The measure that the setting was chosen by, in words."""
        measure = "accuracy (highest)" if self.choose == "accuracy" else "NLL (lowest)"
        runs = max(setting.runs for setting in self.settings)
        over = f", mean over {runs} seeds" if runs > 1 else ""
        return f"{measure} on the validation split{over}"


def run_sweep(
    recipe: Recipe | StrPath,
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
    engine: Engine | None = None,
) -> SweepResult:
    """Train every combination with every seed, choose, and write the tables.

    A setting with a failed run is never chosen.  Equal means are decided by the other criterion, then
    by their order.  More than one job have a process each: then a run that is killed, for want of memory
    perhaps, does not take the others with it.

    Args:
        recipe: a recipe or its file.
        over: values by key, as `--set` takes them: {"regularizer.end": [0.01, 0.1]}.
        seeds: how many, from the recipe's own on.
        jobs: runs trained at once, each in a process with one thread.
        folder: folder of the sweep; runs/sweep-NAME if not given.
        choose: by the mean over seeds of this, on the validation split: "accuracy" or "nll".
        resume: keep finished runs, go on with the others.
        changes: `section.key=value` for every run.
        root: folder of the datasets; the environment variable GPATTENTION_DATA if not given.
        device: where to train; "cuda" alone spreads the jobs over all GPUs.
        on_done: called with each run, in the order in which they are done.
        engine: where they are trained, e.g. `ray_cluster`'s; in processes of this machine if not given.

    Returns:
        All runs and the setting that was chosen.

    Raises:
        ValueError: a value is refused, before anything is trained.
        FileExistsError: the folder holds runs already, and `resume` is not set.
        CheckpointError: the folder holds runs of another sweep.
        TrainingStoppedError: SIGTERM or Ctrl-C came.
    """
    check_choice("choose", choose, CRITERIA)
    jobs = check_count("jobs", jobs)
    base = (
        change_recipe(recipe, changes) if isinstance(recipe, Recipe) else load_recipe(Path(recipe), changes)
    )
    if folder is None:
        folder = Path("runs") / check_name("the folder of the sweep", f"sweep-{base.name}")
    place = Path(folder) if engine is None else Path(folder).absolute()
    planned = plan_sweep(base, over, seeds, place)
    finished = [run for run in planned if _is_finished(run, resume=resume)]  # all, before any is reported
    rest = [run for run in planned if run not in finished]
    work = partial(train_one, root=None if root is None else Path(root).absolute(), device=str(device))
    trained = side_by_side(work, rest, jobs, when_stopped="resume to go on", engine=engine)
    rows: dict[Path, SweepRow] = {}
    for run, answer, _ in chain(((run, "", 0.0) for run in finished), trained):
        rows[run.folder] = run.ended(str(answer))
        if on_done is not None:
            on_done(rows[run.folder])
    ordered = tuple(rows[run.folder] for run in planned)
    settings = _settings(ordered)
    result = SweepResult(base, place, choose, ordered, settings, choose_setting(settings, choose))
    write_sweep(result)
    return result


def train_one(run: SweepRow, slot: int, *, root: Path | None, device: str) -> str | TrainingStoppedError:
    """Train or resume a run; returns an empty text, an error, or that it was stopped."""
    count = torch.cuda.device_count() if device == "cuda" else 0
    device = f"cuda:{slot % count}" if count > 1 else device  # `cuda` alone: the jobs take turns
    begun = (run.folder / "recipe.json").is_file()
    try:
        train_recipe(run.recipe, run.folder, root=root, resume=begun, device=device)
    except TrainingStoppedError as stopped:
        return stopped
    except Exception as error:  # of any kind: the sweep goes on, and its table has the reason
        return f"{type(error).__name__}: {error}".rstrip(": ")
    return ""


def choose_setting(settings: Sequence[SweepSetting], choose: Criterion) -> SweepSetting | None:
    """The best of those whose runs all finished."""

    def order(setting: SweepSetting) -> list[float]:
        means = [-setting.accuracy.mean, setting.nll.mean] if setting.accuracy and setting.nll else []
        return means if choose == "accuracy" else means[::-1]

    return min((setting for setting in settings if setting.failed == 0), key=order, default=None)


def _is_finished(run: SweepRow, *, resume: bool) -> bool:
    """Whether an earlier sweep finished it; another sweep's runs are refused before any work."""
    written = run.folder / "recipe.json"
    if not written.is_file():
        check_new(run.folder)
        return False
    if not resume:
        raise FileExistsError(f"{run.folder} holds a run already: resume the sweep, or choose another folder")
    check_resumed(run.recipe, run.folder)
    try:
        return open_run(run.folder).finished
    except (FileNotFoundError, ValueError):  # no model yet, or a broken one, which is training's to report
        return False


def _settings(rows: Sequence[SweepRow]) -> tuple[SweepSetting, ...]:
    groups: dict[tuple[str, ...], list[SweepRow]] = {}
    for row in rows:
        groups.setdefault(tuple(row.settings.values()), []).append(row)
    found = []
    for of in groups.values():
        accuracy, nll = (OverSeeds.of(getattr(row, name) for row in of) for name in ("accuracy", "nll"))
        found.append(SweepSetting(of[0].settings, len(of), sum(bool(row.error) for row in of), accuracy, nll))
    return tuple(found)


def plan_sweep(
    recipe: Recipe, over: Mapping[str, Sequence[object]], seeds: int, folder: Path
) -> tuple[SweepRow, ...]:
    """All runs, setting by setting; a value that the recipe refuses is an error before any training."""
    seeds = check_count("seeds", seeds)
    texts = {key: _texts(key, values) for key, values in over.items()}
    if "seed" in texts:
        raise ValueError("expected keys other than seed to sweep over: seeds are what --seeds is for")
    runs = []
    for values in product(*texts.values()):
        settings = dict(zip(texts, values, strict=True))
        label = label_of(settings)
        changed = change_recipe(recipe, [f"{key}={value}" for key, value in settings.items()])
        named = replace(changed, name=f"{recipe.name}-{label}") if settings else changed
        for seed in range(recipe.seed, recipe.seed + seeds):
            runs.append(SweepRow(settings, with_seed(named, seed), folder / label / f"seed-{seed}"))
    return tuple(runs)


def parse_over(texts: Sequence[str]) -> dict[str, list[str]]:
    """Parse `key=v1,v2` as often as given; commas inside brackets and quotes belong to a value."""
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
    """Split at the commas of the top level.

    >>> split_values('1e-3, [1, 2], "a,b"')
    ['1e-3', '[1, 2]', '"a,b"']
    """
    parts, depth, quote, start = [], 0, "", 0
    for i, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "[]{}":
            depth += 1 if letter in "[{" else -1
        elif letter == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [part.strip() for part in (*parts, text[start:])]


def label_of(settings: Mapping[str, str]) -> str:
    """`key=value,key=value` as the name of a folder; a digest distinguishes what a name cannot hold."""
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


def write_sweep(result: SweepResult) -> None:
    """Write all three files; without a choice there is no `chosen.toml`, also none of an earlier time."""
    remove_leftovers(make_folder(result.folder))
    write_atomically(result.folder / "sweep.csv", sweep_csv(result).encode())
    write_atomically(result.folder / "sweep.md", sweep_markdown(result).encode())
    if result.chosen_recipe is None:
        (result.folder / "chosen.toml").unlink(missing_ok=True)
    else:
        comment = f"Chosen by {result.how_chosen}; see sweep.md."
        write_recipe(result.folder / "chosen.toml", result.chosen_recipe, comment)


def sweep_csv(result: SweepResult) -> str:
    """One row for each run."""
    heads = ["seed", "status", "epoch", "validation_accuracy", "validation_nll", "folder", "error"]
    lines = []
    for row in result.rows:
        status, folder = "failed" if row.error else "finished", row.folder.relative_to(result.folder)
        figures = [row.recipe.seed, status, row.epoch, row.accuracy, row.nll, folder, row.error]
        lines.append([*row.settings.values(), *figures])
    return csv_text([*result.rows[0].settings, *heads], lines)


def sweep_markdown(result: SweepResult) -> str:
    """One row for each setting, the chosen one in bold, then the runs that failed."""
    heads = [*result.rows[0].settings, "validation accuracy", "validation NLL", "runs"]
    rows = []
    for setting in result.settings:
        cells = [*setting.settings.values(), *setting.numbers]
        rows.append([Bold(cell) for cell in cells] if setting is result.chosen else cells)
    error = "± is the standard error over seeds." if any(s.runs > 1 for s in result.settings) else ""
    lines = [f"# Sweep of {markdown(result.recipe.name)}", ""]
    lines += [f"Chosen by {result.how_chosen}. {error}".rstrip(), "", markdown_table(heads, rows, left=None)]
    if result.chosen is None:
        lines += ["None was chosen: every setting has a run that failed.", ""]
    failed = [row for row in result.rows if row.error]
    lines += ["Failed runs:", ""] if failed else []
    places = {row.folder: markdown_code(row.folder.relative_to(result.folder)) for row in failed}
    lines += [f"- {places[row.folder]}: {markdown(row.error)}" for row in failed]
    return "\n".join(lines).rstrip("\n") + "\n"
