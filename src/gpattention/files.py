"""Files read whole and checked, and written whole or not at all.

Whatever is wrong with a file that is read is a `ValueError`, or an `OSError` where it cannot be read.  What
somebody else wrote, or called a file, is shown as `visible`.
"""

import errno
import hashlib
import json
import math
import os
import re
import tomllib
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

from gpattention.checks import nearest

try:
    import fcntl
except ImportError:  # Windows has no such locks, and removes no file that is open
    fcntl = None  # type: ignore[assignment]

StrPath = str | os.PathLike[str]
LARGEST = 1 << 26  # bytes of a file that is read as a whole
LARGEST_TOML = 1 << 20  # it is written by hand
DEEPEST = 100  # lists and tables in each other: whoever goes through them later may recurse
_DOTS = 200  # of a line of TOML: time is quadratic in the length of a key
_TRIES = 100  # temporary files that may be removed one after the other before anything is written
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{32}")  # what `replaced` calls a file that is not whole yet


def visible(text: object, keep: str = "") -> str:
    r"""Every sign that is not printed (control, direction of writing, half a character) as its escape.

    >>> visible("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    plain = str(text)
    if plain.isprintable():
        return plain
    return "".join(
        letter
        if letter.isprintable() or letter in keep or unicodedata.category(letter) == "Zs"
        else letter.encode("unicode_escape").decode()
        for letter in plain
    )


def existing_file(argument: str, path: StrPath) -> Path:
    """The path, if a file is there."""
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"expected {argument} to be a file, got {file}")
    return file


def nearest_path(path: Path, suffix: str = "", *, beside: Iterable[str] = ()) -> str:
    """What an error about a missing path ends with: the nearest name in its folder, or in one `beside` it."""
    folders = [folder for name in (".", *beside) if (folder := path.parent / name).is_dir()]
    found = {each.name: each for folder in folders for each in sorted(folder.glob(f"[!.]*{suffix}"))}
    near = nearest(path.name, found)
    return "" if near is None else f"; did you mean {found[near]}?"


def file_digest(file: Path) -> str:
    """SHA-256 of the contents; the name and the folder do not count."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def digest(*parts: str | bytes) -> str:
    """SHA-256 of the parts in order; ("ab", "c") and ("a", "bc") differ."""
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "little"))
        total.update(data)
    return total.hexdigest()


def decoded(content: bytes, where: str | Path) -> str:
    """Text in UTF-8, without the mark that some editors begin it with; a wrong byte is named by its line."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{where}, line {line}: expected text in UTF-8, got the byte 0x{content[error.start]:02x}"
        ) from None


def read_text(path: Path) -> str:
    """All of a text file."""
    return decoded(_content(path), path)


def read_json(path: Path, *, nonfinite: bool = False) -> Any:
    """What a JSON file holds; NaN and infinite numbers only where asked for, as in measured figures."""
    return parse_json(_content(path), path, nonfinite=nonfinite)


def read_object(path: Path, *, nonfinite: bool = False) -> dict[str, Any]:
    """The same of a file that must hold an object."""
    found = read_json(path, nonfinite=nonfinite)
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected an object, got {type(found).__name__}")
    return found


def parse_json(content: str | bytes, where: str | Path, *, nonfinite: bool = False) -> Any:
    """JSON that came with something else; `where` is how an error calls it."""
    hooks: dict[str, Any] = {} if nonfinite else {"parse_constant": _finite, "parse_float": _finite}
    text = decoded(content, f"{where} is not JSON") if isinstance(content, bytes) else content
    try:
        return _shallow(json.loads(text, object_pairs_hook=_distinct, **hooks))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {_reason(error)}") from None


def read_toml(path: Path) -> dict[str, Any]:
    """What a TOML file holds."""
    return parse_toml(_content(path, LARGEST_TOML), path)


def parse_toml(content: str | bytes, where: str | Path) -> dict[str, Any]:
    """TOML that came with something else."""
    text = decoded(content, f"{where} is not TOML") if isinstance(content, bytes) else content
    for number, line in enumerate(text.split("\n"), start=1):
        if line.count(".") > _DOTS:
            raise ValueError(f"{where} is not TOML: more than {_DOTS} dots in line {number}")
    try:
        found: dict[str, Any] = _shallow(tomllib.loads(text))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not TOML: {_reason(error)}") from None
    return found


def _content(path: Path, limit: int = LARGEST) -> bytes:
    if not path.is_file():  # a pipe might never end
        raise FileNotFoundError(f"no file {path}")
    if path.stat().st_size > limit:
        raise ValueError(f"{path}: expected at most {limit} bytes, got {path.stat().st_size}")
    return path.read_bytes()


def _reason(error: Exception) -> str:
    deep = isinstance(error, RecursionError)
    return f"more than {DEEPEST} lists and tables in each other" if deep else str(error)


def _shallow(found: Any) -> Any:
    level = [found] if isinstance(found, dict | list) else []
    for _ in range(DEEPEST):
        inside = (each.values() if isinstance(each, dict) else each for each in level)
        level = [inner for each in inside for inner in each if isinstance(inner, dict | list)]
        if not level:
            return found
    raise RecursionError


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"expected every key once, got {twice!r} twice")
    return found


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"expected finite numbers, got {text}")
    return number


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
