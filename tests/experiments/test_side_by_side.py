"""Work in several processes: answers, deaths, and a signal that leaves none of them behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from gpattention.experiments import run_demo
from gpattention.experiments import side_by_side as module
from gpattention.experiments.side_by_side import Died, Work, _serve, _Worker, side_by_side
from gpattention.training import TrainingFailedError, TrainingStoppedError


class Stubborn:
    """A process that is not one: it answers nothing and goes on when asked to stop."""

    exitcode: int | None = None

    def __init__(self) -> None:
        self.told: list[str] = []

    def terminate(self) -> None:
        self.told.append("terminate")

    def join(self, timeout: float | None = None) -> None:
        self.told.append("join")

    def is_alive(self) -> bool:
        return "kill" not in self.told

    def kill(self) -> None:
        self.told.append("kill")


class Started:
    """In the place of `_start`: processes that are none, and our ends of their pipes."""

    def __init__(self, answers: dict[str, str] | None = None, exitcode: int | None = None) -> None:
        self.answers, self.exitcode = answers or {}, exitcode
        self.processes: list[Stubborn] = []
        self.ends: list[Connection] = []
        self.tasks: list[object] = []

    def __call__(self, work: Work, slot: int, task: object) -> _Worker:
        ours, theirs = Pipe()
        process = Stubborn()
        process.exitcode = self.exitcode
        if self.exitcode is not None:
            theirs.close()
        elif isinstance(task, str) and task in self.answers:
            theirs.send(self.answers[task])
        self.processes.append(process)
        self.ends.append(theirs)
        self.tasks.append(task)
        return _Worker(process, ours, slot, task)  # type: ignore[arg-type]


def double(task: int, slot: int) -> int:
    return 2 * task


def test_a_signal_ends_all_workers_even_stubborn_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started({"first": "answer"})
    monkeypatch.setattr(module, "_start", started)
    answers = side_by_side(double, ["first", "second", "third"], 2, when_stopped="resume to go on")
    assert next(answers) == ("first", "answer")
    assert started.ends[0].recv() == "third"  # the first worker went on with the third task
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(TrainingStoppedError, match="stopped by SIGTERM; resume to go on"):
        next(answers)
    assert [process.told for process in started.processes] == [["terminate", "join", "kill", "join"]] * 2


def test_a_worker_that_ends_by_itself_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started(exitcode=3)
    monkeypatch.setattr(module, "_start", started)
    answers = list(side_by_side(double, [0, 1, 2], 2, when_stopped=""))
    assert started.tasks == [0, 1, 2]
    assert answers == [(task, Died("its process ended with exit code 3")) for task in range(3)]


def test_a_worker_answers_every_task_until_nobody_listens() -> None:
    ours, theirs = Pipe()
    worker = threading.Thread(target=_serve, args=(theirs, double, 0))
    worker.start()
    answers = []
    for task in range(3):
        ours.send(task)
        answers.append(ours.recv())
    ours.close()
    worker.join(10)
    assert not worker.is_alive()
    assert answers == [0, 2, 4]


PROGRAM = """
import os, time
from pathlib import Path
from gpattention.experiments.side_by_side import side_by_side

def work(task, slot):
    Path(task).write_text(str(os.getpid()))
    time.sleep(600)

if __name__ == "__main__":
    for _ in side_by_side(work, ["a.pid", "b.pid", "c.pid"], 2, when_stopped="nothing is kept"):
        pass
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_real_processes_end_with_the_one_that_started_them(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    program = subprocess.Popen(
        [sys.executable, "program.py"], cwd=tmp_path, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if all((tmp_path / f"{name}.pid").is_file() for name in "ab"):
                break
            time.sleep(0.1)
        if number == signal.SIGINT:
            os.killpg(program.pid, number)  # a terminal tells every process
        else:
            program.send_signal(number)
        _, told = program.communicate(timeout=30)
    finally:
        program.kill()
    assert f"TrainingStoppedError: stopped by {number.name}; nothing is kept" in told
    assert told.count("Traceback") == 1  # the others go without a word
    assert not (tmp_path / "c.pid").exists()
    for name in "ab":
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / f"{name}.pid").read_text()), 0)


class TestDemo:
    def test_a_signal_ends_its_processes(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        started = Started()

        def start(work: Work, slot: int, task: object) -> _Worker:
            if slot == 1:
                signal.raise_signal(signal.SIGTERM)
            return started(work, slot, task)

        monkeypatch.setattr(module, "_start", start)
        with pytest.raises(TrainingStoppedError, match="stopped by SIGTERM; the next demo starts anew"):
            run_demo(tmp_path, models=("softmax", "cgp"), workers=2)
        assert [process.told[0] for process in started.processes] == ["terminate"] * 2

    def test_one_that_dies_is_told(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "_start", Started(exitcode=1))
        with pytest.raises(TrainingFailedError, match="demo-cgp: its process ended with exit code 1"):
            run_demo(tmp_path, models=("softmax", "cgp"), workers=2)

    def test_alone_it_tells_the_same(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def stop(*_: object, **__: object) -> None:
            raise TrainingStoppedError("stopped by SIGINT at step 3; resume to go on")

        monkeypatch.setattr("gpattention.experiments.demo.train_recipe", stop)
        with pytest.raises(TrainingStoppedError, match=r"^stopped by SIGINT at step 3; the next demo starts"):
            run_demo(tmp_path, models=("softmax",), workers=1)
