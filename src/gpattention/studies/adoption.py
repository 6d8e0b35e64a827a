"""Adoption studies: one trained model as it is, attached and converted, compared on the same items.

`adoption_cola` and `adoption_images` say what their hosts are, how one is tuned and what is measured of it.
Everything else is here, once: methods and the trainings that they need, finished results as files, the
training, the comparison of methods, and its tables.

All methods of a training share its weights.  Temperatures and scales are fitted on validation items alone.
A method's figures of one seed are a cell; a cell is a row of the table of results whose recipe is the model
and whose predictor is the method.
"""

import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, cast

import torch
from safetensors.torch import save
from torch import Tensor, nn

from gpattention import evaluation, hosts
from gpattention.checks import check_choice, check_count, check_name
from gpattention.data import NoRootError
from gpattention.evaluation import (
    ItemSet,
    ModelPredictor,
    Predicted,
    Predictor,
    fit_temperature,
    predict_items,
)
from gpattention.files import StrPath, read_object
from gpattention.gp import NumericalError, check_health
from gpattention.metrics import metric_of, metrics_of
from gpattention.models.config import read_tensors
from gpattention.models.predict import Classifier
from gpattention.numerics import choose_device
from gpattention.reports.drawing import drawn, dress, picture
from gpattention.reports.style import INK, NEUTRAL, styles_for
from gpattention.runs import Column, Difference, Results, difference
from gpattention.runs.tables import Bold, Markup, csv_text, markdown, markdown_table
from gpattention.studies import write_file
from gpattention.training import train_steps

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Methods, and the trainings whose weights they share

PLAIN, TEMPERATURE, MC_DROPOUT = "plain", "temperature", "mc_dropout"
ATTACHED, ATTACHED_GLOBAL = "attached", "attached-global"
TEMPERED = "+temperature"  # ends the name of what has one
CONVERSIONS = ("direct", "cgp", "scgp")
OPTIONS: dict[str, dict[str, Any]] = {"scgp": {"num_inducing": 32}}  # of a kind; the others have their own
Start: TypeAlias = Literal["host", "pretrained"]
STARTS: tuple[Start, ...] = ("host", "pretrained")


@dataclass(frozen=True, eq=False)
class Training:
    """One set of weights for every seed.

    Attributes:
        name: of its files, and of the method without a temperature.
        titles: what tables call the methods that it serves, by method.
        kind: what attention is converted to; None leaves it as it is.
        further: whether it goes on where the seed's fine-tuned host ended.
    """

    name: str
    titles: Mapping[str, str]
    kind: str | None = None
    further: bool = False


def converted(kind: str, start: Start = "host") -> Training:
    """The training of a model converted to a kind of attention.

    Args:
        kind: of `CONVERSIONS`.
        start: the seed's fine-tuned host, or the pretrained weights.

    Returns:
        A training of three methods: draws, draws with temperature, the mean with temperature.

    Raises:
        ValueError: an unknown start.
    """
    check_choice("start", start, STARTS)
    name, how = (f"converted-{kind}", "tuned on") if start == "host" else (f"pretrained-{kind}", "fine-tuned")
    title = f"converted to {kind}, {how}"
    titles = {name: title, f"{name}{TEMPERED}": f"{title}, temperature"}
    titles[f"{name}-mean{TEMPERED}"] = f"{title}, no draws, temperature"
    return Training(name, titles, kind, further=start == "host")


_HOST_TITLES = {
    PLAIN: "plain",
    TEMPERATURE: "temperature",
    MC_DROPOUT: "MC dropout",
    f"{MC_DROPOUT}{TEMPERED}": "MC dropout, temperature",
    ATTACHED: "attached, as `fit` chose",
    ATTACHED_GLOBAL: "attached, made to draw (`global`), temperature",
}
HOST = Training("host", _HOST_TITLES)
_CONTROL_TITLES = {"tuned-on": "tuned on", f"tuned-on{TEMPERED}": "tuned on, temperature"}
CONTROL = Training("tuned-on", _CONTROL_TITLES, further=True)
TRAININGS = (HOST, CONTROL, *(converted(kind, start) for start in STARTS for kind in CONVERSIONS))
TITLES = {method: title for training in TRAININGS for method, title in training.titles.items()}
# one number, fitted in a second; and the same of what was tuned for as long as the converted models
BASELINES = (TEMPERATURE, f"tuned-on{TEMPERED}")


