"""Archives from elsewhere, unpacked with suspicion: plain files only, inside the folder, within limits."""

import bz2
import errno
import gzip
import lzma
import os
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, Any, Self

_BLOCK = 1 << 20
_HEADERS = 1 << 20  # bytes of a tar between the contents of two files: long names are read into memory
_MEMORY = 1 << 28  # bytes that xz may ask for
_RATIO, _FREE = 500, 1 << 26  # an archive may unpack to so many times its size, and to so many bytes anyway
_NAME, _PATH = 255, 1024  # bytes of a file's name and of its whole path
_ZIP = (b"PK\3\4", b"PK\5\6")


class _RefusedError(ValueError):
    """What this module says, unlike what its libraries say of a damaged archive."""


def unpack(
    archive: Path,
    folder: Path,
    *,
    limit: int = 8 << 30,
    files: int = 200_000,
    check: Callable[[Sequence[str]], object] | None = None,
) -> None:
    """Unpack a .tar, .tar.gz, .tar.bz2, .tar.xz or .zip into a folder.

    `ValueError`, and nothing unpacked, for archives that are cut off or altered (all of it is read, to the
    last checksum); absolute names, names that leave the folder, have control characters or come twice; links
    and devices; more than `limit` bytes, `files` files, or 500 times the archive's own size; and where a link
    that is in the folder already would be followed.  Files that are there already are replaced, one by one,
    at the end.  `check` is called with all names before, to refuse them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".unpacking-") as temporary:
        staging = Path(temporary)
        try:
            names = _write(archive, staging, limit, files)
        except _RefusedError:
            raise
        except Exception as error:  # a damaged archive can raise almost anything
            # a full disk; the errors of gzip and bz2 have no number, a place outside the archive has EINVAL
            if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
                raise
            told = str(error) or type(error).__name__
            raise ValueError(
                f"{archive}: expected a sound .tar, .tar.gz, .tar.xz or .zip, got {told}"
            ) from None
        if check is not None:
            check(names)
        places = [(staging / name, folder / name) for name in names]
        for _, place in places:
            _check_place(archive, folder, place)
        for file, place in places:
            place.parent.mkdir(parents=True, exist_ok=True)
            os.replace(file, place)


def _write(archive: Path, staging: Path, limit: int, files: int) -> list[str]:
    """All files into an empty folder; their names."""
    with archive.open("rb") as stream:
        begin = stream.read(4)
    room, names = limit, []
    for name, content in (_zipped if begin in _ZIP else _tarred)(archive, limit, files):
        target = staging / _inside(archive, name)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            out = target.open("xb")
        except (FileExistsError, NotADirectoryError):
            raise _RefusedError(
                f"{archive}: expected every name once, got {name!r} twice, or below itself"
            ) from None
        with content, out:
            # what is read counts, not what the archive says
            while block := content.read(_BLOCK):
                room -= len(block)
                if room < 0:
                    raise _RefusedError(f"{archive}: expected at most {limit} bytes, got more")
                _check_ratio(archive, limit - room)
                out.write(block)
        names.append(target.relative_to(staging).as_posix())
    return names


def _check_ratio(archive: Path, size: int) -> None:
    if size > _FREE and size > _RATIO * archive.stat().st_size:
        raise _RefusedError(
            f"{archive}: expected at most {_RATIO} times its own size to come out of it, got more"
        )


def _tarred(archive: Path, limit: int, files: int) -> Iterator[tuple[str, IO[bytes]]]:
    with archive.open("rb") as packed:
        stream = _Bounded(archive, _decompressed(packed))
        stream.allow(_HEADERS)
        # as a stream: nothing is read twice or skipped, so that no byte escapes the checksum
        with tarfile.open(fileobj=stream, mode="r|", tarinfo=_Header) as tar:  # type: ignore[call-overload]
            for count, member in enumerate(tar, start=1):
                if count > files:  # folders too, or there could be any number of them
                    raise _RefusedError(f"{archive}: expected at most {files} files, got more")
                if member.isdir():
                    stream.allow(_HEADERS)
                    continue
                if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.issparse():
                    raise _RefusedError(
                        f"{archive}: expected plain files, got a link or a device: {member.name!r}"
                    )
                if not 0 <= member.size <= limit:
                    raise _RefusedError(f"{archive}: expected at most {limit} bytes, got {member.size}")
                stream.allow(member.size + _HEADERS)
                content = tar.extractfile(member)
                assert content is not None
                yield member.name, content
                stream.allow(_HEADERS)
            # the checksum comes last, after what fills the last block
            while stream.read(_BLOCK):
                pass


class _Header(tarfile.TarInfo):
    """One that must be sound: tarfile itself takes a damaged one, and a missing one, for the end."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"{error} instead of a file or the end") from None


