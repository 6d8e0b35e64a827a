"""Many runs at once: processes side by side, and one GPU shared between them.

`side_by_side` serves sweeps, plans, evaluations and the demo.  A signal ends all processes, and one that dies
leaves the others alone.  Where the work is done is an `Engine`'s affair: processes of this machine, or a
cluster's (`ray_cluster`).  `shared_gpu` lets processes compute on one GPU at the same time.
"""

import math
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from gpattention.training import StopRequest, TrainingStoppedError

Task = TypeVar("Task")
Work = Callable[[Any, int], Any]  # a task and the number of the process, from 0 on; it can be pickled

LOOK = 0.2  # seconds between two looks at whether this process was asked to stop
GRACE = 60.0  # seconds that a process has to save what it trains
TRIES = 4  # of a task whose node is lost, time after time


@dataclass(frozen=True)
class Died:
    """The end of a process that gave no answer.

    Attributes:
        code: its exit code; of one that was killed, the signal with a minus sign.
    """

    code: int

    def __str__(self) -> str:
        killed = f"was killed by {signal.Signals(-self.code).name}" if self.code < 0 else ""
        return f"its process {killed or f'ended with exit code {self.code}'}"


@dataclass(frozen=True)
class Lost:
    """The loss of a node: nobody knows how its process ended, and the task is begun again.

    Attributes:
        reason: what is known.
    """

    reason: str

    def __str__(self) -> str:
        return f"its node was lost: {self.reason}"


@dataclass(eq=False)
class Worker:
    """A task under way.

    Attributes:
        slot: number of its place among those at once.
        task: the task.
        begin: when it began, by this process's monotonic clock.
    """

    slot: int
    task: Any
    begin: float


class Engine(Protocol):
    """Where tasks are worked on."""

    def start(self, work: Work, slot: int, task: Any, fresh: bool, tries: int) -> Any:
        """Begin a task, for the first time or after so many tries that were lost, and return its `Worker`."""

    def answers(self, workers: Sequence[Any], seconds: float) -> Iterable[tuple[Any, bool, Any]]:
        """Wait so long for messages: yields the worker, whether it is its answer, and the message."""

    def stop(self, worker: Any) -> None:
        """Ask it to save what it trains and to answer."""

    def end(self, workers: Sequence[Any]) -> None:
        """Ask all of them to stop, and wait until none is left."""


_SEND: ContextVar[Callable[[Any], object]] = ContextVar("send", default=lambda _: None)


def report(message: Any) -> None:
    """Pass a message about the work of this process to `on_message` of the process that started it."""
    _SEND.get()(message)


@dataclass(eq=False)
class _Worker(Worker):
    """A process of this machine, and the end of its pipe."""

    process: SpawnProcess
    pipe: Connection


