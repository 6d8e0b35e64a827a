"""A run: train one from a recipe, open a finished one or a model that was shared, find those in a folder."""

import csv
import io
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from gpattention.data.places import StrPath
from gpattention.experiments.inputs.preparation import prepare, save_preprocessing
from gpattention.experiments.inputs.preprocessing import Preprocessing, load_preprocessing
from gpattention.models import TextTransformer, Transformer, VisionTransformer
from gpattention.reading import read_json, read_object, read_text
from gpattention.training import (
    Progress,
    Recipe,
    TrainingResult,
    build_kernel_model,
    build_model,
    fit,
    load_recipe,
    recipe_from_dict,
    take_first_phase,
)
from gpattention.training.folder import check_new, check_resumed
from gpattention.training.hardware import is_leading
from gpattention.training.records import read_events
from gpattention.training.seeds import check_seed

CONFIG, CARD_RECIPE = "config.json", "recipe.toml"
MODELS: dict[str, type[Transformer]] = {c.__name__: c for c in (VisionTransformer, TextTransformer)}


@dataclass(frozen=True, eq=False)
class Run:
    """A run's folder, read."""

    folder: Path
    recipe: Recipe
    model: Transformer  # the weights chosen, on the CPU, in evaluation mode
    rows: tuple[dict[str, Any], ...]  # of metrics.csv
    events: tuple[dict[str, Any], ...]  # of events.jsonl

    @cached_property
    def preprocessing(self) -> Preprocessing:
        """What turns raw images or sentences into the model's inputs."""
        return load_preprocessing(self.folder)

    @property
    def finished(self) -> bool:
        """Whether training came to its end."""
        return any(event.get("event") == "finished" for event in self.events)

    @property
    def unfinished_epoch(self) -> int | None:
        """The last epoch that was validated, where training was seen to begin and not to end."""
        seen = [event.get("epoch") for event in self.events if event.get("event") == "validated"]
        return seen[-1] if seen and not self.finished else None


def chosen_row(recipe: Recipe, rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The validation of the weights that a run keeps: its last, or its best of the last phase.

    Of equals the first is kept, as in training.
    """
    if not rows:
        raise ValueError("expected a run with a validation, got none")
    if recipe.checkpoint.select == "last":
        return rows[-1]
    late = [row for row in rows if row["phase"] == rows[-1]["phase"]]
    if recipe.checkpoint.select == "best-nll":
        return min(late, key=lambda row: float(row["validation_nll"]))
    return max(late, key=lambda row: float(row["validation_accuracy"]))


def train_recipe(
    recipe: Recipe,
    folder: StrPath,
    *,
    root: StrPath | None = None,
    resume: bool = False,
    first_phase: StrPath | None = None,
    device: torch.device | str = "cpu",
    progress: Callable[[Progress], object] | None = None,
    preparing: Callable[[int, int], None] | None = None,
    **options: Any,
) -> TrainingResult:
    """Load the recipe's data, write what prediction needs of it, and train.

    Args:
        recipe: of images or texts.
        folder: the run's.
        root: folder of the datasets; the environment variable GPATTENTION_DATA if not given.
        resume: go on from the last checkpoint.
        first_phase: a run whose first phase is the same and is taken over, to the same bits; it is
            looked at only where there is nothing to resume.
        device: where to train.
        progress: called at every step.
        preparing: called with (done, total) of the sentences whose frozen vectors are computed first.
        options: further ones of `fit`.
    """
    check_seed("seed", recipe.seed)
    begun = (Path(folder) / "recipe.json").exists()
    if resume and (begun or first_phase is None):  # before the data, whose split a changed seed would change
        check_resumed(recipe, Path(folder))
    elif is_leading():  # before the data, and before anything in the folder changes
        check_new(Path(folder), taking=first_phase is not None)
    prepared = prepare(recipe, root, progress=preparing)
    build_kernel_model(recipe, prepared.training.facts)  # mistakes in a recipe show before a folder is made
    build_model(recipe, prepared.training.facts)
    if first_phase is not None and not (resume and begun):
        take_first_phase(recipe, folder, first_phase)
        resume = True
    save_preprocessing(folder, prepared)
    return fit(
        recipe, prepared.training, Path(folder), resume=resume, device=device, progress=progress, **options
    )


def open_run(folder: StrPath) -> Run:
    """Everything of a run; it must have a model already."""
    folder = Path(folder)
    recipe = read_recipe(folder)
    if not (folder / "model" / CONFIG).is_file():
        raise FileNotFoundError(
            f"expected a model in {folder / 'model'}, got none: the run writes it {_first_written(recipe)}; "
            f"gpattention train --resume --run {shlex.quote(str(folder))} goes on with it"
        )
    return Run(
        folder, recipe, _model(folder / "model"), read_rows(folder / "metrics.csv"), read_events(folder)
    )


def open_trained(folder: StrPath) -> Run:
    """A run, or a folder that `gpattention models card` made of one: without metrics and events then."""
    folder = Path(folder)
    if (folder / "recipe.json").is_file() or not (folder / CARD_RECIPE).is_file():
        return open_run(folder)
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"expected a shared model in {folder}, got no {CONFIG} beside {CARD_RECIPE}")
    return Run(folder, load_recipe(folder / CARD_RECIPE), _model(folder), (), ())


def find_runs(folder: StrPath, *, unfinished: bool = False) -> list[Path]:
    """Folders of every run in or below a folder, sorted; those without a model only with `unfinished`."""
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}")
    found = sorted(path.parent for path in folder.rglob("recipe.json"))
    return [run for run in found if unfinished or (run / "model" / CONFIG).is_file()]


def read_recipe(folder: StrPath) -> Recipe:
    """The recipe that a run was begun with."""
    file = Path(folder) / "recipe.json"
    if not file.is_file():
        raise FileNotFoundError(f"expected a run in {folder}, got no {file.name} there")
    plain = read_json(file, nonfinite=True)
    try:
        return recipe_from_dict(plain)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _first_written(recipe: Recipe) -> str:
    """When a run has a model for the first time."""
    if recipe.checkpoint.select == "last":
        return "at its end, as checkpoint.select is 'last'"
    if recipe.phases.epochs == 0 or recipe.phases.kernel_epochs == 0:
        return "at its first validation"
    return "at the first validation of its second phase"


def _model(folder: Path) -> Transformer:
    config = folder / CONFIG
    name = read_object(config).get("model")
    if name not in MODELS:
        raise ValueError(f"{config}: expected model to be one of {', '.join(MODELS)}, got {name!r}")
    return MODELS[name].from_pretrained(folder)


def read_rows(file: Path) -> tuple[dict[str, Any], ...]:
    """Of `metrics.csv`; none where there is no such file."""
    if not file.is_file():
        return ()
    table = csv.reader(io.StringIO(read_text(file), newline=""))
    rows: list[dict[str, Any]] = []
    try:
        names = next(table, [])
        for cells in table:
            if cells and len(cells) != len(names):
                raise ValueError(f"expected {len(names)} cells as in its first line, got {len(cells)}")
            if cells:
                rows.append({name: _value(text) for name, text in zip(names, cells, strict=True)})
    except (csv.Error, ValueError) as error:
        raise ValueError(f"{file}, line {table.line_num}: {error}") from None
    return tuple(rows)


def _value(text: str | None) -> int | float | str | None:
    """What a cell of a CSV file was: nothing, a whole number, a number or text."""
    if not text:
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
