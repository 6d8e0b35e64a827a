"""Files are whole or not there, whatever the disk does; what killed processes leave is known and removed."""

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gpattention.models.storage import make_folder, remove_leftovers, replaced, write_atomically
from tests.disks import CALLS, failing_at, half_written, read_only, room_for

OLD, NEW = b"before", b"after " * 4000


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("how", ["size", *CALLS])
def test_a_full_disk_leaves_what_was_there(
    how: str, there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.safetensors"
    if there:
        file.write_bytes(OLD)
    with monkeypatch.context() as patch:
        if how != "size":
            failing_at(patch, how, 1)
        with room_for(1000 if how == "size" else 10**9), pytest.raises(OSError, match=r"model\.safe") as told:
            write_atomically(file, NEW)
    assert told.value.errno == (errno.EFBIG if how == "size" else errno.ENOSPC)
    assert told.value.filename == str(file)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"] * there
    assert not there or file.read_bytes() == OLD
    write_atomically(file, NEW)
    assert file.read_bytes() == NEW


def test_a_read_only_folder_is_named_by_the_file_that_was_to_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.json"
    with (
        read_only(monkeypatch, tmp_path),
        pytest.raises(OSError, match=r"Read-only file system: '.*/config\.json'$"),
    ):
        write_atomically(file, NEW)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_where_the_file_should_be(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(IsADirectoryError, match=r"config\.json'$"):
        write_atomically(tmp_path / "config.json", NEW)
    assert half_written(tmp_path) == []


@pytest.mark.parametrize("below", ["", "a", "a/b"])
def test_a_file_where_a_folder_should_be(below: str, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(NotADirectoryError, match=rf"expected {tmp_path}/runs to be a folder, got a file"):
        make_folder(tmp_path / "runs" / below)


def test_names_as_long_as_a_file_system_bears(tmp_path: Path) -> None:
    for name in ("x" * 255, "\N{GREEK SMALL LETTER ALPHA}" * 127, "\N{DNA DOUBLE HELIX}" * 63):
        write_atomically(tmp_path / name, NEW)
        assert (tmp_path / name).read_bytes() == NEW


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    code = f"""
import os, pathlib
from gpattention.models.storage import replaced
(pathlib.Path({str(tmp_path)!r}) / "model").mkdir()
with replaced(pathlib.Path({str(tmp_path)!r}) / "model" / "weights") as file:
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), {int(signal.SIGKILL)})
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    other = [".lock", ".weights.not-ours", "weights", f".hidden.{'g' * 32}"]
    for name in other:
        (tmp_path / name).write_text("")
    (tmp_path / f".link.{'0' * 32}").symlink_to(tmp_path / "weights")
    assert len(half_written(tmp_path / "model")) == 1
    removed = remove_leftovers(tmp_path)
    assert [file.parent.name for file in removed] == ["model"]
    assert list((tmp_path / "model").iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*other, "model", f".link.{'0' * 32}"])


def test_what_a_living_process_writes_is_not_removed(tmp_path: Path) -> None:
    with replaced(tmp_path / "weights") as file:
        file.write(b"half")
        assert remove_leftovers(tmp_path) == []
        assert len(half_written(tmp_path)) == 1
        code = f"""
import pathlib
from gpattention.models.storage import remove_leftovers
print(remove_leftovers(pathlib.Path({str(tmp_path)!r})))
"""
        found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
        assert found.stdout == "[]\n"
        file.write(b" and half")
    assert (tmp_path / "weights").read_bytes() == b"half and half"
    assert remove_leftovers(tmp_path) == []


def test_cleaning_all_the_time_does_not_disturb_who_writes(tmp_path: Path) -> None:
    """Also between the making of a file and its lock."""
    done = threading.Event()

    def clean() -> None:
        while not done.is_set():
            remove_leftovers(tmp_path)

    cleaner = threading.Thread(target=clean)
    cleaner.start()
    try:
        for i in range(300):
            write_atomically(tmp_path / "file", b"%d" % i)
            assert (tmp_path / "file").read_bytes() == b"%d" % i
    finally:
        done.set()
        cleaner.join()
    assert os.listdir(tmp_path) == ["file"]
