"""Archives, NumPy arrays and images from unknown sources, read with checks against damage and attacks.

Archives may only contain plain files, inside the folder and within limits; arrays must not contain objects or
be larger than their file; images are decoded by Pillow (extra `train`) and by no other program.  Every defect
raises a `ValueError` that names the file.
"""

import bz2
import errno
import gzip
import lzma
import math
import os
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import IO, TYPE_CHECKING, Any, Literal, Self, get_args

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from gpattention.checks import check_choice
from gpattention.files import StrPath

if TYPE_CHECKING:
    from PIL.Image import Image

LARGEST = 8 << 30  # bytes of an array in an .npz
# most unpacked bytes: RATIO times the size of the file, or FREE if it is more
RATIO, FREE = 500, 1 << 26

_BLOCK = 1 << 20


@contextmanager
def _named(file: StrPath, what: str) -> Iterator[None]:
    """Turn the errors of a damaged file, which can be of almost any type, into one that names the file."""
    try:
        yield
    except Exception as error:
        # missing files and full disks pass; errors of damage have no number, or EINVAL
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        raise ValueError(f"{file}: expected {what}, got {str(error) or type(error).__name__}") from None


_HEADERS = 1 << 20  # bytes of a tar between the contents of two files, as long names are read into memory
_MEMORY = 1 << 28  # bytes of memory for xz
_NAME, _PATH = 255, 1024  # bytes of the name of a file and of its whole path
_ZIP = (b"PK\3\4", b"PK\5\6")


