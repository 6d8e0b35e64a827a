"""The settings of an attached model in a folder: numbers as safetensors, what they belong to as JSON.

The files have names of their own, so that they may lie beside the model's.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from gpattention.adopt.frames import Frame
from gpattention.adopt.settings import Settings
from gpattention.models.storage import check_finite, make_folder, write_atomically
from gpattention.reading import read_json

FORMAT = "gpattention-attached-1"
RECORD_FILE = "attached.json"
NUMBERS_FILE = "attached.safetensors"
_NUMBERS = ("scale", "noise", "power")  # tensors of the settings; the others are plain
_PLAIN = ("draws", "temperature", "residual")
_KEYS = {"format", "sites", "framed", "sha256", *_PLAIN}


def save_settings(folder: Path, sites: Sequence[str], settings: Settings) -> None:
    """Write both files, each in one piece; the record last, and it says which numbers are its own."""
    tensors: dict[str, Tensor] = {name: getattr(settings, name) for name in _NUMBERS}
    for place, frame in enumerate(settings.frames):
        if frame is not None:
            tensors |= {f"frames.{place}.{name}": x for name, x in vars(frame).items()}
    # clones, since safetensors refuses tensors that share memory, as maps that change nothing may
    numbers = save({name: x.detach().cpu().clone().contiguous() for name, x in tensors.items()})
    record = {
        "format": FORMAT,
        "sites": list(sites),
        **{name: getattr(settings, name) for name in _PLAIN},
        "framed": [frame is not None for frame in settings.frames],
        "sha256": hashlib.sha256(numbers).hexdigest(),
    }
    text = json.dumps(record, indent=2) + "\n"  # raises before anything is written
    make_folder(folder)
    write_atomically(folder / NUMBERS_FILE, numbers)
    write_atomically(folder / RECORD_FILE, text.encode())


def load_settings(folder: Path) -> tuple[list[str], Settings]:
    """The names of the sites and their settings; every defect is told by file and field."""
    record, path = _read_record(folder / RECORD_FILE), folder / NUMBERS_FILE
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest != record["sha256"]:
        raise ValueError(
            f"{path}: expected the numbers that {RECORD_FILE} was written with, sha256 {record['sha256']}, "
            f"got {digest}: save the settings again"
        )
    try:
        tensors = load(content)
        frames = tuple(
            Frame(**{name: tensors[f"frames.{place}.{name}"] for name in Frame.__dataclass_fields__})
            if framed
            else None
            for place, framed in enumerate(record["framed"])
        )
        numbers = {name: tensors[name] for name in _NUMBERS}
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"{path} does not hold the settings of an attached model: {error}") from error
    check_finite(path, tensors)
    plain = {name: record[name] for name in _PLAIN}
    return record["sites"], Settings(**{**numbers, **plain, "draws": tuple(plain["draws"])}, frames=frames)


def _read_record(path: Path) -> dict[str, Any]:
    record = read_json(path)
    found = record.get("format") if isinstance(record, dict) else type(record).__name__
    if found != FORMAT:
        raise ValueError(f"{path}: expected format {FORMAT!r}, got {found!r}")
    differ = sorted(set(record) ^ _KEYS)
    if differ:
        raise ValueError(
            f"{path}: expected the keys {', '.join(sorted(_KEYS))}, got a difference in {differ}"
        )
    return record
