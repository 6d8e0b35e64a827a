"""Work in several processes at once: a signal ends all of them, and one that dies leaves the others alone."""

import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, TypeVar

import torch

from gpattention.training import TrainingStoppedError
from gpattention.training.signals import StopRequest

Task = TypeVar("Task")
Work = Callable[[Any, int], Any]  # a task and the number of the process, from 0 on; it can be pickled

LOOK = 0.2  # seconds between two looks at whether this process was asked to stop
GRACE = 60.0  # seconds that a process has to save what it trains


@dataclass(frozen=True)
class Died:
    """In the place of an answer: how the process ended that should have given it."""

    how: str


@dataclass(frozen=True)
class _Worker:
    """A process that does one task after another, and the task it is at."""

    process: SpawnProcess
    pipe: Connection
    slot: int
    task: Any


def side_by_side(
    work: Work, tasks: Sequence[Task], at_once: int, *, when_stopped: str
) -> Iterator[tuple[Task, Any]]:
    """Each task when it is done, with what `work` returned for it, or with `Died`.

    Every process has one thread.  SIGTERM or Ctrl-C ends them all and raises `TrainingStoppedError`, whose
    message ends in `when_stopped`.
    """
    waiting = deque(tasks)
    workers: list[_Worker] = []
    with StopRequest() as stop:
        try:
            for slot in range(min(at_once, len(tasks))):
                workers.append(_start(work, slot, waiting.popleft()))
            while workers:
                ready = wait([worker.pipe for worker in workers], timeout=LOOK)
                if stop.asked:
                    raise TrainingStoppedError(f"stopped by {stop.asked}; {when_stopped}")
                for worker in [each for each in workers if each.pipe in ready]:
                    answer = _answer(worker)
                    workers.remove(worker)
                    if waiting:
                        workers.append(_go_on(work, worker, waiting.popleft()))
                    else:
                        worker.pipe.close()  # nothing more to do: the child goes
                        worker.process.join(GRACE)
                    yield worker.task, answer
        finally:
            _end(workers)


def _start(work: Work, slot: int, task: Any) -> _Worker:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_child, args=(theirs, work, slot))  # no daemon: loaders start their own
    process.start()
    theirs.close()  # the child's is the only one left: when it dies, ours sees the end
    _send(ours, task)
    return _Worker(process, ours, slot, task)


def _go_on(work: Work, worker: _Worker, task: Any) -> _Worker:
    """The same process with the next task, or a new one if it died."""
    if worker.process.exitcode is not None:
        return _start(work, worker.slot, task)
    _send(worker.pipe, task)
    return replace(worker, task=task)


def _send(pipe: Connection, task: Any) -> None:
    with suppress(OSError):  # a child that is dead already shows when it is waited for
        pipe.send(task)


def _child(pipe: Connection, work: Work, slot: int) -> None:
    # a terminal tells Ctrl-C to every process; the one that started this ends it, and tells of it once
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)  # as many processes as cores: more threads would wait for each other
    _serve(pipe, work, slot)


def _serve(pipe: Connection, work: Work, slot: int) -> None:
    """In the child: until the other end closes."""
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        answer = work(task, slot)
        with suppress(OSError):  # nobody listens any more
            pipe.send(answer)


def _answer(worker: _Worker) -> Any:
    """What the child says of its task; if it died without a word, how."""
    try:
        return worker.pipe.recv()
    except (EOFError, ConnectionResetError):
        worker.process.join()
    code = worker.process.exitcode or 0
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return Died(f"its process {how}")


def _end(workers: Sequence[_Worker]) -> None:
    """Ask the processes to save what they train and stop, and wait for them."""
    for worker in workers:
        worker.process.terminate()
        worker.pipe.close()  # after this task it finds no other
    for worker in workers:
        worker.process.join(GRACE)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
