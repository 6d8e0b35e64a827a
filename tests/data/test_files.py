"""Arrays, images and archives of anybody: damaged, hostile or too much, and the sound ones as they are."""

import gzip
import io
import os
import random
import resource
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gpattention.data import files, load_corrupted, load_ood, unpack
from gpattention.data.files import PIXELS, image_files, map_npy, open_image, read_images, read_npz
from gpattention.evaluation.corrupted import read_pictures
from tests.data.official import write_images
from tests.refusals import refusals


@contextmanager
def memory_below(kilobytes: int) -> Iterator[None]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < kilobytes


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
    "a side that is no number": headed(described("('a',)"), bytes(4)),
    "objects": npy(np.array([{}, {}], dtype=object)),
    "deep header": headed("(" * 9000),
    "a header that is code": headed("__import__('os').system('true')"),
    "a long header": headed(" " * 60_000),
    "nothing": b"",
    "a pickle": b"\x80\4]\x94.",
    "text": b"not an array",
    "a version that is not known": b"\x93NUMPY\x09\0" + bytes(100),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arrays_are_named_with_their_file(name: str, tmp_path: Path) -> None:
    for file in ("fog.npy", "labels.npy"):
        (tmp_path / file).write_bytes(BAD[name])
    with memory_below(100_000):
        for read in (
            lambda: map_npy(tmp_path / "fog.npy"),
            lambda: load_corrupted("cifar10-c", tmp_path, folder=tmp_path, subset=True).part("fog", 1),
        ):
            with pytest.raises(ValueError, match=r"fog\.npy: expected a NumPy array, got ."):
                read()
        for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            with zipfile.ZipFile(tmp_path / "x.npz", "w", method) as archive:
                archive.writestr("images.npy", BAD[name])
            for read in (
                lambda: read_npz(tmp_path / "x.npz", "images"),
                lambda: load_ood(str(tmp_path / "x.npz")),
            ):
                with pytest.raises(ValueError, match=r"x\.npz: expected an \.npz file, got ."):
                    read()


def npz(folder: Path, content: bytes) -> None:
    (folder / "x.npz").write_bytes(content)
    read_npz(folder / "x.npz", "images")


