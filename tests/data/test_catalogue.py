"""Datasets by name: the root, what is there, and downloads from a server of our own: whole, cut, wrong."""

import hashlib
import inspect
import io
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from gpattention import data
from gpattention.data import ImageData, check, data_root, get, known, load
from gpattention.data.catalogue import CATALOGUE, Archive, Layout, download
from tests.data import official
from tests.refusals import refusals


def test_the_front_door_holds_the_public_names_alone() -> None:
    assert {n for n, x in vars(data).items() if n[0] != "_" and not inspect.ismodule(x)} == set(data.__all__)


test_refusals = refusals([
    (lambda: load("imagenet"), "name to be one of digits, cifar10, cifar100", "imagenet"),
    (lambda: load("digits", subset=True), "digits .* augment", "subset"),
    (lambda folder: load("cola", folder, augment=True), "cola .* form, subset", "augment"),
    (lambda folder: load("textures", folder, ood=()), "textures .* size, fit, subset", "ood"),
    (lambda folder: load("cifar10-c", folder, severity=1), "cifar10-c .* folder", "severity"),
    # `--set data.options.augment=False` brings the text 'False', which is true
    (lambda: load("digits", augment="False"), "augment of digits", "'False'"),
    (lambda folder: load("cola", folder, subset=1), "subset of cola", "1"),
    (lambda: load("digits", split_seed="1"), "split_seed of digits", "'1'"),
    (lambda folder: load("textures", folder, split_seed=1), "textures .* size, fit, subset", "split_seed"),
    (lambda folder: get("digits", folder), "dataset", "'digits', which comes with the library"),
    (lambda folder: get("mnist", folder), "name to be one of digits, cifar10", "mnist"),
    (lambda folder: download("file:///etc/x", folder / "x", ""), "url", "file:///etc/x"),
])  # fmt: skip


def test_every_known_dataset_is_sound_and_can_be_asked_for(tmp_path: Path) -> None:
    assert isinstance(load("digits"), ImageData)
    for entry in known():
        assert entry.about
        assert entry.licence
        assert entry.page.startswith("https://")
        assert (entry.archive is None) == (not entry.layouts) == (entry.name == "digits")
        if entry.archive is not None:
            assert len(entry.archive.md5) == 32
            assert set(entry.archive.md5) <= set("0123456789abcdef")
            assert entry.archive.url is None or entry.archive.url.startswith("https://")
            with pytest.raises(FileNotFoundError):
                load(entry.name, tmp_path)
    assert len({entry.archive.md5 for entry in known() if entry.archive}) == len(known()) - 1


def test_one_split_for_all_seeds() -> None:
    """What `split_seed` decides; the augmentation stays the training's own."""
    one, other, plain = (load("digits", seed=s, augment=True, **more) for s, more in (
        (1, {"split_seed": 7}), (2, {"split_seed": 7}), (7, {}),
    ))  # fmt: skip
    for part, found in one.parts.items():
        assert found.images.equal(other.parts[part].images)
        assert found.images.equal(plain.parts[part].images)
    assert (one.augmentation.seed, other.augmentation.seed) == (1, 2)


