"""Does adoption help trained vision transformers?  Clean, corrupted and foreign images, over several seeds.

Runs that differ by their seed alone are one model, whose weights serve the methods of `HOST_METHODS`.  Every
converted kind starts from them and is tuned on for a short while, and so is, as a control, the host itself.
Temperatures, attached and prior scales are fitted on the validation images of a run; nothing is fitted on
any other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpattention.adopt.attach import attach
from gpattention.data.places import StrPath
from gpattention.experiments.adoption.cells import Cell
from gpattention.experiments.adoption.image_work import ImageSettings, Progress, RunWork
from gpattention.experiments.adoption.trainings import all_trainings
from gpattention.experiments.judging.weights import open_with_digest
from gpattention.experiments.runs import Run, find_runs
from gpattention.runs import name_without_seed


@dataclass(frozen=True)
class ImageResult:
    """One cell for each run and method, and what is to be said."""

    cells: tuple[Cell, ...]
    notes: tuple[str, ...]


def adopt_images(
    folders: Sequence[StrPath],
    settings: ImageSettings,
    progress: Progress | None = None,
    on_part: Callable[[str, float], object] | None = None,
) -> ImageResult:
    """Every run below these folders whose attention can be attached to; `on_part` is told times.

    What is finished with the same settings, of the same weights and data, is read from RUN/adoption.
    """
    runs, notes = _attachable(folders)
    told: dict[str, None] = dict.fromkeys(notes)
    cells: list[Cell] = []
    for run, weights in runs:
        work = RunWork(run, weights, settings, progress or (lambda *_: None), on_part or (lambda *_: None))
        cells += work.cells()
        told |= dict.fromkeys(work.notes)
    if not cells:
        raise ValueError("expected finished cells in these runs, got none: leave out --finished")
    order = {name: place for place, name in enumerate(m for t in all_trainings() for m in t.methods)}
    cells.sort(key=lambda cell: (cell.group, order[cell.method], cell.seed))
    return ImageResult(tuple(cells), tuple(told))


def _attachable(folders: Sequence[StrPath]) -> tuple[list[tuple[Run, str]], list[str]]:
    """With the SHA-256 of their weights.  All runs are opened first, so that a bad folder costs no work."""
    runs, notes = list[tuple[Run, str]](), list[str]()
    for folder in dict.fromkeys(place for given in folders for place in _runs_in(Path(given))):
        run, weights = open_with_digest(folder)
        try:
            if run.recipe.model.type != "vision":
                raise ValueError("it reads no images")
            attach(run.model)
        except ValueError as error:
            notes.append(f"{folder} is left out: {str(error).splitlines()[0]}")
        else:
            runs.append((run, weights))
    if not runs:
        raise ValueError(
            "expected at least one run of softmax or kernel attention on images, got none: "
            + "; ".join(notes)
        )
    seen: dict[tuple[str, int], Path] = {}
    for run, _ in runs:
        key = (name_without_seed(run.recipe.name), run.recipe.seed)
        if key in seen:
            raise ValueError(f"expected one run for each seed of {key[0]}, got {seen[key]} and {run.folder}")
        seen[key] = run.folder
    return runs, notes


def _runs_in(folder: Path) -> list[Path]:
    below = [folder] if (folder / "recipe.json").is_file() else find_runs(folder)
    if not below:
        raise FileNotFoundError(f"expected a run in {folder} or below, got none with a model")
    return below
