"""A run that is killed, stopped or damaged, on disks that fail: resumed to the same numbers, or refused."""

import errno
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from gpattention.runs import append_event, read_events
from gpattention.training import (
    CheckpointError,
    RunInUseError,
    TrainingFailedError,
    TrainingStep,
    fit,
    take_first_phase,
)
from gpattention.training.folder import PARTS, list_checkpoints, read_checkpoint
from tests.disks import CALLS, counted, failing_at, half_written, read_only, room_for
from tests.training.toy import run, toy_data, toy_recipe

SHORT = {"phases__epochs": 1, "phases__kernel_epochs": 1}


def weights(folder: Path) -> bytes:
    return (folder / "model" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run that nothing disturbed."""
    torch.set_num_threads(1)
    return fit(toy_recipe(**SHORT), toy_data(), tmp_path_factory.mktemp("short") / "run").folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Likewise of 4 steps an epoch, 16 in all, 8 in each phase."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    done = run(folder)
    assert done.returncode == 0, done.stderr
    return folder


def assert_goes_on(folder: Path, whole: Path, how: str = "resume") -> None:
    done = run(folder, how)
    assert done.returncode == 0, done.stderr
    assert weights(folder) == weights(whole)
    last = [read_checkpoint(list_checkpoints(f / "checkpoints")[-1]) for f in (folder, whole)]
    for name, x in last[0].tensors.items():
        assert torch.equal(x, last[1].tensors[name]), name
    assert (folder / "metrics.csv").read_text() == (whole / "metrics.csv").read_text()
    assert half_written(folder) == []


@pytest.mark.parametrize("when", ["step 2", "step 6", "step 8", "step 11", "step 15", "write 6", "write 11"])
def test_a_killed_run_resumes_to_the_same_bits(when: str, whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert run(folder, *when.split()).returncode == -signal.SIGKILL
    assert len(half_written(folder)) == when.startswith("write")
    assert_goes_on(folder, whole)


def test_a_run_that_is_killed_before_it_is_one_begins_anew(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert run(folder, "write", "1").returncode == -signal.SIGKILL
    assert [half_written(folder) != [], (folder / "recipe.json").exists()] == [True, False]
    assert_goes_on(folder, whole, "")


def test_a_stopped_run_saves_where_it_is(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert "stopped by SIGTERM at step 10" in run(folder, "stop", "10").stdout
    assert list_checkpoints(folder / "checkpoints")[-1].name == "step-00000010.safetensors"
    assert_goes_on(folder, whole)


def test_damaged_and_foreign_checkpoints_are_refused(short: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(short, folder)
    path = list_checkpoints(folder / "checkpoints")[-1]
    content, digest = path.read_bytes(), path.with_suffix(".sha256")

    def refused(message: str) -> None:
        with pytest.raises(CheckpointError, match=message):
            fit(toy_recipe(**SHORT), toy_data(), folder, resume=True)

    for damaged in (content[:-7], content[:-1] + bytes([content[-1] ^ 1])):
        path.write_bytes(damaged)
        refused("truncated or altered")
    path.write_bytes(content)
    digest.write_bytes(b"\xff\xfe")
    refused(f"{path.stem}.sha256 says")
    save_file({"x": torch.zeros(1)}, path)
    digest.unlink()
    refused("has no checksum")


def test_one_process_at_a_time(tmp_path: Path) -> None:
    """Two would write over each other's checkpoints; a process that ends or dies gives the folder free."""
    folder, recipe, data = tmp_path / "run", toy_recipe(**SHORT), toy_data()
    refused = []

    def also(progress: TrainingStep) -> None:
        if progress.step == 1:
            with pytest.raises(RunInUseError, match=f"{folder} is being trained by another process"):
                fit(recipe, data, folder, resume=True)
            refused.append(progress.step)

    fit(recipe, data, folder, progress=also)
    assert refused == [1]
    code = f"""
import os, pathlib
from gpattention.training.folder import exclusive
with exclusive(pathlib.Path({str(folder)!r})):
    os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    fit(recipe, data, folder, resume=True)


def test_another_recipe_or_folder_is_refused(short: Path, tmp_path: Path) -> None:
    data, folder = toy_data(), tmp_path / "run"
    shutil.copytree(short, folder)
    config = {"depth": 2, "heads": 2, "width": 16}  # in another order, which is no other run
    fit(toy_recipe(**SHORT, model={"config": config, "attention": "cgp"}), data, folder, resume=True)
    other = toy_recipe(**SHORT, model__options={"noise": 0.1}, name="other")
    changed = "name is 'toy' there and 'other' here, model.options.noise is not given there and 0.1 here"
    for recipe, place, message in (
        (toy_recipe(phases__kernel_epochs=1), folder, r"to resume: phases.epochs is 1 there and 2 here\."),
        (other, folder, changed),
        (other, tmp_path / "empty", "nothing to resume"),
    ):
        with pytest.raises(CheckpointError, match=message):
            fit(recipe, data, place, resume=True)
    with pytest.raises(FileExistsError, match="holds a run already"):
        fit(toy_recipe(), data, folder)
    (folder / "recipe.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"recipe\.json is not a recipe"):
        fit(other, data, folder, resume=True)


@pytest.mark.parametrize("part", PARTS)
def test_a_folder_with_something_of_a_run_but_no_run_is_left_alone(part: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    kept = folder / part if "." in part else folder / part / "precious"
    kept.parent.mkdir(parents=True)
    kept.write_text("")
    with pytest.raises(
        FileExistsError, match=rf"{folder} holds no run \(no recipe.json\), but {part}, which"
    ):
        fit(toy_recipe(**SHORT), toy_data(), folder)
    assert [path for path in folder.rglob("*") if path.is_file()] == [kept]
    assert kept.read_text() == ""


def test_a_first_phase_is_not_taken_into_such_a_folder_but_goes_on_where_it_was_killed(
    short: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, folder = toy_recipe("scgp", **SHORT), tmp_path / "run"
    (tmp_path / "other" / "checkpoints").mkdir(parents=True)
    with pytest.raises(FileExistsError, match="but checkpoints, which"):
        take_first_phase(recipe, tmp_path / "other", short)
    for number in range(1, 6):  # two checkpoints of two files each, and the recipe
        with monkeypatch.context() as patch:
            failing_at(patch, "replace", number, errno.EIO)
            with pytest.raises(OSError, match=str(folder)):
                take_first_phase(recipe, folder, short)
        assert not (folder / "recipe.json").exists()
        with pytest.raises(FileExistsError, match="which training would overwrite"):
            fit(recipe, toy_data(), folder)  # would start with the checkpoint of another run
    take_first_phase(recipe, folder, short)
    assert [event["event"] for event in read_events(folder)] == ["first phase taken"]
    fit(recipe, toy_data(), folder, resume=True)


@pytest.mark.parametrize("call", CALLS)
def test_a_disk_that_is_full_at_any_file_leaves_no_orphan_and_training_goes_on(
    call: str, short: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file of the run in turn is the first that has no room."""
    recipe, data = toy_recipe(**SHORT), toy_data()
    with monkeypatch.context() as patch:
        calls = counted(patch, call)
        fit(recipe, data, tmp_path / "counted")
    assert len(calls) > 10  # recipe, metrics, checkpoints and their sums, weights and config
    for number in range(1, len(calls) + 1):
        folder = tmp_path / str(number)
        message = rf"({folder}/.*: No space left on device)|(No space left on device: '{folder}/.*')"
        with monkeypatch.context() as patch:
            failing_at(patch, call, number)
            with pytest.raises((TrainingFailedError, OSError), match=message) as error:
                fit(recipe, data, folder)
        left = list_checkpoints(folder / "checkpoints")
        assert not left or f"last good checkpoint is {left[-1]}" in str(error.value)
        assert half_written(folder) == []
        fit(recipe, data, folder, resume=(folder / "recipe.json").exists())
        assert weights(folder) == weights(short)


@pytest.mark.parametrize("size", [100, 700, 3000, 40_000])
def test_a_disk_that_is_full_in_the_middle_of_a_file(size: int, short: Path, tmp_path: Path) -> None:
    folder, recipe, data = tmp_path / "run", toy_recipe(**SHORT), toy_data()
    with room_for(size), pytest.raises((TrainingFailedError, OSError), match=str(folder)) as error:
        fit(recipe, data, folder)
    assert half_written(folder) == []
    assert "Make room and resume" in str(error.value) or isinstance(error.value, OSError)
    begun = (folder / "recipe.json").exists()
    if begun:
        assert all(isinstance(event, dict) for event in read_events(folder))
    fit(recipe, data, folder, resume=begun)
    assert weights(folder) == weights(short)


def test_half_a_line_of_events_is_not_left_or_is_replaced(tmp_path: Path) -> None:
    append_event(tmp_path, "phase", step=0)
    before = (tmp_path / "events.jsonl").read_bytes()
    with room_for(len(before) + 20), pytest.raises(OSError, match=r"File too large: '.*events\.jsonl'"):
        append_event(tmp_path, "failed", reason="x" * 1000)
    assert (tmp_path / "events.jsonl").read_bytes() == before
    (tmp_path / "events.jsonl").write_bytes(before + b'{"time": 179488')  # killed there
    assert [event["event"] for event in read_events(tmp_path)] == ["phase"]
    append_event(tmp_path, "resumed", step=0)
    assert [event["event"] for event in read_events(tmp_path)] == ["phase", "resumed"]


def test_a_read_only_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, data, folder = toy_recipe(**SHORT), toy_data(), tmp_path / "run"
    with read_only(monkeypatch, tmp_path), pytest.raises(OSError, match=rf"Read-only .*{folder}'"):
        fit(recipe, data, folder)
    assert list(tmp_path.iterdir()) == []

    def becomes_read_only(progress: TrainingStep) -> None:
        if progress.step == 1:
            patch.enter_context(read_only(monkeypatch, folder))

    message = rf"write {folder}/metrics\.csv: Read-only file system; .*Make it writable and resume"
    with ExitStack() as patch, pytest.raises(TrainingFailedError, match=message):
        fit(recipe, data, folder, progress=becomes_read_only)
    fit(recipe, data, folder, resume=True)


@pytest.mark.parametrize("name", ["", "checkpoints", "model", "events.jsonl/", "metrics.csv/"])
def test_a_file_where_a_folder_should_be_and_the_other_way_round(
    name: str, short: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    place = folder / name
    if name:  # of a run that was begun
        shutil.copytree(short, folder)
        shutil.rmtree(place) if place.is_dir() else place.unlink()
    place.mkdir() if name.endswith("/") else place.write_text("")
    with pytest.raises((OSError, TrainingFailedError, CheckpointError), match=str(place)):
        fit(toy_recipe(**SHORT), toy_data(), folder, resume=bool(name))
