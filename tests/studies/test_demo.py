"""The demo's processes: a signal ends them, one that dies is an error."""

import signal
from pathlib import Path

import pytest

from gpattention.studies import scheduler
from gpattention.studies.demo import run_demo
from gpattention.studies.scheduler import Work, _Worker
from gpattention.training import TrainingFailedError, TrainingStoppedError
from tests.studies.test_scheduler import Started


def test_a_signal_ends_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started()

    def start(work: Work, slot: int, task: object, fresh: bool) -> _Worker:
        if slot == 1:
            signal.raise_signal(signal.SIGTERM)
        return started(work, slot, task, fresh)

    monkeypatch.setattr(scheduler, "_start", start)
    with pytest.raises(TrainingStoppedError, match="stopped by SIGTERM; what is trained so far is kept"):
        run_demo(tmp_path, models=("softmax", "cgp"), workers=2)
    assert [process.calls[0] for process in started.processes] == ["terminate"] * 2


def test_one_that_dies_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_start", Started(exitcode=1))
    with pytest.raises(TrainingFailedError, match="demo-cgp: its process ended with exit code 1"):
        run_demo(tmp_path, models=("softmax", "cgp"), workers=2)


def test_alone_it_says_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise TrainingStoppedError("stopped by SIGINT at step 3; resume to go on")

    monkeypatch.setattr("gpattention.studies.demo.train_recipe", stop)
    with pytest.raises(TrainingStoppedError, match=r"^stopped by SIGINT at step 3; what is trained"):
        run_demo(tmp_path, models=("softmax",), workers=1)
    with pytest.raises(ValueError, match=r"workers .* got 0"):
        run_demo(tmp_path, workers=0)
