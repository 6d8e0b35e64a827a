"""Archives that try to leave the folder, and archives that are too much."""

import io
import stat
import tarfile
import zipfile
from pathlib import Path

import pytest

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
    with pytest.raises(ValueError, match=r"expected a sound .tar, .tar.gz or .zip"):
        unpack(archive, tmp_path / "out")
    assert everything(tmp_path / "out") == {}


def test_names_differ_from_each_other(tmp_path: Path) -> None:
    for second in ("a", "a/b"):
        with pytest.raises(ValueError, match=r"expected a sound"):
            unpack(tarred(tmp_path / "x", ("a", b"1"), (second, b"2")), tmp_path / "out")
