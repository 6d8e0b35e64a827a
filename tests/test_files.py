"""Files: what is read of them, and that they are written whole or not at all."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpattention import from_pretrained
from gpattention.data import load_corrupted
from gpattention.files import (
    DEEPEST,
    make_folder,
    parse_toml,
    read_json,
    read_text,
    read_toml,
    remove_leftovers,
    replaced,
    write_atomically,
)
from gpattention.hosts.settings import load_settings
from gpattention.models import VisionTransformer
from gpattention.models.embeddings import Vocabulary
from gpattention.runs import load_recipe, read_recipe
from gpattention.runs.folder import read_rows
from gpattention.runs.records import read_events, read_suite
from gpattention.studies.plans import load_plan
from tests.disks import CALLS, failing_at, half_written, read_only, room_for


def written(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


BAD_JSON: dict[str, tuple[str | bytes, str]] = {
    "5,000 brackets": ("[" * 5000 + "]" * 5000, "more than 100 lists and tables in each other"),
    "5,000 brackets that stay open": ("[" * 5000, "more than 100 lists and tables in each other"),
    "5,000 objects": ('{"a":' * 5000 + "1" + "}" * 5000, "more than 100 lists and tables in each other"),
    "101 lists": ("[" * 101 + "]" * 101, "more than 100 lists and tables in each other"),
    "5,000 digits": ("1" * 5000, "limit"),
    "a key twice": ('{"a": 1, "b": {"c": 1, "d": 2, "c": 3}}', "expected every key once, got 'c' twice"),
    "NaN": ('{"a": NaN}', "expected finite numbers, got NaN"),
    "minus infinity": ("[-Infinity]", "expected finite numbers, got -Infinity"),
    "infinity in digits": ('{"a": 1e999}', "expected finite numbers, got 1e999"),
    "half": ('{"a": ', "Expecting value"),
    "nothing": ("", "Expecting value"),
    "bytes": (b'{\n"a":\n"\xff"}', "line 3: expected text in UTF-8, got the byte 0xff"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "line 1: expected text in UTF-8"),
}


BAD_TOML: dict[str, tuple[str | bytes, str]] = {
    "5,000 brackets": (f"x = {'[' * 5000}{']' * 5000}", "more than 100 lists and tables in each other"),
    "5,000 tables": (f"x = {'{a = ' * 5000}1{'}' * 5000}", "more than 100 lists and tables in each other"),
    "a key of 5,000 parts": (".".join("a" * 5000) + " = 1", "more than 200 dots in line 1"),
    "a key of 150 parts": ("\n" + ".".join("a" * 150) + " = 1", "more than 100 lists and tables"),
    "a table of 150 parts": (f"[{'.'.join('a' * 150)}]", "more than 100 lists and tables"),
    "5,000 digits": (f"x = {'1' * 5000}", "limit"),
    "a key twice": ("x = 1\nx = 2", "overwrite"),
    "bytes": (b"x = 1\ny = '\xe9'", "line 2: expected text in UTF-8, got the byte 0xe9"),
}


@pytest.mark.parametrize(
    ("kind", "name"), [*(("json", n) for n in BAD_JSON), *(("toml", n) for n in BAD_TOML)]
)
def test_bad_files_are_refused_by_their_names(kind: str, name: str, tmp_path: Path) -> None:
    read, (content, message) = (read_json, BAD_JSON[name]) if kind == "json" else (read_toml, BAD_TOML[name])
    with pytest.raises(ValueError, match=rf"x\.{kind} is not {kind.upper()}.*{re.escape(message)}"):
        read(written(tmp_path / f"x.{kind}", content))


def test_long_keys_do_not_take_for_ever(tmp_path: Path) -> None:
    begun = time.perf_counter()
    with pytest.raises(ValueError, match="dots in line 1"):
        read_toml(written(tmp_path / "x.toml", ".".join("a" * 500_000) + " = 1"))
    with pytest.raises(ValueError, match="expected at most 1048576 bytes, got 1048577"):
        read_toml(written(tmp_path / "x.toml", "#" * ((1 << 20) + 1)))
    assert time.perf_counter() - begun < 20  # on a busy machine; it would be hours


def test_what_is_sound_is_read(tmp_path: Path) -> None:
    deep: Any = []
    for _ in range(DEEPEST - 1):
        deep = [deep]
    for plain in ({"a": [1, 2.5, None, {"b": "\u00e9"}]}, deep, [], 3, "x"):
        assert read_json(written(tmp_path / "x", json.dumps(plain))) == plain
        assert read_json(written(tmp_path / "x", json.dumps(plain).encode("utf-8-sig"))) == plain
    assert read_json(written(tmp_path / "x", "[Infinity, 1e999]"), nonfinite=True) == [float("inf")] * 2
    assert parse_toml("a.b = 1\n[c]\nd = [0.1, 0.2]", "x") == {"a": {"b": 1}, "c": {"d": [0.1, 0.2]}}
    assert read_toml(written(tmp_path / "x", "a = 1".encode("utf-8-sig"))) == {"a": 1}


def test_only_files_are_read(tmp_path: Path) -> None:
    for read in (read_json, read_toml, read_text):
        for path in (tmp_path, tmp_path / "none"):
            with pytest.raises(FileNotFoundError, match=f"no file {path}"):
                read(path)


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "recipe of a run": ("recipe.json", lambda f: read_recipe(f.parent)),
    "suite": ("clean.json", read_suite),
    "events": ("events.jsonl", lambda f: read_events(f.parent)),
    "model": ("config.json", lambda f: VisionTransformer.from_pretrained(f.parent)),
    "converted model": ("config.json", lambda f: from_pretrained(f.parent)),
    "conversion": ("conversion.json", lambda f: from_pretrained(f.parent)),
    "settings": ("attached.json", lambda f: load_settings(f.parent)),
    "vocabulary": ("words.json", Vocabulary.load),
    "corrupted images": (
        "regenerated.json",
        lambda f: load_corrupted("cifar10-c", folder=f.parent, subset=True),
    ),
    "recipe": ("recipe.toml", load_recipe),
    "plan": ("plan.toml", load_plan),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("content", ["5,000 brackets", "5,000 digits", "bytes"])
def test_every_reader_names_the_file(name: str, content: str, tmp_path: Path) -> None:
    file, read = READERS[name]
    bad = (BAD_TOML if file.endswith("toml") else BAD_JSON)[content][0]
    path = written(tmp_path / "folder" / file, bad)
    (path.parent / "fog.npy").touch()
    if file == "events.jsonl":
        path.write_bytes(path.read_bytes().replace(b"\n", b" ") + b"\n")
    with pytest.raises(ValueError, match=re.escape(str(path))):
        read(path)


def test_events_name_their_line(tmp_path: Path) -> None:
    good = b'{"event": "a", "loss": NaN}\n'
    for bad, message in (
        (b'{"event": "\xff"}\n', "line 3: expected text in UTF-8, got the byte 0xff"),
        (b"{\n", "line 3 is not JSON"),
        (b"[" * 5000 + b"\n", "line 3 is not JSON: more than 100 lists"),
        (b"[]\n", "line 3: expected a JSON object, got list"),
        (b'{"a": 1, "a": 2}\n', "line 3 is not JSON: expected every key once"),
    ):
        written(tmp_path / "events.jsonl", good * 2 + bad + good)
        with pytest.raises(ValueError, match=rf"events\.jsonl, {re.escape(message)}"):
            read_events(tmp_path)
    written(tmp_path / "events.jsonl", good + b'{"event": "\xff')  # half a character of a killed run
    assert [event["event"] for event in read_events(tmp_path)] == ["a"]


def test_metrics_name_their_line(tmp_path: Path) -> None:
    good = b"epoch,loss,note\n1,0.5,\n"
    file = tmp_path / "metrics.csv"
    for bad, message in (
        (b"2,0.\xff,\n", "line 3: expected text in UTF-8, got the byte 0xff"),
        (b"2,0.5\n", "line 3: expected as many cells as in its first line"),
        (b"2,0.5,,\n", "line 3: expected as many cells as in its first line"),
        (b'2,0.5,"' + b"x" * 200_000 + b'"\n', "line 3: field larger than field limit"),
    ):
        with pytest.raises(ValueError, match=rf"metrics\.csv, {re.escape(message)}"):
            read_rows(written(file, good + bad))
    assert read_rows(written(file, good)) == ({"epoch": 1, "loss": 0.5, "note": None},)
    assert read_rows(written(file, b"")) == ()


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
        room = 1000 if how == "size" else 10**9
        with room_for(room), pytest.raises(OSError, match=r"model\.safe") as raised:
            write_atomically(file, NEW)
    assert raised.value.errno == (errno.EFBIG if how == "size" else errno.ENOSPC)
    assert raised.value.filename == str(file)
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
from gpattention.files import replaced
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
from gpattention.files import remove_leftovers
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
