"""The whole state of a run in one file: written atomically, checked on reading, never a pickle.

A checkpoint is a safetensors file: model and optimiser tensors, random-number states, and the counters
as JSON in its metadata, with a SHA-256 of everything beside it (`<name>.sha256`).
"""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from gpattention.models.storage import make_folder, write_atomically
from gpattention.reading import parse_json

FORMAT = "gpattention-checkpoint-1"
_NAME = re.compile(r"step-(\d{8})\.safetensors$")


class CheckpointError(RuntimeError):
    """A checkpoint that is truncated, altered, or not one of this run."""


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by name, and everything else a run needs to go on, as JSON values."""

    tensors: dict[str, Tensor]
    state: dict[str, Any]


def write_checkpoint(folder: Path, step: int, checkpoint: Checkpoint, *, keep: int) -> Path:
    """Write `step-` and eight digits; only then drop the oldest beyond `keep`."""
    make_folder(folder)
    path = folder / f"step-{step:08d}.safetensors"
    tensors = {name: x.detach().cpu().contiguous() for name, x in checkpoint.tensors.items()}
    content = save(tensors, {"format": FORMAT, "state": json.dumps(checkpoint.state)})
    digest = hashlib.sha256(content).hexdigest()
    write_atomically(path.with_suffix(".sha256"), f"{digest}\n".encode())
    write_atomically(path, content)
    for old in list_checkpoints(folder)[:-keep]:
        old.unlink(missing_ok=True)
        old.with_suffix(".sha256").unlink(missing_ok=True)
    return path


def read_checkpoint(path: Path) -> Checkpoint:
    """Everything, or `CheckpointError` with the reason."""
    if not path.is_file():
        raise CheckpointError(f"no checkpoint {path}")
    digest_file = path.with_suffix(".sha256")
    if not digest_file.is_file():
        raise CheckpointError(f"{path} has no checksum {digest_file.name}: not written by this library")
    content = path.read_bytes()
    # whatever bytes a damaged one holds, it is not equal then
    found, wanted = (
        hashlib.sha256(content).hexdigest(),
        digest_file.read_bytes().decode(errors="replace").strip(),
    )
    if found != wanted:
        raise CheckpointError(
            f"{path} is truncated or altered: its checksum is {found[:12]}..., "
            f"{digest_file.name} says {wanted[:12]!r}..."
        )
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise CheckpointError(f"{path}: expected format {FORMAT}, got {metadata.get('format')!r}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            return Checkpoint(tensors, parse_json(metadata["state"], path, nonfinite=True))
    except (SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path} is not a checkpoint of this library: {error}") from error


def list_checkpoints(folder: Path) -> list[Path]:
    """Oldest first."""
    return sorted(path for path in folder.glob("step-*.safetensors") if _NAME.search(path.name))
