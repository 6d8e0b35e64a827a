"""One process at a time writes into the folder of a run."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)  # of some network file systems


class RunInUseError(OSError):
    """Another process is training in this folder."""


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Keep other processes out of a folder; a process that dies gives it free."""
    with (folder / LOCK).open("ab") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunInUseError(
                    f"{folder} is being trained by another process: wait for it, or stop it first"
                ) from None
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
        yield