def methods_of(kinds: Sequence[str], start: Start = "host") -> tuple[str, ...]:
    """Methods of a comparison, in the order of its table.

    Args:
        kinds: that the host is converted to; without any there is no control either.
        start: where converted models start; those that start at the pretrained weights need no control.

    Returns:
        Those of the host, of the control, then of every kind.

    Raises:
        ValueError: an unknown start.
    """
    control = [CONTROL] if kinds and start == "host" else []
    trainings = [HOST, *control, *(converted(kind, start) for kind in kinds)]
    return tuple(method for training in trainings for method in training.titles)


# Settings


Rule: TypeAlias = Literal["count", "> 0", ">= 0"]
WEIGHT_DECAY = 0.01  # of matrices; vectors have none
WARMUP = 0.1  # fraction of the steps in which the learning rate rises
CLIP = 1.0  # largest norm of a gradient


def check_numbers(owner: Any, prefix: str = "", **rules: Rule) -> None:
    """Refuse fields that break their rule; a count is a whole number >= 1, and None is not checked."""
    for name, rule in rules.items():
        value = getattr(owner, name)
        if value is not None and rule == "count":
            object.__setattr__(owner, name, check_count(f"{prefix}{name}", value))
        elif value is not None and not (value > 0 if rule == "> 0" else value >= 0):
            raise ValueError(f"expected {prefix}{name} {rule}, got {value}")


@dataclass(frozen=True)
class Finetuning:
    """AdamW on all weights: a short warm-up, then down to 0 in a line.

    Args:
        epochs: passes over the training part.
        learning_rate: the highest, after the warm-up.
        batch_size: items of a step.
        regularizer: weight of the regulariser of a converted model.
    """

    epochs: int = 3
    learning_rate: float = 2e-4
    batch_size: int = 32
    regularizer: float = 0.01

    def __post_init__(self) -> None:
        check_numbers(self, epochs="count", batch_size="count", learning_rate="> 0", regularizer=">= 0")

    def described(self) -> dict[str, Any]:
        """What the weights depend on."""
        return {**asdict(self), "weight_decay": WEIGHT_DECAY, "warmup": WARMUP, "clip": CLIP}


@dataclass(frozen=True)
class Further:
    """How a fine-tuned host is tuned further, as it is or converted; all else is as in its fine-tuning.

    Args:
        epochs: passes over the training part.
        learning_rate: the highest, after the warm-up; lower than that of fine-tuning.
        regularizer: weight of the regulariser of a converted model.
        prior_scale: at which a converted model starts; the standard deviation of its draws is in proportion.
            It is learned, but a short training hardly moves it.  None, for images: that one of a few whose
            draws are best on validation before any tuning.
    """

    epochs: int = 1
    learning_rate: float = 5e-5
    regularizer: float = 0.01
    prior_scale: float | None = 0.3

    def __post_init__(self) -> None:
        check_numbers(self, "further ", epochs="count", learning_rate="> 0", prior_scale="> 0")
        check_numbers(self, "further ", regularizer=">= 0")

    def after(self, first: Finetuning) -> Finetuning:
        """The schedule, given that of the host."""
        own = {name: value for name, value in asdict(self).items() if name != "prior_scale"}
        return replace(first, **own)

    def described(self, training: Training, **more: Any) -> dict[str, Any]:
        """What the weights of a training depend on: nothing for the host; the control knows no process."""
        left_out = () if training.kind else ("regularizer", "prior_scale")
        found = {name: value for name, value in asdict(self).items() if name not in left_out}
        return {"further": found | more} if training.further else {}


