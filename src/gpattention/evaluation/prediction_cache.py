"""Predictions kept in a run's folder, so that one pass of the model serves every suite and every resumption.

A file holds the logits of all draws of one set.  It says what they depend on, the version of this library
included, and is taken only if all of that is the same; a damaged one is refused, since what else happened to
the folder is unknown.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from gpattention.data.places import check_name
from gpattention.gp.noise import NOISE_LAYOUT
from gpattention.models.storage import make_folder, write_atomically

FORMAT = "gpattention-prediction-1"


class DamagedPredictionError(ValueError):
    """A file of the cache that does not hold what it says."""


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


@dataclass(frozen=True, eq=False)
class RawPrediction:
    """What a predictor gave, and what it was about."""

    logits: Tensor  # [S, B, C] float32
    labels: Tensor | None = None  # [B] int64
    layer_variance: Tensor | None = None  # [B, L] float32

    def to(self, device: torch.device | str) -> "RawPrediction":
        """The same on another device."""
        moved = (None if x is None else x.to(device) for x in (self.labels, self.layer_variance))
        return RawPrediction(self.logits.to(device), *moved)

    def _tensors(self) -> dict[str, Tensor]:
        told = {"logits": self.logits, "labels": self.labels, "gp_variance": self.layer_variance}
        return {name: x.detach().cpu().contiguous() for name, x in told.items() if x is not None}


class PredictionCache:
    """Files `FOLDER/PREDICTOR/SET.safetensors`, each whole or not there.

    With `fresh`, files that were not written by this object are passed over and replaced, damaged or not.
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
                    raise _damaged(path, f"its format is {metadata.get('format')!r}, not {FORMAT}")
                if json.loads(metadata["key"]) != asdict(key):
                    return None
                tensors = {each: file.get_tensor(each) for each in file.keys()}  # noqa: SIM118 - no mapping
        except (SafetensorError, OSError, KeyError, json.JSONDecodeError) as error:
            raise _damaged(path, str(error)) from error
        if "logits" not in tensors or metadata.get("sha256") != _digest(tensors):
            raise _damaged(path, "its numbers do not have the checksum that it states")
        return RawPrediction(tensors["logits"], tensors.get("labels"), tensors.get("gp_variance"))

    def write(self, name: str, key: CacheKey, prediction: RawPrediction) -> Path:
        """Keep a prediction in place of an older one."""
        path = self.path(name, key)
        tensors = prediction._tensors()
        metadata = {"format": FORMAT, "key": json.dumps(asdict(key)), "sha256": _digest(tensors)}
        make_folder(path.parent)
        write_atomically(path, save(tensors, metadata))
        self._written.add(path)
        return path


def file_digest(path: str | Path) -> str:
    """SHA-256 of a file."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(tensors: Mapping[str, Tensor]) -> str:
    total = hashlib.sha256()
    for name, x in sorted(tensors.items()):
        total.update(f"{name} {x.dtype} {tuple(x.shape)}\n".encode())
        total.update(x.contiguous().view(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def _damaged(path: Path, reason: str) -> DamagedPredictionError:
    return DamagedPredictionError(
        f"{path} is damaged: {reason}. Evaluate with --fresh (fresh=True) to predict anew, or remove it"
    )
