"""Archives that try to leave the folder, and archives that are too much."""

import gzip
import io
import random
import resource
import stat
import tarfile
import zipfile
from pathlib import Path

import pytest

from gpattention.data import unpacking
from gpattention.data.unpacking import unpack


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


GOOD = (("a/x.txt", b"one"), ("a/b/y.txt", b"two"), ("./z.txt", b""))
UNPACKED = {"a/x.txt": b"one", "a/b/y.txt": b"two", "z.txt": b""}


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz"])
def test_tar(mode: str, tmp_path: Path) -> None:
    archive = tarred(tmp_path / "x", special("a", tarfile.DIRTYPE), *GOOD, mode=mode)
    unpack(archive, tmp_path / "out")
    assert everything(tmp_path / "out") == UNPACKED


def test_zip(tmp_path: Path) -> None:
    archive = zipped(tmp_path / "x.zip", ("a/", b""), *GOOD)
    unpack(archive, tmp_path / "out")
    assert everything(tmp_path / "out") == UNPACKED


def test_files_are_replaced_and_others_stay(tmp_path: Path) -> None:
    (tmp_path / "out" / "a").mkdir(parents=True)
    (tmp_path / "out" / "a" / "x.txt").write_bytes(b"old")
    (tmp_path / "out" / "a" / "mine.txt").write_bytes(b"mine")
    unpack(tarred(tmp_path / "x", *GOOD), tmp_path / "out")
    assert everything(tmp_path / "out") == UNPACKED | {"a/mine.txt": b"mine"}


ESCAPES = ["../evil", "a/../../evil", "/evil", "..\\evil", "C:\\evil", "C:/evil", "a/.."]


@pytest.mark.parametrize("name", ESCAPES)
@pytest.mark.parametrize("write", [tarred, zipped])
def test_names_stay_inside(write, name: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    archive = write(tmp_path / "in" / "x", *GOOD, (name, b"!"))
    with pytest.raises(ValueError, match="names inside the folder, got"):
        unpack(archive, tmp_path / "deep" / "out")
    assert set(everything(tmp_path)) == {"in/x"}


@pytest.mark.parametrize(
    "member",
    [
        special("link", tarfile.SYMTYPE, "/etc/passwd"),
        special("link", tarfile.SYMTYPE, "a/x.txt"),
        special("link", tarfile.LNKTYPE, "../../x"),
        special("pipe", tarfile.FIFOTYPE),
        special("device", tarfile.CHRTYPE),
    ],
)
def test_no_links_or_devices_in_tar(member: tarfile.TarInfo, tmp_path: Path) -> None:
    archive = tarred(tmp_path / "x", *GOOD, member, (f"{member.name}/inside", b"!"))
    with pytest.raises(ValueError, match=f"expected plain files, got a link or a device: '{member.name}'"):
        unpack(archive, tmp_path / "out")
    assert everything(tmp_path / "out") == {}


def test_no_links_in_zip(tmp_path: Path) -> None:
    link = zipfile.ZipInfo("link")
    link.create_system = 3
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with pytest.raises(ValueError, match="got a link or a device: 'link'"):
        unpack(zipped(tmp_path / "x.zip", *GOOD, (link, b"/etc/passwd")), tmp_path / "out")
    assert everything(tmp_path / "out") == {}


@pytest.mark.parametrize("write", [tarred, zipped])
def test_limits(write, tmp_path: Path) -> None:
    archive = write(tmp_path / "x", ("a", bytes(3_000_000)), ("b", b"!"))
    unpack(archive, tmp_path / "enough", limit=3_000_001, files=2)
    with pytest.raises(ValueError, match="at most 3000000 bytes, got more"):
        unpack(archive, tmp_path / "out", limit=3_000_000)
    with pytest.raises(ValueError, match="at most 1 files, got more"):
        unpack(archive, tmp_path / "out", files=1)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("write", [tarred, zipped])
@pytest.mark.parametrize("cut", [0, 100, -60])
def test_damaged_archives_are_told(write, cut: int, tmp_path: Path) -> None:
    archive = write(tmp_path / "x", ("a", bytes(range(256)) * 500), ("b", b"!" * 3000))
    archive.write_bytes(archive.read_bytes()[:cut])
    with pytest.raises(ValueError, match=r"expected a sound .tar, .tar.gz, .tar.xz or .zip"):
        unpack(archive, tmp_path / "out")
    assert everything(tmp_path / "out") == {}


def test_names_differ_from_each_other(tmp_path: Path) -> None:
    for second in ("a", "a/b"):
        with pytest.raises(ValueError, match=rf"expected every name once, got '{second}' twice, or below"):
            unpack(tarred(tmp_path / "x", ("a", b"1"), (second, b"2")), tmp_path / "out")


def flipped(content: bytes, place: int) -> bytes:
    changed = bytearray(content)
    changed[place] ^= 1
    return bytes(changed)


@pytest.mark.parametrize("place", [-8, -4], ids=["checksum", "length"])
def test_wrong_checksums_at_the_end_are_told(place: int, tmp_path: Path) -> None:
    archive = tarred(tmp_path / "x", *GOOD)
    archive.write_bytes(flipped(archive.read_bytes(), place))
    with pytest.raises(ValueError, match=r"x: expected a sound .*, got"):
        unpack(archive, tmp_path / "out")
    assert everything(tmp_path / "out") == {}


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz", "w:bz2"])
def test_damage_anywhere_is_told_or_does_not_matter(mode: str, tmp_path: Path) -> None:
    """Of a compressed archive every flipped bit is told; a plain tar has checksums of its headers alone."""
    chance = random.Random(0)
    content = chance.randbytes(700)
    whole = tarred(tmp_path / "x", ("a/x", content), ("y", content), mode=mode).read_bytes()
    told = 0
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
            told += 1
        else:
            found = everything(tmp_path / f"out{turn}")
            assert [len(x) for x in found.values()] == [700, 700]
            if mode != "w":  # bits of gzip's header, such as the time, mean nothing
                assert set(found.values()) == {content}
    assert told >= (25 if mode == "w" else 120)


def test_a_damaged_header_is_not_the_end(tmp_path: Path) -> None:
    archive = tarred(tmp_path / "x", ("a", b"1" * 512), ("b", b"2"), mode="w")
    archive.write_bytes(flipped(archive.read_bytes(), 1024))  # the name of the second
    with pytest.raises(
        ValueError, match=r"expected a sound .*, got bad checksum instead of a file or the end"
    ):
        unpack(archive, tmp_path / "out")
    archive.write_bytes(archive.read_bytes()[:1024])  # after the first, in the right place for a cut
    with pytest.raises(
        ValueError, match=r"expected a sound .*, got empty header instead of a file or the end"
    ):
        unpack(archive, tmp_path / "out")


@pytest.mark.parametrize("write", [tarred, zipped])
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("a\nb", "without control characters, got 'a\\\\nb'"),
        ("a\x1b[31mb", "without control characters"),
        ("a\u202egnp.exe", "without control characters"),
        ("x" * 300, "at most 255 bytes in paths of at most 1024"),
        ("\u00e9" * 128, "at most 255 bytes in paths of at most 1024"),
        ("/".join("x" * 200 for _ in range(6)), "at most 255 bytes in paths of at most 1024"),
    ],
)
def test_names_that_are_no_names(write, name: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"x: expected names .*{told}"):
        unpack(write(tmp_path / "x", *GOOD, (name, b"!")), tmp_path / "out")
    assert everything(tmp_path / "out") == {}