@dataclass(frozen=True, kw_only=True)
class StudySettings:
    """What every adoption study lets one choose.

    Args:
        methods: rows of the table; see `methods_of`.
        further: how converted hosts and the control are tuned.
        samples: draws of a prediction.
        root: folder of the datasets; the environment variable GPATTENTION_DATA if not given.
        device: auto, cpu, cuda, ...
        fit: options of `Handle.fit`.
        finished: whether to read what is finished and compute nothing.
        fresh: whether to train and compute everything anew, finished or not.
    """

    known: ClassVar[tuple[str, ...]] = tuple(TITLES)  # methods that the study has

    methods: tuple[str, ...] = methods_of(CONVERSIONS[:2])
    further: Further = field(default_factory=Further)
    samples: int = 10
    root: StrPath | None = None
    device: torch.device | str = "auto"
    fit: dict[str, Any] = field(default_factory=dict)
    finished: bool = False
    fresh: bool = False

    def __post_init__(self) -> None:
        if self.finished and self.fresh:
            raise ValueError("expected finished (read) or fresh (compute everything anew), got both")
        check_numbers(self, samples="count")
        for method in self.methods:
            check_choice("method", method, self.known)


# Finished results as files that say what they depend on, each whole or not there

FORMAT = "gpattention-adoption-1"
DATA = "data"  # key of settings: what the data hold, by name; None where they are not on this machine
WEIGHTS = frozenset({"model", "host", "encoder"})  # keys of settings: digests of weights that all starts from


@dataclass(frozen=True)
class Cell:
    """What one method came to with one seed.

    Attributes:
        group: the model; methods of one group are compared with each other.
        seed: of the model.
        method: one of `TITLES`.
        values: by set, by metric.
        detail: temperatures, choices, notes.
        seconds: of predicting.
    """

    group: str
    seed: int
    method: str
    values: Mapping[str, Mapping[str, float]]
    detail: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


