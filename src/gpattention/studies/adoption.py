"""Adoption studies: a trained model as it is, attached and converted, all compared on the same items.

This file has what the studies share: the methods, the trainings that they need, finished results as
files, and the order of the work.  `adoption_cola` and `adoption_images` define the hosts (the trained
models), how they are fine-tuned and what is measured; `adoption_tables` writes the pages.

Methods of one training share its weights.  Temperatures and scales are fitted on validation items only.
The figures of one method with one seed are a cell.
"""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn

from gpattention import hosts
from gpattention.checks import check_choice, check_count, check_name
from gpattention.data import NoRootError
from gpattention.evaluation import (
    ItemSet,
    MCDropout,
    ModelPredictor,
    Predicted,
    Predictor,
    fit_temperature,
    predict_items,
)
from gpattention.files import StrPath, digest, read_object
from gpattention.gp import NumericalError, check_health
from gpattention.metrics import metrics_of
from gpattention.models.predict import Classifier
from gpattention.numerics import choose_device
from gpattention.studies import write_file
from gpattention.training import train_steps

# Methods, and the trainings whose weights they share

PLAIN, TEMPERATURE, MC_DROPOUT = "plain", "temperature", "mc_dropout"
ATTACHED, ATTACHED_GLOBAL = "attached", "attached-global"
TEMPERED = "+temperature"  # ending of methods whose logits are divided by a fitted temperature
CONVERSIONS = ("direct", "cgp")
Start: TypeAlias = Literal["host", "pretrained"]
STARTS: tuple[Start, ...] = ("host", "pretrained")


@dataclass(frozen=True, eq=False)
class Training:
    """A way to train the weights that several methods share.

    Attributes:
        name: name of its method without a temperature, and of its files.
        titles: titles in tables, by method.
        kind: kind of attention that the model is converted to; None leaves it unchanged.
        further: whether training starts from the seed's fine-tuned host.
    """

    name: str
    titles: Mapping[str, str]
    kind: str | None = None
    further: bool = False


def _titles(name: str, title: str) -> dict[str, str]:
    """Titles of a method without and with a temperature."""
    return {name: title, f"{name}{TEMPERED}": f"{title}, temperature"}


def converted(kind: str, start: Start = "host") -> Training:
    """The training of a model converted to a kind of attention.

    Args:
        kind: one of `CONVERSIONS`.
        start: the weights to start from: the seed's fine-tuned host, or the pretrained model.

    Returns:
        A training of three methods: draws, draws with temperature, the mean with temperature.
    """
    name, how = (f"converted-{kind}", "tuned on") if start == "host" else (f"pretrained-{kind}", "fine-tuned")
    title = f"converted to {kind}, {how}"
    mean = {f"{name}-mean{TEMPERED}": f"{title}, no draws, temperature"}
    return Training(name, _titles(name, title) | mean, kind, further=start == "host")


HOST = Training("host", {
    PLAIN: "plain",
    TEMPERATURE: "temperature",
    **_titles(MC_DROPOUT, "MC dropout"),
    ATTACHED: "attached, as `fit` chose",
    ATTACHED_GLOBAL: "attached, made to draw (`global`), temperature",
})  # fmt: skip
CONTROL = Training("tuned-on", _titles("tuned-on", "tuned on"), further=True)
TRAININGS = (HOST, CONTROL, *(converted(kind, start) for start in STARTS for kind in CONVERSIONS))
TITLES = {method: title for training in TRAININGS for method, title in training.titles.items()}


# Settings

WEIGHT_DECAY = 0.01  # for matrices; vectors have none
WARMUP = 0.1  # fraction of the steps during which the learning rate rises
CLIP = 1.0  # largest norm of the gradient
COUNTS = ("epochs", "batch_size", "samples", "limit")  # settings that are whole numbers >= 1
POSITIVE = ("learning_rate", "prior_scale")


