"""Studies on top of runs and results: the paper's tables, plans of many runs, sweeps, adoption, benchmarks.

Only the command line imports them.
"""

from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path

from gpattention.files import StrPath, make_folder, write_atomically
from gpattention.runs import find_runs

__all__ = ["published", "runs_below", "write_file"]


def write_file(file: Path, content: bytes) -> Path:
    """Write a whole file, and make its folder if it is missing.

    Args:
        file: path of the file.
        content: its content.

    Returns:
        The path of the file.
    """
    make_folder(file.parent)
    write_atomically(file, content)
    return file


def published(name: str) -> str:
    """Read a file of `published/`: what the paper prints, and the tables of studies.

    Args:
        name: name of the file.

    Returns:
        Its text.
    """
    return (files("gpattention.studies") / "published" / name).read_text(encoding="utf-8")


def runs_below(folders: Iterable[StrPath]) -> list[Path]:
    """Find the runs with a model in folders or below.

    Args:
        folders: run folders, or folders of runs.

    Returns:
        The folder of each run once, however often it is named.

    Raises:
        FileNotFoundError: a folder has no run with a model.
    """
    found: dict[Path, Path] = {}
    for folder in map(Path, folders):
        runs = [folder] if (folder / "recipe.json").is_file() else find_runs(folder)
        if not runs:
            raise FileNotFoundError(f"expected a run in {folder} or below, got none with a model")
        for run in runs:
            found.setdefault(run.resolve(), run)
    return list(found.values())
