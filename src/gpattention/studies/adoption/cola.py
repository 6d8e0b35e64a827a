"""Does adoption help a fine-tuned encoder?  CoLA, in and out of domain, over several seeds.

Each seed has its own split, head, order of sentences and draws.  All weights of the encoder are fine-tuned,
which makes the host and serves the methods of `methods.HOST_METHODS`.  Every converted kind starts from the
seed's host and is tuned on for a short while, and so is, as a control, the host itself; or kinds start from
the pretrained weights with the schedule of the host.  Temperatures, attached scales and everything else are
fitted on the validation part.
"""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpattention.adopt.attach import attach
from gpattention.adopt.convert import convert
from gpattention.checks import check_count
from gpattention.data.cola import load_cola
from gpattention.data.places import StrPath
from gpattention.evaluation.mc_dropout import MCDropout
from gpattention.evaluation.predictor import Predictor
from gpattention.metrics import metrics_of
from gpattention.metrics.checks import check_choice
from gpattention.studies.adoption.cells import DATA, Cell, Cells, KeptWeights, here
from gpattention.studies.adoption.encoder import (
    MINILM,
    Answering,
    ConvertedPredictor,
    Finetuning,
    Head,
    Sentences,
    build_classifier,
    encode_data,
    encoder_digest,
    encoder_folder,
    finetune,
    load_tokenizer,
    predict_sentences,
)
from gpattention.studies.adoption.methods import (
    ATTACHED,
    ATTACHED_GLOBAL,
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
    Variant,
    all_trainings,
    methods_of,
)
from gpattention.training import choose_device

# Fine-tuned weights: read where they are, else trained and kept.

EXAMPLE = 64  # sentences at whose tokens inducing inputs start
OPTIONS: dict[str, dict[str, Any]] = {"scgp": {"num_inducing": 32}}  # of a kind; the others have their own
Epochs = list[dict[str, float]]


@dataclass(frozen=True)
class Weights:
    """Those of one seed, in a folder.

    Args:
        folder: where they are kept.
        encoder: folder of the pretrained ones.
        parts: sentences by name.
        finetuning: from the pretrained weights.
        further: from the fine-tuned host.
        head: what is classified.
        seed: of head, order, dropout and draws.
        device: where all of it happens.
        progress: is told how many steps of how many are done.
        remade: where given, kept weights count only if they are in it, by folder and name of their training;
            those trained now are added.
    """

    folder: Path
    encoder: Path
    parts: dict[str, Sentences]
    finetuning: Finetuning
    further: Further = field(default_factory=Further)
    head: Head = "mean"
    seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    progress: Callable[[int, int], object] | None = None
    remade: set[Path] | None = None

    def trained(self, training: Training) -> tuple[nn.Module, Epochs]:
        """The model of a training, in evaluation mode, and what its epochs came to."""
        kept, settings = KeptWeights(self.folder), self._settings(training)
        old = self.remade is not None and self.folder / training.name not in self.remade
        before = None if old else kept.record(training.name, settings)
        model = self.start(training, known=before is not None)
        if before is not None:
            model.load_state_dict(kept.tensors(training.name))
            return model.eval(), before["epochs"]
        first = self.finetuning
        rows = finetune(
            model, self.parts["train"], self.parts["validation"],
            self.further.after(first) if training.further else first,
            seed=self.seed, device=self.device, progress=self.progress,
            epochs_before=first.epochs if training.further else 0,
        )  # fmt: skip
        epochs = [asdict(row) for row in rows]
        kept.write(training.name, settings, model, {"epochs": epochs})
        if self.remade is not None:
            self.remade.add(self.folder / training.name)
        return model.eval(), epochs

    def start(self, training: Training, *, known: bool = False) -> nn.Module:
        """The model before its own training; where its end is known, with any weights."""
        if training.further and not known:
            model, _ = self.trained(HOST)
        else:
            model = build_classifier(self.encoder, head=self.head, seed=self.seed).to(self.device)
        if training.kind is not None:
            self._convert(model, training)
        return model

    def _convert(self, model: nn.Module, training: Training) -> None:
        """In place; sparse kinds are shown sentences of all lengths."""
        kind, train = training.kind or "", self.parts["train"]
        options = dict(OPTIONS.get(kind, {}))
        if training.further:
            options["prior_scale"] = self.further.prior_scale
        if kind == "scgp":
            spread = torch.linspace(0, len(train) - 1, min(EXAMPLE, len(train))).long().tolist()
            options["example"] = train.inputs(spread, self.device)
        convert(model, kind, seed=self.seed, **options)

    def _settings(self, training: Training) -> dict[str, Any]:
        started = {"encoder": encoder_digest(self.encoder), "head": self.head}
        seen = {DATA: {name: self.parts[name].digest for name in ("train", "validation")}}
        return {**started, **asdict(self.finetuning), **self.further.described(training), **seen}


