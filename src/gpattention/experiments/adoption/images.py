"""Does adoption help trained vision transformers?  Clean, corrupted and foreign images, over several seeds.

Runs that differ by their seed alone are one model.  Temperatures and attached scales are fitted on the
validation images of a run; nothing is fitted on any other.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gpattention
from gpattention.adopt.attach import attach
from gpattention.data.places import StrPath
from gpattention.evaluation.items import ItemSet
from gpattention.evaluation.mc_dropout import MCDropout
from gpattention.evaluation.predicting import predict_items
from gpattention.evaluation.prediction_cache import file_digest
from gpattention.evaluation.predictor import ModelPredictor, Predictor
from gpattention.experiments.adoption.cells import Cell, Cells
from gpattention.experiments.adoption.image_parts import PARTS, part_values
from gpattention.experiments.adoption.methods import (
    HOST_METHODS,
    MC_DROPOUT,
    MC_DROPOUT_TEMPERATURE,
    PLAIN,
    TEMPERATURE,
    Fitting,
    Source,
)
from gpattention.experiments.judging.run_sets import RunSets, run_sets
from gpattention.experiments.judging.summary import name_without_seed
from gpattention.experiments.runs import Run, find_runs, open_run
from gpattention.metrics.checks import check_choice
from gpattention.models.rows import check_count
from gpattention.training import choose_device

Progress = Callable[[str, int, int], object]  # what is done, how much of it, of how much
FOLDER = "adoption"  # in a run's folder
FIT_ROWS = {"cuda": 2000}  # items times samples that `fit` runs at once where the default would idle


@dataclass(frozen=True)
class ImageSettings:
    """What is compared, and with how much work.

    Args:
        parts: of clean, corrupted, ood.
        samples: draws of a prediction.
        seed: of the draws.
        root: folder of the datasets; the environment variable GPATTENTION_DATA if not given.
        device: auto, cpu, cuda, ...
        limit: at most so many images of each set.
        types: of corruptions; all if not given.
        severities: of corruptions, 1 to 5; all if not given.
        batch_size: images times draws that run at once; 256 on a CPU and 2000 on a GPU if not given.
        fit: options of `Handle.fit`.
    """

    parts: tuple[str, ...] = PARTS
    samples: int = 10
    seed: int = 0
    root: StrPath | None = None
    device: torch.device | str = "auto"
    limit: int | None = None
    types: tuple[str, ...] | None = None
    severities: tuple[int, ...] | None = None
    batch_size: int | None = None
    fit: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_count("samples", self.samples, least=1)
        for part in self.parts:
            check_choice("part", part, PARTS)
        for name in ("limit", "batch_size"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), least=1)


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

    What is finished with the same settings is read from RUN/adoption.
    """
    runs, notes = _attachable(folders)
    told: dict[str, None] = dict.fromkeys(notes)
    cells: list[Cell] = []
    for run in runs:
        work = _RunWork(run, settings, progress or (lambda *_: None), on_part or (lambda *_: None))
        cells += work.cells()
        told |= dict.fromkeys(work.notes)
    order = {method: place for place, method in enumerate(HOST_METHODS)}
    cells.sort(key=lambda cell: (cell.group, order[cell.method], cell.seed))
    return ImageResult(tuple(cells), tuple(told))


def _attachable(folders: Sequence[StrPath]) -> tuple[list[Run], list[str]]:
    """All runs are opened first, so that a bad folder costs no work."""
    runs, notes = [], []
    for folder in dict.fromkeys(place for given in folders for place in _runs_in(Path(given))):
        run = open_run(folder)
        try:
            if run.recipe.model.type != "vision":
                raise ValueError("it reads no images")
            attach(run.model)
        except ValueError as error:
            notes.append(f"{folder} is left out: {str(error).splitlines()[0]}")
        else:
            runs.append(run)
    if not runs:
        raise ValueError(
            "expected at least one run of softmax or kernel attention on images, got none: "
            + "; ".join(notes)
        )
    seen: dict[tuple[str, int], Path] = {}
    for run in runs:
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