def side_by_side(
    work: Work,
    tasks: Sequence[Task],
    at_once: int,
    *,
    when_stopped: str | None = None,
    fresh: bool = False,
    ready: Callable[[Task], bool] = lambda _: True,
    minutes: float | None = None,
    on_message: Callable[[Task, Any], object] = lambda task, message: None,
    engine: Engine | None = None,
) -> Iterator[tuple[Task, Any, float]]:
    """Work on tasks in a process each, `at_once` at a time; if that is 1, in this one unless `fresh`.

    A task whose node is lost is begun again before any other; `work` must know how to go on with it.

    Args:
        work: what is done; it returns failures as answers.
        tasks: started in this order, as soon as they are ready.
        at_once: processes.
        when_stopped: how the message of the error ends that a signal raises.  Without it, a signal asks the
            processes to stop, nothing more is started, and their answers are yielded as always.
        fresh: a process also for a single one, with as many threads as it likes; else processes have one
            thread each, as there are as many of them as cores.
        ready: whether a task can be started now.
        minutes: after which the processes are asked to stop, as by a signal.
        on_message: called with a task and the messages that its work passes to `report`.
        engine: where; on this machine if not given.

    Yields:
        Each task when it is done, its answer and how many seconds it took.  The answer is what `work`
        returned, `Died`, `Lost` as often as it was tried, or None where a task never became ready.

    Raises:
        TrainingStoppedError: SIGTERM or Ctrl-C came, and `when_stopped` was given.
    """
    if at_once == 1 and not fresh and engine is None:
        yield from _in_this_process(work, tasks, when_stopped, on_message)
        return
    place: Engine = _Processes() if engine is None else engine
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    waiting, stopping = list(tasks), False
    tries: Counter[int] = Counter()  # that were lost, by the identity of the task
    workers: list[Worker] = []
    with StopRequest() as stop:
        try:
            while waiting or workers:
                late = deadline is not None and time.monotonic() > deadline
                if not stopping and (stop.asked or late):
                    if stop.asked and when_stopped is not None:
                        raise TrainingStoppedError(f"stopped by {stop.asked}; {when_stopped}")
                    stopping, waiting = True, []
                    for worker in workers:
                        place.stop(worker)
                for task in [task for task in waiting if ready(task)][: at_once - len(workers)]:
                    waiting.remove(task)
                    free = min({*range(at_once)} - {worker.slot for worker in workers})
                    workers.append(place.start(work, free, task, fresh, tries[id(task)]))
                if not workers:  # what the others wait for has failed
                    yield from ((task, None, 0.0) for task in waiting)
                    return
                for worker, final, answer in place.answers(workers, LOOK):
                    if not final:
                        on_message(worker.task, answer)
                        continue
                    workers.remove(worker)
                    if isinstance(answer, Lost) and not stopping:
                        tries[id(worker.task)] += 1
                        if tries[id(worker.task)] < TRIES:
                            waiting.insert(0, worker.task)
                            continue
                    yield worker.task, answer, time.monotonic() - worker.begin
        finally:
            place.end(workers)


def _in_this_process(
    work: Work,
    tasks: Sequence[Task],
    when_stopped: str | None,
    on_message: Callable[[Task, Any], object],
) -> Iterator[tuple[Task, Any, float]]:
    for task in tasks:
        begin = time.monotonic()
        before = _SEND.set(partial(on_message, task))
        try:
            answer = work(task, 0)
        finally:
            _SEND.reset(before)
        if isinstance(answer, TrainingStoppedError):
            raise TrainingStoppedError(f"{str(answer).partition(';')[0]}; {when_stopped}") from answer
        yield task, answer, time.monotonic() - begin


class _Processes:
    """The engine of one machine."""

    def start(self, work: Work, slot: int, task: Any, fresh: bool, tries: int) -> _Worker:
        return _start(work, slot, task, fresh)

    def answers(self, workers: Sequence[_Worker], seconds: float) -> Iterator[tuple[_Worker, bool, Any]]:
        answered = wait([worker.pipe for worker in workers], timeout=seconds)
        for worker in [each for each in workers if each.pipe in answered]:
            try:
                final, answer = worker.pipe.recv()
            except (EOFError, ConnectionResetError):  # it died without an answer
                worker.process.join()
                final, answer = True, Died(worker.process.exitcode or 0)
            if final:
                worker.pipe.close()
                worker.process.join(GRACE)
            yield worker, final, answer

    def stop(self, worker: _Worker) -> None:
        worker.process.terminate()

    def end(self, workers: Sequence[_Worker]) -> None:
        for worker in workers:
            worker.process.terminate()
            worker.pipe.close()
        for worker in workers:
            worker.process.join(GRACE)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()


def _start(work: Work, slot: int, task: Any, fresh: bool) -> _Worker:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    # no daemon: loaders have theirs
    process = context.Process(target=_child, args=(theirs, work, task, slot, fresh))
    with _deaf():
        process.start()
    theirs.close()  # the child's is the only one left: when it dies, ours sees the end
    return _Worker(slot, task, time.monotonic(), process, ours)