def unpack(
    archive: Path,
    folder: Path,
    *,
    limit: int = 8 << 30,
    files: int = 200_000,
    check: Callable[[Sequence[str]], object] | None = None,
) -> None:
    """Unpack a .tar, .tar.gz, .tar.bz2, .tar.xz or .zip into a folder.

    Existing files are replaced, one by one, at the end.

    Args:
        archive: the file to unpack, which is read completely, to the last checksum.
        folder: the target, created if it is missing.
        limit: most bytes to unpack.
        files: most files to unpack.
        check: called with all names before anything is moved; it may raise to refuse them.

    Raises:
        ValueError: the archive is cut off or altered; has names that are absolute, leave the folder, contain
            control characters or appear twice; has links or devices; has more than `limit` bytes, `files`
            files, or 500 times its own size; or a link in the folder would be followed.  Nothing is unpacked
            then.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".unpacking-") as temporary:
        staging = Path(temporary)
        with _named(archive, "a sound .tar, .tar.gz, .tar.bz2, .tar.xz or .zip"):
            names = _write(archive, staging, limit, files)
        if check is not None:
            check(names)
        # all places are checked before the first file is moved, so that an archive is unpacked fully or not
        for name in names:
            _check_place(archive, folder, folder / name)
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(staging / name, folder / name)


def _write(archive: Path, staging: Path, limit: int, files: int) -> list[str]:
    """Unpack all files into an empty folder and return their names."""
    with archive.open("rb") as stream:
        begin = stream.read(4)
    size, names = 0, []
    for name, content in (_zipped if begin in _ZIP else _tarred)(archive, limit, files):
        target = staging / _inside(name)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            out = target.open("xb")
        except (FileExistsError, NotADirectoryError):
            raise ValueError(f"the name {name!r} twice, or below itself") from None
        with content, out:
            # bytes are counted, as the archive may state another number
            while block := content.read(_BLOCK):
                size += len(block)
                if size > limit:
                    raise ValueError(f"more than {limit} bytes")
                _check_ratio(archive, size)
                out.write(block)
        names.append(target.relative_to(staging).as_posix())
    return names


def _check_ratio(archive: Path, size: int) -> None:
    if size > FREE and size > RATIO * archive.stat().st_size:
        raise ValueError(f"more than {RATIO} times its own size")


def _tarred(archive: Path, limit: int, files: int) -> Iterator[tuple[str, IO[bytes]]]:
    with archive.open("rb") as packed:
        stream = _Bounded(archive, _decompressed(packed))
        # read as a stream, in which no byte is skipped, so that the checksum covers all of them
        with tarfile.open(fileobj=stream, mode="r|", tarinfo=_Header) as tar:  # type: ignore[call-overload]
            for count, member in enumerate(tar, start=1):
                if count > files:  # folders count too
                    raise ValueError(f"more than {files} files")
                if not member.isdir():
                    if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.issparse():
                        raise ValueError(f"a link or a device: {member.name!r}")
                    if not 0 <= member.size <= limit:
                        raise ValueError(f"{member.size} bytes, more than {limit}")
                    stream.room = member.size + _HEADERS
                    content = tar.extractfile(member)
                    assert content is not None
                    yield member.name, content
                stream.room = _HEADERS
            # the checksum follows the padding of the last block
            while stream.read(_BLOCK):
                pass


class _Header(tarfile.TarInfo):
    """A header that must be valid: tarfile itself takes a damaged or missing one for the end."""

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
    """The content of one or more compressed streams; the reader of lzma has no limit of memory."""

    def __init__(self, packed: IO[bytes], begin: Callable[[], Any]) -> None:
        self._packed, self._begin, self._made = packed, begin, begin()

    def read(self, size: int) -> bytes:
        """At most `size` bytes; none at the end."""
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
            found: bytes = self._made.decompress(given, size)
            if found:
                return found


class _Bounded:
    """A stream that returns at most `room` bytes after this was set last."""

    def __init__(self, archive: Path, stream: Any) -> None:
        self._archive, self._stream, self._given = archive, stream, 0
        self.room = _HEADERS

    def read(self, size: int) -> bytes:
        """At most `size` bytes; none at the end."""
        found: bytes = self._stream.read(size)
        self.room -= len(found)
        self._given += len(found)
        if self.room < 0:
            raise ValueError(f"more than {_HEADERS} bytes between two files")
        _check_ratio(self._archive, self._given)
        return found


def _zipped(archive: Path, limit: int, files: int) -> Iterator[tuple[str, IO[bytes]]]:
    with zipfile.ZipFile(archive) as zipped:
        if len(zipped.infolist()) > files:
            raise ValueError(f"more than {files} files")
        for member in zipped.infolist():
            if member.is_dir():
                continue
            kind = (member.external_attr >> 16) & 0o170000  # of Unix; 0 if the archive has none
            if kind not in (0, 0o100000):
                raise ValueError(f"a link or a device: {member.filename!r}")
            if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ValueError(f"{member.filename!r}, neither stored nor deflated")
            if member.file_size > limit:
                raise ValueError(f"{member.file_size} bytes, more than {limit}")
            yield member.filename, zipped.open(member)


def _inside(name: str) -> Path:
    """The name as a relative path below the folder."""
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or not path.parts or ":" in path.parts[0]:
        raise ValueError(f"a name outside the folder: {name!r}")
    if not name.isprintable():
        raise ValueError(f"a name with control characters: {name[:_NAME]!r}")
    if len(name.encode()) > _PATH or any(len(each.encode()) > _NAME for each in path.parts):
        raise ValueError(f"a name longer than file systems have it: {name[:60]!r}...")
    return Path(*path.parts)


def _check_place(archive: Path, folder: Path, place: Path) -> None:
    """Refuse links in the folder, which could lead anywhere; one in the place of the file is replaced."""
    for above in place.relative_to(folder).parents:
        there = folder / above
        if (there.is_symlink() and above.parts) or (there.exists() and not there.is_dir()):
            raise ValueError(f"{archive}: expected a folder {there}, got a link or a file of that name")
    if place.is_dir() and not place.is_symlink():
        raise ValueError(f"{archive}: expected a file or nothing at {place}, got a folder of that name")


def read_npz(file: Path, name: str) -> np.ndarray:
    """One array of an .npz file."""
    with _named(file, "an .npz file"), zipfile.ZipFile(file) as archive:
        held = [each.removesuffix(".npy") for each in archive.namelist()]
        if name not in held:
            raise ValueError(f"expected an array {name!r}, got {held[:10]}")
        with archive.open(f"{name}.npy" if f"{name}.npy" in archive.namelist() else name) as stream:
            shape, kind, begin = _header(stream)
            size, held_bytes = math.prod(shape) * kind.itemsize, archive.getinfo(stream.name).file_size
            if held_bytes - begin != size:
                raise ValueError(f"{name!r} says that it has {size} bytes, and has {held_bytes - begin}")
            if size > LARGEST or size > max(FREE, RATIO * file.stat().st_size):
                raise ValueError(f"{name!r} would have {size} bytes, of a file of {file.stat().st_size}")
        with archive.open(stream.name) as stream:
            found: np.ndarray = npy.read_array(stream, allow_pickle=False)
            if stream.read(1):  # reads to the end, which checks the checksum
                raise ValueError(f"{name!r} has more bytes than it says")
            return found


def map_npy(file: Path) -> np.ndarray:
    """An .npy file mapped into memory, with copy on write, as torch needs writable arrays."""
    with _named(file, "a NumPy array"):
        with file.open("rb") as stream:
            shape, kind, begin = _header(stream)
        if math.prod(shape) * kind.itemsize != file.stat().st_size - begin:
            raise ValueError(f"a header of shape {shape} and type {kind}, which do not fit the file's size")
        return npy.open_memmap(file, mode="c")


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """Shape, type, and number of bytes before the first number."""
    version = npy.read_magic(stream)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, kind = read(stream)
    if kind.hasobject:
        raise ValueError("Python objects, which are not read")
    if not all(isinstance(side, int) and side >= 0 for side in shape):
        raise ValueError(f"the shape {shape}")
    return shape, kind, stream.tell()


Fit = Literal["exact", "crop", "resize"]
# without EPS, whose files are programs
FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "PPM", "TIFF", "GIF", "AVIF", "JPEG2000", "MPO", "ICO", "TGA", "DIB")
PIXELS = 89_478_485  # a quarter of a gigabyte in colour; the limit of Pillow, which only warns above it
SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp", ".ppm", ".tif", ".tiff"})


def image_files(folder: Path) -> list[Path]:
    """All image files in and below a folder, without hidden ones.

    Args:
        folder: the folder.

    Returns:
        Files sorted by path.

    Raises:
        OSError: a folder cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise error  # os.walk would pass over the folder as if it were empty

    within = (Path(place) / name for place, _, names in os.walk(folder, onerror=refuse) for name in names)
    found = (file for file in within if file.suffix.lower() in SUFFIXES and not file.name.startswith("."))
    return sorted((f for f in found if f.is_file()), key=lambda file: file.relative_to(folder).parts)