@dataclass(frozen=True, kw_only=True)
class StudySettings:
    """Settings of every adoption study.

    Args:
        kinds: kinds of attention to convert the host to, direct and cgp, or none; without any, the control
            is not trained either.
        convert_from: convert the fine-tuned host and tune it on beside its control, or convert the pretrained
            model and fine-tune it.
        further_epochs: epochs in which the control and the converted hosts are tuned on.
        further_learning_rate: highest learning rate, after the warm-up; lower than that of fine-tuning.
        further_regularizer: weight of a converted model's regulariser.
        further_prior_scale: initial prior scale of a converted model; the standard deviation of its draws is
            proportional to it, and a short training hardly changes it. Images without one take the scale, of
            a few, whose draws are best on validation before any tuning.
        samples: draws per prediction.
        root (FOLDER): folder of the datasets (default: the environment variable GPATTENTION_DATA).
        device: auto, cpu, cuda, ...
        fit: options of `Handle.fit`.
        finished: read finished results and compute nothing.
        fresh: train and compute everything anew, even what is finished.
    """

    kinds: tuple[str, ...] = CONVERSIONS
    convert_from: Start = "host"
    further_epochs: int = 1
    further_learning_rate: float = 5e-5
    further_regularizer: float = 0.01
    further_prior_scale: float | None = None
    samples: int = 10
    root: StrPath | None = None
    device: torch.device | str = "auto"
    fit: dict[str, Any] = field(default_factory=dict)
    finished: bool = False
    fresh: bool = False

    def __post_init__(self) -> None:
        if self.finished and self.fresh:
            raise ValueError("expected finished (read) or fresh (compute everything anew), got both")
        if self.kinds == ("none",):
            object.__setattr__(self, "kinds", ())
        for name, value in vars(self).items():
            field_name = name.removeprefix("further_")
            if value is None:
                continue
            if field_name in COUNTS:
                object.__setattr__(self, name, check_count(name, value))
            elif field_name in POSITIVE and not value > 0:
                raise ValueError(f"expected {name} > 0, got {value}")
            elif field_name == "regularizer" and not value >= 0:
                raise ValueError(f"expected {name} >= 0, got {value}")
        for kind in self.kinds:
            check_choice("kinds", kind, CONVERSIONS)
        check_choice("convert_from", self.convert_from, STARTS)

    @property
    def trainings(self) -> tuple[Training, ...]:
        """The host, its control, and one training for every kind, in the order of the table."""
        control = [CONTROL] if self.kinds and self.convert_from == "host" else []
        return (HOST, *control, *(converted(kind, self.convert_from) for kind in self.kinds))

    def further(self, training: Training) -> dict[str, Any]:
        """The `further_` settings that a training's weights depend on: none for the host."""
        names = ["further_epochs", "further_learning_rate"]
        names += ["further_regularizer", "further_prior_scale"] if training.kind else []
        return {name: getattr(self, name) for name in names if training.further}


# Finished results


@dataclass(frozen=True)
class Cell:
    """The figures of one method with one seed.

    Attributes:
        group: name of the model; methods of one group are compared with each other.
        seed: seed of the model.
        method: one of `TITLES`.
        values: figures by set and metric.
        detail: temperatures, choices, how it was trained.
    """

    group: str
    seed: int
    method: str
    values: Mapping[str, Mapping[str, float]]
    detail: Mapping[str, Any] = field(default_factory=dict)


class Store:
    """A JSON file of results whose name has a digest of its settings: other settings replace nothing.

    Args:
        folder: folder of the file.
        name: beginning of the file's name.
        settings: everything that the results depend on except the data.
        data: digests of the data, by name; None if they are not on this machine.
    """

    def __init__(
        self, folder: Path, name: str, settings: Mapping[str, Any], data: Mapping[str, Any] | None
    ) -> None:
        self.settings, self.data = json.loads(json.dumps([settings, data]))
        ending = digest(json.dumps(self.settings, sort_keys=True))[:12]
        self.path = folder / f"{check_name('the name of a file', name)}-{ending}.json"

    def read(self) -> dict[str, Any] | None:
        """The content of the file; None if it is missing, or was made from other data."""
        if not self.path.is_file():
            return None
        plain = read_object(self.path, nonfinite=True)
        if {"settings", "data"} - plain.keys():
            raise ValueError(f"{self.path} is not a finished result: delete it to compute it anew")
        return plain if self.data in (None, plain["data"]) else None

    def write(self, content: Mapping[str, Any]) -> None:
        """Write the file, replacing an earlier one."""
        whole = {**content, "settings": self.settings, "data": self.data}
        write_file(self.path, (json.dumps(whole, indent=1) + "\n").encode())