def grown(folder: Path) -> None:
    """128 MB of zeros in 128 kB: more than a thousand times as much."""
    with zipfile.ZipFile(folder / "x.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("images.npy", headed(described("(134217728,)"), bytes(1 << 27)))
    with memory_below(50_000):
        read_npz(folder / "x.npz", "images")


def long_line(folder: Path) -> None:
    """100,000 x 1 pixels to a shorter side of 3,000: 900 gigabytes."""
    Image.fromarray(np.zeros((1, 100_000), np.uint8)).save(folder / "x.png")
    read_images([folder / "x.png"], 3000, "resize")


def fitted(folder: Path, *arguments: object) -> None:
    write_images(folder, [(32, 32), (36, 40)])
    read_images(image_files(folder), *arguments)


test_refusals = refusals([
    (lambda folder: npz(folder, b""), r"x\.npz: expected an \.npz file", "got ."),
    (lambda folder: npz(folder, npy(IMAGES)), r"x\.npz: expected an \.npz file", "got ."),
    (grown, "'images' would have 134217728 bytes", r"a file of 1\d{5}$"),
    (long_line, r"x\.png: ", "300000000 x 3000 pixels"),
    (lambda folder: fitted(folder, 32), "00001.png", r"36 x 40 pixels for 32 x 32 \(fit 'exact'\)"),
    (lambda folder: fitted(folder, 64, "crop"), r"00000.png", r"32 x 32 pixels for 64 x 64 \(fit 'crop'\)"),
    (lambda folder: fitted(folder, 32, "squeeze"), "fit to be one of exact, crop, resize", "squeeze"),
    (lambda: load_ood(__file__), r"a folder or an \.npz file", "test_files.py"),
])  # fmt: skip


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("order", ["C", "F"])
def test_sound_arrays_come_back(save, order: str, tmp_path: Path) -> None:
    x = np.asarray(IMAGES, order=order)
    save(tmp_path / "x.npz", images=x, empty=np.zeros((0, 3)))
    assert np.array_equal(read_npz(tmp_path / "x.npz", "images"), x)
    assert read_npz(tmp_path / "x.npz", "empty").shape == (0, 3)
    np.save(tmp_path / "x.npy", x)
    assert np.array_equal(map_npy(tmp_path / "x.npy"), x)


# --- images -------------------------------------------------------------------------------------------------


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width: int, height: int, rows: bytes = b"") -> bytes:
    """A grey image whose header says that size."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


BOMBS = {
    "more than Pillow takes": png(100_000, 100_000),
    "more than Pillow warns of": png(10_000, 10_000),
    "a line": png(80_000_000, 1, bytes(100)),
    "no pixels": png(0, 32),
    "cut off": png(32, 32, bytes(33 * 32))[:50],
    "few rows": png(32, 32, bytes(100)),
    "text": b"not an image",
    "nothing": b"",
    "a program": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 32 32\n%%EndComments\nshowpage\n%%EOF\n",
}


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("name", BOMBS)
def test_bad_images_are_named_with_their_file(name: str, tmp_path: Path) -> None:
    write_images(tmp_path, [(32, 32)], ["a.png"])
    (tmp_path / "b.png").write_bytes(BOMBS[name])
    for fit in ("crop", "resize"):
        for read in (
            lambda f: read_images(image_files(tmp_path), fit=f),
            lambda f: load_ood(str(tmp_path), fit=f),
        ):
            with pytest.raises(ValueError, match=r"b\.png: expected an image file that fits, got ."):
                read(fit)
    if name != "a line":  # which is one, for pictures of any size
        with pytest.raises(ValueError, match=r"b\.png: expected an image"):
            read_pictures(tmp_path)


def test_fits(tmp_path: Path) -> None:
    write_images(tmp_path, [(32, 32), (36, 40)])
    same, larger = image_files(tmp_path)
    original = torch.from_numpy(np.array(Image.open(larger))).permute(2, 0, 1)
    assert read_images([larger], 32, "crop")[0].equal(original[:, 4:36, 2:34])
    assert read_images([same], 32, "exact")[0].shape == (3, 32, 32)
    assert read_images([same], 32, "resize").equal(read_images([same], 32, "exact"))
    by_hand = np.array(Image.open(larger).resize((32, 36), Image.Resampling.BILINEAR))[2:34]
    assert read_images([larger], 32, "resize")[0].equal(torch.from_numpy(by_hand).permute(2, 0, 1))
    assert PIXELS == Image.MAX_IMAGE_PIXELS


def test_files_are_found_in_order(tmp_path: Path) -> None:
    write_images(tmp_path, [(4, 4)] * 4, ["b/1.png", "a/2.PNG", "a/10.jpg", "a/.hidden.png"])
    (tmp_path / "a" / "notes.txt").write_text("no image")
    found = [file.relative_to(tmp_path).as_posix() for file in image_files(tmp_path)]
    assert found == ["a/10.jpg", "a/2.PNG", "b/1.png"]
    with pytest.raises(NotADirectoryError, match=r"notes\.txt"):
        image_files(tmp_path / "a" / "notes.txt")
    with pytest.raises(FileNotFoundError, match="none"), open_image(tmp_path / "none.png"):
        pass


def test_folders_that_cannot_be_read_are_not_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    write_images(tmp_path / "b", [(32, 32)])
    scan = os.scandir

    def refusing(path: object = ".") -> object:  # as the superuser, who runs many tests, never sees it
        if str(path).endswith("a"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(PermissionError, match=str(tmp_path / "a")):
        image_files(tmp_path)


# --- archives -----------------------------------------------------------------------------------------------


def tarred(file: Path, *members: tarfile.TarInfo | tuple[str, bytes], mode: str = "w:gz") -> Path:
    with tarfile.open(file, mode) as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
            else:
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                tar.addfile(info, io.BytesIO(member[1]))
    return file


def zipped(file: Path, *members: tuple[str | zipfile.ZipInfo, bytes]) -> Path:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return file


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def everything(folder: Path) -> dict[str, bytes]:
    return {f.relative_to(folder).as_posix(): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


both = pytest.mark.parametrize("write", [tarred, zipped])
GOOD = (("a/x.txt", b"one"), ("a/b/y.txt", b"two"), ("./z.txt", b""))
UNPACKED = {"a/x.txt": b"one", "a/b/y.txt": b"two", "z.txt": b""}


def refused(archive: Path, match: str, left: dict[str, bytes] | None = None, **options: object) -> None:
    """The archive is refused by its name, and nothing but what was there is left."""
    out = archive.parent / "out"
    with pytest.raises(ValueError, match=rf"{archive.name}: expected .*{match}"):
        unpack(archive, out, **options)
    assert everything(out) == (left or {})


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz", "zip"])
def test_files_are_replaced_and_others_stay(mode: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    if mode == "zip":
        archive = zipped(tmp_path / "x.zip", ("a/", b""), *GOOD)
    else:
        archive = tarred(tmp_path / "x", special("a", tarfile.DIRTYPE), *GOOD, mode=mode)
    unpack(archive, out)
    assert everything(out) == UNPACKED
    (out / "a" / "x.txt").write_bytes(b"old")
    (out / "a" / "mine.txt").write_bytes(b"mine")
    unpack(archive, out)
    assert everything(out) == UNPACKED | {"a/mine.txt": b"mine"}


OUTSIDE, SIGNS, LONG = "a name outside", "a name with control characters", "a name longer than"
NAMES = {
    "../evil": OUTSIDE, "a/../../evil": OUTSIDE, "/evil": OUTSIDE, "..\\evil": OUTSIDE, "C:\\evil": OUTSIDE,
    "C:/evil": OUTSIDE, "a/..": OUTSIDE, "a\nb": SIGNS, "a\x1b[31mb": SIGNS, "a\u202egnp.exe": SIGNS,
    "x" * 300: LONG, "\u00e9" * 128: LONG, "/".join("x" * 200 for _ in range(6)): LONG,
}  # fmt: skip


@both
@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_names_stay_inside_and_can_be_shown(write, name: str, tmp_path: Path) -> None:
    refused(write(tmp_path / "x", *GOOD, (name, b"!")), NAMES[name])
    assert set(everything(tmp_path)) == {"x"}


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        (tarfile.SYMTYPE, "/etc/passwd"), (tarfile.SYMTYPE, "a/x.txt"), (tarfile.LNKTYPE, "../../x"),
        (tarfile.FIFOTYPE, ""), (tarfile.CHRTYPE, ""), (b"zip", "/etc/passwd"),
    ],
)  # fmt: skip
def test_no_links_or_devices(kind: bytes, target: str, tmp_path: Path) -> None:
    if kind == b"zip":
        link = zipfile.ZipInfo("name")
        link.create_system, link.external_attr = 3, (stat.S_IFLNK | 0o777) << 16
        archive = zipped(tmp_path / "x", *GOOD, (link, target.encode()))
    else:
        archive = tarred(tmp_path / "x", *GOOD, special("name", kind, target), ("name/inside", b"!"))
    refused(archive, "got a link or a device: 'name'")


@both
def test_limits(write, tmp_path: Path) -> None:
    archive = write(tmp_path / "x", ("a", bytes(3_000_000)), ("b", b"!"))
    unpack(archive, tmp_path / "enough", limit=3_000_001, files=2)
    refused(archive, "more than 3000000", limit=3_000_000)
    refused(archive, "more than 1 files", files=1)
    folders = [special(f"d{i}", tarfile.DIRTYPE) for i in range(20)]  # count too
    refused(tarred(tmp_path / "y", *folders), "more than 10 files", files=10)


def test_names_differ_from_each_other(tmp_path: Path) -> None:
    for second in ("a", "a/b"):
        archive = tarred(tmp_path / "x", ("a", b"1"), (second, b"2"))
        refused(archive, f"the name '{second}' twice, or below")


def flipped(content: bytes, place: int) -> bytes:
    changed = bytearray(content)
    changed[place] ^= 1
    return bytes(changed)


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz", "w:bz2"])
def test_damage_anywhere_is_refused_or_does_not_matter(mode: str, tmp_path: Path) -> None:
    """Of a compressed archive every flipped bit is refused; a plain tar has checksums of its headers only."""
    chance = random.Random(0)
    content = chance.randbytes(700)
    whole = tarred(tmp_path / "x", ("a/x", content), ("y", content), mode=mode).read_bytes()
    refused_archives = 0
    for turn in range(150):
        changed = (
            flipped(whole, chance.randrange(len(whole))) if turn % 2 else whole[: turn * len(whole) // 150]
        )
        (tmp_path / "x").write_bytes(changed)
        try:
            unpack(tmp_path / "x", tmp_path / f"out{turn}")
        except ValueError as error:
            assert str(error).startswith(f"{tmp_path / 'x'}: expected ")  # noqa: PT017 - or it is sound
            assert everything(tmp_path / f"out{turn}") == {}
            refused_archives += 1
        else:
            found = everything(tmp_path / f"out{turn}")
            assert [len(x) for x in found.values()] == [700, 700]
            if mode != "w":  # bits of gzip's header, such as the time, mean nothing
                assert set(found.values()) == {content}
    assert refused_archives >= (25 if mode == "w" else 120)


def test_a_damaged_header_is_not_the_end(tmp_path: Path) -> None:
    archive = tarred(tmp_path / "x", ("a", b"1" * 512), ("b", b"2"), mode="w")
    archive.write_bytes(flipped(archive.read_bytes(), 1024))  # the name of the second
    refused(archive, "got bad checksum instead of a file or the end")
    archive.write_bytes(archive.read_bytes()[:1024])  # after the first, in the right place for a cut
    refused(archive, "got empty header instead of a file or the end")


def test_links_in_the_folder_are_not_followed(tmp_path: Path) -> None:
    out, outside, victim = (tmp_path / name for name in ("out", "outside", "victim"))
    outside.mkdir()
    out.mkdir()
    victim.write_bytes(b"mine")
    (out / "a").symlink_to(outside)
    archive = tarred(tmp_path / "x", *GOOD)
    refused(archive, "a folder .*out/a, got a link")
    assert everything(outside) == {}
    (out / "a").unlink()
    (out / "z.txt").symlink_to(victim)  # in a file's own place: the link goes, not the file
    unpack(archive, out)
    assert victim.read_bytes() == b"mine"
    assert everything(out) == UNPACKED
    (tmp_path / "link").symlink_to(out)  # the folder that was asked for may be one
    unpack(archive, tmp_path / "link")


def test_files_and_folders_in_each_others_place(tmp_path: Path) -> None:
    archive, out = tarred(tmp_path / "x", *GOOD), tmp_path / "out"
    (out / "z.txt").mkdir(parents=True)
    refused(archive, "a file or nothing at")
    (out / "z.txt").rmdir()
    (out / "a").write_bytes(b"mine")
    refused(archive, "a folder .*out/a, got a link or a file", {"a": b"mine"})


def test_archives_that_grow_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "FREE", 1 << 20)
    content = ("a", bytes(20 << 20))
    made = [tarred(tmp_path / mode, content, mode=f"w:{mode}") for mode in ("gz", "xz", "bz2")]
    for archive in (*made, zipped(tmp_path / "x.zip", content)):
        refused(archive, "more than 500 times its own size")


def test_archives_do_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of a file is read into memory as a whole: one of 200 MB in 200 kB must not be."""
    head = tarfile.TarInfo("././@LongLink")
    head.type, head.size = tarfile.GNUTYPE_LONGNAME, 200 << 20
    (tmp_path / "x").write_bytes(gzip.compress(head.tobuf(tarfile.GNU_FORMAT) + b"x" * head.size, 9))
    with memory_below(50_000):
        refused(tmp_path / "x", "more than 1048576 bytes between two files")
    monkeypatch.setattr(files, "_MEMORY", 1 << 20)
    asks_for_9_mb = tarred(tmp_path / "x", *GOOD, mode="w:xz")
    refused(asks_for_9_mb, "got Memory usage limit exceeded")


def test_names_can_be_refused_before_anything_is_moved(tmp_path: Path) -> None:
    def refuse(names: list[str]) -> None:
        raise ValueError(f"x: expected none of {names}")

    refused(tarred(tmp_path / "x", *GOOD), r"none of \['a/x.txt', 'a/b/y.txt', 'z.txt'\]", check=refuse)
