"""Adoption studies: one trained model as it is, attached and converted, compared on the same items.

`adoption_cola` and `adoption_images` say what their hosts are, how one is tuned and what is measured of it.
Everything else is here, once: methods and the trainings that they need, finished results as files, the
training and the measuring; `adoption_tables` has the pages.

All methods of a training share its weights.  Temperatures and scales are fitted on validation items alone.
A method's figures of one seed are a cell.
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
TEMPERED = "+temperature"  # ends the name of what has one
CONVERSIONS = ("direct", "cgp")
Start: TypeAlias = Literal["host", "pretrained"]
STARTS: tuple[Start, ...] = ("host", "pretrained")


@dataclass(frozen=True, eq=False)
class Training:
    """One set of weights for every seed.

    Attributes:
        name: of the method without a temperature, and of its files.
        titles: what tables call the methods that it serves, by method.
        kind: what attention is converted to; None leaves it as it is.
        further: whether it goes on where the seed's fine-tuned host ended.
    """

    name: str
    titles: Mapping[str, str]
    kind: str | None = None
    further: bool = False


def _heated(name: str, title: str) -> dict[str, str]:
    return {name: title, f"{name}{TEMPERED}": f"{title}, temperature"}


def converted(kind: str, start: Start = "host") -> Training:
    """The training of a model converted to a kind of attention.

    Args:
        kind: of `CONVERSIONS`.
        start: the seed's fine-tuned host, or the pretrained weights.

    Returns:
        A training of three methods: draws, draws with temperature, the mean with temperature.
    """
    name, how = (f"converted-{kind}", "tuned on") if start == "host" else (f"pretrained-{kind}", "fine-tuned")
    title = f"converted to {kind}, {how}"
    mean = {f"{name}-mean{TEMPERED}": f"{title}, no draws, temperature"}
    return Training(name, _heated(name, title) | mean, kind, further=start == "host")


HOST = Training("host", {
    PLAIN: "plain",
    TEMPERATURE: "temperature",
    **_heated(MC_DROPOUT, "MC dropout"),
    ATTACHED: "attached, as `fit` chose",
    ATTACHED_GLOBAL: "attached, made to draw (`global`), temperature",
})  # fmt: skip
CONTROL = Training("tuned-on", _heated("tuned-on", "tuned on"), further=True)
TRAININGS = (HOST, CONTROL, *(converted(kind, start) for start in STARTS for kind in CONVERSIONS))
TITLES = {method: title for training in TRAININGS for method, title in training.titles.items()}


# Settings

WEIGHT_DECAY = 0.01  # of matrices; vectors have none
WARMUP = 0.1  # fraction of the steps in which the learning rate rises
CLIP = 1.0  # largest norm of a gradient
COUNTS = ("epochs", "batch_size", "samples", "limit")  # settings that are whole numbers >= 1
POSITIVE = ("learning_rate", "prior_scale")


@dataclass(frozen=True, kw_only=True)
class StudySettings:
    """What every adoption study lets one choose.

    Args:
        kinds: that the host is converted to; without any there is no control either.
        convert_from: the fine-tuned host, tuned on beside its control; or the pretrained one, fine-tuned.
        further_epochs: in which the control and converted hosts are tuned on.
        further_learning_rate: the highest, after the warm-up; lower than that of fine-tuning.
        further_regularizer: weight of the regulariser of a converted model.
        further_prior_scale: at which a converted model starts; the standard deviation of its draws is in
            proportion, and a short training hardly moves it. Without one, for images: that of a few whose
            draws are best on validation before any tuning.
        samples: draws of a prediction.
        root: folder of the datasets; the environment variable GPATTENTION_DATA if not given.
        device: auto, cpu, cuda, ...
        fit: options of `Handle.fit`.
        finished: whether to read what is finished and compute nothing.
        fresh: whether to train and compute everything anew, finished or not.
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
        for name, value in vars(self).items():
            what = name.removeprefix("further_")
            if what in COUNTS and value is not None:
                object.__setattr__(self, name, check_count(name, value))
            elif what in POSITIVE and value is not None and not value > 0:
                raise ValueError(f"expected {name} > 0, got {value}")
            elif what == "regularizer" and not value >= 0:
                raise ValueError(f"expected {name} >= 0, got {value}")
        for kind in self.kinds:
            check_choice("kinds", kind, CONVERSIONS)
        check_choice("convert_from", self.convert_from, STARTS)

    @property
    def trainings(self) -> tuple[Training, ...]:
        """The host, its control, and one for every kind: in the order of the table."""
        control = [CONTROL] if self.kinds and self.convert_from == "host" else []
        return (HOST, *control, *(converted(kind, self.convert_from) for kind in self.kinds))

    def further(self, training: Training) -> dict[str, Any]:
        """What the weights of a training depend on: nothing for the host; the control knows no process."""
        names = ["further_epochs", "further_learning_rate"]
        names += ["further_regularizer", "further_prior_scale"] if training.kind else []
        return {name: getattr(self, name) for name in names if training.further}