def read_images(files: Sequence[Path], size: int = 32, fit: Fit = "exact") -> Tensor:
    """Decoded colour images, [n, 3, size, size] uint8.

    Args:
        files: see `open_image`.
        size: side of the result.
        fit: "exact" refuses images of another size; "crop" cuts out the centre; "resize" changes the shorter
            side to `size` (bilinear, antialiased) and cuts out the centre.
    """
    check_choice("fit", fit, get_args(Fit))
    pillow()
    images = np.empty((len(files), size, size, 3), np.uint8)
    for i, file in enumerate(files):
        with open_image(file) as opened:
            images[i] = np.asarray(_fitted(eight_bit(opened, 3), size, fit))
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()


@contextmanager
def open_image(file: StrPath) -> "Iterator[Image]":
    """An image file for the body of a `with`, whose errors of decoding and fitting name the file too.

    Args:
        file: of any format that Pillow decodes without another program.

    Returns:
        The opened image.

    Raises:
        ValueError: the file is not an image, is damaged, has more than 89 million pixels, which are not
            decoded then, or has a format for which Pillow needs another program.
        ImportError: Pillow is missing.
    """
    image_module = pillow()
    image_module.init()
    formats = [each for each in FORMATS if each in image_module.OPEN]
    with _named(file, "an image file that fits"), image_module.open(file, formats=formats) as opened:
        width, height = opened.size
        if width * height > PIXELS:
            raise ValueError(f"{width} x {height} pixels, more than {PIXELS}")
        yield opened


def eight_bit(image: "Image", channels: int) -> "Image":
    """The image in colour (3 channels) or grey (1) with 8 bits.

    Grey of 16 bits keeps its upper 8 bits; Pillow would cut values at 255, which makes nearly all of them
    white.  Pixels of 32 bits are refused, as their range is not known.
    """
    if image.mode in ("I", "F"):
        raise ValueError(f"pixels of 32 bits (mode {image.mode}), whose range is not known: save 8 or 16")
    if image.mode.startswith("I;16"):  # also big-endian
        image = pillow().fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image.convert("RGB" if channels == 3 else "L")


def _fitted(image: "Image", size: int, fit: Fit) -> "Image":
    width, height = image.size
    if fit == "resize" and min(width, height) != size:
        short = min(width, height)
        width, height = (round(side * size / short) for side in (width, height))
        if width * height > PIXELS:  # of a line of pixels
            raise ValueError(f"sides of {image.size}, which would grow to {width} x {height} pixels")
        image = image.resize((width, height), pillow().Resampling.BILINEAR)
    if (width, height) == (size, size):
        return image
    if fit == "exact" or min(width, height) < size:
        raise ValueError(f"{width} x {height} pixels for {size} x {size} (fit {fit!r})")
    left, top = (width - size) // 2, (height - size) // 2
    return image.crop((left, top, left + size, top + size))


def pillow() -> ModuleType:
    """Pillow, imported when the first image file is decoded."""
    try:
        from PIL import Image
    except ImportError:
        raise ImportError("image files need Pillow: pip install 'gpattention[train]'") from None
    return Image
