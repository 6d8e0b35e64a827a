"""Where runs stand: what each is doing, how far it is, how fast, and how long it will take."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gpattention.data.places import StrPath
from gpattention.experiments.run_names import distinct_names
from gpattention.experiments.runs import find_runs, read_recipe
from gpattention.training import Recipe
from gpattention.training.folder import SHARED, TAKEN
from gpattention.training.lock import in_use
from gpattention.training.records import read_events

State = Literal["waiting", "training", "finished", "failed", "stopped", "cut off", "shared", "unknown"]
ENDS: Mapping[str, State] = {
    "finished": "finished",
    "failed": "failed",
    "stopped": "stopped",
    SHARED: "shared",
}
BREAKS = ("phase", "resumed", "stopped", "failed")  # between two validations: their times say nothing


@dataclass(frozen=True)
class RunStatus:
    """One run, as its folder tells it."""

    run: str
    folder: Path
    state: State
    phase: str | None  # "kernel" or "gp"; None before the first
    epoch: int  # of the last validation, or where a first phase that was taken over ended
    epochs: int
    accuracy: float | None
    nll: float | None
    steps_per_second: float | None  # between the last two validations of this phase
    seconds_left: float | None  # at that rate
    at_least: bool  # whether a second phase, whose rate nobody knows yet, comes after
    silent: float | None  # seconds since anything was written down
    reason: str | None  # why it failed, or what asked it to stop
    judged: tuple[str, ...]  # suites that are evaluated


def read_statuses(folders: Sequence[StrPath], *, now: float | None = None) -> tuple[RunStatus, ...]:
    """Of every run in or below the folders, finished or not.

    Args:
        folders: of runs, or folders that hold runs.
        now: seconds since the epoch; the clock's if not given.

    Raises:
        FileNotFoundError: a folder is missing, or there is no run in any of them.
    """
    found = list(dict.fromkeys(run for folder in folders for run in find_runs(folder, unfinished=True)))
    if not found:
        raise FileNotFoundError(f"expected runs in {', '.join(map(str, folders))}, found none")
    moment = time.time() if now is None else now
    names = distinct_names(found)
    return tuple(_told(name, folder, moment) for name, folder in zip(names, found, strict=True))


def _told(name: str, folder: Path, now: float) -> RunStatus:
    """A damaged folder says so in its place; the others are told all the same."""
    try:
        return _status(name, folder, now)
    except (ValueError, KeyError, TypeError, OSError) as error:
        reason = f"{folder / 'events.jsonl'} lacks {error}" if isinstance(error, KeyError) else str(error)
        return RunStatus(
            name, folder, "unknown", None, 0, 0, None, None, None, None, False, None, reason, ()
        )  # fmt: skip


def _status(name: str, folder: Path, now: float) -> RunStatus:
    recipe, events = read_recipe(folder), read_events(folder)
    last = events[-1] if events else {}
    row = next((event for event in reversed(events) if event["event"] == "validated"), None)
    phase = next((event["phase"] for event in reversed(events) if event["event"] == "phase"), None)
    state = _state(folder, last)
    rate = _rate(events)
    return RunStatus(
        run=name,
        folder=folder,
        state=state,
        phase=phase,
        epoch=_begun(recipe, events) if row is None else row["epoch"],
        epochs=recipe.epochs,
        accuracy=None if row is None else row["validation_accuracy"],
        nll=None if row is None else row["validation_nll"],
        steps_per_second=rate,
        seconds_left=_left(row, recipe.epochs, rate, now) if state == "training" else None,
        at_least=phase == "kernel" and recipe.phases.epochs > 0,
        silent=max(0.0, now - last["time"]) if last else None,  # another machine's clock may be ahead
        reason=last.get("reason")
        if state == "failed"
        else last.get("signal")
        if state == "stopped"
        else None,
        judged=tuple(sorted(file.stem for file in (folder / "evaluation").glob("*.json"))),
    )


def _begun(recipe: Recipe, events: Sequence[Mapping[str, Any]]) -> int:
    """Epochs before the first validation: those of a first phase that another run has trained."""
    taken = any(event["event"] == TAKEN for event in events)
    return recipe.phases.kernel_epochs if taken else 0


def _state(folder: Path, last: Mapping[str, Any]) -> State:
    """Whoever trains holds the folder's lock; a process that was killed does not."""
    trains = in_use(folder)
    if trains:
        return "training"
    if last.get("event") in ENDS:
        return ENDS[last["event"]]
    if trains is None:
        return "unknown"
    return "cut off" if last else "waiting"


def _rate(events: Sequence[Mapping[str, Any]]) -> float | None:
    """Steps a second between the last two validations, if nothing broke in between.

    None where the clock stood still or was set back between them.
    """
    later: Mapping[str, Any] | None = None
    for event in reversed(events):
        if event["event"] == "validated":
            if later is not None:
                seconds = later["time"] - event["time"]
                return (later["step"] - event["step"]) / seconds if seconds > 0 else None
            later = event
        elif later is not None and event["event"] in BREAKS:
            return None
        elif event["event"] == "phase":
            return None  # the rate of the phase before
    return None


def _left(row: Mapping[str, Any] | None, epochs: int, rate: float | None, now: float) -> float | None:
    if row is None or not rate:
        return None
    steps = row["step"] / row["epoch"] * epochs - row["step"]
    return max(steps / rate - max(now - row["time"], 0.0), 0.0)
