"""Training several runs, some at once; one that fails tells why and leaves the others alone."""

import signal
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

import torch

from gpattention.experiments.runs import train_recipe
from gpattention.experiments.sweep.plan import PlannedRun
from gpattention.training import TrainingStoppedError
from gpattention.training.signals import StopRequest

LOOK = 0.2  # seconds between two looks at whether the sweep was asked to stop
GRACE = 60.0  # seconds that a run has to save itself


@dataclass(frozen=True)
class Job:
    """One run to train, or to go on with."""

    run: PlannedRun
    root: str | Path | None
    device: str
    resume: bool


def train_all(jobs: Sequence[Job], at_once: int) -> Iterator[tuple[PlannedRun, str]]:
    """Each run when it is done, with the reason if it failed.

    One at a time, they train in this process.  More have a process each, with one thread: then a run
    that is killed, for want of memory perhaps, does not take the others with it.
    """
    if at_once == 1:
        for job in jobs:
            yield job.run, train_one(job)
    else:
        yield from _in_processes(jobs, at_once)


def train_one(job: Job) -> str:
    """Train to the end; empty, or why that failed.  A request to stop is no failure and goes through."""
    try:
        train_recipe(
            job.run.recipe, job.run.folder, root=job.root, resume=job.resume, device=job.device
        )  # fmt: skip
    except TrainingStoppedError:
        raise
    except Exception as error:  # of any kind: the sweep goes on, and its table tells
        return f"{type(error).__name__}: {error}".rstrip(": ")
    return ""


def device_of(name: str, slot: int) -> str:
    """`cuda` alone means all GPUs: the jobs take turns."""
    count = torch.cuda.device_count() if name == "cuda" else 0
    return f"cuda:{slot % count}" if count > 1 else name


@dataclass(frozen=True)
class _Worker:
    """A process that trains one run after another, on its device, and the run it is at."""

    process: SpawnProcess
    pipe: Connection
    device: str
    job: Job


def _in_processes(jobs: Sequence[Job], at_once: int) -> Iterator[tuple[PlannedRun, str]]:
    waiting = deque(jobs)
    workers: list[_Worker] = []
    with StopRequest() as stop:
        try:
            for slot in range(min(at_once, len(jobs))):
                job = waiting.popleft()
                workers.append(_start(job, device_of(job.device, slot)))
            while workers:
                ready = wait([worker.pipe for worker in workers], timeout=LOOK)
                if stop.asked:
                    raise TrainingStoppedError(f"stopped by {stop.asked}; resume to go on")
                for worker in [each for each in workers if each.pipe in ready]:
                    reason = _reason(worker)
                    workers.remove(worker)
                    if waiting:
                        workers.append(_go_on(worker, waiting.popleft()))
                    else:
                        worker.pipe.close()  # nothing more to do: the child goes
                        worker.process.join(GRACE)
                    yield worker.job.run, reason
        finally:
            _end(workers)


def _start(job: Job, device: str) -> _Worker:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, device))  # no daemon: loaders may start their own
    process.start()
    theirs.close()  # the child's is the only one left: when it dies, ours sees the end
    _send(ours, job)
    return _Worker(process, ours, device, job)


def _go_on(worker: _Worker, job: Job) -> _Worker:
    """The same process with the next run, or a new one if it died."""
    if worker.process.exitcode is not None:
        return _start(job, worker.device)
    _send(worker.pipe, job)
    return replace(worker, job=job)


def _send(pipe: Connection, job: Job) -> None:
    with suppress(OSError):  # a child that is dead already shows when it is waited for
        pipe.send(job)


def _work(pipe: Connection, device: str) -> None:
    """In the child: until the other end closes."""
    torch.set_num_threads(1)  # as many processes as cores: more threads would wait for each other
    while True:
        try:
            job: Job = pipe.recv()
        except EOFError:
            return
        try:
            reason = train_one(replace(job, device=device))
        except TrainingStoppedError as stopped:
            reason = str(stopped)
        with suppress(OSError):  # nobody listens any more
            pipe.send(reason)


def _reason(worker: _Worker) -> str:
    """What the child says of its run; if it died without a word, how."""
    try:
        return str(worker.pipe.recv())
    except (EOFError, ConnectionResetError):
        worker.process.join()
    code = worker.process.exitcode or 0
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"its process {how}"


def _end(workers: Sequence[_Worker]) -> None:
    """Ask the runs to save and stop, and wait for them."""
    for worker in workers:
        worker.process.terminate()
        worker.pipe.close()  # after this run it finds no other
    for worker in workers:
        worker.process.join(GRACE)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
