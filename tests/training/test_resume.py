"""A run that is killed, stopped or damaged: the same numbers after resuming, or a clear refusal."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpattention.training import CheckpointError, Progress, fit
from gpattention.training.checkpoint import list_checkpoints, read_checkpoint
from gpattention.training.lock import RunInUseError
from gpattention.training.records import append_event, read_events
from tests.disks import half_written
from tests.training.toy import toy_data, toy_recipe

ROOT = Path(__file__).parent.parent.parent


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.training.toy", str(folder), "cgp", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbed: 4 steps an epoch, 16 in all, 8 in each phase."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    done = run(folder, "none")
    assert done.returncode == 0, done.stderr
    return folder


def assert_same(folder: Path, whole: Path) -> None:
    ours, theirs = load_file(folder / "model/model.safetensors"), load_file(whole / "model/model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, x in ours.items():
        assert torch.equal(x, theirs[name]), name
    last = [read_checkpoint(list_checkpoints(f / "checkpoints")[-1]) for f in (folder, whole)]
    for name, x in last[0].tensors.items():
        assert torch.equal(x, last[1].tensors[name]), name
    assert (folder / "metrics.csv").read_text() == (whole / "metrics.csv").read_text()


@pytest.mark.parametrize(
    "when",
    [
        ("step", "2"),
        ("step", "6"),
        ("step", "8"),
        ("step", "11"),
        ("step", "15"),
        ("write", "6"),
        ("write", "11"),
    ],
    ids=" ".join,
)
def test_a_killed_run_resumes_to_the_same_bits(when: tuple[str, str], whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert run(folder, *when).returncode == -signal.SIGKILL
    assert len(half_written(folder)) == (when[0] == "write")
    done = run(folder, "none", "0", "resume")
    assert done.returncode == 0, done.stderr
    assert_same(folder, whole)
    assert half_written(folder) == []


def test_a_run_that_is_killed_before_it_is_one_begins_anew(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert run(folder, "write", "1").returncode == -signal.SIGKILL
    assert [half_written(folder) != [], (folder / "recipe.json").exists()] == [True, False]
    done = run(folder, "none")
    assert done.returncode == 0, done.stderr
    assert_same(folder, whole)
    assert half_written(folder) == []


def test_a_stopped_run_saves_where_it_is(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    stopped = run(folder, "term", "10")
    assert stopped.returncode == 1
    assert "stopped by SIGTERM at step 10" in stopped.stderr
    assert list_checkpoints(folder / "checkpoints")[-1].name == "step-00000010.safetensors"
    assert run(folder, "none", "0", "resume").returncode == 0
    assert_same(folder, whole)


def test_damaged_and_foreign_checkpoints_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    recipe, data = toy_recipe(), toy_data()
    fit(recipe, data, folder)
    path = list_checkpoints(folder / "checkpoints")[-1]
    content = path.read_bytes()
    path.write_bytes(content[:-7])
    with pytest.raises(CheckpointError, match="truncated or altered"):
        fit(recipe, data, folder, resume=True)
    altered = bytearray(content)
    altered[-1] ^= 1
    path.write_bytes(bytes(altered))
    with pytest.raises(CheckpointError, match="truncated or altered"):
        fit(recipe, data, folder, resume=True)
    path.write_bytes(content)
    path.with_suffix(".sha256").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=f"{path.stem}.sha256 says"):
        fit(recipe, data, folder, resume=True)
    save_file({"x": torch.zeros(1)}, path)
    path.with_suffix(".sha256").unlink()
    with pytest.raises(CheckpointError, match="has no checksum"):
        fit(recipe, data, folder, resume=True)


def test_one_process_at_a_time(tmp_path: Path) -> None:
    """Two would write over each other's checkpoints; a process that ends or dies gives the folder free."""
    folder, recipe, data = tmp_path / "run", toy_recipe(phases__epochs=1), toy_data()
    refused = []

    def also(progress: Progress) -> None:
        if progress.step == 1:
            with pytest.raises(RunInUseError, match=f"{folder} is being trained by another process"):
                fit(recipe, data, folder, resume=True)
            refused.append(progress.step)

    fit(recipe, data, folder, progress=also)
    assert refused == [1]
    fit(recipe, data, folder, resume=True)
    code = f"""
import os, pathlib
from gpattention.training.lock import exclusive
with exclusive(pathlib.Path({str(folder)!r})):
    os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    fit(recipe, data, folder, resume=True)


def test_the_order_of_a_recipes_options_is_no_other_run(tmp_path: Path) -> None:
    fit(toy_recipe(phases__epochs=1), toy_data(), tmp_path / "run")
    turned = toy_recipe(
        phases__epochs=1, model={"config": {"depth": 2, "heads": 2, "width": 16}, "attention": "cgp"}
    )
    fit(turned, toy_data(), tmp_path / "run", resume=True)
    (tmp_path / "run" / "recipe.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"recipe\.json is not a recipe"):
        fit(turned, toy_data(), tmp_path / "run", resume=True)


def test_half_a_line_of_events_is_replaced(tmp_path: Path) -> None:
    append_event(tmp_path, "phase", step=0)
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"time": 179488')  # the disk was full
    assert [event["event"] for event in read_events(tmp_path)] == ["phase"]
    append_event(tmp_path, "resumed", step=0)
    assert [event["event"] for event in read_events(tmp_path)] == ["phase", "resumed"]


def test_another_recipe_or_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    fit(toy_recipe(phases__epochs=1), toy_data(), folder)
    with pytest.raises(CheckpointError, match=r"to resume: phases.epochs is 1 there and 2 here\."):
        fit(toy_recipe(), toy_data(), folder, resume=True)
    other = toy_recipe(phases__epochs=1, model__options={"noise": 0.1}, name="other")
    told = "name is 'toy' there and 'other' here, model.options.noise is not given there and 0.1 here"
    with pytest.raises(CheckpointError, match=told):
        fit(other, toy_data(), folder, resume=True)
    with pytest.raises(FileExistsError, match="holds a run already"):
        fit(toy_recipe(), toy_data(), folder)
    with pytest.raises(CheckpointError, match="nothing to resume"):
        fit(toy_recipe(), toy_data(), tmp_path / "empty", resume=True)
