"""A model's folder: `config.json` and `model.safetensors`, whole or not at all."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from gpattention.models.config import FORMAT_VERSION

CONVERSION_FILE = "conversion.json"  # written beside the two by whoever converts a model's attention


def save_folder(folder: Path, model: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write both files, each atomically; the weights first, so that a config implies weights.

    The record of an earlier model's conversion goes: it would be done again on this one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    described = {"format_version": FORMAT_VERSION, "model": model, "config": config}
    text = json.dumps(described, indent=2) + "\n"  # raises before anything is written
    write_atomically(folder / "model.safetensors", save(plain))
    write_atomically(folder / "config.json", text.encode())
    (folder / CONVERSION_FILE).unlink(missing_ok=True)


def load_folder(folder: Path, model: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors of a model of the class `model`; every defect is told by file and field."""
    described = _read_config(folder / "config.json")
    version, name = described.get("format_version"), described.get("model")
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{folder / 'config.json'}: expected format_version {FORMAT_VERSION}, got {version!r}"
        )
    if name != model:
        raise ValueError(f"{folder / 'config.json'}: expected model {model!r}, got {name!r}")
    unknown = sorted(set(described) - {"format_version", "model", "config"})
    if unknown or not isinstance(described.get("config"), dict):
        raise ValueError(f"{folder / 'config.json'}: expected a 'config' and no {unknown or 'other keys'}")
    weights = folder / "model.safetensors"
    if not weights.is_file():
        raise FileNotFoundError(f"no file {weights}")
    try:
        return described["config"], load_file(weights)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{weights} is not a whole safetensors file: {error}") from error


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    try:
        described = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(described, dict):
        raise ValueError(f"{path}: expected an object, got {type(described).__name__}")
    return described


def write_atomically(path: Path, content: bytes) -> None:
    """All of it or nothing, also when the process is killed half-way."""
    # not mkstemp's: that is for its owner's eyes alone, and so would be the model
    temporary = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