# The study of one host

Progress = Callable[[str, int, int], object]  # called with the work, how much is done, and how much there is
Values = dict[str, dict[str, dict[str, float]]]  # figures by method, set and metric


@dataclass(frozen=True)
class Row:
    """A fitted method: a predictor, its number of draws, and the temperature of its logits."""

    method: str
    predictor: Predictor
    samples: int
    temperature: float | None = None  # NaN until it is fitted
    detail: Mapping[str, Any] = field(default_factory=dict)


class Study(ABC):
    """The study of one host: finished cells are read, missing ones computed part by part.

    Args:
        settings: settings of the study.
        progress: called with the work, how much of it is done, and how much there is.
    """

    folder: Path  # folder of finished cells
    group: str  # name of the model in tables
    label: str  # name of the host in messages
    seed: int  # seed of the host
    draw_seed: int  # seed of the draws
    parts: tuple[str, ...] = ("",)  # parts of the measurements, each with files of its own

    def __init__(self, settings: StudySettings, progress: Progress | None) -> None:
        self.settings, self.device = settings, choose_device(settings.device)
        self.report = progress or (lambda *_: None)
        self.notes: list[str] = []
        self._kept: dict[int, tuple[Predictor, Tensor]] = {}  # logits of validation items, by predictor

    @property
    @abstractmethod
    def validation(self) -> ItemSet:
        """The validation items, which everything is fitted on."""

    @abstractmethod
    def described(self, training: Training, part: str) -> dict[str, Any]:
        """Everything that the cells of a part depend on except the data."""

    @abstractmethod
    def data(self, training: Training, part: str) -> dict[str, Any]:
        """Digests of the data that the cells of a part depend on; fails if they are not on this machine."""

    @cached_property
    @abstractmethod
    def host(self) -> tuple[nn.Module, dict[str, Any]]:
        """The host in evaluation mode, and the record of its training."""

    @abstractmethod
    def start(self, training: Training) -> tuple[nn.Module, dict[str, Any]]:
        """The model before its training, and what to record of it."""

    @abstractmethod
    def tune(self, model: nn.Module, training: Training) -> list[dict[str, float]]:
        """Train the model in place; returns a row for every epoch."""

    @abstractmethod
    def fit_data(self) -> tuple[list[Any], dict[str, Any]]:
        """Batches and options for `Handle.fit`."""

    @abstractmethod
    def measured(self, part: str, rows: Sequence[Row]) -> tuple[Values, Sequence[str]]:
        """The figures of a part for every row, and notes about its sets."""

    def classifier(self, model: nn.Module) -> Classifier:
        """The model with the interface of this library's transformers."""
        return cast(Classifier, model)

    def cells(self) -> list[Cell]:
        """The cells of all methods that the host can have."""
        values, details = Values(), dict[str, dict[str, Any]]()
        for training in self.settings.trainings:
            stores = {part: self._store(training, part) for part in self.parts}
            found = {} if self.settings.fresh else {part: store.read() for part, store in stores.items()}
            missing = [part for part in self.parts if found.get(part) is None]
            if missing and not self.settings.finished:
                model, record = self.trained(training)
                rows, lacking = self.rows(training, model)
                shared = {"training": record} if record else {}
                own = {row.method: {**shared, **row.detail} for row in rows}
                for part in missing:  # each is written as soon as it is measured
                    figures, notes = self.measured(part, rows)
                    result = {"values": figures, "details": own, "notes": [*lacking, *notes]}
                    stores[part].write(result)
                    found[part] = result
            for content in filter(None, found.values()):
                self.notes += content["notes"]
                details |= content["details"]
                for method, figures in content["values"].items():
                    values.setdefault(method, {}).update(figures)
        return [Cell(self.group, self.seed, method, of, details[method]) for method, of in values.items()]

    def _store(self, training: Training, part: str) -> Store:
        try:
            data = self.data(training, part)
        except (FileNotFoundError, ImportError, NoRootError):
            if not self.settings.finished:
                raise
            data = None
            note = "its data are not on this machine: they were not compared with those of finished results"
            self.notes.append(f"{self.label}: {note}")
        name = "-".join(filter(None, (part, training.name)))
        return Store(self.folder, name, self.described(training, part), data)

    def trained(self, training: Training) -> tuple[nn.Module, dict[str, Any]]:
        """The model of a training in evaluation mode, and its record."""
        if training is HOST:
            return deepcopy(self.host[0]), self.host[1]  # a copy: later trainings need it without attachments
        model, record = self.start(training)
        record["epochs"] = self.tune(model, training)
        return model.eval(), record

    def fine_tune(
        self,
        module: nn.Module,
        epochs: int,
        learning_rate: float,
        batches: Iterable[Any],
        loss: Callable[[Any], Tensor],
        training: Training,
        *,
        steps: int,
        epochs_before: int = 0,
    ) -> list[dict[str, float]]:
        """Train in place with AdamW; the weights are those after the last step.

        Args:
            module: the model, or a module that holds it.
            epochs: number of epochs.
            learning_rate: highest learning rate: reached after the warm-up, then falls to 0 linearly.
            batches: batches of at least all epochs.
            loss: the loss of a batch.  []
            training: the training, for messages.
            steps: steps per epoch.
            epochs_before: epochs that the weights were trained for before.

        Returns:
            One row for each epoch.

        Raises:
            NumericalError: the loss is not finite.
        """
        trainable = [p for p in module.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trainable if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in trainable if p.ndim <= 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=learning_rate, fused=True)
        total, cuda = epochs * steps, self.device.type == "cuda"
        rising = WARMUP * total

        def rate(step: int) -> float:
            share = (step + 1) / rising if step + 1 < rising else (total - step) / (total + 1 - rising)
            return learning_rate * share

        rows, losses = list[dict[str, float]](), list[Tensor]()
        with torch.random.fork_rng(devices=[self.device] if cuda else []):
            torch.manual_seed(self.seed)  # for dropout, and for draws that do not depend on an item's number
            some = islice(batches, total)
            taken = train_steps(module, loss, some, optimizer, rate, clip=CLIP, defer_checks=cuda)
            for done, value in enumerate(taken, 1):
                losses.append(value)
                self.report(f"{self.label} {training.name} fine-tuning", done, total)
                if done % steps == 0:
                    if cuda:
                        check_health()
                    epoch, mean = epochs_before + done // steps, float(torch.stack(losses).mean())
                    if not math.isfinite(mean):
                        raise NumericalError(
                            f"the loss of epoch {epoch} is {mean}: try a lower learning rate"
                        )
                    rows.append({"epoch": epoch, "loss": mean})
                    losses = []
        return rows

    def predictions(self, rows: Sequence[Row], items: ItemSet) -> Iterator[tuple[str, Predicted]]:
        """Predictions of all methods; those with the same predictor share its logits."""
        labels = None if items.labels is None else items.labels.to(self.device)
        shared: dict[int, Tensor] = {}
        for row in rows:
            key = id(row.predictor)
            if key not in shared:
                shared[key] = self.logits(row.predictor, row.samples, items)
            yield row.method, Predicted.from_logits(shared[key], labels, temperature=row.temperature)

    def logits(self, predictor: Predictor, samples: int, items: ItemSet) -> Tensor:
        """Logits of every draw; those of validation items are kept for fits and figures.  [S, n, C]"""
        # the predictor is kept with its logits: otherwise a later object could have the same id
        kept = self._kept if items is self.validation else {}
        if id(predictor) not in kept:
            found = predict_items(predictor, items, samples=samples, seed=self.draw_seed, device=self.device)
            kept[id(predictor)] = predictor, found.logits
        return kept[id(predictor)][1]

    def rows(self, training: Training, model: nn.Module) -> tuple[list[Row], list[str]]:
        """The fitted methods of a training, and notes on those that are not possible."""
        assert self.validation.labels is not None
        classifier, samples, name = self.classifier(model), self.settings.samples, training.name
        plain, lacking, self._kept = ModelPredictor(classifier, draw="none"), list[str](), {}
        rows = [Row(PLAIN if training is HOST else name, plain, 0)]
        if training.kind is not None:
            rows = [Row(name, converted_predictor(model), samples), Row(f"{name}-mean", plain, 0)]
        elif training is HOST:
            try:
                rows.append(Row(MC_DROPOUT, MCDropout(classifier), samples))
            except ValueError as error:
                lacking.append(f"{self.label}: MC dropout is left out: {error}")
        for row in rows[:]:
            method = TEMPERATURE if row.method == PLAIN else f"{row.method}{TEMPERED}"
            rows.append(replace(row, method=method, temperature=math.nan))
        rows += self._attached(model) if training is HOST else []
        fitted = []
        for row in (row for row in rows if row.method in training.titles):
            try:
                if row.temperature is not None:
                    logits = self.logits(row.predictor, row.samples, self.validation)
                    temperature = fit_temperature(logits, self.validation.labels.to(self.device))
                    detail = {**row.detail, "temperature": temperature}
                    row = replace(row, temperature=temperature, detail=detail)
                fitted.append(row)
            except NumericalError as error:  # such as all validation items being classified correctly
                lacking.append(f"{self.label}: {row.method} is left out: {error}")
        return fitted, lacking

    def _attached(self, model: nn.Module) -> list[Row]:
        """Two attached models: as `fit` chose, and with the `global` settings whether it chose them or not.

        `fit` holds back two fifths of the items to choose by.  The temperature of the `global` draws is
        fitted on all items, like that of the method `temperature`, so that the two differ in the draws only.
        """

        def report(stage: str, done: int, total: int) -> None:
            self.report(f"{self.label} fit, {stage}", done, total)

        chosen, forced = hosts.attach(model), hosts.attach(model)
        data, options = self.fit_data()
        fit = chosen.fit(data, seed=self.draw_seed, progress=report, **options)
        own = replace(next(c.settings for c in fit.candidates if c.name == "global"), temperature=1.0)
        chosen.settings, forced.settings = fit.settings, own
        draws = fit.settings.any_drawn
        detail = {"chosen": fit.chosen, "temperature": fit.settings.temperature, "draws": draws}
        numbers = {name: float(getattr(own, name)[0, 0]) for name in ("scale", "noise", "power")}
        samples = self.settings.samples
        return [
            Row(ATTACHED, cast(Predictor, chosen), samples if draws else 1, detail=detail),
            Row(ATTACHED_GLOBAL, cast(Predictor, forced), samples, math.nan, numbers),
        ]