class Store:
    """JSON files of one folder, all made with the same settings.

    Args:
        folder: where they are.
        settings: all that they depend on: digests of weights, what the data hold (`DATA`), and the rest.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder, self.settings = folder, json.loads(json.dumps(dict(settings)))

    def path(self, name: str) -> Path:
        """The file of a name, refused where it would lie elsewhere."""
        return self.folder / check_name("the name of a file", name)

    def read(self, name: str) -> dict[str, Any] | None:
        """What a file holds; None where it is not there, or made of other weights or data, or of fewer items.

        `ValueError` where it is damaged, of more items, or was made with other settings.
        """
        path, asked = self.path(name), self.settings
        if not path.is_file():
            return None
        try:
            plain = read_object(path, nonfinite=True)
            found = plain["settings"]
            if plain.get("format", FORMAT) != FORMAT:
                raise ValueError(f"expected format {FORMAT}, got {plain['format']!r}")
        except (KeyError, ValueError) as error:
            message = f"{path} is not a finished result: {error}; delete it to compute it anew"
            raise ValueError(message) from error
        # data that are not here cannot be compared; what does not name its data is never the same
        unknown = asked.get(DATA, {}) is None and found.get(DATA) is not None
        keys = {key for key in {*found, *asked} if found.get(key) != asked.get(key)}
        keys -= {DATA} if unknown else set()
        if not keys or keys & WEIGHTS:
            return None if keys else plain
        evaluation.check_as_much(asked, found, path, "adopt")
        changed = sorted(keys - {DATA, *evaluation.REDUCING})
        if changed:
            both = ", ".join(f"{key} {found.get(key)!r} instead of {asked.get(key)!r}" for key in changed)
            how = "choose another folder for the runs, or --fresh (fresh=True) to replace it"
            raise ValueError(f"{path} was made with other settings ({both}): {how}")
        return None

    def write(self, name: str, **content: Any) -> None:
        """Replace what is there."""
        text = json.dumps({**content, "settings": self.settings}, indent=1) + "\n"
        write_file(self.path(name), text.encode())


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

    weights: Path  # folder of trained weights
    finished: Path  # folder of finished cells
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
        self._trained: set[str] = set()  # in this call
        self._kept: dict[int, tuple[Predictor, Tensor]] = {}  # logits of validation items, by predictor

    @property
    @abstractmethod
    def validation(self) -> ItemSet:
        """Items that everything is fitted on."""

    @abstractmethod
    def described(self, training: Training, part: str) -> dict[str, Any]:
        """Settings of cells: all that they depend on but the data."""

    @abstractmethod
    def data(self, training: Training, part: str) -> dict[str, Any]:
        """What the data of a cell hold, by name; fails where they are not on this machine."""

    @abstractmethod
    def weights_settings(self, training: Training) -> dict[str, Any]:
        """All that the weights of a training depend on."""

    @abstractmethod
    def start(self, training: Training, *, known: bool = False) -> tuple[nn.Module, dict[str, Any]]:
        """The model before its training, with any weights where its end is `known`; and what to record."""

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
        """One for each method, its parts together."""
        found: dict[str, list[Cell]] = {}
        wanted = {t: [m for m in t.titles if m in self.settings.methods] for t in TRAININGS}
        # all is read before any work, so that what cannot be replaced is refused first
        read = {t: self._read(t, methods) for t, methods in wanted.items() if methods}
        for training, (done, missing) in read.items():
            for cell in (*done, *self._computed(training, missing)):
                found.setdefault(cell.method, []).append(cell)
                self.notes += cell.detail["notes"]
        return [
            replace(parts[0], values={name: x for c in parts for name, x in c.values.items()},
                    seconds=sum(c.seconds for c in parts))
            for parts in found.values()
        ]  # fmt: skip

    def trained(self, training: Training) -> tuple[nn.Module, dict[str, Any]]:
        """The model of a training in evaluation mode, and its record; kept weights are not trained again."""
        store = Store(self.weights, self.weights_settings(training))
        file, name = store.path(f"{training.name}.safetensors"), f"{training.name}-training.json"
        counts = file.is_file() and (not self.settings.fresh or training.name in self._trained)
        record = store.read(name) if counts else None
        model, begun = self.start(training, known=record is not None)
        if record is None:
            record = {**begun, "epochs": self.tune(model, training)}
            tensors = {key: x.detach().cpu().contiguous().clone() for key, x in model.state_dict().items()}
            write_file(file, save(tensors))  # the weights first: a record says that they are whole
            store.write(name, **record)
            self._trained.add(training.name)
        else:
            model.load_state_dict(read_tensors(file))
        return model.eval(), {key: value for key, value in record.items() if key != "settings"}

    def fine_tune(
        self,
        module: nn.Module,
        schedule: Finetuning,
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
            schedule: epochs and learning rate.
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
        optimizer = torch.optim.AdamW(groups, lr=schedule.learning_rate, fused=True)
        total, cuda = schedule.epochs * steps, self.device.type == "cuda"
        rising = WARMUP * total

        def rate(step: int) -> float:
            share = (step + 1) / rising if step + 1 < rising else (total - step) / (total + 1 - rising)
            return schedule.learning_rate * share

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
        kept = self._kept if items is self.validation else {}
        if id(predictor) not in kept:
            how = {"samples": samples, "seed": self.draw_seed, "batch_size": self.batch_size}
            found = predict_items(predictor, items, device=self.device, **how)  # type: ignore[arg-type]
            kept[id(predictor)] = predictor, found.logits
        return kept[id(predictor)][1]

    def rows(
        self, training: Training, model: nn.Module, wanted: Sequence[str]
    ) -> tuple[list[Row], list[str]]:
        """The methods of a training that are wanted and can be had, and why others cannot."""
        classifier, samples, notes = self.classifier(model), self.settings.samples, list[str]()
        plain, name, self._kept = ModelPredictor(classifier, draw="none"), training.name, {}
        pairs: list[tuple[Predictor, str, str, int]] = []  # as it is, with temperature, draws
        if training is HOST:
            pairs.append((plain, PLAIN, TEMPERATURE, 0))
            if MC_DROPOUT in wanted or f"{MC_DROPOUT}{TEMPERED}" in wanted:
                try:
                    dropout = evaluation.MCDropout(classifier)
                    pairs.append((dropout, MC_DROPOUT, f"{MC_DROPOUT}{TEMPERED}", samples))
                except ValueError as error:
                    notes.append(f"MC dropout is left out: {error}")
        elif training.kind is None:
            pairs.append((plain, name, f"{name}{TEMPERED}", 0))
        else:
            pairs.append((converted_predictor(model), name, f"{name}{TEMPERED}", samples))
            pairs.append((plain, f"{name}-mean", f"{name}-mean{TEMPERED}", 0))
        rows = [
            Row(called, predictor, draws, temperature)
            for predictor, method, heated, draws in pairs
            for called, temperature in ((method, None), (heated, math.nan))
        ]
        rows += self._attached(model) if ATTACHED in wanted or ATTACHED_GLOBAL in wanted else []
        fitted = []
        for row in (row for row in rows if row.method in wanted):
            try:
                fitted.append(row if row.temperature is None else self._tempered(row))
            except NumericalError as error:  # such as every validation item being classified right
                notes.append(f"{row.method} is left out: {error}")
        return fitted, notes

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
        candidates = {c.name: {"nll": c.nll, "fitted_nll": c.fitted_nll} for c in fit.candidates}
        draws, temperature, samples = fit.settings.any_drawn, fit.settings.temperature, self.settings.samples
        detail = {"chosen": fit.chosen, "candidates": candidates, "temperature": temperature, "draws": draws}
        numbers = {name: float(getattr(own, name)[0, 0]) for name in ("scale", "noise", "power")}
        return [
            Row(ATTACHED, cast(Predictor, chosen), samples if draws else 1, detail=detail),
            Row(ATTACHED_GLOBAL, cast(Predictor, forced), samples, math.nan, numbers),
        ]

    def _read(self, training: Training, methods: Sequence[str]) -> tuple[list[Cell], dict[str, list[str]]]:
        """What is finished, and by part the methods that are missing and that this host can have."""
        cells, missing = list[Cell](), dict[str, list[str]]()
        for part in self.parts:
            store, fresh = self._store(training, part), self.settings.fresh
            read = {m: None if fresh else store.read(f"{m}.json") for m in methods}
            absent = [method for method, found in read.items() if found is None]
            stale = [method for method in absent if store.path(f"{method}.json").is_file()]
            if self.settings.finished and stale:
                where = f"{self.label} {part}".strip()
                self.notes.append(f"{where}: of other weights or data, so left out: {', '.join(stale)}")
            done = [Cell(**found["cell"]) for found in read.values() if found is not None]
            without = {method for cell in done for method in cell.detail.get("left_out", ())}
            missing[part] = [method for method in absent if method not in without]
            cells += done
        return cells, missing

    def _store(self, training: Training, part: str) -> Store:
        try:
            data = self.data(training, part)
        except (FileNotFoundError, ImportError, NoRootError):
            if not self.settings.finished:
                raise
            data = None
            note = "its data are not here and were not compared with those that finished results name"
            self.notes.append(f"{self.label}: {note}")
        return Store(self.finished / part, {**self.described(training, part), DATA: data})

    def _computed(self, training: Training, missing: dict[str, list[str]]) -> list[Cell]:
        """The rest, unless only what is finished is asked for."""
        wanted = [method for method in training.titles if any(method in names for names in missing.values())]
        if not wanted or self.settings.finished:
            return []
        model, record = self.trained(training)
        rows, reasons = self.rows(training, model, wanted)
        had, found = {row.method for row in rows}, list[Cell]()
        shared: dict[str, Any] = {"left_out": [method for method in wanted if method not in had]}
        shared |= {"training": record} if record else {}
        for part, methods in missing.items():
            chosen = [row for row in rows if row.method in methods]
            if not chosen:
                continue
            begin = time.perf_counter()
            values, notes = self.measured(part, chosen)
            seconds = time.perf_counter() - begin
            said = [*(f"{self.label}: {reason}" for reason in reasons), *notes]
            store = self._store(training, part)
            for row in chosen:
                detail = {**shared, **row.detail, "notes": said}
                found.append(Cell(self.group, self.seed, row.method, values[row.method], detail, seconds))
                store.write(f"{row.method}.json", format=FORMAT, cell=asdict(found[-1]))
        return found


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


# Tables and pictures

SUITE = "adoption"
PICTURES = ("png", "svg")
# metrics that have a panel in the picture, and the panel's name
PANELS = {"mcc": "MCC", "nll": "NLL", "ece": "ECE", "aurc": "AURC", "auroc": "AUROC of foreign images"}


def columns_of(place: str, short: str, legend: str, metrics: Sequence[str]) -> list[Column]:
    """Columns of one set; `short` begins their heads, `legend` names the set in pictures."""
    heads = {name: f"{short} {metric_of(name).label}".strip() for name in metrics}
    return [Column(SUITE, place, name, head=head, group=legend) for name, head in heads.items()]


def results_of(cells: Iterable[Cell]) -> Results:
    """Cells as the table of results.

    Args:
        cells: of any groups.

    Returns:
        Groups are its recipes, methods its predictors; `auroc_SCORE` is the metric auroc by that score.
    """
    names = ("recipe", "seed", "predictor", "suite", "set", "metric", "score", "value")
    rows = []
    for cell in cells:
        for place, name, value in ((p, n, x) for p, values in cell.values.items() for n, x in values.items()):
            metric, score = ("auroc", name[6:]) if name.startswith("auroc_") else (name, None)
            row = (cell.group, cell.seed, cell.method, SUITE, place, metric, score, value)
            rows.append(dict(zip(names, row, strict=True)))
    return Results.from_rows(rows)


def seeds_of(cells: Iterable[Cell]) -> dict[str, dict[str, int]]:
    """Methods of each group and how many seeds they have, in the order in which they come."""
    found: dict[str, dict[str, int]] = {}
    for cell in cells:
        methods = found.setdefault(cell.group, {})
        methods[cell.method] = methods.get(cell.method, 0) + 1
    return found


def to_markdown(
    cells: Sequence[Cell], columns: Sequence[Column], baselines: Sequence[str] = (TEMPERATURE,)
) -> str:
    """Tables of a comparison.

    Args:
        cells: of any groups.
        columns: those without any figure are left out.
        baselines: methods that differences are taken from, seed by seed.

    Returns:
        For each group a table of means and one of differences from every baseline that it has.
    """
    results, parts = results_of(cells), list[str]()
    for group, methods in seeds_of(cells).items():
        shown = [c for c in columns if any(c.find(results, group, method) for method in methods)]
        heads, rows = [column.head for column in shown], []
        for method, seeds in methods.items():
            figures = (column.find(results, group, method) for column in shown)
            rows.append([_title(method), *("-" if x is None else x.text() for x in figures), str(seeds)])
        parts += [f"## {markdown(group)}\n", markdown_table(["", *heads, "seeds"], rows)]
        for baseline in baselines if len(methods) > 1 else ():
            if baseline not in methods:
                continue
            rows = []
            for method in (method for method in methods if method != baseline):
                gaps = (gap_of(results, group, method, baseline, column) for column in shown)
                rows.append([_title(method), *map(_gap_text, gaps)])
            parts += [
                f"Differences are taken seed by seed, method minus {_title(baseline)}, ± their standard "
                "error; bold ones are clear (Student's t, 95 %).\n",
                markdown_table([Markup(f"minus {_title(baseline)}"), *heads], rows),
            ]
    return "\n".join(parts)


def gap_of(results: Results, group: str, method: str, baseline: str, column: Column) -> Difference | None:
    """A method less the baseline; None where one of them has no such number."""
    one, other = (column.find(results, group, each) for each in (method, baseline))
    return None if one is None or other is None else difference(one, other)


def _title(method: str) -> Markup:
    """Titles are ours, and may be Markdown; names of methods may be anyone's."""
    return Markup(TITLES[method]) if method in TITLES else markdown(method)


