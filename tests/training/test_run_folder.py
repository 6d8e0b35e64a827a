"""The folder of a run: what it may not hold at the beginning, and disks that fail while it is written."""

import errno
import json
import os
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from gpattention.training import CheckpointError, TrainingFailedError, fit, take_first_phase
from gpattention.training.folder import PARTS
from gpattention.training.records import append_event, read_events
from tests.disks import CALLS, counted, failing_at, half_written, read_only, room_for
from tests.training.toy import toy_data, toy_recipe

SHORT = {"phases__epochs": 1, "phases__kernel_epochs": 1}


def weights(folder: Path) -> bytes:
    return (folder / "model" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbed."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("whole") / "run"
    fit(toy_recipe(**SHORT), toy_data(), folder)
    return folder


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
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = toy_recipe("scgp", **SHORT)
    (tmp_path / "other" / "checkpoints").mkdir(parents=True)
    with pytest.raises(FileExistsError, match="but checkpoints, which"):
        take_first_phase(recipe, tmp_path / "other", whole)
    folder = tmp_path / "run"
    for number in range(1, 6):  # two checkpoints of two files each, and the recipe
        with monkeypatch.context() as patch:
            failing_at(patch, "replace", number, errno.EIO)
            with pytest.raises(OSError, match=str(folder)):
                take_first_phase(recipe, folder, whole)
        assert not (folder / "recipe.json").exists()
        with pytest.raises(FileExistsError, match="which training would overwrite"):
            fit(recipe, toy_data(), folder)  # would start with the checkpoint of another run
    take_first_phase(recipe, folder, whole)
    assert [event["event"] for event in read_events(folder)] == ["first phase taken"]
    fit(recipe, toy_data(), folder, resume=True)


@pytest.mark.parametrize("call", CALLS)
def test_a_disk_that_is_full_at_any_file_leaves_no_orphan_and_training_goes_on(
    call: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file of the run in turn is the first that has no room."""
    recipe, data = toy_recipe(**SHORT), toy_data()
    with monkeypatch.context() as patch:
        calls = counted(patch, call)
        fit(recipe, data, tmp_path / "counted")
    assert len(calls) > 10  # recipe, metrics, checkpoints and their sums, weights and config
    for number in range(1, len(calls) + 1):
        folder = tmp_path / str(number)
        told = rf"({folder}/.*: No space left on device)|(No space left on device: '{folder}/.*')"
        with monkeypatch.context() as patch:
            failing_at(patch, call, number)
            with pytest.raises((TrainingFailedError, OSError), match=told):
                fit(recipe, data, folder)
        assert half_written(folder) == []
        fit(recipe, data, folder, resume=(folder / "recipe.json").exists())
        assert weights(folder) == weights(whole)


@pytest.mark.parametrize("size", [100, 700, 3000, 40_000])
def test_a_disk_that_is_full_in_the_middle_of_a_file(size: int, whole: Path, tmp_path: Path) -> None:
    folder, recipe, data = tmp_path / "run", toy_recipe(**SHORT), toy_data()
    with room_for(size), pytest.raises((TrainingFailedError, OSError), match=str(folder)) as told:
        fit(recipe, data, folder)
    assert half_written(folder) == []
    assert "Make room and resume" in str(told.value) or isinstance(told.value, OSError)
    begun = (folder / "recipe.json").exists()
    if begun:
        assert all(isinstance(event, dict) for event in read_events(folder))
    fit(recipe, data, folder, resume=begun)
    assert weights(folder) == weights(whole)


def test_an_event_that_has_no_room_leaves_whole_lines(tmp_path: Path) -> None:
    append_event(tmp_path, "phase", step=0)
    before = (tmp_path / "events.jsonl").read_bytes()
    with room_for(len(before) + 20), pytest.raises(OSError, match=r"File too large: '.*events\.jsonl'"):
        append_event(tmp_path, "failed", reason="x" * 1000)
    assert (tmp_path / "events.jsonl").read_bytes() == before


def test_a_read_only_folder_is_told_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, data = toy_recipe(**SHORT), toy_data()
    with read_only(monkeypatch, tmp_path), pytest.raises(OSError, match=rf"Read-only .*{tmp_path}/run'"):
        fit(recipe, data, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []
    folder = tmp_path / "run"
    seen = []

    def becomes_read_only(progress: object) -> None:
        if not seen:
            seen.append(progress)
            patch.enter_context(read_only(monkeypatch, folder))

    with (
        ExitStack() as patch,
        pytest.raises(
            TrainingFailedError,
            match=rf"write {folder}/metrics\.csv: Read-only file system; .*Make it writable and resume",
        ),
    ):
        fit(recipe, data, folder, progress=becomes_read_only)
    fit(recipe, data, folder, resume=True)


@pytest.mark.parametrize(
    "name", ["run", "run/checkpoints", "run/model", "run/events.jsonl/", "run/metrics.csv/"]
)
def test_a_file_where_a_folder_should_be_and_the_other_way_round(name: str, tmp_path: Path) -> None:
    recipe, data = toy_recipe(**SHORT), toy_data()
    place = tmp_path / name
    if name != "run":  # of a run that was begun
        fit(recipe, data, tmp_path / "run")
        if place.is_dir():
            for file in place.iterdir():
                file.unlink()
            place.rmdir()
        else:
            place.unlink()
    place.mkdir() if name.endswith("/") else place.write_text("")
    with pytest.raises((OSError, TrainingFailedError, CheckpointError), match=name.rstrip("/")) as told:
        fit(recipe, data, tmp_path / "run", resume=name != "run")
    assert str(tmp_path) in str(told.value)


def test_a_clock_that_goes_backwards_does_not_disturb_a_run(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The times of events fall; what is computed and how long it took does not depend on them."""
    moment = [2e9]

    def earlier() -> float:
        moment[0] -= 1000
        return moment[0]

    monkeypatch.setattr("time.time", earlier)
    speeds = []
    fit(
        toy_recipe(**SHORT), toy_data(), tmp_path / "run",
        progress=lambda progress: speeds.append(progress.examples_per_second),
    )  # fmt: skip
    times = [event["time"] for event in read_events(tmp_path / "run")]
    assert times == sorted(times, reverse=True)
    assert min(speeds) > 0
    assert weights(tmp_path / "run") == weights(whole)


def test_a_recipe_is_the_first_that_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a folder with anything else of a run, but without it, is somebody else's."""
    real, written = os.replace, []
    monkeypatch.setattr(os, "replace", lambda a, b: (written.append(Path(b).name), real(a, b))[1])
    fit(toy_recipe(**SHORT), toy_data(), tmp_path / "run")
    assert written[0] == "recipe.json"
    assert json.loads((tmp_path / "run" / "recipe.json").read_text())["name"] == "toy"
