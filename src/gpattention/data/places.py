"""Where data lies on this machine, and what may be the name of a file or folder."""

import os
from pathlib import Path

VARIABLE = "GPATTENTION_DATA"
LONGEST = 255  # bytes of a name, as file systems have it

StrPath = str | os.PathLike[str]


class NoRootError(ValueError):
    """Nobody says where the datasets are."""


def data_root(root: StrPath | None = None) -> Path:
    """The folder that holds the datasets: `root`, or what the environment variable GPATTENTION_DATA says."""
    given = os.environ.get(VARIABLE) if root is None else root
    if not given:
        raise NoRootError(
            "expected the folder of the datasets, got none: name it with root (--data on the command line) "
            f"or the environment variable {VARIABLE}"
        )
    folder = Path(given).expanduser()
    if not folder.is_dir():
        where = (
            f"the environment variable {VARIABLE}" if root is None else "root (--data on the command line)"
        )
        raise FileNotFoundError(f"expected {where} to be a folder, got {folder}")
    return folder


def check_name(field: str, name: object) -> str:
    """The name, if it can be that of one file or folder, on every system, and can be shown as it is.

    It has no separator (slash or backslash), no sign that is not printed (control characters, line breaks,
    marks that turn the direction of writing, bytes that are no text), no dot at its beginning, as our files
    that are not whole yet have, and no space around it nor dot at its end, which some systems drop.
    """
    fits = (
        isinstance(name, str)
        and name.isprintable()
        and not set(name) & {"/", "\\"}
        and name == name.strip(" ").rstrip(".")
        and not name.startswith(".")
        and 0 < len(name.encode()) <= LONGEST
    )
    if not fits:
        shown = repr(name) if len(repr(name)) <= 100 else f"{repr(name)[:100]}..."
        raise ValueError(
            f"expected {field} to be the name of one file or folder (1 to {LONGEST} bytes, no slash, "
            f"backslash or control character, no dot or space at an end), got {shown}"
        )
    assert isinstance(name, str)
    return name


def existing_file(file: Path) -> Path:
    """The path, if a file is there."""
    if not file.is_file():
        raise FileNotFoundError(f"expected a file {file}, got nothing: is the dataset complete?")
    return file
