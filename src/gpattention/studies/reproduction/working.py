"""The work of a plan: processes of `gpattention`, some at once, each with its own log.

Everything can be stopped and started again: finished runs are left alone, others go on where they were.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gpattention.data.places import StrPath
from gpattention.experiments.recipe_file import write_recipe
from gpattention.models.storage import make_folder
from gpattention.studies.reproduction.model_card import write_shared_run
from gpattention.studies.reproduction.plan import Plan, PlannedTraining
from gpattention.training.checkpoint import list_checkpoints
from gpattention.training.folder import FIRST_PHASE, SHARED
from gpattention.training.records import read_events
from gpattention.training.signals import StopRequest

LOOK = 0.2  # seconds between two looks at the processes
PATIENCE = 60.0  # seconds that a process has to save its state when the work ends with an error
STOPPED = 130  # exit code of a command that saved its state and stopped


@dataclass(frozen=True)
class Outcome:
    """How one process ended."""

    name: str
    code: int  # 0: done; STOPPED: saved, goes on next time; else failed
    seconds: float
    log: Path

    @property
    def said(self) -> str:
        """The last line of its log."""
        lines = self.log.read_text(errors="replace").replace("\r", "\n").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


_Running = tuple["subprocess.Popen[bytes]", tuple["_Work", float]]  # and when it was started


@dataclass(frozen=True)
class _Work:
    name: str
    arguments: tuple[str, ...]
    log: Path
    awaits: Path | None = None  # a folder that another run writes a checkpoint into

    @property
    def ready(self) -> bool:
        return self.awaits is None or bool(list_checkpoints(self.awaits))


def train_plan(
    plan: Plan,
    runs: StrPath,
    *,
    at_once: int = 1,
    minutes: float | None = None,
    device: str = "auto",
    root: StrPath | None = None,
    on_done: Callable[[Outcome], object] | None = None,
) -> list[Outcome]:
    """Train every run of a plan that is not finished, at most `at_once` at a time.

    Runs whose first phases are the same wait for the one that trains it and take it over, or train their own
    where a finished run no longer has it.  Shared models are copied, not trained.  After `minutes` the runs
    under way are told to save their state and stop.
    """
    runs = Path(runs)
    make_folder(runs / "recipes")
    sources = plan.sources()
    options = (*_options(device, root), *plan.train)
    works = []
    for training in plan.trainings:
        if is_finished(runs / training.folder):
            continue
        if training.shared is not None:
            write_shared_run(training.shared, runs / training.folder)
            continue
        file = runs / "recipes" / f"{training.folder}.toml"
        write_recipe(file, training.recipe, f"run {training.folder} of the plan {plan.name}")
        source = sources.get(training.folder)
        if source is not None and _is_gone(runs / source):
            source = None
        works.append(_training(training, runs, file, source, options))
    return list(_told(_all(works, at_once, minutes), on_done))


def evaluate_plan(
    plan: Plan,
    runs: StrPath,
    *,
    at_once: int = 1,
    minutes: float | None = None,
    device: str = "auto",
    root: StrPath | None = None,
    on_done: Callable[[Outcome], object] | None = None,
) -> list[Outcome]:
    """Judge the finished runs of a plan: the seeds of a model together, `at_once` models at a time."""
    runs = Path(runs)
    works = []
    for model in plan.models:
        seeds = [t for t in plan.trainings if t.model == model]
        finished = [str(runs / t.folder) for t in seeds if is_finished(runs / t.folder)]
        if finished:
            settings = (*plan.evaluate, *seeds[0].evaluate)  # of an option given twice the last counts
            arguments = ("evaluate", *finished, "--suite", ",".join(plan.suites), *settings)
            log = runs / "logs" / f"evaluate-{model}.txt"
            works.append(_Work(model, (*arguments, *_options(device, root)), log))
    return list(_told(_all(works, at_once, minutes), on_done))


def is_finished(folder: Path) -> bool:
    """Whether a run has trained to its end, here or elsewhere."""
    whole = (folder / "recipe.json").is_file()  # not so where a shared model was half copied
    return whole and any(event["event"] in ("finished", SHARED) for event in read_events(folder))


def _is_gone(source: Path) -> bool:
    """Whether the first phase of a finished run was removed, or not brought along."""
    return is_finished(source) and not list_checkpoints(source / FIRST_PHASE)


def _training(
    training: PlannedTraining, runs: Path, file: Path, source: str | None, options: tuple[str, ...]
) -> _Work:
    folder = runs / training.folder
    begun = (folder / "recipe.json").is_file()
    arguments = ["train", str(file), "--run", str(folder), *options]
    if begun:
        arguments.append("--resume")
    if source is not None and not begun:
        arguments += ["--first-phase", str(runs / source)]
    awaits = None if source is None or begun else runs / source / FIRST_PHASE
    return _Work(training.folder, tuple(arguments), runs / "logs" / f"{training.folder}.txt", awaits)


def _options(device: str, root: StrPath | None) -> tuple[str, ...]:
    return ("--device", device, *(() if root is None else ("--data", str(root))))


def _told(outcomes: Iterator[Outcome], on_done: Callable[[Outcome], object] | None) -> Iterator[Outcome]:
    for outcome in outcomes:
        if on_done is not None:
            on_done(outcome)
        yield outcome


def _all(works: Sequence[_Work], at_once: int, minutes: float | None) -> Iterator[Outcome]:
    """Start what is ready while there is room, in the order given; end early on a signal or a deadline."""
    if at_once < 1:
        raise ValueError(f"expected at_once >= 1, got {at_once}")
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    waiting = list(works)
    running: dict[str, _Running] = {}
    told = False
    with StopRequest() as stop, _ended(running):
        while waiting or running:
            ending = stop.asked is not None or (deadline is not None and time.monotonic() > deadline)
            if ending:
                waiting = []
                if not told:
                    for process, _ in running.values():
                        process.send_signal(signal.SIGTERM)
                told = True
            for work in [w for w in waiting if w.ready][: at_once - len(running)]:
                waiting.remove(work)
                running[work.name] = (_start(work), (work, time.monotonic()))
            if not running and waiting:  # what they wait for has failed
                for work in waiting:
                    make_folder(work.log.parent)
                    work.log.write_text(
                        "the run whose first phase it was to take over did not reach its end\n"
                    )
                    yield Outcome(work.name, 1, 0.0, work.log)
                return
            for name, (process, (work, begin)) in list(running.items()):
                if process.poll() is not None:
                    del running[name]
                    # one that was told to stop before it could listen has lost nothing
                    code = STOPPED if told and process.returncode == -signal.SIGTERM else process.returncode
                    yield Outcome(name, code, time.monotonic() - begin, work.log)
            time.sleep(LOOK)


@contextmanager
def _ended(running: dict[str, _Running]) -> Iterator[None]:
    """Leave no process behind, whatever ends the work: a second call would train in the same folders."""
    try:
        yield
    finally:
        for process, _ in running.values():
            process.send_signal(signal.SIGTERM)
        for process, _ in running.values():
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _start(work: _Work) -> "subprocess.Popen[bytes]":
    make_folder(work.log.parent)
    with work.log.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "gpattention", *work.arguments], stdout=log, stderr=subprocess.STDOUT
        )
