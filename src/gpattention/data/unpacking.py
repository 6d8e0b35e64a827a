"""Archives from elsewhere, unpacked with suspicion: plain files only, inside the folder, within a limit."""

import gzip
import os
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

_BLOCK = 1 << 20
# not an archive; cut off or altered; encrypted; two members of one name, or a file that is also a folder
_DAMAGED = (
    tarfile.TarError,
    zipfile.BadZipFile,
    gzip.BadGzipFile,
    zlib.error,
    EOFError,
    RuntimeError,
    FileExistsError,
    NotADirectoryError,
)


def unpack(archive: Path, folder: Path, *, limit: int = 8 << 30, files: int = 200_000) -> None:
    """Unpack a .tar, .tar.gz or .zip into a folder.

    `ValueError`, and nothing unpacked, for absolute names, names that leave the folder, links, devices, more
    than `limit` bytes or `files` files.  Files that are there already are replaced, one by one, at the end.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".unpacking-") as temporary:
        staging = Path(temporary)
        try:
            _write(archive, staging, limit, files)
        except _DAMAGED as error:
            raise ValueError(f"{archive}: expected a sound .tar, .tar.gz or .zip, got {error}") from None
        for file in sorted(staging.rglob("*")):
            if file.is_file():
                place = folder / file.relative_to(staging)
                place.parent.mkdir(parents=True, exist_ok=True)
                os.replace(file, place)


def _write(archive: Path, staging: Path, limit: int, files: int) -> None:
    room = limit
    members = _zipped(archive) if zipfile.is_zipfile(archive) else _tarred(archive)
    for count, (name, stream) in enumerate(members, start=1):
        if count > files:
            raise ValueError(f"{archive}: expected at most {files} files, got more")
        target = staging / _inside(archive, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        with stream, target.open("xb") as out:
            # what is read counts, not what the archive says
            while block := stream.read(_BLOCK):
                room -= len(block)
                if room < 0:
                    raise ValueError(f"{archive}: expected at most {limit} bytes, got more")
                out.write(block)


def _tarred(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    with tarfile.open(archive, "r:*") as tar:
        for member in tar:
            if member.isdir():
                continue
            stream = tar.extractfile(member) if member.isreg() else None
            if stream is None:
                raise ValueError(f"{archive}: expected plain files, got a link or a device: {member.name!r}")
            yield member.name, stream


def _zipped(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    with zipfile.ZipFile(archive) as zipped:
        for member in zipped.infolist():
            if member.is_dir():
                continue
            kind = (member.external_attr >> 16) & 0o170000  # as Unix writes it; 0 where it did not
            if kind not in (0, 0o100000):
                raise ValueError(
                    f"{archive}: expected plain files, got a link or a device: {member.filename!r}"
                )
            yield member.filename, zipped.open(member)


def _inside(archive: Path, name: str) -> Path:
    """The name as a relative path below the folder."""
    path = PurePosixPath(name.replace("\\", "/"))
    bad = path.is_absolute() or ".." in path.parts or not path.parts or ":" in path.parts[0] or "\0" in name
    if bad:
        raise ValueError(f"{archive}: expected names inside the folder, got {name!r}")
    return Path(*path.parts)