def converted_predictor(model: nn.Module) -> Predictor:
    """A predictor that draws from a converted model."""
    return cast(Predictor, SimpleNamespace(predict=partial(hosts.predict, model)))


def label_scores(predicted: Predicted, metrics: Sequence[str]) -> dict[str, float]:
    """Metrics of labelled items, by name."""
    functions, probs = metrics_of("labels"), predicted.prediction.probs
    return {name: functions[name](probs, predicted.known_labels) for name in metrics}


@dataclass(frozen=True)
class AdoptionResult:
    """The comparison of all hosts.

    Attributes:
        cells: a cell for each host and method, in the order of the table.
        notes: what is missing, reduced or regenerated.
    """

    cells: tuple[Cell, ...]
    notes: tuple[str, ...]


def run_studies(studies: Iterable[Study], notes: Iterable[str] = ()) -> AdoptionResult:
    """Run studies one after the other.

    Args:
        studies: studies of all hosts; a generator frees the data of one before the next.
        notes: notes to begin with.

    Returns:
        Cells sorted by group, method and seed, and each note once.

    Raises:
        ValueError: nothing is finished, and `finished` allows no computing.
    """
    cells, unique_notes = list[Cell](), dict.fromkeys(notes)
    for study in studies:
        cells += study.cells()
        unique_notes |= dict.fromkeys(study.notes)
    if not cells:
        raise ValueError("expected finished cells in these runs, got none: leave out --finished")
    order = list(TITLES)
    cells.sort(key=lambda cell: (cell.group, order.index(cell.method), cell.seed))
    return AdoptionResult(tuple(cells), tuple(unique_notes))
