"""Does adoption help trained vision transformers?  Clean, corrupted and foreign images, over several seeds.

Runs that differ by their seed alone are one model, whose weights serve the methods of `HOST_METHODS`.  Every
converted kind starts from them and is tuned on for a short while, and so is, as a control, the host itself.
Temperatures, attached and prior scales are fitted on the validation images of a run; nothing is fitted on
any other.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gpattention
from gpattention.adopt.attach import attach
from gpattention.adopt.convert import conversion_of, convert
from gpattention.checks import check_count
from gpattention.data.corruptions import CATEGORIES
from gpattention.data.places import StrPath
from gpattention.evaluation.items import ItemSet
from gpattention.evaluation.mc_dropout import MCDropout
from gpattention.evaluation.predicted import Predicted
from gpattention.evaluation.predicting import predict_items
from gpattention.evaluation.predictor import ModelPredictor, Predictor
from gpattention.evaluation.records import Record
from gpattention.evaluation.suites.corrupted import corruption_means, set_name
from gpattention.evaluation.temperature import fit_temperature
from gpattention.experiments.inputs.preparation import prepare
from gpattention.experiments.judging.judges import load_outside
from gpattention.experiments.judging.run_sets import RunSets, run_sets
from gpattention.experiments.judging.weights import open_with_digest
from gpattention.experiments.runs import Run, find_runs
from gpattention.gp import NumericalError, check_health, deferred_checks
from gpattention.metrics import accuracy, auroc, metrics_of, nll
from gpattention.metrics.checks import check_choice
from gpattention.models import Transformer
from gpattention.runs import name_without_seed
from gpattention.studies.adoption.cells import DATA, Cell, Cells, KeptWeights, here
from gpattention.studies.adoption.cola import OPTIONS
from gpattention.studies.adoption.encoder import (
    ConvertedPredictor,
    Finetuning,
    parameter_groups,
    rate_share,
)
from gpattention.studies.adoption.methods import (
    ATTACHED,
    ATTACHED_GLOBAL,
    CONTROL,
    CONVERSIONS,
    HOST,
    MC_DROPOUT,
    MC_DROPOUT_TEMPERATURE,
    PLAIN,
    TEMPERATURE,
    Fitting,
    Further,
    Source,
    Training,
    all_trainings,
    converted,
)
from gpattention.training import Recipe, TrainingData, choose_device
from gpattention.training.feeding import Feed
from gpattention.training.objective import Objective
from gpattention.training.schedule import Schedule

# Tune a trained vision transformer on, as it is or converted: further epochs on its own training images.


@dataclass(frozen=True)
class ImageEpoch:
    """What an epoch came to; validation without draws."""

    epoch: int
    loss: float
    validation_accuracy: float
    validation_nll: float


def tune_on(
    model: Transformer,
    recipe: Recipe,
    data: TrainingData,
    validation: ItemSet,
    settings: Finetuning,
    *,
    device: torch.device,
    progress: Callable[[int, int], object] | None = None,
) -> list[dict[str, float]]:
    """In place; the weights are those after the last step, whatever validation says on the way.

    Images come as in the run's own training, in the orders (and crops) of the epochs after its last.  The
    run's seed decides them, dropout and the draws of a converted model.
    """
    converted = conversion_of(model) is not None
    recipe = replace(
        recipe,
        optimizer=replace(recipe.optimizer, batch_size=settings.batch_size, accumulate=1),
        phases=replace(recipe.phases, draw="independent"),
        regularizer=replace(recipe.regularizer, normalised=True),
    )
    feed = Feed(recipe, data, device, torch.float32)
    objective = Objective(model, recipe, "gp" if converted else "kernel")
    optimiser = torch.optim.AdamW(parameter_groups(model, settings), lr=settings.learning_rate, fused=True)
    schedule = Schedule(recipe, feed.steps_per_epoch)
    first, total = schedule.total_steps, settings.epochs * feed.steps_per_epoch
    alpha = torch.tensor(settings.regularizer, device=device)
    rows, losses = [], []
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(recipe.seed)
        for done, (batch,) in enumerate(islice(feed.updates(first), total), 1):
            objective.train()
            for group in optimiser.param_groups:
                group["lr"] = settings.learning_rate * rate_share(done, total, settings.warmup)
            optimiser.zero_grad()
            seed = torch.tensor(schedule.controls(first + done - 1).seed, device=device)
            with deferred_checks() if device.type == "cuda" else nullcontext():
                loss, _ = objective(batch.inputs, batch.labels, batch.items, seed, alpha)
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
            optimiser.step()
            losses.append(loss.detach())
            if progress is not None:
                progress(done, total)
            if done % feed.steps_per_epoch == 0:
                epoch = recipe.epochs + done // feed.steps_per_epoch
                rows.append(asdict(_validated(model, validation, epoch, losses, device)))
                losses = []
    model.eval()
    return rows


def _validated(
    model: Transformer, validation: ItemSet, epoch: int, losses: list[torch.Tensor], device: torch.device
) -> ImageEpoch:
    if device.type == "cuda":
        check_health()
    mean = float(torch.stack(losses).mean())
    if not math.isfinite(mean):
        raise NumericalError(f"the loss of epoch {epoch} is {mean}: try a lower learning rate")
    raw = predict_items(ModelPredictor(model, draw="none"), validation, samples=0, seed=0, device=device)
    told = Predicted.from_logits(raw.logits, raw.labels)
    probs = told.prediction.probs
    return ImageEpoch(epoch, mean, accuracy(probs, told.known_labels), nll(probs, told.known_labels))


# The models of a run on images: the host, the host tuned on, and converted kinds tuned on.

PRIOR_SCALES = (0.01, 0.03, 0.1, 0.3, 1.0)  # of which one is chosen
CHOOSE_BY = 500  # validation images
EXAMPLE = 64  # training images at whose tokens inducing inputs start


@dataclass(frozen=True)
class ImageModels:
    """Those of one run.

    Args:
        run: its weights are the host's.
        weights: SHA-256 of these, whatever the file holds by now.
        sets: brings its images.
        root: folder of the datasets.
        further: how the host is tuned on.
        samples: draws by which a prior scale is chosen.
        seed: of these draws.
        device: where all of it happens.
        folder: where weights are kept, in the run's folder.
        progress: is told how many steps of how many are done.
        fresh: whether kept weights do not count.
    """

    run: Run
    weights: str
    sets: Callable[[], RunSets]
    root: StrPath | None
    further: Further
    samples: int
    seed: int
    device: torch.device
    folder: str
    progress: Callable[[int, int], object]
    fresh: bool = False

    def trained(self, training: Training) -> tuple[Transformer, dict[str, Any]]:
        """The model of a training, in evaluation mode, and what is to be told of it."""
        model = deepcopy(self.run.model).to(self.device).eval()
        if training == HOST:
            return model, {}
        kept, settings = KeptWeights(self.run.folder / self.folder), self._all_settings(training)
        told = None if self.fresh else kept.record(training.name, settings)
        if told is not None:
            if training.kind is not None:
                self._convert(model, training.kind, 1.0)
            model.load_state_dict(kept.tensors(training.name))
            return model.eval(), told
        start: dict[str, Any] = {}
        if training.kind is not None:
            model, start = self._converted(training.kind)
        epochs = tune_on(
            model, self.run.recipe, self._data, self.sets().chose_weights, self._schedule,
            device=self.device, progress=self.progress,
        )  # fmt: skip
        told = {**start, "epochs": epochs}
        kept.write(training.name, settings, model, told)
        return model, told

    def settings(self, training: Training) -> dict[str, Any]:
        """How a training goes on from the host; nothing for the host itself."""
        found = self.further.described(training)
        if found:
            found["further"]["batch_size"] = self._schedule.batch_size
        return found

    def data(self, training: Training) -> dict[str, str]:
        """What the items hold that it is tuned on and chosen by, whatever the limit of those judged."""
        if training == HOST:
            return {}
        sets = self.sets()
        return {"train": sets.train.digest, "chosen_on": sets.chose_weights.digest}

    def _all_settings(self, training: Training) -> dict[str, Any]:
        """Everything that its weights depend on."""
        host = {"host": self.weights, DATA: self.data(training)}
        chosen = training.kind is not None and self.further.prior_scale is None
        draws = {"samples": self.samples, "seed": self.seed} if chosen else {}
        return {**self.settings(training), **host, **draws}

    @property
    def _schedule(self) -> Finetuning:
        """As sentences are fine-tuned further, in batches of the run."""
        return self.further.after(Finetuning(batch_size=self.run.recipe.optimizer.batch_size))

    @cached_property
    def _data(self) -> TrainingData:
        return prepare(self.run.recipe, self.root).training

    def _converted(self, kind: str) -> tuple[Transformer, dict[str, Any]]:
        """At the prior scale wanted, or at the one whose draws are best before any tuning."""
        given = self.further.prior_scale
        scales = PRIOR_SCALES if given is None else (given,)
        models = {
            scale: self._convert(deepcopy(self.run.model).to(self.device).eval(), kind, scale)
            for scale in scales
        }
        if given is not None:
            return models[given], {"prior_scale": given}
        found = {scale: self._drawn_nll(ConvertedPredictor(model)) for scale, model in models.items()}
        best = min(found, key=lambda scale: found[scale])
        return models[best], {"prior_scale": best, "nll_before": {str(s): x for s, x in found.items()}}

    def _convert(self, model: Transformer, kind: str, scale: float) -> Transformer:
        options: dict[str, Any] = {"prior_scale": scale, **OPTIONS.get(kind, {})}
        if kind == "scgp":
            options["example"] = self.sets().train.inputs(0, EXAMPLE, self.device)
        return convert(model, kind, seed=self.run.recipe.seed, **options)

    def _drawn_nll(self, predictor: Predictor) -> float:
        """Of the draws at their best temperature."""
        some = self.sets().chose_weights.first(CHOOSE_BY)
        raw = predict_items(predictor, some, samples=self.samples, seed=self.seed, device=self.device)
        assert raw.labels is not None
        try:
            heat = fit_temperature(raw.logits, raw.labels)
        except NumericalError as error:
            error.add_note("no prior scale can be chosen by these draws: name it (--further-prior-scale)")
            raise
        told = Predicted.from_logits(raw.logits, raw.labels, temperature=heat)
        return nll(told.prediction.probs, told.known_labels)


# What is measured on images: labels where there are any, and how well strange images are told apart.

PARTS = ("clean", "corrupted", "ood")
METRICS = ("accuracy", "nll", "ece", "mce", "aurc")
SCORES = ("entropy", "mutual_information", "max_softmax")

Values = dict[str, dict[str, dict[str, float]]]  # by method, set and metric
Logits = Callable[[Predictor, int, ItemSet], Tensor]  # [S, n, C]
Counted = Callable[[int, int], object]


def part_values(
    part: str,
    sets: RunSets,
    sources: Sequence[Source],
    logits: Logits,
    device: torch.device,
    tell: Counted,
) -> tuple[Values, list[str]]:
    """Every number of a part for every method, and what is to be said about the sets."""
    return _PARTS[part](sets, sources, logits, device, tell)


def _clean(
    sets: RunSets, sources: Sequence[Source], logits: Logits, device: torch.device, tell: Counted
) -> tuple[Values, list[str]]:
    found: Values = {}
    for done, items in enumerate((sets.validation, sets.test)):
        for method, predicted in _predictions(sources, logits, items):
            found.setdefault(method, {})[items.name] = _scores(predicted)
        tell(done + 1, 2)
    return found, []


def _corrupted(
    sets: RunSets, sources: Sequence[Source], logits: Logits, device: torch.device, tell: Counted
) -> tuple[Values, list[str]]:
    assert sets.corrupted is not None  # images have corruptions
    source = sets.corrupted(device, None)
    records: list[Record] = []
    places = [(corruption, severity) for corruption in source.types for severity in source.severities]
    for done, (corruption, severity) in enumerate(places):
        items = sets.corrupted_items(source, corruption, severity)
        for method, predicted in _predictions(sources, logits, items):
            name = set_name(corruption, severity)
            records += [Record(name, method, metric, x) for metric, x in _scores(predicted).items()]
        tell(done + 1, len(places))
    found: Values = {}
    for record in (*corruption_means(records, CATEGORIES), *records):
        found.setdefault(record.predictor, {}).setdefault(record.set, {})[record.metric] = record.value
    return found, list(source.notes)


def _ood(
    sets: RunSets, sources: Sequence[Source], logits: Logits, device: torch.device, tell: Counted
) -> tuple[Values, list[str]]:
    outside, notes = load_outside(sets)
    inside = {method: _strangeness(p) for method, p in _predictions(sources, logits, sets.test)}
    found: Values = {method: {} for method in inside}
    for done, items in enumerate(outside):
        for method, predicted in _predictions(sources, logits, items):
            scores = _strangeness(predicted)
            found[method][items.name] = {
                f"auroc_{name}": auroc(inside[method][name], score) for name, score in scores.items()
            }
        tell(done + 1, len(outside))
    return found, list(notes)


_PARTS = {"clean": _clean, "corrupted": _corrupted, "ood": _ood}


def _predictions(sources: Sequence[Source], logits: Logits, items: ItemSet) -> list[tuple[str, Predicted]]:
    """Of all methods; what several share is predicted once."""
    found = []
    for source in sources:
        drawn = logits(source.predictor, source.samples, items)
        labels = None if items.labels is None else items.labels.to(drawn.device)
        found += [(variant.method, variant.predicted(drawn, labels)) for variant in source.variants]
    return found


def _scores(predicted: Predicted) -> dict[str, float]:
    probs, labels = predicted.prediction.probs, predicted.known_labels
    functions = metrics_of("labels")
    return {name: functions[name](probs, labels) for name in METRICS}


def _strangeness(predicted: Predicted) -> dict[str, Tensor]:
    """Scores that are larger for strange images, [n] each; without draws there is nothing to disagree."""
    told = predicted.prediction
    found = {"entropy": told.entropy, "max_softmax": 1 - told.confidence}
    several = told.drawn and told.samples > 1
    return found | ({"mutual_information": told.mutual_information} if several else {})


# The comparison on one run of images: what is finished is read, the rest computed part by part.

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
