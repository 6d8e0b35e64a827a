"""Studies on top of runs and results: the paper's tables, plans of many runs, sweeps, adoption, benchmarks.

Nothing but the command line imports them.
"""

from pathlib import Path

from gpattention.files import make_folder, write_atomically

__all__ = ["write_file"]


def write_file(file: Path, content: bytes) -> Path:
    """Write a file as a whole, in a folder that is made if it is not there.

    Args:
        file: where to.
        content: all of it.

    Returns:
        The file.
    """
    make_folder(file.parent)
    write_atomically(file, content)
    return file
