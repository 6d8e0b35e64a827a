"""What is predicted, by what, and what comes out: sets of items, predictors, and predictions kept in files.

A test set under 19 corruptions of 5 severities is a million images: they stay 8-bit, and only the chunk that
is predicted next is normalised.  Predictions are kept in a run's folder, so that one pass of the model serves
every suite and every resumption.  A file holds the logits of all draws of one set.  It says what they depend
on, the version of this library included, and is taken only if all of that is the same; a damaged one is
refused, since what else happened to the folder is unknown.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from gpattention.checks import check_count, check_labels, check_name, check_whole
from gpattention.files import make_folder, write_atomically
from gpattention.gp import check_health, deferred_checks
from gpattention.models import Prediction, Signals
from gpattention.models.predict import Inputs, Progress, count_items, device_of, take
from gpattention.ops import NOISE_LAYOUT

# Sets of items


def _unchanged(stored: Inputs) -> Inputs:
    """Of items that are stored as a model's inputs."""
    return stored


@dataclass(frozen=True, eq=False)
class ItemSet:
    """n items of one kind under the name that their records will have.

    Args:
        name: validation, test, ood/NAME, corrupted/TYPE/SEVERITY.
        stored: such as 8-bit images [n, C, H, W], or the tensors of encoded sentences, [n, ...] each.
        labels: [n] int64; None where items belong to no class.
        prepare: turns some stored items into a model's inputs, on their device.
        words: of sentences, for people and other encoders.

    Raises:
        ValueError: labels or words of another number of items.
    """

    name: str
    stored: Inputs
    labels: Tensor | None = None
    prepare: Callable[[Any], Inputs] = _unchanged
    words: tuple[tuple[str, ...], ...] | None = None

    def __post_init__(self) -> None:
        count = count_items(self.stored)
        for what, many in (("labels", self.labels), ("words", self.words)):
            if many is not None and len(many) != count:
                raise ValueError(f"expected {what} of {count} items in {self.name}, got {len(many)}")

    def __len__(self) -> int:
        return count_items(self.stored)

    def chunks(self, size: int, device: torch.device) -> Iterator[tuple[int, Inputs]]:
        """Number of the first item, and model inputs on `device`, of at most `size` items in a row."""
        for start in range(0, len(self), size):
            yield start, self.inputs(start, start + size, device)

    def inputs(self, start: int, end: int, device: torch.device) -> Inputs:
        """Model inputs of the items from `start` up to `end`."""
        if isinstance(self.stored, Tensor):
            return self.prepare(self.stored[start:end].to(device))
        return self.prepare({name: x[start:end].to(device) for name, x in self.stored.items()})

    def select(self, items: Tensor) -> "ItemSet":
        """These items of it, in that order."""
        return replace(
            self,
            stored=take(self.stored, items, device_of(self.stored)),
            labels=None if self.labels is None else self.labels[items.to(self.labels.device)],
            words=None if self.words is None else tuple(self.words[i] for i in items.tolist()),
        )

    def first(self, count: int | None) -> "ItemSet":
        """The first so many, or all."""
        return self if count is None or count >= len(self) else self.select(torch.arange(count))

    def spread(self, count: int | None) -> "ItemSet":
        """So many, evenly spread over all of them, or all: item i n / count, rounded down, for i = 0, 1, ...

        For sets in some order, such as a folder that holds one class after the other.
        """
        if count is None or count >= len(self):
            return self
        return self.select(torch.arange(count) * len(self) // count)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything a prediction depends on but the model: items, labels, preparation."""
        first = self.inputs(0, 1, torch.device("cpu"))  # differs with the moments of normalisation
        labels = {} if self.labels is None else {"labels": self.labels}
        return _digest({**_named("items", self.stored), **labels}, _named("first", first))


def _named(name: str, inputs: Inputs) -> dict[str, Tensor]:
    return {name: inputs} if isinstance(inputs, Tensor) else dict(inputs)


def _digest(*groups: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and numbers, each group in the order of its names."""
    total = hashlib.sha256()
    for name, x in (pair for group in groups for pair in sorted(group.items())):
        total.update(f"{name} {x.dtype} {tuple(x.shape)}\n".encode())
        # of the bytes, so that NaN and -0.0 count, and without a copy
        total.update(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def row_digests(stored: Inputs) -> list[bytes]:
    """A fingerprint of every item by itself, to find it in another set.  n of 16 bytes"""
    tensors = [x for _, x in sorted(_named("items", stored).items())]
    rows = [x.detach().cpu().contiguous().flatten(1).view(torch.uint8).numpy() for x in tensors]
    return [
        hashlib.blake2b(b"".join(part[i].tobytes() for part in rows), digest_size=16).digest()
        for i in range(len(rows[0]))
    ]


# Predictors


class Predictor(Protocol):
    """Anything that predicts items as `gpattention.models.predict` does: a model or one of its competitors.

    The draws of an item depend on `seed` and its number `first_item` + position alone; `samples=0` is
    the prediction without draws.  `batch_size=None` leaves the rows that run at once to the predictor.
    """

    def predict(
        self, inputs: Inputs, *, samples: int = ..., seed: int = ..., batch_size: int | None = ...,
        first_item: int = ..., progress: Progress | None = ...,
    ) -> Prediction:  # fmt: skip
        """The prediction of every item."""
        ...


@dataclass(frozen=True)
class Request:
    """What `predict` was asked for, checked."""

    samples: int = 10
    seed: int = 0
    batch_size: int | None = None
    first_item: int = 0
    progress: Progress | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples", check_count("samples", self.samples, least=0))
        object.__setattr__(self, "seed", check_whole("seed", self.seed))
        object.__setattr__(self, "first_item", check_count("first_item", self.first_item, least=0))


class BasePredictor(ABC):
    """What our own predictors share: one signature, whose arguments travel as a `Request`."""

    def predict(
        self, inputs: Inputs, *, samples: int = 10, seed: int = 0, batch_size: int | None = None,
        first_item: int = 0, progress: Progress | None = None,
    ) -> Prediction:  # fmt: skip
        """Predict every item.

        Args:
            inputs: a tensor or a mapping of tensors, items first.
            samples: draws of every item; 0 is the prediction without draws.
            seed: of the draws.
            batch_size: rows that run at once; 256, or 2000 on a GPU, if not given.
            first_item: number of the first item, for callers that bring the items in parts.
            progress: called with what is done, and with all there is.

        Returns:
            The prediction, where the inputs lie.

        Raises:
            ValueError: samples, seed or first_item that cannot be.
        """
        return self._predict(inputs, Request(samples, seed, batch_size, first_item, progress))

    @abstractmethod
    def _predict(self, inputs: Inputs, request: Request) -> Prediction: ...


def check_predictor(predictor: object) -> None:
    """Something with a `predict` method; models are wrapped first."""
    if not callable(getattr(predictor, "predict", None)):
        got = f"{type(predictor).__name__}: wrap a model as ModelPredictor(model)"
        raise ValueError(f"expected a predictor with a `predict` method, got {got}")


def not_fitted(what: object) -> RuntimeError:
    """The error of using before fitting."""
    return RuntimeError(f"{type(what).__name__} is not fitted yet: call fit(inputs, labels) first")


# Predictions


@dataclass(frozen=True, eq=False)
class Predicted:
    """A predictor's prediction of one set beside what is known of its items; made by `from_logits`.

    Attributes:
        prediction: in float64.
        labels: [B]; None where the items belong to no class.
        layer_variance: [B, L] mean over heads and real tokens, layer by layer.
        temperature: what the logits were divided by, or [B] item by item.
        signals: what one pass of the model without draws says, where a suite asks for it.
    """

    prediction: Prediction
    labels: Tensor | None = None
    layer_variance: Tensor | None = None
    temperature: float | Tensor | None = None
    signals: Signals | None = None

    @classmethod
    def from_logits(
        cls, logits: Tensor, labels: Tensor | None = None, layer_variance: Tensor | None = None,
        temperature: float | Tensor | None = None,
    ) -> "Predicted":  # fmt: skip
        """From the untempered logits of S draws: [S, B, C], with labels [B] and variances [B, L]."""
        exact = logits.double() / _divisor(temperature, logits)
        prediction = Prediction.from_logits(exact)
        if labels is not None:
            check_labels(labels, len(prediction), prediction.classes)
            labels = labels.to(logits.device, torch.int64)
        return cls(prediction, labels, layer_variance, temperature)

    def tempered(self, temperature: float | Tensor) -> "Predicted":
        """The same at another temperature, of all items or [B], from the same draws."""
        logits = self.prediction.logits * _divisor(self.temperature, self.prediction.logits)
        found = Predicted.from_logits(logits, self.labels, self.layer_variance, temperature)
        return replace(found, signals=self.signals)

    def __len__(self) -> int:
        return len(self.prediction)

    @property
    def known_labels(self) -> Tensor:
        """The labels, where a suite cannot do without them.  [B]"""
        if self.labels is None:
            raise ValueError("expected items with labels, got none")
        return self.labels


def _divisor(temperature: float | Tensor | None, logits: Tensor) -> float | Tensor:
    """What logits [S, B, C] are divided by: a number, or [B, 1]."""
    if not isinstance(temperature, Tensor):
        return 1.0 if temperature is None else temperature
    if temperature.shape != logits.shape[1:2]:
        raise ValueError(
            f"expected temperature to be a number or [{logits.shape[1]}], one per item, "
            f"got shape {tuple(temperature.shape)}"
        )
    return temperature.to(logits.device, torch.float64)[:, None]


@dataclass(frozen=True, eq=False)
class RawPrediction:
    """What a predictor gave, and what it was about: as files keep it."""

    logits: Tensor  # [S, B, C] float32
    labels: Tensor | None = None  # [B] int64
    layer_variance: Tensor | None = None  # [B, L] float32

    def to(self, device: torch.device | str) -> "RawPrediction":
        """The same on another device."""
        moved = (None if x is None else x.to(device) for x in (self.labels, self.layer_variance))
        return RawPrediction(self.logits.to(device), *moved)


CHUNK = 2000  # items that are prepared at once


def predict_items(
    predictor: Predictor, items: ItemSet, *, samples: int, seed: int, device: torch.device,
    batch_size: int | None = None, progress: Progress | None = None,
) -> RawPrediction:  # fmt: skip
    """Predict a whole set in chunks.

    An item's noise belongs to its number in the set, so neither chunks nor `batch_size` change a draw.  On a
    GPU nothing is read back before the end of a chunk.

    Args:
        predictor: a model or one of its competitors.
        items: to be predicted.
        samples: draws of every item.
        seed: of the draws.
        device: the model's, where the inputs are prepared.
        batch_size: rows that run at once.
        progress: called with thousandths of items done, and in all.

    Returns:
        Logits of all draws, and the layers' variances where the predictor has them, on `device`.
    """
    logits, variances = list[Tensor](), list[Tensor]()
    # on a CPU a failed factorisation can say at once which one it was
    with deferred_checks() if device.type == "cuda" else nullcontext():
        for start, inputs in items.chunks(CHUNK, device):

            def part(done: int, total: int, start: int = start) -> None:
                assert progress is not None
                here = min(CHUNK, len(items) - start)
                progress(1000 * start + 1000 * here * done // total, 1000 * len(items))

            found = predictor.predict(
                inputs, samples=samples, seed=seed, batch_size=batch_size, first_item=start,
                progress=None if progress is None else part,
            )  # fmt: skip
            logits.append(found.logits.float())
            means = None if found.variances is None else layer_means(found.variances, padding_of(inputs))
            variances += [] if means is None else [means.float()]
    if device.type == "cuda":
        check_health()
    return RawPrediction(
        torch.cat(logits, 1),
        None if items.labels is None else items.labels.to(device),
        torch.cat(variances) if len(variances) == len(logits) else None,
    )


def layer_means(variances: Sequence[Tensor | None], padding: Tensor | None) -> Tensor | None:
    """Means over heads, real tokens and dimensions of those layers that have a variance.  [B, L]

    Variances are [B, H, N] or [B, H, N, D], and 0 at padded tokens; `padding` [B, N] is True there.
    """
    known = [token_means(variance) for variance in variances if variance is not None]
    if not known:
        return None
    each = torch.stack(known, 1)  # [B, L, N]
    if padding is None:
        return each.mean(-1)
    # variances are 0 at padding, so that the sum is of real tokens alone
    return each.sum(-1) / (~padding).sum(-1, keepdim=True).clamp_min(1).to(each)


def token_means(variance: Tensor) -> Tensor:
    """Mean over heads, and over dimensions where there are any.  [B, N]"""
    return (variance.mean(-1) if variance.ndim == 4 else variance).mean(1)


def padding_of(inputs: Inputs) -> Tensor | None:
    """Which tokens of sentences are padding; images have none.  [B, N]"""
    if not isinstance(inputs, Mapping) or "tokens" not in inputs:
        return None
    padding = inputs.get("padding_mask")
    return inputs["tokens"] == 0 if padding is None else padding


# Predictions in files

FORMAT = "gpattention-prediction-1"


class DamagedPredictionError(ValueError):
    """A file of the cache that does not hold what it says."""

    def __init__(self, path: Path, reason: object) -> None:
        super().__init__(
            f"{path} is damaged: {reason}. Evaluate with --fresh (fresh=True) to predict anew, or remove it"
        )


@dataclass(frozen=True)
class CacheKey:
    """Everything that the logits of a set depend on."""

    predictor: str
    samples: int
    seed: int
    draw: str  # none, independent, joint, dropout, ...
    model: str  # SHA-256 of its weights
    config: str  # what the weights do not say: the model's class and options, as JSON
    items: str  # SHA-256 of the set
    version: str  # of this library
    fitted: str = ""  # of a last layer: its options, and SHA-256 of the items that it was fitted to
    noise: int = NOISE_LAYOUT


class PredictionCache:
    """Files `FOLDER/PREDICTOR/SET.safetensors`, each whole or not there.

    Args:
        folder: made when something is written.
        fresh: whether files that this object did not write are passed over and replaced, damaged or not.
    """

    def __init__(self, folder: str | Path, *, fresh: bool = False) -> None:
        self.folder = Path(folder)
        self._fresh = fresh
        self._written: set[Path] = set()

    def path(self, name: str, key: CacheKey) -> Path:
        """Where the set `name` lies; what is before its slashes are folders."""
        parts = (key.predictor, *f"{name}.safetensors".split("/"))
        return self.folder.joinpath(*(check_name("the name of a predictor or set", part) for part in parts))

    def read(self, name: str, key: CacheKey) -> RawPrediction | None:
        """The prediction of the set, or None where there is none of this key."""
        path = self.path(name, key)
        if not path.is_file() or (self._fresh and path not in self._written):
            return None
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != FORMAT:
                    message = f"its format is {metadata.get('format')!r}, not {FORMAT}"
                    raise DamagedPredictionError(path, message)
                if json.loads(metadata["key"]) != asdict(key):
                    return None
                tensors = {each: file.get_tensor(each) for each in file.keys()}  # noqa: SIM118 - no mapping
        except (SafetensorError, OSError, KeyError, json.JSONDecodeError) as error:
            raise DamagedPredictionError(path, error) from error
        if "logits" not in tensors or metadata.get("sha256") != _digest(tensors):
            raise DamagedPredictionError(path, "its numbers do not have the checksum that it states")
        return RawPrediction(tensors["logits"], tensors.get("labels"), tensors.get("gp_variance"))

    def write(self, name: str, key: CacheKey, prediction: RawPrediction) -> Path:
        """Keep a prediction in place of an older one."""
        path = self.path(name, key)
        stored = {
            "logits": prediction.logits, "labels": prediction.labels, "gp_variance": prediction.layer_variance
        }  # fmt: skip
        tensors = {name: x.detach().cpu().contiguous() for name, x in stored.items() if x is not None}
        metadata = {"format": FORMAT, "key": json.dumps(asdict(key)), "sha256": _digest(tensors)}
        make_folder(path.parent)
        write_atomically(path, save(tensors, metadata))
        self._written.add(path)
        return path
