"""NumPy's files from elsewhere: no objects, no more than the file holds, every defect told with its name."""

import math
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

LARGEST = 8 << 30  # bytes of an array in an .npz
_RATIO, _FREE = 500, 1 << 26  # it may be so many times as large as the file, and so large anyway


def read_npz(file: Path, name: str) -> np.ndarray:
    """One array of an .npz file."""
    with _told(file, "an .npz file"), zipfile.ZipFile(file) as archive:
        held = [each.removesuffix(".npy") for each in archive.namelist()]
        if name not in held:
            raise ValueError(f"expected an array {name!r}, got {held[:10]}")
        with archive.open(f"{name}.npy" if f"{name}.npy" in archive.namelist() else name) as stream:
            shape, kind, begin = _header(stream)
            size, told = math.prod(shape) * kind.itemsize, archive.getinfo(stream.name).file_size
            if told - begin != size:
                raise ValueError(f"{name!r} says that it has {size} bytes, and has {told - begin}")
            if size > LARGEST or size > max(_FREE, _RATIO * file.stat().st_size):
                raise ValueError(f"{name!r} would have {size} bytes, of a file of {file.stat().st_size}")
        with archive.open(stream.name) as stream:
            found: np.ndarray = npy.read_array(stream, allow_pickle=False)
            if stream.read(1):  # to the end, where the checksum is
                raise ValueError(f"{name!r} has more bytes than it says")
            return found


def map_npy(file: Path) -> np.ndarray:
    """An .npy file, mapped into memory: "c", copy on write, as torch wants arrays that could be written."""
    with _told(file, "a NumPy array"):
        with file.open("rb") as stream:
            shape, kind, begin = _header(stream)
        if math.prod(shape) * kind.itemsize != file.stat().st_size - begin:
            raise ValueError(
                f"a header of shape {shape} and type {kind} that does not fit the size of the file"
            )
        return npy.open_memmap(file, mode="c")


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """Shape, type, and the bytes before the first number."""
    version = npy.read_magic(stream)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, kind = read(stream)
    if kind.hasobject:
        raise ValueError("Python objects, which are not read")
    if not all(isinstance(side, int) and side >= 0 for side in shape):
        raise ValueError(f"the shape {shape}")
    return shape, kind, stream.tell()


@contextmanager
def _told(file: Path, what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a damaged file can raise almost anything
        if isinstance(error, OSError) and error.filename is not None:  # a file that cannot be read
            raise
        raise ValueError(f"{file}: expected {what}, got {error or type(error).__name__}") from None