Progress = Callable[[str, int, int], object]  # what is done, how much of it, of how much
METRICS = ("accuracy", "mcc", "nll", "ece", "mce", "aurc")
SETS = ("validation", "test", "ood/out-of-domain")
FIT_BATCH = 40  # of which `fit` takes 24 to fit to and 16 to choose by
GROUP = "cola"


@dataclass(frozen=True)
class ColaSettings:
    """What is compared, and with how much work.

    Args:
        encoder: a folder, or package:NAME/inside.
        head: "mean" over the tokens, or the host's own on the "first" one.
        methods: rows of the table; see `methods_of`.
        seeds: each is a split, a head, an order and a stream of draws.
        finetuning: from the pretrained weights.
        further: from the fine-tuned host: of converted kinds and of their control.
        samples: draws of a prediction.
        root: folder of the datasets; the environment variable GPATTENTION_DATA if not given.
        runs: where weights and finished cells go.
        device: auto, cpu, cuda, ...
        subset: whether a CoLA of other than the published size is taken.
        fit: options of `Handle.fit`.
        finished: whether to read what is finished and compute nothing.
        fresh: whether to train and compute everything anew, finished or not.
    """

    encoder: str = MINILM
    head: Head = "mean"
    methods: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    finetuning: Finetuning = field(default_factory=Finetuning)
    further: Further = field(default_factory=Further)
    samples: int = 10
    root: StrPath | None = None
    runs: StrPath = "runs/adopt-cola"
    device: torch.device | str = "auto"
    subset: bool = False
    fit: dict[str, Any] = field(default_factory=dict)
    finished: bool = False
    fresh: bool = False

    def __post_init__(self) -> None:
        if self.finished and self.fresh:
            raise ValueError("expected finished (read) or fresh (compute everything anew), got both")
        object.__setattr__(self, "samples", check_count("samples", self.samples, least=1))
        if not self.seeds:
            raise ValueError("expected at least one of seeds, got none")
        if self.further.prior_scale is None:
            raise ValueError("expected further prior_scale to be a number for sentences, got None")
        for method in self.methods:
            check_choice("method", method, tuple(n for one in all_trainings() for n in one.methods))


def adopt_cola(settings: ColaSettings, progress: Progress | None = None) -> list[Cell]:
    """Every cell that is asked for, computed or read; first the host of every seed, then kind by kind."""
    work = _Work(settings, progress or (lambda what, done, total: None))
    wanted = settings.methods or methods_of(CONVERSIONS[:2])
    found: list[Cell] = []
    for training in all_trainings():
        asked = [name for name in training.methods if name in wanted]
        for seed in settings.seeds if asked else ():
            found += work.cells_of(seed, training, asked)
    if not found:
        raise ValueError(f"expected finished cells in {settings.runs}, got none: leave out --finished")
    return found


