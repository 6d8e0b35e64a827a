"""A model's folder: `config.json` and `model.safetensors`, whole or not at all, as every file of ours."""

import errno
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

from safetensors.torch import load_file, save
from torch import Tensor

from gpattention.models.config import FORMAT_VERSION
from gpattention.reading import read_object

try:
    import fcntl
except ImportError:  # Windows has no such locks, and removes no file that is open
    fcntl = None  # type: ignore[assignment]

_TRIES = 100  # temporary files that may be removed one after the other before anything is written
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{32}")  # what `replaced` calls a file that is not whole yet
CONVERSION_FILE = "conversion.json"  # written beside the two by whoever converts a model's attention


def save_folder(folder: Path, model: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write both files, each atomically; the weights first, so that a config implies weights.

    The record of an earlier model's conversion goes: it would be done again on this one.
    """
    make_folder(folder)
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
    """All of it or nothing, also when the process is killed half-way or the disk is full.

    Raises:
        OSError: with the name of the file, whatever could not be done.
    """
    with replaced(path) as file:
        file.write(content)


@contextmanager
def replaced(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that takes the place of `path` when the block ends, and is gone when the block fails.

    Until then it is called `.NAME.HEX` and held by a lock: one that nobody holds was left by a process that
    was killed, and `remove_leftovers` removes it.
    """
    temporary: Path | None = None
    try:
        temporary, file = _begun(path)
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if fcntl is not None:  # while it is held, or it could be taken for a leftover
                os.replace(temporary, path)
        if fcntl is None:
            os.replace(temporary, path)
    except BaseException as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None:  # names what was to be written, not how
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def remove_leftovers(folder: Path) -> list[Path]:
    """Remove what killed processes left half written in a folder and below; never a living one's."""
    removed = []
    for place, _, names in os.walk(folder):  # follows no link
        for name in names:
            file = Path(place) / name
            if _TEMPORARY.fullmatch(name) and not file.is_symlink() and _is_abandoned(file):
                removed.append(file)
    return sorted(removed)


def make_folder(folder: Path) -> Path:
    """The folder, made with those above it where it is missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        file = next(place for place in (folder, *folder.parents) if place.exists() and not place.is_dir())
        raise NotADirectoryError(f"expected {file} to be a folder, got a file") from None
    return folder


def _begun(path: Path) -> tuple[Path, IO[bytes]]:
    """A temporary file beside `path`, held."""
    for _ in range(_TRIES):
        # not mkstemp's: that is for its owner's eyes alone, and so would be the model
        temporary = path.with_name(f".{path.name[:40]}.{uuid4().hex}")
        file = temporary.open("xb")
        if not _take(file) or temporary.exists():
            return temporary, file
        file.close()  # it was removed as a leftover between its making and its lock: the next is another one
    raise OSError(errno.EBUSY, f"{_TRIES} temporary files were removed before they could be locked")


def _take(file: IO[bytes], *, wait: bool = True) -> bool:
    """Hold a file; False where file systems have no locks, or where somebody else holds it."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_abandoned(file: Path) -> bool:
    """Remove a temporary file that nobody holds; whether that was so."""
    try:
        if fcntl is None:
            file.unlink()
            return True
        with file.open("r+b") as held:
            if not _take(held, wait=False):
                return False
            file.unlink()
    except OSError:  # it has become whole meanwhile, or is not ours to remove
        return False
    return True
