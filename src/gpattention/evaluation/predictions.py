"""Sets of items, predictors, and predictions that are kept in files.

A test set under 19 corruptions at 5 severities has a million images: they stay 8-bit, and only the chunk that
is predicted next is normalised.  Predictions are kept in the folder of the run, so that one pass of the model
serves every suite and every resumption.  A file holds the logits of all draws of one set together with
everything they depend on, including the version of this library, and is used only if all of that is equal.  A
damaged file is refused, since nobody knows what else happened to the folder.
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
from gpattention.models.prediction import Items
from gpattention.ops import NOISE_LAYOUT

# Sets of items


@dataclass(frozen=True, eq=False)
class ItemSet:
    """n items of one kind, under the name that records use for them.

    Args:
        name: validation, test, ood/NAME, corrupted/TYPE/SEVERITY.
        stored: 8-bit images [n, C, H, W], for example, or the tensors of encoded sentences, [n, ...] each.
        labels: [n] int64; None if the items belong to no class.
        prepare: turns stored items into inputs of the model, on the same device; None if they are inputs.
        words: of sentences, for people and for other encoders.

    Raises:
        ValueError: the number of labels or words differs from the number of items.
    """

    name: str
    stored: Inputs
    labels: Tensor | None = None
    prepare: Callable[[Any], Inputs] | None = None
    words: tuple[tuple[str, ...], ...] | None = None

    def __post_init__(self) -> None:
        count = count_items(self.stored)
        for what, many in (("labels", self.labels), ("words", self.words)):
            if many is not None and len(many) != count:
                raise ValueError(f"expected {what} of {count} items in {self.name}, got {len(many)}")

    def __len__(self) -> int:
        return count_items(self.stored)

    def chunks(self, size: int, device: torch.device) -> Iterator[tuple[int, Inputs]]:
        """The number of the first item and the inputs, on `device`, of at most `size` items at a time."""
        for start in range(0, len(self), size):
            yield start, self.inputs(start, start + size, device)

    def inputs(self, start: int, end: int, device: torch.device) -> Inputs:
        """Model inputs of the items from `start` up to `end`."""
        some = take(self.stored, slice(start, end), device)
        return some if self.prepare is None else self.prepare(some)

    def select(self, items: Tensor) -> "ItemSet":
        """The set of these items, in this order."""
        return replace(
            self,
            stored=take(self.stored, items, device_of(self.stored)),
            labels=None if self.labels is None else self.labels[items.to(self.labels.device)],
            words=None if self.words is None else tuple(self.words[i] for i in items.tolist()),
        )

    def first(self, count: int | None) -> "ItemSet":
        """The first `count` items, or all."""
        return self if count is None or count >= len(self) else self.select(torch.arange(count))

    def spread(self, count: int | None) -> "ItemSet":
        """`count` items spread evenly over the set, or all: number i n / count, rounded down, for i = 0, ...

        Meant for sets with an order, such as a folder that holds one class after the other.
        """
        if count is None or count >= len(self):
            return self
        return self.select(torch.arange(count) * len(self) // count)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything but the model that a prediction depends on: items, labels, preparation."""
        first = self.inputs(0, 1, torch.device("cpu"))  # changes with the moments of the normalisation
        labels = {} if self.labels is None else {"labels": self.labels}
        return _digest({**_named("items", self.stored), **labels}, _named("first", first))


def _named(name: str, inputs: Inputs) -> dict[str, Tensor]:
    return {name: inputs} if isinstance(inputs, Tensor) else dict(inputs)


