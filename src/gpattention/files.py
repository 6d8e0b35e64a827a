"""Reading files with checks, and writing them completely or not at all.

A file that is wrong raises a `ValueError`, one that cannot be read an `OSError`.  Text and file names that
somebody else wrote pass through `visible` before they are shown.
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
from typing import IO, Any, cast
from uuid import uuid4

from gpattention.checks import nearest

try:
    import fcntl
except ImportError:  # Windows lacks these locks, and does not remove open files
    fcntl = None  # type: ignore[assignment]

StrPath = str | os.PathLike[str]
LARGEST = 1 << 26  # bytes of a file that is read as a whole
LARGEST_TOML = 1 << 20  # smaller, as people write TOML by hand
DEEPEST = 100  # levels of nested lists and tables, as code that walks through them may recurse
_DOTS = 200  # in one line of TOML: parsing takes quadratic time in the length of a dotted key
_TRIES = 100  # attempts to create a temporary file that no clean-up removes
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{32}")  # names of the unfinished files of `replaced`


def visible(text: object, keep: str = "") -> str:
    r"""The text with every unprintable character (control, direction of writing, lone surrogate) escaped.

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
    """The path of a file that exists; errors name the argument."""
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"expected {argument} to be a file, got {file}")
    return file


def nearest_path(path: Path, suffix: str = "", *, beside: Iterable[str] = ()) -> str:
    """The end of an error about a missing path: the most similar name in its folder or one `beside` it."""
    folders = [folder for name in (".", *beside) if (folder := path.parent / name).is_dir()]
    found = {each.name: each for folder in folders for each in sorted(folder.glob(f"[!.]*{suffix}"))}
    near = nearest(path.name, found)
    return "" if near is None else f"; did you mean {found[near]}?"


def file_digest(file: Path) -> str:
    """SHA-256 of the contents of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def digest(*parts: str | bytes) -> str:
    """SHA-256 of the parts and their lengths, so that ("ab", "c") and ("a", "bc") differ."""
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "little"))
        total.update(data)
    return total.hexdigest()


def decoded(content: bytes, where: str | Path) -> str:
    """Decode UTF-8 without a byte-order mark; an error names the line of a wrong byte."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{where}, line {line}: expected text in UTF-8, got the byte 0x{content[error.start]:02x}"
        ) from None


def read_text(path: Path) -> str:
    """The text of a file."""
    return decoded(_content(path), path)


def read_json(path: Path, *, nonfinite: bool = False) -> Any:
    """The value in a JSON file; NaN and infinities only if `nonfinite`, as in measured numbers."""
    return parse_json(_content(path), path, nonfinite=nonfinite)


def read_object(path: Path, *, nonfinite: bool = False) -> dict[str, Any]:
    """The object in a JSON file."""
    found = read_json(path, nonfinite=nonfinite)
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected an object, got {type(found).__name__}")
    return found


def parse_json(content: str | bytes, where: str | Path, *, nonfinite: bool = False) -> Any:
    """The value of JSON text; `where` names its source in errors."""
    hooks: dict[str, Any] = {} if nonfinite else {"parse_constant": _finite, "parse_float": _finite}
    text = decoded(content, f"{where} is not JSON") if isinstance(content, bytes) else content
    try:
        return _shallow(json.loads(text, object_pairs_hook=_distinct, **hooks))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {_reason(error)}") from None


def read_toml(path: Path) -> dict[str, Any]:
    """The table in a TOML file."""
    return parse_toml(_content(path, LARGEST_TOML), path)


def parse_toml(content: str | bytes, where: str | Path) -> dict[str, Any]:
    """The table of TOML text; `where` names its source in errors."""
    text = decoded(content, f"{where} is not TOML") if isinstance(content, bytes) else content
    for number, line in enumerate(text.split("\n"), start=1):
        if line.count(".") > _DOTS:
            raise ValueError(f"{where} is not TOML: more than {_DOTS} dots in line {number}")
    try:
        return cast(dict[str, Any], _shallow(tomllib.loads(text)))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not TOML: {_reason(error)}") from None


def _content(path: Path, limit: int = LARGEST) -> bytes:
    if not path.is_file():  # reading a pipe might never end
        raise FileNotFoundError(f"no file {path}")
    if path.stat().st_size > limit:
        raise ValueError(f"{path}: expected at most {limit} bytes, got {path.stat().st_size}")
    return path.read_bytes()


def _reason(error: Exception) -> str:
    deep = isinstance(error, RecursionError)
    return f"more than {DEEPEST} lists and tables in each other" if deep else str(error)


def _shallow(value: Any) -> Any:
    """The value, if its lists and tables are not nested too deeply."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(DEEPEST):
        inside = (each.values() if isinstance(each, dict) else each for each in level)
        level = [inner for each in inside for inner in each if isinstance(inner, dict | list)]
        if not level:
            return value
    raise RecursionError


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"expected every key once, got {twice!r} twice")
    return table


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"expected finite numbers, got {text}")
    return number


def write_atomically(path: Path, content: bytes) -> None:
    """Write the whole file or leave it as it was, even if the process is killed or the disk is full.

    Raises:
        OSError: it cannot be written; the error names the file.
    """
    with replaced(path) as file:
        file.write(content)


@contextmanager
def replaced(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file that replaces `path` when the block ends, and is removed if the block fails.

    Its name is `.NAME.HEX`, and its writer locks it: a file without a lock was left behind by a killed
    process, and `remove_leftovers` removes it.
    """
    temporary: Path | None = None
    try:
        temporary, file = _open_temporary(path)
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if fcntl is not None:  # while it is locked, or a clean-up could remove it
                os.replace(temporary, path)
        if fcntl is None:
            os.replace(temporary, path)
    except BaseException as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None:  # name the file, not the temporary one
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def remove_leftovers(folder: Path) -> list[Path]:
    """Remove the unfinished files of killed processes in a folder and below it; returns their paths."""
    files = (Path(place) / name for place, _, names in os.walk(folder) for name in names)  # follows no link
    ours = (file for file in files if _TEMPORARY.fullmatch(file.name) and not file.is_symlink())
    return sorted(file for file in ours if _remove_unlocked(file))


def make_folder(folder: Path) -> Path:
    """Create a folder and its parents if they are missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        file = next(place for place in (folder, *folder.parents) if place.exists() and not place.is_dir())
        raise NotADirectoryError(f"expected {file} to be a folder, got a file") from None
    return folder


def _open_temporary(path: Path) -> tuple[Path, IO[bytes]]:
    """A locked temporary file beside `path`."""
    for _ in range(_TRIES):
        # not by mkstemp, whose files only their owner may read: so would be the model
        temporary = path.with_name(f".{path.name[:40]}.{uuid4().hex}")
        file = temporary.open("xb")
        if not _lock(file) or temporary.exists():
            return temporary, file
        file.close()  # a clean-up removed it before it was locked
    raise OSError(errno.EBUSY, f"{_TRIES} temporary files were removed before they could be locked")


def _lock(file: IO[bytes], *, wait: bool = True) -> bool:
    """Lock a file; False if somebody else holds the lock, or the system has no locks."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove_unlocked(file: Path) -> bool:
    """Remove a temporary file unless its writer holds it; whether it was removed."""
    try:
        if fcntl is None:
            file.unlink()
            return True
        with file.open("r+b") as held:
            if not _lock(held, wait=False):
                return False
            file.unlink()
    except OSError:  # finished meanwhile, or not ours to remove
        return False
    return True
