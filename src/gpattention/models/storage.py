"""A model's folder: `config.json` and `model.safetensors`, whole or not at all."""

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from safetensors.torch import load_file, save
from torch import Tensor

from gpattention.models.config import FORMAT_VERSION
from gpattention.reading import read_object

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
    described = read_object(folder / "config.json")
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
    return described["config"], read_tensors(folder / "model.safetensors")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, whose numbers must be finite."""
    tensors = load_tensors(path)
    check_finite(path, tensors)
    return tensors


def load_tensors(path: Path) -> dict[str, Tensor]:
    """The same, whatever the numbers are."""
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    try:
        return load_file(path)
    except Exception as error:  # its header is JSON and names types: it can be wrong in many ways
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error


def check_finite(where: str | Path, tensors: Mapping[str, Tensor], infinite: Collection[str] = ()) -> None:
    """`ValueError` with the first tensor that is NaN somewhere, or infinite unless it is named as one."""
    for name, x in tensors.items():
        if x.is_meta or not (x.is_floating_point() or x.is_complex()):
            continue
        x = x.float() if x.itemsize == 1 else x  # of 8 bits: nothing is known of them but their values
        bad = x.isnan() if name in infinite else ~x.isfinite()
        if bool(bad.any()):
            raise ValueError(
                f"{where}: expected finite numbers, got {x[bad][0].item()} in {name} "
                f"({int(bad.sum())} of {x.numel()} numbers)"
            )


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