def _gap_text(gap: Difference | None) -> str:
    if gap is None:
        return "-"
    # what rounds to nothing is not to stand out
    return Bold(gap.text()) if gap.clear and abs(gap.mean) >= 0.0005 else gap.text()


def summary_csv(cells: Sequence[Cell], columns: Sequence[Column]) -> str:
    """Numbers of the tables as CSV, nothing rounded.

    Args:
        cells: of any groups.
        columns: what to write of each method.

    Returns:
        One line for each number, with its difference from the temperature.
    """
    results, lines = results_of(cells), list[list[object]]()
    for group, methods in seeds_of(cells).items():
        for method, column in ((method, column) for method in methods for column in columns):
            figure = column.find(results, group, method)
            gap = gap_of(results, group, method, TEMPERATURE, column)
            if figure is not None:
                name = column.metric if column.score is None else f"{column.metric}_{column.score}"
                less = [gap and gap.mean, gap and gap.error]
                own = [figure.count, figure.mean, figure.error]
                lines.append([group, method, column.set, name, *own, *less])
    heads = ["group", "method", "set", "metric", "seeds", "mean", "standard_error", "difference"]
    return csv_text([*heads, "difference_standard_error"], lines)


def cells_csv(cells: Sequence[Cell]) -> str:
    """Every number of every cell as CSV, but for single corruptions, of which there are hundreds.

    Args:
        cells: of any groups.

    Returns:
        One line for each number.
    """
    lines = (
        [cell.group, cell.seed, cell.method, name, metric, value]
        for cell in cells
        for name, values in cell.values.items()
        if name.count("/") < 2
        for metric, value in values.items()
    )
    return csv_text(["group", "seed", "method", "set", "metric", "value"], lines)


