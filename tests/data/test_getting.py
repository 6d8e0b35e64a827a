"""Downloads from a server of our own: whole, interrupted, wrong, absent."""

import hashlib
import io
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from gpattention.data import check, get, known, load
from gpattention.data.catalogue import CATALOGUE, Archive, Layout
from gpattention.data.downloading import download
from tests.data import official


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
    told: list[tuple[int, int | None]] = []
    file = tmp_path / "new" / "file"
    download(server.url, file, server.md5, progress=lambda *x: told.append(x))
    assert file.read_bytes() == server.content
    assert told[-1] == (len(server.content), len(server.content))
    assert list(file.parent.iterdir()) == [file]
    server.length = False
    download(server.url, file, server.md5, progress=lambda *x: told.append(x))
    assert told[-1] == (len(server.content), None)


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


def test_a_whole_part_needs_its_checksum_only(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.part").write_bytes(server.content)
    download(server.url, tmp_path / "file", server.md5)
    assert (tmp_path / "file").read_bytes() == server.content


def test_a_wrong_part_is_noticed_and_thrown_away(server: Server, tmp_path: Path) -> None:
    file, part = tmp_path / "file", tmp_path / "file.part"
    part.write_bytes(b"something else")
    with pytest.raises(ValueError, match=f"file.part: expected md5 {server.md5}, got "):
        download(server.url, file, server.md5)
    assert not part.exists()
    assert not file.exists()
    download(server.url, file, server.md5)
    assert file.read_bytes() == server.content


def test_a_link_in_the_place_of_a_part_is_not_followed(server: Server, tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(b"mine")
    (tmp_path / "file.part").symlink_to(tmp_path / "mine")
    with pytest.raises(ValueError, match=r"expected .*file\.part to be a file .*, got a link"):
        download(server.url, tmp_path / "file", server.md5)
    assert (tmp_path / "mine").read_bytes() == b"mine"
    assert server.asked == []


def test_downloads_say_what_is_wrong(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "file"
    with pytest.raises(ValueError, match=r"url to begin with https:// or http://, got 'file:///etc/x'"):
        download("file:///etc/x", file, "")
    with pytest.raises(ConnectionError, match=r"could not download .*404"):
        download(f"{server.url}/other", file, "")
    with pytest.raises(ValueError, match=r"at most 100 bytes from .*, got more"):
        download(server.url, file, server.md5, limit=100)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def cola_on_server(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    source = tmp_path / "source"
    official.write_cola(source)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        tar.add(source / "cola_public", "cola_public")
    server.content = buffer.getvalue()
    archive = Archive("cola.tar.gz", server.md5, server.url, 1 << 20)
    monkeypatch.setitem(CATALOGUE, "cola", replace(CATALOGUE["cola"], archive=archive))
    (tmp_path / "root").mkdir()
    return server


def test_get(cola_on_server: Server, tmp_path: Path) -> None:
    root = tmp_path / "root"
    assert get("cola", root) == root / "cola_public"
    assert [path.name for path in root.iterdir()] == ["cola_public"]
    assert len(load("cola", root, subset=True).test) == 8
    assert get("cola", root) == root / "cola_public"
    assert len(cola_on_server.asked) == 1


def test_get_completes_what_was_begun_and_may_keep_the_archive(
    cola_on_server: Server, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    get("cola", root, keep=True)
    lost = root / "cola_public" / "raw" / "in_domain_dev.tsv"
    lost.unlink()
    (status,) = [s for s in check(root) if s.name == "cola"]
    assert (status.state, status.missing) == ("incomplete", ("cola_public/raw/in_domain_dev.tsv",))
    get("cola", root)
    assert lost.is_file()
    assert (root / "cola.tar.gz").is_file()  # it was there before, so it stays
    assert len(cola_on_server.asked) == 1


def test_get_without_a_network(
    cola_on_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    archive = Archive("cola.tar.gz", cola_on_server.md5, "http://127.0.0.1:9/none", 1 << 20)
    monkeypatch.setitem(CATALOGUE, "cola", replace(CATALOGUE["cola"], archive=archive))
    with pytest.raises(
        ConnectionError, match=r"put cola.tar.gz \(md5 .*, see https://nyu-mll.*\) into .*root"
    ):
        get("cola", root)
    (root / "cola.tar.gz").write_bytes(b"another file")
    with pytest.raises(ValueError, match=f"cola.tar.gz: expected md5 {archive.md5}"):
        get("cola", root)
    (root / "cola.tar.gz").write_bytes(cola_on_server.content)
    assert get("cola", root) == root / "cola_public"


def test_an_archive_of_something_else_is_told(
    cola_on_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = replace(CATALOGUE["cola"], layouts=(Layout("cola_public", ("raw/other.tsv",)),))
    monkeypatch.setitem(CATALOGUE, "cola", changed)
    with pytest.raises(
        ValueError, match=r"all of cola in it, got .*incomplete, without cola_public/raw/other.tsv"
    ):
        get("cola", tmp_path / "root")


def test_what_get_does_not_get(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="got 'digits', which comes with the library"):
        get("digits", tmp_path)
    with pytest.raises(ValueError, match=r"name to be one of digits, cifar10, .*got 'mnist'"):
        get("mnist", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"put LSUN.tar.gz \(md5 .*odin\) into"):
        get("lsun-crop", tmp_path)


def test_the_catalogue_is_sound() -> None:
    for entry in known():
        assert entry.about
        assert entry.licence
        assert entry.page.startswith("https://")
        assert (entry.archive is None) == (not entry.layouts) == (entry.name == "digits")
        if entry.archive is not None:
            assert len(entry.archive.md5) == 32
            assert set(entry.archive.md5) <= set("0123456789abcdef")
            assert entry.archive.url is None or entry.archive.url.startswith("https://")
    assert len({entry.archive.md5 for entry in known() if entry.archive}) == len(known()) - 1


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
