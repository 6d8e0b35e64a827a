"""Text, JSON and TOML from files that anybody may have written: what they hold, or an error with the file.

All readers of such files in the library go through here.  Work and memory are bounded by the size of a file,
which has a limit, whatever it says; what is wrong with it is a `ValueError`, or an `OSError` where it cannot
be read.
"""

import json
import math
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

LARGEST = 1 << 26  # bytes of a file that is read as a whole
LARGEST_TOML = 1 << 20  # it is written by hand
DEEPEST = 100  # lists and tables in each other: whoever goes through them later may recurse
_DOTS = 200  # of a line of TOML: time is quadratic in the length of a key


def decoded(content: bytes, where: str | Path) -> str:
    """Text in UTF-8, without the mark that some editors begin it with; a wrong byte is told with its line."""
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
    return (
        f"more than {DEEPEST} lists and tables in each other"
        if isinstance(error, RecursionError)
        else str(error)
    )


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
