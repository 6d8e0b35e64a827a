"""`regenerated.json` says that a folder was regenerated, from what and how."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

from gpattention.reading import read_object

RECORD = "regenerated.json"


def open_record(folder: Path, described: dict[str, Any], recipe: dict[str, Any]) -> dict[str, Any]:
    """The record of the folder: the one there if it has the same recipe, else a new one, written at once."""
    path = folder / RECORD
    if path.is_file():
        record = _read(path)
        found = record.get("recipe")
        if not isinstance(found, dict) or not isinstance(record.get("files"), dict):
            raise ValueError(f"{path}: expected an object with the objects 'recipe' and 'files'")
        for field in sorted({*recipe, *found}):
            if found.get(field) != recipe.get(field):
                raise ValueError(
                    f"{path}: expected {field} {recipe.get(field)!r}, got {found.get(field)!r}; "
                    "regenerate with another recipe into another folder"
                )
        return record
    folder.mkdir(parents=True, exist_ok=True)
    strangers = sorted(each.name for each in folder.glob("*.npy"))
    if strangers:
        raise ValueError(
            f"folder: expected one with a {RECORD} or without arrays, got {folder} with "
            f"{', '.join(strangers)}; these may be the published ones"
        )
    record = described | {"recipe": recipe, "files": {}}
    write_record(folder, record)
    return record


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Replace the record as a whole."""
    text = json.dumps(record, indent=2) + "\n"
    write_whole(folder / RECORD, lambda part: _write_text(part, text))


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a file beside `path`, then move it there; a failure leaves no trace."""
    part = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        write(part)
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _write_text(path: Path, text: str) -> None:
    path.write_text(text)


def _read(path: Path) -> dict[str, Any]:
    return read_object(path)
