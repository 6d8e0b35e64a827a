"""NumPy files that promise more than they hold, or hold what must not be read."""

import io
import random
import resource
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

from gpattention.data import load_corrupted, load_ood
from gpattention.data.arrays import map_npy, read_npz


def npy(x: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, x, allow_pickle=True)
    return stream.getvalue()


def headed(header: str, body: bytes = b"") -> bytes:
    text = header.encode() + b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text + body


def described(shape: str, kind: str = "|u1") -> str:
    return f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}}}"


IMAGES = np.arange(2 * 32 * 32 * 3, dtype=np.uint8).reshape(2, 32, 32, 3)
BAD = {
    "more than it holds": headed(described("(1000000, 1000000)"), bytes(100)),
    "more than can be counted": headed(described("(9223372036854775807, 9223372036854775807)")),
    "a little more": npy(IMAGES)[:-1],
    "less": npy(IMAGES) + b"!",
    "a negative side": headed(described("(-1, 4)"), bytes(4)),
    "two negative sides": headed(described("(-2, -2)"), bytes(4)),
    "a side that is no number": headed(described("('a',)"), bytes(4)),
    "objects": npy(np.array([{}, {}], dtype=object)),
    "objects in records": headed(described("(1,)", "O"), bytes(8)),
    "deep header": headed("(" * 9000),
    "a header that is code": headed("__import__('os').system('true')"),
    "a long header": headed(" " * 60_000),
    "nothing": b"",
    "a pickle": b"\x80\4]\x94.",
    "text": b"not an array",
    "an archive": b"PK\3\4" + bytes(100),
    "a version that is not known": b"\x93NUMPY\x09\0" + bytes(100),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arrays_are_told_with_their_file(name: str, tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (tmp_path / "x.npy").write_bytes(BAD[name])
    with pytest.raises(ValueError, match=r"x\.npy: expected a NumPy array, got ."):
        map_npy(tmp_path / "x.npy")
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        with zipfile.ZipFile(tmp_path / "x.npz", "w", method) as archive:
            archive.writestr("images.npy", BAD[name])
        with pytest.raises(ValueError, match=r"x\.npz: expected an \.npz file, got ."):
            read_npz(tmp_path / "x.npz", "images")
        with pytest.raises(ValueError, match=r"x\.npz: expected an \.npz file, got ."):
            load_ood(str(tmp_path / "x.npz"))
    folder = tmp_path / "corrupted"
    folder.mkdir()
    for file in ("fog.npy", "labels.npy"):
        (folder / file).write_bytes(BAD[name])
    with pytest.raises(ValueError, match=r"fog\.npy: expected a NumPy array, got ."):
        load_corrupted("cifar10-c", tmp_path, folder=folder, subset=True).part("fog", 1)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB


def test_archives_that_are_none(tmp_path: Path) -> None:
    np.savez(tmp_path / "other.npz", pictures=IMAGES)
    with pytest.raises(ValueError, match=r"other\.npz: .*expected an array 'images', got \['pictures'\]"):
        read_npz(tmp_path / "other.npz", "images")
    for content in (b"", b"PK\3\4", npy(IMAGES), b"text"):
        (tmp_path / "x.npz").write_bytes(content)
        with pytest.raises(ValueError, match=r"x\.npz: expected an \.npz file, got ."):
            read_npz(tmp_path / "x.npz", "images")


def test_arrays_that_grow_too_much(tmp_path: Path) -> None:
    """128 MB of zeros in 128 kB: more than a thousand times as much."""
    with zipfile.ZipFile(tmp_path / "x.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("images.npy", headed(described("(134217728,)"), bytes(1 << 27)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=r"'images' would have 134217728 bytes, of a file of 1\d{5}$"):
        read_npz(tmp_path / "x.npz", "images")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("order", ["C", "F"])
def test_sound_arrays_come_back(save, order: str, tmp_path: Path) -> None:
    x = np.asarray(IMAGES, order=order)
    save(tmp_path / "x.npz", images=x, empty=np.zeros((0, 3)))
    assert np.array_equal(read_npz(tmp_path / "x.npz", "images"), x)
    assert read_npz(tmp_path / "x.npz", "empty").shape == (0, 3)
    np.save(tmp_path / "x.npy", x)
    assert np.array_equal(map_npy(tmp_path / "x.npy"), x)


@pytest.mark.parametrize("seed", range(2))
def test_damaged_bytes_are_told(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    np.savez_compressed(tmp_path / "x.npz", images=IMAGES)
    whole = (tmp_path / "x.npz").read_bytes()
    for _ in range(300):
        changed = bytearray(whole)
        changed[chance.randrange(len(whole))] = chance.randrange(256)
        (tmp_path / "x.npz").write_bytes(changed)
        try:
            assert np.array_equal(read_npz(tmp_path / "x.npz", "images"), IMAGES)
        except ValueError as error:
            assert str(error).startswith(str(tmp_path / "x.npz"))  # noqa: PT017 - or it does not matter