def test_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPATTENTION_DATA", raising=False)
    with pytest.raises(ValueError, match=r"got none: name it with root \(--data .*\) or .* GPATTENTION_DATA"):
        load("cifar10")
    with pytest.raises(FileNotFoundError, match=r"root \(--data .*\) to be a folder, got .*nowhere"):
        load("cifar10", tmp_path / "nowhere")
    monkeypatch.setenv("GPATTENTION_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match=r"variable GPATTENTION_DATA to be a folder, got .*nowhere"):
        load("cifar10")
    monkeypatch.setenv("GPATTENTION_DATA", str(tmp_path))
    assert data_root() == tmp_path
    (tmp_path / "other").mkdir()
    assert data_root(tmp_path / "other") == tmp_path / "other"


def test_check_tells_what_is_there(tmp_path: Path) -> None:
    before = {status.name: status for status in check(tmp_path)}
    assert before["digits"].state == "bundled"
    assert {status.state for name, status in before.items() if name != "digits"} == {"missing"}
    assert "downloads https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz" in str(before["cifar10"])
    assert "put LSUN.tar.gz" in str(before["lsun-crop"])
    official.write_cifar10_python(tmp_path)
    official.write_corrupted(tmp_path)
    official.write_cola(tmp_path)
    (tmp_path / "dtd" / "images" / "banded").mkdir(parents=True)
    (tmp_path / "dtd" / "images" / "banded" / "1.png").write_bytes(b"x")
    (tmp_path / "LSUN" / "test").mkdir(parents=True)
    after = {status.name: status for status in check(tmp_path)}
    assert {name: s.state for name, s in after.items() if s.state != "missing"} == {
        "digits": "bundled", "cifar10": "subset", "cifar10-c": "incomplete", "cola": "present",
        "textures": "subset", "lsun-crop": "incomplete",
    }  # fmt: skip
    assert "load with subset=True, or else get('cifar10', root)" in str(after["cifar10"])
    assert "17 missing: CIFAR-10-C/brightness.npy" in str(after["cifar10-c"])
    assert str(after["cola"]) == f"{'cola':<20} present: {tmp_path / 'cola_public'}"


def test_enough_bytes_are_the_whole(tmp_path: Path) -> None:
    official.write_cifar10_binary(tmp_path)
    for file in (tmp_path / "cifar-10-batches-bin").glob("*.bin"):
        with file.open("r+b") as stream:
            stream.truncate(10_000 * 3073)  # sparse
    states = {status.name: status.state for status in check(tmp_path)}
    assert states["cifar10"] == "present"


@dataclass
class Server:
    """What it serves, how it behaves, and what it was asked."""

    content: bytes = bytes(range(256)) * 40
    ranges: bool = True
    length: bool = True
    stop_after: int | None = None
    asked: list[str | None] = field(default_factory=list)
    url: str = ""

    @property
    def md5(self) -> str:
        return hashlib.md5(self.content, usedforsecurity=False).hexdigest()


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = self.headers.get("Range")
            state.asked.append(asked)
            if self.path != "/file":
                self.send_error(404)
                return
            start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and state.ranges else 0
            if start >= len(state.content):
                self.send_error(416)
                return
            rest = state.content[start:]
            self.send_response(206 if asked and state.ranges else 200)
            if asked and state.ranges:
                end = len(state.content)
                self.send_header("Content-Range", f"bytes {start}-{end - 1}/{end}")
            if state.length:
                self.send_header("Content-Length", str(len(rest)))
            self.end_headers()
            self.wfile.write(rest if state.stop_after is None else rest[: state.stop_after])

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        state.url = f"http://127.0.0.1:{http.server_port}/file"
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        yield state
        http.shutdown()
        thread.join()


def test_a_whole_download(server: Server, tmp_path: Path) -> None:
    calls: list[tuple[int, int | None]] = []
    file, whole = tmp_path / "new" / "file", len(server.content)
    for server.length, total in ((True, whole), (False, None)):
        download(server.url, file, server.md5, progress=lambda *x: calls.append(x))
        assert file.read_bytes() == server.content
        assert calls[-1] == (whole, total)
        assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("ranges", [True, False])
def test_an_interrupted_download_goes_on(ranges: bool, server: Server, tmp_path: Path) -> None:
    file, part = tmp_path / "file", tmp_path / "file.part"
    server.ranges, server.stop_after = ranges, 3000
    with pytest.raises(ConnectionError, match=r"ended after 3000 of 10240 bytes; call again to go on"):
        download(server.url, file, server.md5)
    assert part.read_bytes() == server.content[:3000]
    assert not file.exists()
    server.stop_after = None
    download(server.url, file, server.md5)
    assert file.read_bytes() == server.content
    assert server.asked == [None, "bytes=3000-"]
    assert not part.exists()


def test_a_part_needs_its_checksum(server: Server, tmp_path: Path) -> None:
    file, part = tmp_path / "file", tmp_path / "file.part"
    part.write_bytes(server.content)
    download(server.url, file, server.md5)
    assert file.read_bytes() == server.content
    file.unlink()
    part.write_bytes(b"something else")
    with pytest.raises(ValueError, match=f"file.part: expected md5 {server.md5}, got "):
        download(server.url, file, server.md5)
    assert list(tmp_path.iterdir()) == []  # thrown away, so that the next call is a new one
    download(server.url, file, server.md5)
    assert file.read_bytes() == server.content


def test_a_link_in_the_place_of_a_part_is_not_followed(server: Server, tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(b"mine")
    (tmp_path / "file.part").symlink_to(tmp_path / "mine")
    with pytest.raises(ValueError, match=r"expected .*file\.part to be a file .*, got a link"):
        download(server.url, tmp_path / "file", server.md5)
    assert (tmp_path / "mine").read_bytes() == b"mine"
    assert server.asked == []


def test_downloads_that_fail_leave_nothing(server: Server, tmp_path: Path) -> None:
    with pytest.raises(ConnectionError, match=r"could not download .*404"):
        download(f"{server.url}/other", tmp_path / "file", "")
    with pytest.raises(ValueError, match=r"at most 100 bytes from .*, got more"):
        download(server.url, tmp_path / "file", server.md5, limit=100)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def root(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for datasets, with CoLA on the server."""
    official.write_cola(tmp_path / "source")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        tar.add(tmp_path / "source" / "cola_public", "cola_public")
    server.content = buffer.getvalue()
    archive = Archive("cola.tar.gz", server.md5, server.url, 1 << 20)
    monkeypatch.setitem(CATALOGUE, "cola", replace(CATALOGUE["cola"], archive=archive))
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


def test_get(root: Path, server: Server) -> None:
    for _ in range(2):  # the second time nothing is left to do
        assert get("cola", root) == root / "cola_public"
    assert [path.name for path in root.iterdir()] == ["cola_public"]
    assert len(load("cola", root, subset=True).test) == 8
    assert len(server.asked) == 1


def test_get_completes_what_was_begun_and_may_keep_the_archive(root: Path, server: Server) -> None:
    get("cola", root, keep=True)
    lost = root / "cola_public" / "raw" / "in_domain_dev.tsv"
    lost.unlink()
    (status,) = [s for s in check(root) if s.name == "cola"]
    assert (status.state, status.missing) == ("incomplete", ("cola_public/raw/in_domain_dev.tsv",))
    get("cola", root)
    assert lost.is_file()
    assert (root / "cola.tar.gz").is_file()  # it was there before, so it stays
    assert len(server.asked) == 1


def test_get_says_what_it_cannot_get(root: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    cola = CATALOGUE["cola"]
    offline = Archive("cola.tar.gz", server.md5, "http://127.0.0.1:9/none", 1 << 20)
    monkeypatch.setitem(CATALOGUE, "cola", replace(cola, archive=offline))
    with pytest.raises(
        ConnectionError, match=r"put cola.tar.gz \(md5 .*, see https://nyu-mll.*\) into .*root"
    ):
        get("cola", root)
    (root / "cola.tar.gz").write_bytes(b"another file")
    with pytest.raises(ValueError, match=f"cola.tar.gz: expected md5 {server.md5}"):
        get("cola", root)
    (root / "cola.tar.gz").write_bytes(server.content)
    assert get("cola", root) == root / "cola_public"
    monkeypatch.setitem(
        CATALOGUE, "cola", replace(cola, layouts=(Layout("cola_public", ("raw/other.tsv",)),))
    )
    with pytest.raises(ValueError, match=r"all of cola in it, got .*incomplete.*cola_public/raw/other.tsv"):
        get("cola", root)
    with pytest.raises(FileNotFoundError, match=r"put LSUN.tar.gz \(md5 .*odin\) into"):
        get("lsun-crop", root)