def test_links_in_the_folder_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "victim").write_bytes(b"mine")
    out = tmp_path / "out"
    out.mkdir()
    (out / "a").symlink_to(tmp_path / "outside")
    archive = tarred(tmp_path / "x", *GOOD)
    with pytest.raises(ValueError, match=r"expected folders in .*out, got a link to follow: .*out/a"):
        unpack(archive, out)
    assert everything(tmp_path / "outside") == {}
    assert not (out / "z.txt").exists()
    (out / "a").unlink()
    (out / "z.txt").symlink_to(tmp_path / "victim")  # in a file's own place: the link goes, not the file
    unpack(archive, out)
    assert (tmp_path / "victim").read_bytes() == b"mine"
    assert everything(out) == UNPACKED
    (tmp_path / "link").symlink_to(out)  # the folder that was asked for may be one
    unpack(archive, tmp_path / "link")


def test_files_and_folders_in_each_others_place(tmp_path: Path) -> None:
    archive = tarred(tmp_path / "x", *GOOD)
    for name, told in (
        ("a", "expected a folder .*out1/a, got a file"),
        ("z.txt", "expected a file or nothing at"),
    ):
        out = tmp_path / ("out1" if name == "a" else "out2")
        out.mkdir()
        if name == "a":
            (out / name).write_bytes(b"mine")
        else:
            (out / name).mkdir()
        with pytest.raises(ValueError, match=told):
            unpack(archive, out)
        assert everything(out) == ({"a": b"mine"} if name == "a" else {})


def test_archives_that_grow_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpacking, "_FREE", 1 << 20)
    for mode in ("w:gz", "w:xz", "w:bz2"):
        archive = tarred(tmp_path / mode[2:], ("a", bytes(20 << 20)), mode=mode)
        with pytest.raises(ValueError, match="at most 500 times its own size to come out of it, got more"):
            unpack(archive, tmp_path / "out")
    with pytest.raises(ValueError, match="at most 500 times its own size"):
        unpack(zipped(tmp_path / "x.zip", ("a", bytes(20 << 20))), tmp_path / "out")
    assert everything(tmp_path / "out") == {}


def test_long_names_do_not_fill_the_memory(tmp_path: Path) -> None:
    """The name of a file is read into memory as a whole: one of 200 MB in 200 kB must not be."""
    head = tarfile.TarInfo("././@LongLink")
    head.type, head.size = tarfile.GNUTYPE_LONGNAME, 200 << 20
    content = head.tobuf(tarfile.GNU_FORMAT) + b"x" * head.size
    (tmp_path / "x").write_bytes(gzip.compress(content, 9))
    del content
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match="at most 1048576 bytes between two files, got more"):
        unpack(tmp_path / "x", tmp_path / "out")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kB


def test_xz_cannot_ask_for_any_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tarred(tmp_path / "x", *GOOD, mode="w:xz")  # asks for 9 MB
    monkeypatch.setattr(unpacking, "_MEMORY", 1 << 20)
    with pytest.raises(ValueError, match=r"expected a sound .*, got Memory usage limit exceeded"):
        unpack(archive, tmp_path / "out")


def test_folders_count_too(tmp_path: Path) -> None:
    folders = [special(f"d{i}", tarfile.DIRTYPE) for i in range(20)]
    with pytest.raises(ValueError, match="expected at most 10 files, got more"):
        unpack(tarred(tmp_path / "x", *folders), tmp_path / "out", files=10)


def test_names_can_be_refused_before_anything_is_moved(tmp_path: Path) -> None:
    found: list[str] = []

    def refuse(names: list[str]) -> None:
        found.extend(names)
        raise ValueError("not these")

    with pytest.raises(ValueError, match="not these"):
        unpack(tarred(tmp_path / "x", *GOOD), tmp_path / "out", check=refuse)
    assert found == ["a/x.txt", "a/b/y.txt", "z.txt"]
    assert everything(tmp_path / "out") == {}