class _Work:
    """Reads what is finished and computes the rest."""

    def __init__(self, settings: ColaSettings, tell: Progress) -> None:
        self._settings, self._tell = settings, tell
        self._device = choose_device(settings.device)
        self._folder = encoder_folder(settings.encoder)
        self._data: dict[int, dict[str, Sentences]] = {}
        self._kept: list[tuple[Predictor, Sentences, Tensor]] = []  # on validation, of the model at hand
        if not settings.finished:
            load_cola(settings.root, form="raw", subset=settings.subset)  # a missing folder costs no work
        self._remade: set[Path] | None = set() if settings.fresh else None
        self._digests: dict[int, dict[str, str] | None] = {}  # by seed, of what its sentences hold
        self._unchecked: dict[Any, Any] = {}  # what finished cells say of sentences that are not here
        self._described = {
            "encoder": encoder_digest(self._folder),
            "head": settings.head,
            "samples": settings.samples,
            "fit": settings.fit,
            **asdict(settings.finetuning),
        }

    def cells_of(self, seed: int, training: Training, names: Sequence[str]) -> list[Cell]:
        """Of one training."""
        cells = self._cells(seed, training)
        found = {name: cells.read(seed, name, unchecked=self._unchecked) for name in names}
        missing = [name for name, cell in found.items() if cell is None]
        if missing and not self._settings.finished:
            found |= {cell.method: cell for cell in self._computed(seed, training, missing)}
        stale = [name for name in missing if self._settings.finished and cells.has(seed, name)]
        if stale:
            told = f"seed {seed}: of other weights or data, so left out: {', '.join(stale)}"
            warnings.warn(told, RuntimeWarning, stacklevel=3)
        return [cell for cell in found.values() if cell is not None]

    def _cells(self, seed: int, training: Training) -> Cells:
        """Those of the host know nothing of what comes after it."""
        given, further = self._settings, self._settings.further.described(training)
        told = {**self._described, **further, DATA: self._digests_of(seed)}
        return Cells(Path(given.runs), told, fresh=given.fresh)

    def _digests_of(self, seed: int) -> dict[str, str] | None:
        if seed not in self._digests:
            parts = here(lambda: self._parts(seed), needed=not self._settings.finished)
            self._digests[seed] = None if parts is None else {name: x.digest for name, x in parts.items()}
        return self._digests[seed]

    def _computed(self, seed: int, training: Training, names: Sequence[str]) -> list[Cell]:
        parts, label = self._parts(seed), f"seed {seed} {training.name}"
        weights = Weights(
            Path(self._settings.runs) / f"seed{seed}", self._folder, parts, self._settings.finetuning,
            self._settings.further, self._settings.head, seed, self._device,
            progress=lambda done, total: self._tell(f"{label} fine-tuning", done, total),
            remade=self._remade,
        )  # fmt: skip
        model, history = weights.trained(training)
        written = []
        self._kept = []
        for source, notes, begin in self._sources(model, training, parts, names, seed, label):
            logits = {
                name: self._logits(source.predictor, parts[name], source.samples, seed, f"{label} {name}")
                for name in SETS
            }
            seconds = time.perf_counter() - begin
            for variant in source.variants:
                values = {name: _scores(variant, logits[name], parts[name].labels) for name in SETS}
                detail = {**variant.detail, "training": history, "notes": notes}
                cell = Cell(GROUP, seed, variant.method, values, detail, seconds)
                self._cells(seed, training).write(cell)
                written.append(cell)
        return written

    def _sources(
        self,
        model: nn.Module,
        training: Training,
        parts: dict[str, Sentences],
        names: Sequence[str],
        seed: int,
        label: str,
    ) -> Iterator[tuple[Source, list[str], float]]:
        """One after the other, each with what is to be said and the time at which its fit began."""
        validation = parts["validation"]
        fitting = Fitting(
            lambda predictor, samples: self._logits(
                predictor, validation, samples, seed, f"{label} validation"
            ),
            validation.labels,
            self._settings.samples,
        )

        def attached() -> list[Source]:
            if ATTACHED not in names and ATTACHED_GLOBAL not in names:
                return []
            data = validation.shuffled(FIT_BATCH, seed=seed, device=self._device)
            return fitting.attached(
                attach(model), data, names, seed=seed,
                progress=lambda stage, done, total: self._tell(f"{label} fit, {stage}", done, total),
                **self._settings.fit,
            )  # fmt: skip

        def pair(predictor: Predictor, name: str, heated: str, samples: int | None = None) -> list[Source]:
            return fitting.with_and_without(predictor, (name, heated), names, samples=samples)

        plain, own, mean = Answering.predictor(model), training.name, training.with_mean
        steps: list[Callable[[], list[Source]]]
        if training == HOST:
            steps = [
                lambda: pair(plain, PLAIN, TEMPERATURE, 0),
                lambda: pair(MCDropout(Answering(model)), MC_DROPOUT, MC_DROPOUT_TEMPERATURE),
                attached,
            ]
        elif training.kind is None:
            steps = [lambda: pair(plain, own, f"{own}+temperature", 0)]
        else:
            steps = [
                lambda: pair(ConvertedPredictor(model), own, f"{own}+temperature"),
                lambda: pair(plain, mean, f"{mean}+temperature", 0),
            ]
        for step in steps:
            begin = time.perf_counter()
            for source in (found for found in step() if found.variants):
                yield source, list(fitting.notes), begin

    def _logits(self, predictor: Predictor, part: Sentences, samples: int, seed: int, label: str) -> Tensor:
        """What was predicted to fit to is not predicted again to be judged."""
        for before, of, logits in self._kept:
            if before is predictor and of is part:
                return logits
        found = predict_sentences(
            predictor, part, samples=samples, seed=seed, device=self._device,
            progress=lambda done, total: self._tell(label, done, total),
        )  # fmt: skip
        if part.name == "validation":
            self._kept.append((predictor, part, found))
        return found

    def _parts(self, seed: int) -> dict[str, Sentences]:
        if seed not in self._data:
            data = load_cola(self._settings.root, seed, form="raw", subset=self._settings.subset)
            self._data = {seed: encode_data(data, load_tokenizer(self._folder))}
        return self._data[seed]


def _scores(variant: Variant, logits: Tensor, labels: Tensor) -> dict[str, float]:
    told = variant.predicted(logits, labels)
    functions = metrics_of("labels")
    return {name: functions[name](told.prediction.probs, told.known_labels) for name in METRICS}