def _digest(*groups: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, types, shapes and numbers, each group in the order of its names."""
    total = hashlib.sha256()
    for name, x in (pair for group in groups for pair in sorted(group.items())):
        total.update(f"{name} {x.dtype} {tuple(x.shape)}\n".encode())
        # the bytes themselves, so that NaN and -0.0 count, and without a copy
        total.update(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def row_digests(stored: Inputs) -> list[bytes]:
    """A fingerprint of 16 bytes for each item, by which it is found in another set."""
    tensors = [x for _, x in sorted(_named("items", stored).items())]
    rows = [x.detach().cpu().contiguous().flatten(1).view(torch.uint8).numpy() for x in tensors]
    return [
        hashlib.blake2b(b"".join(part[i].tobytes() for part in rows), digest_size=16).digest()
        for i in range(len(rows[0]))
    ]


# Predictors


class Predictor(Protocol):
    """Anything that predicts items as `gpattention.models.predict` does: a model or one of its competitors.

    The draws of an item depend only on `seed` and on its number, `first_item` + position.  `samples=0` is
    the prediction without draws.  With `batch_size=None` the predictor decides how many rows run at once.
    """

    def predict(
        self, inputs: Inputs, *, samples: int = ..., seed: int = ..., batch_size: int | None = ...,
        first_item: int = ..., progress: Progress | None = ...,
    ) -> Prediction:  # fmt: skip
        """The prediction of every item."""
        ...


@dataclass(frozen=True)
class Request:
    """The checked arguments of `predict`."""

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
    """Base of our own predictors: one signature, whose arguments reach `_predict` as a `Request`."""

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
            progress: called with the amount done and the total.

        Returns:
            The prediction, on the device of the inputs.

        Raises:
            ValueError: samples, seed or first_item out of their range.
        """
        return self._predict(inputs, Request(samples, seed, batch_size, first_item, progress))

    @abstractmethod
    def _predict(self, inputs: Inputs, request: Request) -> Prediction: ...


def check_predictor(predictor: object) -> None:
    """Require a `predict` method; models have to be wrapped first."""
    if not callable(getattr(predictor, "predict", None)):
        got = f"{type(predictor).__name__}: wrap a model as ModelPredictor(model)"
        raise ValueError(f"expected a predictor with a `predict` method, got {got}")


def not_fitted(what: object) -> RuntimeError:
    """The error for using something before fitting it."""
    return RuntimeError(f"{type(what).__name__} is not fitted yet: call fit(inputs, labels) first")


# Predictions


@dataclass(frozen=True, eq=False)
class Predicted:
    """A prediction of one set together with what is known about its items; made by `from_logits`.

    Attributes:
        prediction: in float64.
        labels: [B]; None if the items belong to no class.
        layer_variance: [B, L] mean over heads and real tokens, for each layer.
        temperature: the divisor of the logits, one number or one for each item [B].
        signals: of one pass of the model without draws, where a suite needs them.
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
        """The same draws at another temperature, one number or one for each item [B]."""
        logits = self.prediction.logits * _divisor(self.temperature, self.prediction.logits)
        found = Predicted.from_logits(logits, self.labels, self.layer_variance, temperature)
        return replace(found, signals=self.signals)

    def __len__(self) -> int:
        return len(self.prediction)

    @property
    def known_labels(self) -> Tensor:
        """The labels, for suites that need them.  [B]"""
        if self.labels is None:
            raise ValueError("expected items with labels, got none")
        return self.labels


def _divisor(temperature: float | Tensor | None, logits: Tensor) -> float | Tensor:
    """The divisor of logits [S, B, C]: a number, or [B, 1]."""
    if not isinstance(temperature, Tensor):
        return 1.0 if temperature is None else temperature
    if temperature.shape != logits.shape[1:2]:
        raise ValueError(
            f"expected temperature to be a number or [{logits.shape[1]}], one per item, "
            f"got shape {tuple(temperature.shape)}"
        )
    return temperature.to(logits.device, torch.float64)[:, None]


@dataclass(frozen=True, eq=False)
class RawPrediction(Items):
    """The output of a predictor and the labels, as files keep them."""

    logits: Tensor  # [S, B, C] float32
    labels: Tensor | None = None  # [B] int64
    layer_variance: Tensor | None = None  # [B, L] float32
    _axes = {"logits": 1}  # noqa: RUF012

    def __len__(self) -> int:
        return self.logits.shape[1]


CHUNK = 2000  # items that are prepared at once


def predict_items(
    predictor: Predictor, items: ItemSet, *, samples: int, seed: int, device: torch.device,
    batch_size: int | None = None, progress: Progress | None = None,
) -> RawPrediction:  # fmt: skip
    """Predict a whole set in chunks.

    The noise of an item depends on its number in the set, so neither chunks nor `batch_size` change a draw.
    On a GPU nothing is read back before a chunk ends.

    Args:
        predictor: a model or one of its competitors.
        items: the set.
        samples: draws of every item.
        seed: of the draws.
        device: of the model; inputs are prepared there.
        batch_size: rows that run at once.
        progress: called with thousandths of items, those done and all.

    Returns:
        Logits of all draws, and variances of the layers if the predictor has them, on `device`.
    """
    logits, variances = list[Tensor](), list[Tensor]()
    # on a CPU an error can name the factorisation that failed at once
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
    """Means over heads, real tokens and dimensions, for every layer with a variance.  [B, L]

    Variances are [B, H, N] or [B, H, N, D] and 0 at padded tokens, where `padding` [B, N] is True.
    """
    known = [token_means(variance) for variance in variances if variance is not None]
    if not known:
        return None
    each = torch.stack(known, 1)  # [B, L, N]
    if padding is None:
        return each.mean(-1)
    # the sum is one over real tokens, as variances are 0 at padding
    return each.sum(-1) / (~padding).sum(-1, keepdim=True).clamp_min(1).to(each)


def token_means(variance: Tensor) -> Tensor:
    """Mean over heads, and over dimensions if there are any.  [B, N]"""
    return (variance.mean(-1) if variance.ndim == 4 else variance).mean(1)


def padding_of(inputs: Inputs) -> Tensor | None:
    """True at padded tokens of sentences; None for images, which have none.  [B, N]"""
    if not isinstance(inputs, Mapping) or "tokens" not in inputs:
        return None
    padding = inputs.get("padding_mask")
    return inputs["tokens"] == 0 if padding is None else padding


# Predictions in files

FORMAT = "gpattention-prediction-1"


class DamagedPredictionError(ValueError):
    """A file of the cache whose content is not what the file says it is."""

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
    config: str  # class and options of the model, as JSON, since the weights do not hold them
    items: str  # SHA-256 of the set
    version: str  # of this library
    fitted: str = ""  # options of a last layer and SHA-256 of the items it was fitted to
    noise: int = NOISE_LAYOUT


class PredictionCache:
    """Files `FOLDER/PREDICTOR/SET.safetensors`, each complete or absent.

    Args:
        folder: created with the first file.
        fresh: whether to ignore and replace files that this object has not written, damaged or not.
    """

    def __init__(self, folder: str | Path, *, fresh: bool = False) -> None:
        self.folder = Path(folder)
        self._fresh = fresh
        self._written: set[Path] = set()

    def path(self, name: str, key: CacheKey) -> Path:
        """The file of the set `name`, in which slashes separate folders."""
        parts = (key.predictor, *f"{name}.safetensors".split("/"))
        return self.folder.joinpath(*(check_name("the name of a predictor or set", part) for part in parts))

    def read(self, name: str, key: CacheKey) -> RawPrediction | None:
        """The prediction of the set, or None if there is none with this key."""
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
        """Store a prediction, which replaces an older one."""
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