def write_comparison(
    folder: StrPath,
    name: str,
    cells: Sequence[Cell],
    columns: Sequence[Column],
    *,
    about: Sequence[str] = (),
    baselines: Sequence[str] = (TEMPERATURE,),
) -> list[Path]:
    """Write NAME.md, NAME.csv, NAME-cells.csv and, where there is matplotlib, pictures of the differences.

    Args:
        folder: where to.
        name: how files begin.
        cells: of any groups.
        columns: of the tables; those with a `group` and a metric of `PANELS` are drawn.
        about: paragraphs above the tables.
        baselines: methods that differences are taken from.

    Returns:
        The files.

    Raises:
        ValueError: a group cannot be part of a file's name.
    """
    place = Path(folder)
    page = "\n\n".join([*about, to_markdown(cells, columns, baselines)])
    texts = {".md": page, ".csv": summary_csv(cells, columns), "-cells.csv": cells_csv(cells)}
    written = [write_file(place / f"{name}{ending}", text.encode()) for ending, text in texts.items()]
    several, results = seeds_of(cells), results_of(cells)
    for group, methods in several.items() if find_spec("matplotlib") is not None else ():
        figure = differences_figure(results, group, list(methods), columns)
        called = name if len(several) == 1 else check_name("the name of a picture", f"{name}-{group}")
        written += [write_file(place / f"{called}.{form}", picture(figure, form)) for form in PICTURES]
    return written