# Finished results


@dataclass(frozen=True)
class Cell:
    """What one method came to with one seed.

    Attributes:
        group: the model; methods of one group are compared with each other.
        seed: of the model.
        method: one of `TITLES`.
        values: by set, by metric.
        detail: temperatures, choices, how it was trained.
    """

    group: str
    seed: int
    method: str
    values: Mapping[str, Mapping[str, float]]
    detail: Mapping[str, Any] = field(default_factory=dict)


class Store:
    """A JSON file that is named by what it depends on: other settings are another file, and replace nothing.

    Args:
        folder: where it is.
        name: how its name begins.
        settings: all that it depends on but the data.
        data: what these hold, by name; None where they are not on this machine.
    """

    def __init__(
        self, folder: Path, name: str, settings: Mapping[str, Any], data: Mapping[str, Any] | None
    ) -> None:
        self.settings, self.data = json.loads(json.dumps([settings, data]))
        told = digest(json.dumps(self.settings, sort_keys=True))[:12]
        self.path = folder / f"{check_name('the name of a file', name)}-{told}.json"

    def read(self) -> dict[str, Any] | None:
        """What it holds; None where it is not there, or of other data as far as these can be compared."""
        if not self.path.is_file():
            return None
        plain = read_object(self.path, nonfinite=True)
        if {"settings", "data"} - plain.keys():
            raise ValueError(f"{self.path} is not a finished result: delete it to compute it anew")
        return plain if self.data in (None, plain["data"]) else None

    def write(self, content: Mapping[str, Any]) -> None:
        """Replace what is there."""
        whole = {**content, "settings": self.settings, "data": self.data}
        write_file(self.path, (json.dumps(whole, indent=1) + "\n").encode())


# The study of one host

Progress = Callable[[str, int, int], object]  # what is done, how much of it, of how much
Values = dict[str, dict[str, dict[str, float]]]  # by method, set and metric


@dataclass(frozen=True)
class Row:
    """A method, fitted: a predictor, how often it draws, and what its logits are divided by."""

    method: str
    predictor: Predictor
    samples: int
    temperature: float | None = None  # nan until it is fitted
    detail: Mapping[str, Any] = field(default_factory=dict)