def _decompressed(packed: IO[bytes]) -> Any:
    begin = packed.read(6)
    packed.seek(0)
    if begin.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=packed)
    if begin == b"\xfd7zXZ\0":
        return _Stream(packed, lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, _MEMORY))
    if begin.startswith(b"BZh"):
        return _Stream(packed, bz2.BZ2Decompressor)
    return packed


class _Stream:
    """What a file of one or more compressed streams holds; lzma's own knows no limit of memory."""

    def __init__(
        self, packed: IO[bytes], begin: Callable[[], lzma.LZMADecompressor | bz2.BZ2Decompressor]
    ) -> None:
        self._packed, self._begin, self._made = packed, begin, begin()

    def read(self, size: int) -> bytes:
        """At most so many bytes; none at the end."""
        while True:
            given = b""
            if self._made.eof:
                given = self._made.unused_data.lstrip(b"\0") or self._packed.read(_BLOCK).lstrip(b"\0")
                if not given:
                    return b""
                self._made = self._begin()
            elif self._made.needs_input:
                given = self._packed.read(_BLOCK)
                if not given:
                    raise EOFError("an end before the end of its stream")
            if found := self._made.decompress(given, size):
                return found


class _Bounded:
    """A stream that gives no more than it was allowed to last."""

    def __init__(self, archive: Path, stream: Any) -> None:
        self._archive, self._stream, self._room, self._given = archive, stream, 0, 0

    def allow(self, size: int) -> None:
        """So many bytes from here."""
        self._room = size

    def read(self, size: int) -> bytes:
        """At most so many bytes; none at the end."""
        found: bytes = self._stream.read(size)
        self._room -= len(found)
        self._given += len(found)
        if self._room < 0:
            raise _RefusedError(
                f"{self._archive}: expected at most {_HEADERS} bytes between two files, got more"
            )
        _check_ratio(self._archive, self._given)
        return found


def _zipped(archive: Path, limit: int, files: int) -> Iterator[tuple[str, IO[bytes]]]:
    with zipfile.ZipFile(archive) as zipped:
        if len(zipped.infolist()) > files:
            raise _RefusedError(f"{archive}: expected at most {files} files, got more")
        for member in zipped.infolist():
            if member.is_dir():
                continue
            kind = (member.external_attr >> 16) & 0o170000  # as Unix writes it; 0 where it did not
            if kind not in (0, 0o100000):
                raise _RefusedError(
                    f"{archive}: expected plain files, got a link or a device: {member.filename!r}"
                )
            if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise _RefusedError(f"{archive}: expected files stored or deflated, got {member.filename!r}")
            if member.file_size > limit:
                raise _RefusedError(f"{archive}: expected at most {limit} bytes, got {member.file_size}")
            yield member.filename, zipped.open(member)


def _inside(archive: Path, name: str) -> Path:
    """The name as a relative path below the folder."""
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or not path.parts or ":" in path.parts[0]:
        raise _RefusedError(f"{archive}: expected names inside the folder, got {name!r}")
    if not name.isprintable():
        raise _RefusedError(f"{archive}: expected names without control characters, got {name[:_NAME]!r}")
    if len(name.encode()) > _PATH or any(len(each.encode()) > _NAME for each in path.parts):
        raise _RefusedError(
            f"{archive}: expected names of at most {_NAME} bytes in paths of at most {_PATH}, "
            f"got {name[:60]!r}... of {len(name.encode())}"
        )
    return Path(*path.parts)


def _check_place(archive: Path, folder: Path, place: Path) -> None:
    """A link that somebody put into the folder could lead anywhere; a link in the file's own place goes."""
    for above in place.relative_to(folder).parents:
        if (folder / above).is_symlink() and above.parts:
            raise _RefusedError(
                f"{archive}: expected folders in {folder}, got a link to follow: {folder / above}"
            )
        if (folder / above).exists() and not (folder / above).is_dir():
            raise _RefusedError(f"{archive}: expected a folder {folder / above}, got a file of that name")
    if place.is_dir() and not place.is_symlink():
        raise _RefusedError(f"{archive}: expected a file or nothing at {place}, got a folder of that name")
