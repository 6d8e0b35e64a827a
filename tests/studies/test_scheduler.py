"""Work in several processes: answers, deaths, signals that leave none behind; one GPU shared between them."""

import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpattention.cli.main import main
from gpattention.studies import scheduler
from gpattention.studies.scheduler import (
    CONTROL,
    LOG,
    PART,
    PIPE,
    TRIES,
    Died,
    Lost,
    SharingError,
    Work,
    _Worker,
    part_of_gpu,
    report,
    shared_gpu,
    side_by_side,
)
from gpattention.training import TrainingStoppedError
from tests.studies.plan_runs import write_plan


class Stubborn:
    """A process that is not one: it answers nothing and goes on when asked to stop."""

    def __init__(self, exitcode: int | None) -> None:
        self.exitcode, self.calls = exitcode, list[str]()
        self.terminate, self.kill = (partial(self.calls.append, name) for name in ("terminate", "kill"))

    def join(self, timeout: float | None = None) -> None:
        self.calls.append("join")

    def is_alive(self) -> bool:
        return "kill" not in self.calls


class Started:
    """In the place of `_start`: processes that are none, and our ends of their pipes."""

    def __init__(self, answers: dict[str, str] | None = None, exitcode: int | None = None) -> None:
        self.answers, self.exitcode = answers or {}, exitcode
        self.processes: list[Stubborn] = []
        self.ends: list[Connection] = []
        self.tasks: list[tuple[object, int]] = []

    def __call__(self, work: Work, slot: int, task: object, fresh: bool) -> _Worker:
        ours, theirs = Pipe()
        process = Stubborn(self.exitcode)
        if self.exitcode is not None:
            theirs.close()
        elif isinstance(task, str) and task in self.answers:
            theirs.send((True, self.answers[task]))
        self.processes.append(process)
        self.ends.append(theirs)
        self.tasks.append((task, slot))
        return _Worker(slot, task, 0.0, process, ours)  # type: ignore[arg-type]


def double(task: int, slot: int) -> int:
    report(f"at {task}")
    return 2 * task


def test_a_signal_ends_all_workers_even_stubborn_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started({"first": "answer"})
    monkeypatch.setattr(scheduler, "_start", started)
    answers = side_by_side(double, ["first", "second", "third"], 2, when_stopped="resume to go on")
    assert next(answers)[:2] == ("first", "answer")
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(TrainingStoppedError, match="stopped by SIGTERM; resume to go on"):
        next(answers)
    calls = [process.calls for process in started.processes]
    assert calls == [["join"], ["terminate", "join", "kill", "join"]]  # the first had answered


