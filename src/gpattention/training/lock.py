"""One process at a time writes into the folder of a run."""

import errno
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
PATIENCE = 0.5  # seconds: somebody may be looking whether the folder is in use
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)  # of some network file systems


class RunInUseError(OSError):
    """Another process is training in this folder."""


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Keep other processes out of a folder; a process that dies gives it free."""
    with (folder / LOCK).open("ab") as file:
        if fcntl is not None:
            _take(file, folder)
        yield


def in_use(folder: Path) -> bool | None:
    """Whether a process trains in a folder; None where nobody can say."""
    if fcntl is None:
        return None
    try:
        with (folder / LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # given free when the file is closed
    except BlockingIOError:
        return True
    except FileNotFoundError:  # begun before there were locks, or not begun
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return None
    return False


def _take(file: IO[bytes], folder: Path) -> None:
    start = time.monotonic()
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() - start > PATIENCE:
                raise RunInUseError(
                    f"{folder} is being trained by another process: wait for it, or stop it first"
                ) from None
            time.sleep(0.05)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return
