"""Disks that fail: full ones, read-only ones, and those that fail at one operation of many."""

import errno
import io
import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

CALLS = ("fsync", "replace")  # what a file of ours needs of the system, beside being written


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """No file can grow beyond so many bytes: the system itself refuses, in the middle of a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def counted(monkeypatch: pytest.MonkeyPatch, call: str) -> list[tuple[object, ...]]:
    """What a function of `os` is called with from now on."""
    real, calls = getattr(os, call), []
    monkeypatch.setattr(os, call, lambda *given: (calls.append(given), real(*given))[1])
    return calls


def failing_at(monkeypatch: pytest.MonkeyPatch, call: str, number: int, code: int = errno.ENOSPC) -> None:
    """From its call of that number on, a function of `os` fails."""
    real, seen = getattr(os, call), [0]

    def failing(*given: object) -> object:
        seen[0] += 1
        if seen[0] >= number:
            raise OSError(code, os.strerror(code))
        return real(*given)

    monkeypatch.setattr(os, call, failing)


@contextmanager
def read_only(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[None]:
    """Nothing can be made or written in a folder or below, also not by root, whom modes do not stop."""
    real_open, real_mkdir = io.open, os.mkdir

    def refuses(path: object) -> bool:
        return isinstance(path, str | os.PathLike) and Path(path).is_relative_to(folder)

    def told(path: object) -> OSError:
        return OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    def opened(path: object, mode: str = "r", *given: object, **more: object) -> object:
        if refuses(path) and set(mode) & set("wax+"):
            raise told(path)
        return real_open(path, mode, *given, **more)

    def made(path: object, *given: object, **more: object) -> None:
        if refuses(path) and not os.path.isdir(path):
            raise told(path)
        real_mkdir(path, *given, **more)

    with monkeypatch.context() as patch:
        patch.setattr("io.open", opened)
        patch.setattr("builtins.open", opened)
        patch.setattr(os, "mkdir", made)
        yield


def half_written(folder: Path) -> list[str]:
    """Files that were never finished, in a folder and below."""
    return sorted(f.name for f in folder.rglob("*") if re.fullmatch(r"\..+\.[0-9a-f]{32}", f.name))
