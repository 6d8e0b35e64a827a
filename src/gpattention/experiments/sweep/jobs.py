"""Training several runs, some at once; one that fails tells why and leaves the others alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from gpattention.experiments.runs import train_recipe
from gpattention.experiments.side_by_side import Died, side_by_side
from gpattention.experiments.sweep.plan import PlannedRun
from gpattention.training import TrainingStoppedError


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
        return
    for job, answer in side_by_side(train_in_process, jobs, at_once, when_stopped="resume to go on"):
        yield job.run, answer.how if isinstance(answer, Died) else answer


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


def train_in_process(job: Job, slot: int) -> str:
    """`train_one` in one of several processes, where a request to stop is an answer."""
    try:
        return train_one(replace(job, device=device_of(job.device, slot)))
    except TrainingStoppedError as stopped:
        return str(stopped)


def device_of(name: str, slot: int) -> str:
    """`cuda` alone means all GPUs: the jobs take turns."""
    count = torch.cuda.device_count() if name == "cuda" else 0
    return f"cuda:{slot % count}" if count > 1 else name
