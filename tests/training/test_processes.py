"""Several processes train what one trains; one that dies ends the run and leaves a checkpoint."""

import csv
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gpattention.training import TrainingFailedError, launch
from gpattention.training.checkpoint import list_checkpoints, read_checkpoint

pytest.importorskip("lightning_fabric")
ROOT = Path(__file__).parent.parent.parent


def two(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return _python(*command, "-m", "tests.training.many", str(folder), *arguments)


def one(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return _python("-m", "tests.training.many", str(folder), *arguments)


def _python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def weights(folder: Path) -> Mapping[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in two processes, with draws, dropout and a regulariser."""
    folder = tmp_path_factory.mktemp("pair") / "run"
    done = two(folder, "cgp")
    assert done.returncode == 0, done.stderr
    return folder


def test_two_processes_equal_one_to_rounding(pair: Path, tmp_path: Path) -> None:
    done = one(tmp_path / "one", "cgp")
    assert done.returncode == 0, done.stderr
    ours, theirs = weights(tmp_path / "one"), weights(pair)
    for name, x in ours.items():
        torch.testing.assert_close(theirs[name], x, rtol=1e-4, atol=1e-5, msg=name)
    for mine, other in zip(rows(tmp_path / "one"), rows(pair), strict=True):
        for column in ("train_loss", "train_regularizer", "validation_accuracy", "validation_nll"):
            assert float(mine[column]) == pytest.approx(float(other[column]), rel=1e-4), column


def test_a_process_that_dies_ends_the_run_and_resuming_gives_the_same_bits(
    pair: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    command = ["-m", "tests.training.many", str(folder), "cgp", "kill", "10"]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        for name, value in environment.items():
            patch.setenv(name, value)
        with pytest.raises(TrainingFailedError, match=r"killed by SIGKILL.*step-00000008"):
            launch(command, 2, folder)
    done = two(folder, "cgp", "resume")
    assert done.returncode == 0, done.stderr
    for name, x in weights(pair).items():
        assert torch.equal(weights(folder)[name], x), name
    assert rows(folder) == rows(pair)


def test_all_processes_stop_when_one_is_asked_to(pair: Path, tmp_path: Path) -> None:
    stopped = two(tmp_path / "run", "cgp", "stop", "6")
    assert stopped.returncode == 0, stopped.stderr
    assert stopped.stdout.count("at step 6") == 2
    last = read_checkpoint(list_checkpoints(tmp_path / "run" / "checkpoints")[-1])
    assert last.state["step"] == 6
    assert {name for name in last.tensors if name.startswith("random.")} >= {"random.0.cpu", "random.1.cpu"}
    resumed = two(tmp_path / "run", "cgp", "resume")
    assert resumed.returncode == 0, resumed.stderr
    for mine, other in zip(rows(tmp_path / "run"), rows(pair), strict=True):
        assert mine["validation_nll"] == other["validation_nll"]
        # of the steps of both processes, also of those before the stop
        assert float(mine["train_loss"]) == pytest.approx(float(other["train_loss"]), rel=1e-12)


def test_launching_one_process_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 2 processes"):
        launch(["-c", "pass"], 1, tmp_path)


def test_a_signal_has_a_name() -> None:
    from gpattention.training.launch import _ended

    assert _ended(-signal.SIGTERM) == "was killed by SIGTERM"
    assert _ended(3) == "ended with exit code 3"
