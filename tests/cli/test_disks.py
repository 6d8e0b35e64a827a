"""Every command on a disk that fails: a line that names the file, exit code 1 or 2, nothing half written."""

import errno
import re
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest

from gpattention.cli import main
from gpattention.files import replaced
from gpattention.runs.recipe import write_recipe
from gpattention.studies.model_card import wall_seconds
from tests.disks import failing_at, half_written, read_only, room_for
from tests.runs.tiny_runs import digits_recipe

EVALUATE = ("--suite", "clean", "--limit", "20", "--samples", "2", "--predictors", "model", "--device", "cpu")


@pytest.fixture
def here(tmp_path: Path, trained: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run, a recipe and a plan, from which commands are called."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, tmp_path / "runs" / "tiny")
    write_recipe(tmp_path / "tiny.toml", digits_recipe())
    (tmp_path / "plan.toml").write_text('[[runs]]\nrecipe = "tiny"\n')
    return tmp_path


COMMANDS = {
    "train": (["train", "tiny.toml", "--run", "out/run", "--device", "cpu"], "out/run"),
    "evaluate": (["evaluate", "runs/tiny", *EVALUATE], "runs/tiny/evaluation"),
    "report": (["report", "runs/tiny", "-o", "out/report.html"], "out"),
    "sweep": (["sweep", "tiny.toml", "--run", "out/sweep", "--device", "cpu"], "out/sweep"),
    "reproduce": (["reproduce", "plan.toml", "--runs", "out/plan", "--device", "cpu"], "out/plan"),
    "models": (["models", "card", "runs/tiny", "-o", "out/card"], "out/card"),
    "paper": (["paper", "table1", "runs", "-o", "out/table1.md"], "out"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_read_only_folder(
    command: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words, place = COMMANDS[command]
    before = sorted(here.rglob("*"))
    with ExitStack() as stack:
        for folder in (here, Path("out"), Path("runs")):
            stack.enter_context(read_only(monkeypatch, folder))
        assert main(words) in (1, 2)
    text = "".join(capsys.readouterr())
    assert "Read-only file system" in text
    assert place in text
    assert sorted(here.rglob("*")) == before


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_where_a_folder_should_be(
    command: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, place = COMMANDS[command]
    file = Path(place)
    shutil.rmtree(file, ignore_errors=True)
    file.parent.mkdir(exist_ok=True)
    file.write_text("precious")
    assert main(words) in (1, 2)
    text = "".join(capsys.readouterr())
    assert re.search(rf"expected \S*{place} to be a folder, got a file", text)
    assert "Traceback" not in text
    assert file.read_text() == "precious"


@pytest.mark.parametrize("command", ["evaluate", "report", "sweep", "models", "paper"])
@pytest.mark.parametrize("how", ["replace", "fsync", "size"])
def test_a_full_disk(
    command: str, how: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words, place = COMMANDS[command]
    with monkeypatch.context() as patch, room_for(200 if how == "size" else 10**9):
        if how != "size":
            failing_at(patch, how, 1, errno.ENOSPC)
        assert main(words) in (1, 2)
    text = "".join(capsys.readouterr())
    assert re.search(
        rf"(No space left on device|File too large).*{place}|{place}.*(No space|too large)", text
    )
    assert half_written(here) == []


@pytest.mark.parametrize("name", ["evaluation", "predictions"])
def test_what_a_killed_evaluation_left_is_removed_by_the_next(name: str, here: Path) -> None:
    place = here / "runs/tiny/evaluation" / ("predictions/model" if name == "predictions" else "")
    place.mkdir(parents=True)
    orphan = place / f".test.safetensors.{'0' * 32}"
    orphan.write_bytes(b"half")
    with replaced(place / "other") as living:
        living.write(b"half")
        assert main(COMMANDS["evaluate"][0]) == 0
        assert len(half_written(here)) == 1  # another process writes this one
    assert half_written(here) == []


def test_a_clock_that_goes_backwards(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    moment = [2e9]

    def earlier() -> float:
        moment[0] -= 500
        return moment[0]

    monkeypatch.setattr("time.time", earlier)
    for command in ("train", "evaluate", "sweep", "report"):
        assert main(COMMANDS[command][0]) == 0, command
    assert main(["status", "out", "runs"]) == 0
    output = capsys.readouterr().out
    assert not re.search(r"-\d+(\.\d+)? (s|min|h)\b", output)
    events = ({"time": 100.0, "event": "phase"}, {"time": 40.0, "event": "validated"}, {"time": 50.0})
    assert wall_seconds(events) == 10.0