class Study(ABC):
    """One host: what is finished of its methods is read, the rest computed part by part.

    Args:
        settings: what is compared.
        progress: called with what is done, how much of it, and of how much.
    """

    folder: Path  # of finished cells
    group: str  # the model's name in tables
    label: str  # the host's name in messages
    seed: int  # of the host
    draw_seed: int  # of the draws
    parts: tuple[str, ...] = ("",)  # of the measurements, each with files of its own
    batch_size: int | None = None  # items times draws that run at once

    def __init__(self, settings: StudySettings, progress: Progress | None) -> None:
        self.settings, self.device = settings, choose_device(settings.device)
        self.tell = progress or (lambda *_: None)
        self.notes: list[str] = []
        self._kept: dict[int, tuple[Predictor, Tensor]] = {}  # logits of validation items, by predictor

    @property
    @abstractmethod
    def validation(self) -> ItemSet:
        """Items that everything is fitted on."""

    @abstractmethod
    def described(self, training: Training, part: str) -> dict[str, Any]:
        """All that the cells of a part depend on but the data."""

    @abstractmethod
    def data(self, training: Training, part: str) -> dict[str, Any]:
        """What the data of the same hold, by name; fails where they are not on this machine."""

    @cached_property
    @abstractmethod
    def host(self) -> tuple[nn.Module, dict[str, Any]]:
        """The host in evaluation mode, which everything goes on from, and how it was trained."""

    @abstractmethod
    def start(self, training: Training) -> tuple[nn.Module, dict[str, Any]]:
        """The model before its training, and what to record."""

    @abstractmethod
    def tune(self, model: nn.Module, training: Training) -> list[dict[str, float]]:
        """Train in place; what every epoch came to."""

    @abstractmethod
    def fit_data(self) -> tuple[list[Any], dict[str, Any]]:
        """Batches for `Handle.fit`, and its options."""

    @abstractmethod
    def measured(self, part: str, rows: Sequence[Row]) -> tuple[Values, Sequence[str]]:
        """Every number of a part for every row, and notes about its sets."""

    def classifier(self, model: nn.Module) -> Classifier:
        """The model as this library calls one."""
        return cast(Classifier, model)

    def cells(self) -> list[Cell]:
        """One for each method that the host can have, its parts together."""
        values, details = Values(), dict[str, dict[str, Any]]()
        for training in self.settings.trainings:
            stores = {part: self._store(training, part) for part in self.parts}
            found = {} if self.settings.fresh else {part: store.read() for part, store in stores.items()}
            missing = [part for part in self.parts if found.get(part) is None]
            if missing and not self.settings.finished:
                for part, content in self._computed(training, missing):
                    stores[part].write(content)
                    found[part] = content
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
            note = "its data are not here and were not compared with those that finished results name"
            self.notes.append(f"{self.label}: {note}")
        name = "-".join(filter(None, (part, training.name)))
        return Store(self.folder, name, self.described(training, part), data)

    def _computed(self, training: Training, parts: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Each part is told as soon as it is measured."""
        model, record = self.trained(training)
        rows, lacking = self.rows(training, model)
        shared = {"training": record} if record else {}
        details = {row.method: {**shared, **row.detail} for row in rows}
        for part in parts:
            values, notes = self.measured(part, rows)
            yield part, {"values": values, "details": details, "notes": [*lacking, *notes]}

    def trained(self, training: Training) -> tuple[nn.Module, dict[str, Any]]:
        """The model of a training in evaluation mode, and its record."""
        if training is HOST:
            return deepcopy(self.host[0]), self.host[1]  # what is attached to it is not in its way later
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
        """Train in place; the weights are those after the last step.

        Args:
            module: what is trained: the model, or what holds it.
            epochs: how often all items are seen.
            learning_rate: of AdamW: rises at first, then falls to 0 in a line.
            batches: at least those of all epochs.
            loss: from a batch to what is minimised.  []
            training: for messages.
            steps: of an epoch.
            epochs_before: of the weights that it starts from.

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
            torch.manual_seed(self.seed)  # of dropout, and of draws that no item's number decides
            some = islice(batches, total)
            taken = train_steps(module, loss, some, optimizer, rate, clip=CLIP, defer_checks=cuda)
            for done, value in enumerate(taken, 1):
                losses.append(value)
                self.tell(f"{self.label} {training.name} fine-tuning", done, total)
                if done % steps == 0:
                    rows.append(self._epoch(epochs_before + done // steps, losses))
                    losses = []
        return rows

    def _epoch(self, epoch: int, losses: Sequence[Tensor]) -> dict[str, float]:
        if self.device.type == "cuda":
            check_health()
        mean = float(torch.stack(list(losses)).mean())
        if not math.isfinite(mean):
            raise NumericalError(f"the loss of epoch {epoch} is {mean}: try a lower learning rate")
        return {"epoch": epoch, "loss": mean}

    def predictions(self, rows: Sequence[Row], items: ItemSet) -> Iterator[tuple[str, Predicted]]:
        """Of all methods; what several share is predicted once."""
        labels = None if items.labels is None else items.labels.to(self.device)
        shared: dict[int, Tensor] = {}
        for row in rows:
            key = id(row.predictor)
            if key not in shared:
                shared[key] = self.logits(row.predictor, row.samples, items)
            yield row.method, Predicted.from_logits(shared[key], labels, temperature=row.temperature)

    def logits(self, predictor: Predictor, samples: int, items: ItemSet) -> Tensor:
        """Of every draw; validation items are predicted once, to fit to and to measure.  [S, n, C]"""
        # the predictor is kept with its logits: else another one might get its number
        kept = self._kept if items is self.validation else {}
        if id(predictor) not in kept:
            how = {"samples": samples, "seed": self.draw_seed, "batch_size": self.batch_size}
            found = predict_items(predictor, items, device=self.device, **how)  # type: ignore[arg-type]
            kept[id(predictor)] = predictor, found.logits
        return kept[id(predictor)][1]

    def rows(self, training: Training, model: nn.Module) -> tuple[list[Row], list[str]]:
        """The methods of a training that can be had, and why others cannot."""
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
        rows = [each for row in rows for each in (row, self._heated(row))]
        rows += self._attached(model) if training is HOST else []
        fitted = []
        for row in (row for row in rows if row.method in training.titles):
            try:
                fitted.append(row if row.temperature is None else self._tempered(row))
            except NumericalError as error:  # such as every validation item being classified right
                lacking.append(f"{self.label}: {row.method} is left out: {error}")
        return fitted, lacking

    def _heated(self, row: Row) -> Row:
        method = TEMPERATURE if row.method == PLAIN else f"{row.method}{TEMPERED}"
        return replace(row, method=method, temperature=math.nan)

    def _tempered(self, row: Row) -> Row:
        assert self.validation.labels is not None
        logits = self.logits(row.predictor, row.samples, self.validation)
        heat = fit_temperature(logits, self.validation.labels.to(self.device))
        return replace(row, temperature=heat, detail={**row.detail, "temperature": heat})

    def _attached(self, model: nn.Module) -> list[Row]:
        """What `fit` chose; and one scale, noise and power for all, whether it chose them or not.

        `fit` keeps two fifths of the items back to choose by.  The temperature of the forced draws is fitted
        on all items, as that of the method `temperature` is, so that these two differ by the draws alone.
        """

        def tell(stage: str, done: int, total: int) -> None:
            self.tell(f"{self.label} fit, {stage}", done, total)

        chosen, forced = hosts.attach(model), hosts.attach(model)
        data, options = self.fit_data()
        fit = chosen.fit(data, seed=self.draw_seed, progress=tell, **options)
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
    """A converted model, which draws, as a predictor."""
    return cast(Predictor, SimpleNamespace(predict=partial(hosts.predict, model)))


def label_scores(predicted: Predicted, metrics: Sequence[str]) -> dict[str, float]:
    """Metrics of items with labels, by name."""
    functions, probs = metrics_of("labels"), predicted.prediction.probs
    return {name: functions[name](probs, predicted.known_labels) for name in metrics}


@dataclass(frozen=True)
class AdoptionResult:
    """The comparison of all hosts.

    Attributes:
        cells: one for each host and method, in the order of the table.
        notes: what is missing, reduced or regenerated.
    """

    cells: tuple[Cell, ...]
    notes: tuple[str, ...]


def run_studies(studies: Iterable[Study], notes: Iterable[str] = ()) -> AdoptionResult:
    """One study after the other.

    Args:
        studies: of all hosts; a generator frees the data of one before the next.
        notes: what is to be said before.

    Returns:
        Cells by group, method and seed, and notes once each.

    Raises:
        ValueError: nothing is finished and nothing was to be computed.
    """
    cells, said = list[Cell](), dict.fromkeys(notes)
    for study in studies:
        cells += study.cells()
        said |= dict.fromkeys(study.notes)
    if not cells:
        raise ValueError("expected finished cells in these runs, got none: leave out --finished")
    order = list(TITLES)
    cells.sort(key=lambda cell: (cell.group, order.index(cell.method), cell.seed))
    return AdoptionResult(tuple(cells), tuple(said))
