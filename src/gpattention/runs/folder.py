"""A run on disk: open one, find those in a folder, read their results.

A run's folder has `recipe.json`, `metrics.csv`, `events.jsonl`, `checkpoints/`, `model/` with the weights
chosen, `preprocessing/` and `evaluation/`.
"""

import csv
import io
import shlex
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gpattention.checks import check_choice
from gpattention.files import StrPath, nearest_path, read_object, read_text
from gpattention.models import TextTransformer, Transformer, VisionTransformer
from gpattention.runs.inputs import Preprocessing, load_preprocessing
from gpattention.runs.recipe import Recipe, load_recipe, read_recipe
from gpattention.runs.records import read_events, read_noted_suites
from gpattention.runs.results import Results, RunData, group

CONFIG, CARD_RECIPE = "config.json", "recipe.toml"
MODELS: dict[str, type[Transformer]] = {c.__name__: c for c in (VisionTransformer, TextTransformer)}


@dataclass(frozen=True, eq=False)
class Run:
    """A run's folder, read.

    Attributes:
        folder: where it lies.
        recipe: that it was begun with.
        model: the weights chosen, on the CPU, in evaluation mode.
        rows: rows of metrics.csv.
        events: events of events.jsonl.
    """

    folder: Path
    recipe: Recipe
    model: Transformer
    rows: tuple[dict[str, Any], ...]
    events: tuple[dict[str, Any], ...]

    @cached_property
    def preprocessing(self) -> Preprocessing:
        """What turns raw images or sentences into the model's inputs."""
        return load_preprocessing(self.folder)

    @property
    def finished(self) -> bool:
        """Whether training is finished."""
        return any(event.get("event") == "finished" for event in self.events)

    @property
    def unfinished_epoch(self) -> int | None:
        """The last validated epoch of a training that began and did not end."""
        seen = [event.get("epoch") for event in self.events if event.get("event") == "validated"]
        return seen[-1] if seen and not self.finished else None


def open_run(folder: StrPath) -> Run:
    """Open a run with its model.

    Args:
        folder: folder of the run.

    Returns:
        The run with its model.

    Raises:
        FileNotFoundError: there is no run, or it has no model yet.
        ValueError: one of its files is damaged.
    """
    folder = Path(folder)
    recipe = read_recipe(folder)
    if not (folder / "model" / CONFIG).is_file():
        raise FileNotFoundError(
            f"expected a model in {folder / 'model'}, got none: the run writes it in its last phase; "
            f"gpattention train --resume --run {shlex.quote(str(folder))} goes on with it"
        )
    rows, events = read_rows(folder / "metrics.csv"), read_events(folder)
    return Run(folder, recipe, _model(folder / "model"), rows, events)


def open_trained(folder: StrPath) -> Run:
    """Open a run, or a folder that `gpattention models card` made of one.

    Args:
        folder: folder of a run, or of a shared model.

    Returns:
        The run; that of a shared model has no rows and no events.

    Raises:
        FileNotFoundError: the folder has no model.
        ValueError: one of its files is damaged.
    """
    folder = Path(folder)
    if (folder / "recipe.json").is_file() or not (folder / CARD_RECIPE).is_file():
        return open_run(folder)
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"expected a shared model in {folder}, got no {CONFIG} beside {CARD_RECIPE}")
    return Run(folder, load_recipe(folder / CARD_RECIPE), _model(folder), (), ())


def find_runs(folder: StrPath, *, unfinished: bool = False) -> list[Path]:
    """Find the runs in or below a folder.

    Args:
        folder: any.
        unfinished: whether runs without a model count.

    Returns:
        Their folders, sorted.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    folder = Path(folder)
    if not folder.is_dir():
        hint = ", but a file" if folder.is_file() else nearest_path(folder)
        raise FileNotFoundError(f"no folder {folder}{hint}")
    found = sorted(path.parent for path in folder.rglob("recipe.json"))
    return [run for run in found if unfinished or (run / "model" / CONFIG).is_file()]


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """Unique names of folders: in a sweep every setting has a folder `seed-0`.

    Args:
        folders: different ones.

    Returns:
        The name of each, with as many of those above as it takes.
    """
    names = [folder.name for folder in folders]
    depth = 1
    while max(Counter(names).values()) > 1:
        depth += 1
        twice = {name for name, count in Counter(names).items() if count > 1}
        names = [
            "/".join(folder.parts[-depth:]) if name in twice else name
            for name, folder in zip(names, folders, strict=True)
        ]
    return names


def read_results(folders: Sequence[StrPath]) -> Results:
    """Read the table of all evaluations in or below these folders.

    Runs whose recipes differ by seed and name alone are one recipe in it.

    Args:
        folders: folders of runs, or folders that hold runs.

    Returns:
        The table.

    Raises:
        FileNotFoundError: a folder holds no run.
        ValueError: a file is damaged.
    """
    return Results.of(group(read_runs(folders)))


def read_runs(folders: Sequence[StrPath]) -> list[RunData]:
    """Read the runs in or below these folders as plain data.

    Args:
        folders: folders of runs, or folders that hold runs; a run given twice counts once.

    Returns:
        Everything of each run but its weights, finished or not.

    Raises:
        FileNotFoundError: a folder holds no run.
        ValueError: a file is damaged.
    """
    found: dict[Path, Path] = {}
    for folder in folders:  # by the real path: a run may be given twice, or through a link
        below = find_runs(folder, unfinished=True)
        if not below:
            raise FileNotFoundError(f"expected a run in or below {folder}, got no recipe.json there")
        for run in below:
            found.setdefault(run.resolve(), run)
    return [read_run(run, name) for run, name in zip(found.values(), distinct_names([*found]), strict=True)]


def read_run(folder: Path, name: str | None = None) -> RunData:
    """Read a run without its weights.

    Args:
        folder: folder of the run.
        name: unique name among runs; the folder's if not given.

    Returns:
        Its data; suites of other weights than it has now say so.
    """
    return RunData(
        name=folder.name if name is None else name,
        recipe=read_object(folder / "recipe.json", nonfinite=True),  # as it stands: also of older versions
        rows=read_rows(folder / "metrics.csv"),
        events=read_events(folder),
        suites=read_noted_suites(folder),
        folder=str(folder),
    )


def read_rows(file: Path) -> tuple[dict[str, Any], ...]:
    """Rows of metrics.csv, numbers as numbers; empty if absent."""
    if not file.is_file():
        return ()
    table = csv.DictReader(io.StringIO(read_text(file), newline=""))
    rows: list[dict[str, Any]] = []
    try:
        for row in table:
            if None in row or None in row.values():  # more cells, or fewer
                raise ValueError("expected as many cells as in its first line")
            rows.append({name: _value(text) for name, text in row.items()})
    except (csv.Error, ValueError) as error:
        raise ValueError(f"{file}, line {table.reader.line_num}: {error}") from None
    return tuple(rows)


def _value(text: str) -> int | float | str | None:
    """The value of a cell of a CSV file: nothing, a whole number, a number or text."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text or None


def _model(folder: Path) -> Transformer:
    config = folder / CONFIG
    name = str(read_object(config).get("model"))
    check_choice(f"model in {config}", name, MODELS)
    return MODELS[name].from_pretrained(folder)
