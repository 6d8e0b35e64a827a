"""Where data lies on this machine."""

import os
from pathlib import Path

VARIABLE = "GPATTENTION_DATA"

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


def existing_file(file: Path) -> Path:
    """The path, if a file is there."""
    if not file.is_file():
        raise FileNotFoundError(f"expected a file {file}, got nothing: is the dataset complete?")
    return file