def test_one_that_ends_without_an_answer_died(monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started(exitcode=3)
    monkeypatch.setattr(scheduler, "_start", started)
    answers = [(task, answer) for task, answer, _ in side_by_side(double, [0, 1, 2], 2, when_stopped="")]
    assert started.tasks == [(0, 0), (1, 1), (2, 0)]
    assert answers == [(task, Died(3)) for task in range(3)]
    assert str(Died(3)) == "its process ended with exit code 3"


@pytest.mark.parametrize("ask", [lambda: signal.raise_signal(signal.SIGTERM), None])
def test_without_an_error_what_is_under_way_still_answers(
    monkeypatch: pytest.MonkeyPatch, ask: object
) -> None:
    """A signal or a deadline asks the processes to stop and starts nothing more."""
    started = Started({"first": "answer"})
    monkeypatch.setattr(scheduler, "_start", started)
    minutes = None if callable(ask) else 0.2 / 60
    answers = side_by_side(double, ["first", "second", "third"], 1, fresh=True, minutes=minutes)
    assert next(answers)[:2] == ("first", "answer")
    started.answers["second"] = "stopped"
    assert next(answers)[:2] == ("second", "stopped")
    assert [task for task, _ in started.tasks] == ["first", "second"]
    if callable(ask):
        ask()
    else:
        time.sleep(0.3)
    assert list(answers) == []
    assert len(started.tasks) == 2


def test_tasks_wait_until_they_are_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started({"a": "done", "b": "done"})
    monkeypatch.setattr(scheduler, "_start", started)
    ready = {"a"}
    found = []
    for task, answer, _ in side_by_side(double, ["b", "a", "c"], 2, fresh=True, ready=lambda t: t in ready):
        found.append((task, answer))
        ready.add("b")
    assert found == [("a", "done"), ("b", "done"), ("c", None)]  # what the last waits for never came


def test_one_at_a_time_works_here() -> None:
    heard = list[tuple[int, str]]()
    found = side_by_side(double, [1, 2], 1, on_message=lambda task, message: heard.append((task, message)))
    assert [answer for _, answer, _ in found] == [2, 4]
    assert heard == [(1, "at 1"), (2, "at 2")]

    def stop(task: int, slot: int) -> TrainingStoppedError:
        return TrainingStoppedError("stopped by SIGINT at step 3; resume to go on")

    with pytest.raises(TrainingStoppedError, match=r"^stopped by SIGINT at step 3; all is lost$"):
        list(side_by_side(stop, [1], 1, when_stopped="all is lost"))


PROGRAM = """
import os, time
from pathlib import Path
from types import SimpleNamespace
from gpattention.studies.scheduler import side_by_side

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
    pids = [tmp_path / "a.pid", tmp_path / "b.pid"]
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not all(pid.is_file() for pid in pids):
            time.sleep(0.1)
        # a terminal tells every process of Ctrl-C
        (os.killpg if number == signal.SIGINT else os.kill)(program.pid, number)
        _, errors = program.communicate(timeout=30)
    finally:
        program.kill()
    assert f"TrainingStoppedError: stopped by {number.name}; nothing is kept" in errors
    assert errors.count("Traceback") == 1  # the others go without a word
    assert not (tmp_path / "c.pid").exists()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.read_text()), 0)


# One GPU for several processes: the service is started, named to them, and ended; a stand-in plays it

SCRIPT = f"""#!{sys.executable}
import os, pathlib, sys
command = sys.argv[1] if len(sys.argv) > 1 else sys.stdin.read().strip()
with open({{log!r}}, "a") as log:
    log.write(f"{{{{command}}}} {{{{os.environ['{PIPE}']}}}} {{{{os.environ['{LOG}']}}}}\\n")
{{then}}
"""


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without the service: nothing on the path."""
    monkeypatch.delenv(PIPE, raising=False)
    for name in (LOG, PART):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(scheduler, "FURTHER", ())
    return tmp_path


def service(folder: Path, then: str = "") -> Path:
    log, program = folder / "log", folder / CONTROL
    program.write_text(SCRIPT.format(log=str(log), then=then))
    program.chmod(0o755)
    return log


def test_the_service_is_started_named_and_ended_whatever_happens(
    alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = service(alone)
    with shared_gpu(10):
        place = os.environ[PIPE]
        assert os.environ[LOG] == place
        assert os.environ[PART] == "30"
        assert log.read_text() == f"-d {place} {place}\n"
    assert log.read_text().splitlines()[1:] == [f"quit {place} {place}"]
    assert not {PIPE, LOG, PART} & set(os.environ)
    assert not Path(place).exists()
    monkeypatch.setenv(LOG, "mine")
    with pytest.raises(KeyError), shared_gpu():
        raise KeyError("work")
    assert os.environ[LOG] == "mine"
    assert [line.split()[0] for line in log.read_text().splitlines()] == ["-d", "quit"] * 2
    monkeypatch.setenv(PIPE, "theirs")  # one that runs already is used and left
    with shared_gpu(16):
        assert os.environ[PIPE] == "theirs"
        assert os.environ[PART] == "19"
    assert os.environ[PIPE] == "theirs"
    monkeypatch.setenv(PART, "50")
    with shared_gpu(16):
        assert os.environ[PART] == "50"
    assert len(log.read_text().splitlines()) == 4


def test_parts_overlap_and_are_never_more_than_the_whole() -> None:
    assert [part_of_gpu(n) for n in (1, 2, 3, 4, 10, 25, 400)] == [100, 100, 100, 75, 30, 12, 1]


@pytest.mark.parametrize(
    ("then", "message"),
    [
        (None, r"expected nvidia-cuda-mps-control .* got none"),
        ("sys.exit('no such device')", "did not start: no such device"),
        ("sys.exit(3)", "exit code 3"),
        ("import time; time.sleep(60)", "no answer after"),
    ],
)
def test_a_service_that_is_not_there_or_does_not_start(
    alone: Path, then: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if then is not None:
        service(alone, then)
    monkeypatch.setattr(scheduler, "PATIENCE", 0.2 if then and "sleep" in then else 30.0)
    with pytest.raises(SharingError, match=message), shared_gpu():
        pass
    assert PIPE not in os.environ


def test_one_that_does_not_quit(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    file = f'pathlib.Path(os.environ["{PIPE}"], "{CONTROL}.pid")'
    service(alone, f'if command == "-d":\n    {file}.write_text("{daemon.pid}")\nsys.exit(command == "quit")')
    with shared_gpu():
        place = Path(os.environ[PIPE])
    assert daemon.wait(10) == -signal.SIGTERM
    assert not place.exists()
    service(alone, f'pathlib.Path(os.environ["{PIPE}"], "control").touch()\nsys.exit(command == "quit")')
    with pytest.warns(RuntimeWarning, match=f"did not end; .* echo quit | {PIPE}="), shared_gpu():
        place = Path(os.environ[PIPE])
    assert place.is_dir()  # without it nobody could end the service
    shutil.rmtree(place)
    service(alone, "if command == '-d' and os.fork() == 0:\n    import time; time.sleep(3); os._exit(0)")
    monkeypatch.setattr(scheduler, "PATIENCE", 2.0)
    with shared_gpu():  # a daemon that keeps what it writes to is not waited for
        pass


def test_commands_refuse_to_share_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_plan(tmp_path, ("gp",), seeds=[0])
    for command in (["reproduce", str(tmp_path / "plan.toml")], ["sweep", str(tmp_path / "base.toml")]):
        assert main([*command, "--share-gpu", "--device", "cpu"]) == 2
        assert "expected a CUDA device with --share-gpu, got cpu" in capsys.readouterr().err


class Backend:
    """An engine without machines: it works when asked for answers, and loses tasks as often as it should."""

    def __init__(self, lost: dict[str, int]) -> None:
        self.lost, self.started, self.ended = lost, list[tuple[str, int]](), list[str]()

    def start(self, work: Work, slot: int, task: str, fresh: bool, tries: int) -> SimpleNamespace:
        self.started.append((task, tries))
        return SimpleNamespace(work=work, slot=slot, task=task, begin=0.0, tries=tries)

    def answers(
        self, workers: list[SimpleNamespace], seconds: float
    ) -> list[tuple[SimpleNamespace, bool, object]]:
        first = workers[0]
        gone = self.lost.get(first.task, 0) > first.tries
        return [(first, True, Lost("node 7") if gone else first.work(first.task, first.slot))]

    def stop(self, worker: SimpleNamespace) -> None:
        self.ended.append(worker.task)

    def end(self, workers: list[SimpleNamespace]) -> None:
        self.ended += [worker.task for worker in workers]


def test_what_a_lost_node_was_at_is_begun_again_before_the_rest() -> None:
    engine = Backend({"a": 1, "c": TRIES})
    work = lambda task, slot: f"{task} done"  # noqa: E731
    found = {task: answer for task, answer, _ in side_by_side(work, ["a", "b", "c"], 1, engine=engine)}
    assert found == {"a": "a done", "b": "b done", "c": Lost("node 7")}
    assert engine.started == [("a", 0), ("a", 1), ("b", 0), *(("c", tries) for tries in range(TRIES))]
    assert str(found["c"]) == "its node was lost: node 7"


def test_an_engine_ends_what_is_under_way_when_somebody_stops() -> None:
    engine = Backend({})
    answers = side_by_side(lambda task, slot: task, ["a", "b", "c"], 2, engine=engine, when_stopped="resume")
    assert next(answers)[0] == "a"
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(TrainingStoppedError, match="resume"):
        next(answers)
    assert engine.ended == ["b"]