@drawn
def differences_figure(
    results: Results, group: str, methods: Sequence[str], columns: Sequence[Column]
) -> "Figure":
    """Differences from the temperature: a panel for each metric, a colour for each kind of set.

    Left of 0 is less than the baseline; whether that is better or not is for the panel's name to say.  A
    line is the standard error.
    """
    from matplotlib.figure import Figure

    names = [method for method in methods if method != TEMPERATURE]
    words = [TITLES.get(name, name).replace("`", "") for name in names]
    panels = {title: [c for c in columns if c.metric == m and c.group] for m, title in PANELS.items()}
    panels = {title: of for title, of in panels.items() if of}
    styles = styles_for(list(dict.fromkeys(column.group for of in panels.values() for column in of)))
    size = 2.6 * len(panels) + 0.1 * max(map(len, words), default=0), 1.4 + 0.42 * len(names)
    figure, keys = Figure(figsize=size, dpi=72, layout="constrained"), {}
    drawn_on = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, (title, of) in zip(drawn_on, panels.items(), strict=True):
        dress(axes)
        axes.axvline(0, color=NEUTRAL, linewidth=1.5)
        for line, column in enumerate(of):
            gaps = [gap_of(results, group, name, TEMPERATURE, column) for name in names]
            style, shift = styles[column.group], 0.24 * (line - (len(of) - 1) / 2)
            look = {"color": style.colour, "marker": style.marker, "markersize": 6, "linestyle": "none"}
            for row, gap in enumerate(gaps):
                if gap is not None:
                    mark = axes.errorbar(gap.mean, row + shift, xerr=gap.error, elinewidth=2, **look)
                    keys[column.group] = mark
        axes.set_yticks(range(len(names)), labels=words)
        axes.tick_params(axis="y", labelcolor=INK)
        axes.locator_params(axis="x", nbins=4)
        axes.set_title(title, color=INK, fontsize=12.5)
    drawn_on[0].set_ylim(len(names) - 0.5, -0.5)
    look = {"title": f"difference from {TITLES[TEMPERATURE]}", "ncols": max(1, len(keys)), "frameon": False}
    figure.legend(list(keys.values()), list(keys), loc="outside lower center", **look)
    return figure
