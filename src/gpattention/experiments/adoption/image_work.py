"""The comparison on one run of images: what is finished is read, the rest computed part by part."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

import gpattention
from gpattention.adopt.attach import attach
from gpattention.checks import check_count
from gpattention.data.places import StrPath
from gpattention.evaluation.items import ItemSet
from gpattention.evaluation.mc_dropout import MCDropout
from gpattention.evaluation.predicting import predict_items
from gpattention.evaluation.predictor import ModelPredictor, Predictor
from gpattention.experiments.adoption.cells import Cell, Cells
from gpattention.experiments.adoption.earlier import DATA, here
from gpattention.experiments.adoption.image_models import ImageModels
from gpattention.experiments.adoption.image_parts import PARTS, part_values
from gpattention.experiments.adoption.methods import (
    ATTACHED,
    ATTACHED_GLOBAL,
    MC_DROPOUT,
    MC_DROPOUT_TEMPERATURE,
    PLAIN,
    TEMPERATURE,
    Fitting,
    Source,
)
from gpattention.experiments.adoption.predictors import ConvertedPredictor
from gpattention.experiments.adoption.trainings import (
    CONTROL,
    CONVERSIONS,
    HOST,
    Further,
    Training,
    converted,
)
from gpattention.experiments.judging.run_sets import RunSets, run_sets
from gpattention.experiments.runs import Run
from gpattention.metrics.checks import check_choice
from gpattention.models import Transformer
from gpattention.runs import name_without_seed
from gpattention.training import choose_device

Progress = Callable[[str, int, int], object]  # what is done, how much of it, of how much
FOLDER = "adoption"  # in a run's folder
FIT_ROWS = {"cuda": 2000}  # items times samples that `fit` runs at once where the default would idle


@dataclass(frozen=True)
class ImageSettings:
    """What is compared, and with how much work.

    Args:
        parts: of clean, corrupted, ood.
        kinds: that the host is converted to and tuned on as; none leaves the control out too.
        further: how converted hosts and the control are tuned on.
        samples: draws of a prediction.
        seed: of the draws.
        root: folder of the datasets; the environment variable GPATTENTION_DATA if not given.
        device: auto, cpu, cuda, ...
        limit: at most so many images of each set.
        types: of corruptions; all if not given.
        severities: of corruptions, 1 to 5; all if not given.
        batch_size: images times draws that run at once; 256 on a CPU and 2000 on a GPU if not given.
        fit: options of `Handle.fit`.
        finished: whether to read what is finished and compute nothing.
        fresh: whether to compute everything anew, finished or not, also where it was of more images.
    """

    parts: tuple[str, ...] = PARTS
    kinds: tuple[str, ...] = CONVERSIONS[:2]
    further: Further = field(default_factory=lambda: Further(prior_scale=None))
    samples: int = 10
    seed: int = 0
    root: StrPath | None = None
    device: torch.device | str = "auto"
    limit: int | None = None
    types: tuple[str, ...] | None = None
    severities: tuple[int, ...] | None = None
    batch_size: int | None = None
    fit: dict[str, Any] = field(default_factory=dict)
    finished: bool = False
    fresh: bool = False

    def __post_init__(self) -> None:
        if self.finished and self.fresh:
            raise ValueError("expected finished (read) or fresh (compute everything anew), got both")
        object.__setattr__(self, "samples", check_count("samples", self.samples, least=1))
        for part in self.parts:
            check_choice("part", part, PARTS)
        for kind in self.kinds:
            check_choice("kind", kind, CONVERSIONS)
        for name in ("limit", "batch_size"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, check_count(name, getattr(self, name), least=1))

    @property
    def trainings(self) -> tuple[Training, ...]:
        """In the order of the table."""
        return (HOST, *((CONTROL, *map(converted, self.kinds)) if self.kinds else ()))


class RunWork:
    """Reads what is finished of one run and computes the rest.

    `weights` is the SHA-256 of those in `run`, whatever its file holds by now.
    """

    def __init__(
        self,
        run: Run,
        weights: str,
        settings: ImageSettings,
        tell: Progress,
        on_part: Callable[[str, float], object],
    ) -> None:
        self._run, self._settings, self._tell, self._on_part = run, settings, tell, on_part
        self._weights = weights
        self._device = choose_device(settings.device)
        self._name = run.folder.name
        self.notes: list[str] = []
        self._described_data: dict[str, dict[str, Any]] = {}  # by part
        self._unchecked: dict[Any, Any] = {}  # what finished cells say of data that are not here
        self._described = {
            "gpattention": gpattention.__version__,
            "model": weights, "samples": settings.samples, "seed": settings.seed, "limit": settings.limit,
            "fit": settings.fit,
        }  # fmt: skip

    def cells(self) -> list[Cell]:
        """One for each method, its parts together."""
        found: dict[str, list[Cell]] = {}
        read = {training: self._read(training) for training in self._settings.trainings}  # before any work
        for training, (done, missing) in read.items():
            for cell in (*done, *self._rest(training, missing)):
                found.setdefault(cell.method, []).append(cell)
                self.notes += cell.detail["notes"]
        return [_joined(parts) for parts in found.values()]

    def _read(self, training: Training) -> tuple[list[Cell], dict[str, list[str]]]:
        """What is finished, and by part the methods that are missing and that this run can have."""
        found, missing, seed = list[Cell](), dict[str, list[str]](), self._run.recipe.seed
        for part in self._settings.parts:
            cells = self._cells(training, part)
            read = {name: cells.read(seed, name, part, self._unchecked) for name in training.methods}
            if self._settings.finished:
                stale = [name for name, cell in read.items() if cell is None and cells.has(seed, name, part)]
                told = f"{self._name} {part}: of other weights or data, so left out: {', '.join(stale)}"
                self.notes += [told] if stale else []
            done = [cell for cell in read.values() if cell is not None]
            without = {name for cell in done for name in cell.detail.get("left_out", ())}
            missing[part] = [name for name, cell in read.items() if cell is None and name not in without]
            found += done
        return found, missing

    def _rest(self, training: Training, missing: dict[str, list[str]]) -> list[Cell]:
        """Computed, unless only what is finished is asked for."""
        wanted = [name for name in training.methods if any(name in names for names in missing.values())]
        if not wanted or self._settings.finished:
            return []
        found: list[Cell] = []
        sources, told = self._fitted(training, wanted)
        for part, names in missing.items():
            found += self._computed(part, _only(sources, names), training, told)
        return found

    def _cells(self, training: Training, part: str) -> Cells:
        """With all that figures of a part depend on."""
        given, told = self._settings, {**self._described, **self._models.settings(training)}
        if part == "corrupted":
            told |= {"types": given.types, "severities": given.severities}
        told[DATA] = here(
            lambda: {**self._data_of(part), **self._models.data(training)}, needed=not given.finished
        )
        if told[DATA] is None:
            note = "its data are not here and were not compared with those that finished results name"
            self.notes += [f"{self._name}: {note}"]
        return Cells(self._run.folder / FOLDER, told, fresh=given.fresh)

    def _data_of(self, part: str) -> dict[str, Any]:
        if part not in self._described_data:
            self._described_data[part] = self._sets.described(part)
        return self._described_data[part]

    def _computed(
        self, part: str, sources: Sequence[Source], training: Training, told: dict[str, Any]
    ) -> list[Cell]:
        if not sources:
            return []
        begin = time.perf_counter()
        label = f"{self._name} {part}" if training == HOST else f"{self._name} {training.name} {part}"
        values, notes = part_values(
            part, self._sets, sources, self._logits, self._device,
            lambda done, total: self._tell(label, done, total),
        )  # fmt: skip
        seconds = time.perf_counter() - begin
        self._on_part(label, seconds)
        cells = self._cells(training, part)
        group, seed, written = name_without_seed(self._run.recipe.name), self._run.recipe.seed, []
        for variant in (v for source in sources for v in source.variants):
            detail = {**told, **variant.detail, "notes": [*told["notes"], *notes]}
            cell = Cell(group, seed, variant.method, values[variant.method], detail, seconds)
            cells.write(cell, part)
            written.append(cell)
        return written

    def _fitted(self, training: Training, wanted: Sequence[str]) -> tuple[list[Source], dict[str, Any]]:
        """The methods that are wanted, each fitted once, and what their cells are to tell."""
        begin, validation = time.perf_counter(), self._sets.validation
        model, trained = self._models.trained(training)
        assert validation.labels is not None
        fitting = Fitting(
            lambda predictor, samples: self._logits(predictor, samples, validation),
            validation.labels.to(self._device),
            self._settings.samples,
        )
        if training == HOST:
            found = self._of_host(model, fitting, wanted)
        else:
            found = _of_tuned(model, training, fitting, wanted)
        found = [source for source in found if source.variants]
        served = {variant.method for source in found for variant in source.variants}
        self._on_part(
            f"{self._name} {'fit' if training == HOST else training.name}", time.perf_counter() - begin
        )
        told = {
            "left_out": [name for name in wanted if name not in served],
            "notes": [f"{self._name}: {note}" for note in fitting.notes],
        }
        return found, told | ({"training": trained} if trained else {})

    def _of_host(self, model: Transformer, fitting: Fitting, wanted: Sequence[str]) -> list[Source]:
        plain = ModelPredictor(model, draw="none")
        found = fitting.with_and_without(plain, (PLAIN, TEMPERATURE), wanted, samples=0)
        if MC_DROPOUT in wanted or MC_DROPOUT_TEMPERATURE in wanted:
            try:
                dropping: Predictor = MCDropout(model)
            except ValueError as error:
                fitting.notes.append(f"MC dropout is left out: {error}")
            else:
                found += fitting.with_and_without(dropping, (MC_DROPOUT, MC_DROPOUT_TEMPERATURE), wanted)
        if ATTACHED in wanted or ATTACHED_GLOBAL in wanted:
            found += self._attached(model, fitting, wanted)
        return found

    def _attached(self, model: Transformer, fitting: Fitting, wanted: Sequence[str]) -> list[Source]:
        validation = self._sets.validation
        options = {"rows": FIT_ROWS[self._device.type]} if self._device.type in FIT_ROWS else {}
        options |= {"items": len(validation)} | self._settings.fit  # as many as the temperature is fitted to
        some = validation.first(options["items"])
        assert some.labels is not None
        data = [(some.inputs(0, len(some), self._device), some.labels.to(self._device))]
        return fitting.attached(
            attach(model), data, wanted, seed=self._settings.seed,
            progress=lambda stage, done, total: self._tell(f"{self._name} fit, {stage}", done, total),
            **options,
        )  # fmt: skip

    def _logits(self, predictor: Predictor, samples: int, items: ItemSet) -> Tensor:
        return predict_items(
            predictor, items, samples=samples, seed=self._settings.seed, device=self._device,
            batch_size=self._settings.batch_size,
        ).logits  # fmt: skip

    @cached_property
    def _models(self) -> ImageModels:
        given = self._settings
        return ImageModels(
            self._run, self._weights, lambda: self._sets, given.root, given.further, given.samples,
            given.seed, self._device, FOLDER,
            lambda done, total: self._tell(f"{self._name} tuning on", done, total), given.fresh,
        )  # fmt: skip

    @cached_property
    def _sets(self) -> RunSets:
        """Brought once, also to tell whether finished figures are of them."""
        given = self._settings
        return run_sets(
            self._run, given.root, limit=given.limit, types=given.types, severities=given.severities
        )


def _of_tuned(
    model: Transformer, training: Training, fitting: Fitting, wanted: Sequence[str]
) -> list[Source]:
    """The model without draws and, where it is converted, with them before that."""
    plain, name = ModelPredictor(model, draw="none"), training.name
    if training.kind is None:
        return fitting.with_and_without(plain, (name, f"{name}+temperature"), wanted, samples=0)
    mean = training.with_mean
    return [
        *fitting.with_and_without(ConvertedPredictor(model), (name, f"{name}+temperature"), wanted),
        *fitting.with_and_without(plain, (mean, f"{mean}+temperature"), wanted, samples=0),
    ]


def _only(sources: Sequence[Source], names: Sequence[str]) -> list[Source]:
    """The variants of these names, and the sources that have any."""
    found = [
        replace(source, variants=tuple(v for v in source.variants if v.method in names)) for source in sources
    ]
    return [source for source in found if source.variants]


def _joined(cells: Sequence[Cell]) -> Cell:
    """The parts of one method as one cell."""
    first = cells[0]
    values = {name: numbers for cell in cells for name, numbers in cell.values.items()}
    return Cell(first.group, first.seed, first.method, values, first.detail, sum(c.seconds for c in cells))