@contextmanager
def _deaf() -> Iterator[None]:
    """Processes that begin inside do not hear Ctrl-C, which would be a traceback before `_child` begins."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _child(pipe: Connection, work: Work, task: Any, slot: int, fresh: bool) -> None:
    # a terminal sends Ctrl-C to every process; the one that started this one ends it, and reports it once
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not fresh:
        torch.set_num_threads(1)  # as many processes as cores: more threads would wait for each other

    def send(message: Any, *, final: bool = False) -> None:
        with suppress(OSError):  # nobody listens any more
            pipe.send((final, message))

    _SEND.set(send)
    send(work(task, slot), final=True)


# One GPU for several processes at the same time: NVIDIA's Multi-Process Service.  Without it the kernels of
# processes on one GPU take turns; models of the paper's size leave most of a large GPU idle.

CONTROL = "nvidia-cuda-mps-control"
FURTHER = ("/usr/local/nvidia/bin", "/usr/bin")  # drivers of a container are not always on the path
PIPE, LOG = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
PART = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"  # of the multiprocessors that the kernels of a process may take
PATIENCE = 30.0  # seconds for the service to start, or to stop when its last process is gone


class SharingError(OSError):
    """The service is not installed, or did not start."""


def part_of_gpu(processes: int) -> int:
    """Percent of the GPU for each of several processes: three times an equal share.

    Small kernels of one process then leave room for those of others, which more than makes up for their
    taking longer; while some processes wait, the others still fill the GPU.
    """
    return min(100, math.ceil(300 / processes))


@contextmanager
def shared_gpu(processes: int = 1) -> Iterator[None]:
    """Let processes that are started inside share the GPUs; the service ends with the block.

    Where CUDA_MPS_PIPE_DIRECTORY is set already, the service that it names is used and left running, and so
    is the part of the GPU in CUDA_MPS_ACTIVE_THREAD_PERCENTAGE.  The settings of the GPU are not touched.
    A process that crashes on the GPU takes those beside it down.

    Args:
        processes: how many at once, which decides the part that each may take (`part_of_gpu`).

    Raises:
        SharingError: the service is not installed, or did not start.
    """
    part = {} if os.environ.get(PART) else {PART: str(part_of_gpu(processes))}
    if os.environ.get(PIPE):
        with _environment(part):
            yield
        return
    program = shutil.which(CONTROL, path=os.pathsep.join((os.environ.get("PATH", ""), *FURTHER)))
    if program is None:
        without = "without sharing the processes take turns, which is slower and otherwise the same"
        wanted = f"{CONTROL} of NVIDIA's driver on the path to share a GPU"
        raise SharingError(f"expected {wanted}, got none; {without}")
    place = Path(tempfile.mkdtemp(prefix="gpattention-mps-"))
    with _environment({PIPE: str(place), LOG: str(place), **part}):
        try:
            started, message = _call([program, "-d"])
            if started != 0:
                raise SharingError(f"{program} did not start: {message or f'exit code {started}'}")
            yield
        finally:
            _end_service(program, place)


@contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    """Variables of this process and those that it starts, put back afterwards."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _end_service(program: str, place: Path) -> None:
    """Ask the service to quit; one that does not is ended by its number, and if that fails reported."""
    code, _ = _call([program], "quit\n")
    number = place / f"{CONTROL}.pid"
    if code != 0 and number.is_file():
        with suppress(ValueError, OSError):
            os.kill(int(number.read_text()), signal.SIGTERM)
            code = 0
    if code != 0 and any(place.iterdir()):  # without its folder nobody could end it
        how = f"once its processes are gone: echo quit | {PIPE}={place} {program}"
        warnings.warn(f"{CONTROL} did not end; {how}", RuntimeWarning, stacklevel=2)
        return
    shutil.rmtree(place, ignore_errors=True)


def _call(command: list[str], text: str = "") -> tuple[int, str]:
    """Exit code and output.  The output goes to a file: a daemon would keep a pipe open."""
    with tempfile.TemporaryFile("w+") as output:
        try:
            done = subprocess.run(
                command, input=text, stdout=output, stderr=subprocess.STDOUT, text=True, timeout=PATIENCE,
                check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return 1, f"no answer after {PATIENCE:.0f} seconds"
        output.seek(0)
        return done.returncode, output.read().strip()