class _RunWork:
    """Reads what is finished of one run and computes the rest."""

    def __init__(
        self, run: Run, settings: ImageSettings, tell: Progress, on_part: Callable[[str, float], object]
    ) -> None:
        self._run, self._settings, self._tell, self._on_part = run, settings, tell, on_part
        self._device = choose_device(settings.device)
        self._group = name_without_seed(run.recipe.name)
        self._model: Any = run.model.to(self._device)
        self._sources: list[Source] | None = None
        self._left_out: list[str] = []  # methods that this run cannot have
        self.notes: list[str] = []
        described = {
            "gpattention": gpattention.__version__,
            "model": file_digest(run.folder / "model" / "model.safetensors"),
            "samples": settings.samples, "seed": settings.seed, "limit": settings.limit,
            "types": settings.types, "severities": settings.severities, "fit": settings.fit,
        }  # fmt: skip
        self._cells = Cells(run.folder / FOLDER, described)
        self._sets: RunSets = run_sets(
            run, settings.root, limit=settings.limit, types=settings.types, severities=settings.severities
        )

    def cells(self) -> list[Cell]:
        """One for each method, its parts together."""
        seed = self._run.recipe.seed
        found: dict[str, list[Cell]] = {}
        for part in self._settings.parts:
            read = [self._cells.read(seed, method, part) for method in HOST_METHODS]
            done = [cell for cell in read if cell is not None]
            if not done:  # a part is written as a whole
                done = self._computed(part)
            for cell in done:
                found.setdefault(cell.method, []).append(cell)
                self.notes += cell.detail["notes"]
        return [_joined(parts) for parts in found.values()]

    def _computed(self, part: str) -> list[Cell]:
        sources = self._fitted()
        begin = time.perf_counter()
        label = f"{self._run.folder.name} {part}"
        values, notes = part_values(
            part, self._sets, sources, self._logits, self._device,
            lambda done, total: self._tell(label, done, total),
        )  # fmt: skip
        seconds = time.perf_counter() - begin
        self._on_part(label, seconds)
        written = []
        for variant in (v for source in sources for v in source.variants):
            detail = {**variant.detail, "notes": [*self._left_out, *notes]}
            cell = Cell(
                self._group, self._run.recipe.seed, variant.method, values[variant.method], detail, seconds
            )
            self._cells.write(cell, part)
            written.append(cell)
        return written

    def _fitted(self) -> list[Source]:
        """All methods of this run, fitted once."""
        if self._sources is not None:
            return self._sources
        begin, validation = time.perf_counter(), self._sets.validation
        assert validation.labels is not None
        fitting = Fitting(
            lambda predictor, samples: self._logits(predictor, samples, validation),
            validation.labels.to(self._device),
            self._settings.samples,
        )
        plain = ModelPredictor(self._model, draw="none")
        found = fitting.with_and_without(plain, (PLAIN, TEMPERATURE), HOST_METHODS, samples=0)
        try:
            dropping: Predictor = MCDropout(self._model)
        except ValueError as error:
            fitting.notes.append(f"MC dropout is left out: {error}")
        else:
            pair = (MC_DROPOUT, MC_DROPOUT_TEMPERATURE)
            found += fitting.with_and_without(dropping, pair, HOST_METHODS)
        found += self._attached(fitting)
        self._left_out = [f"{self._run.folder.name}: {note}" for note in fitting.notes]
        self._on_part(f"{self._run.folder.name} fit", time.perf_counter() - begin)
        self._sources = [source for source in found if source.variants]
        return self._sources

    def _attached(self, fitting: Fitting) -> list[Source]:
        name, validation = self._run.folder.name, self._sets.validation
        options = {"rows": FIT_ROWS[self._device.type]} if self._device.type in FIT_ROWS else {}
        options |= {"items": len(validation)} | self._settings.fit  # as many as the temperature is fitted to
        some = validation.first(options["items"])
        assert some.labels is not None
        data = [(some.inputs(0, len(some), self._device), some.labels.to(self._device))]
        return fitting.attached(
            attach(self._model), data, HOST_METHODS, seed=self._settings.seed,
            progress=lambda stage, done, total: self._tell(f"{name} fit, {stage}", done, total), **options,
        )  # fmt: skip

    def _logits(self, predictor: Predictor, samples: int, items: ItemSet) -> Tensor:
        return predict_items(
            predictor, items, samples=samples, seed=self._settings.seed, device=self._device,
            batch_size=self._settings.batch_size,
        ).logits  # fmt: skip


def _joined(cells: Sequence[Cell]) -> Cell:
    """The parts of one method as one cell."""
    first = cells[0]
    values = {name: numbers for cell in cells for name, numbers in cell.values.items()}
    return Cell(first.group, first.seed, first.method, values, first.detail, sum(c.seconds for c in cells))
