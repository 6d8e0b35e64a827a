"""Where runs stand: what each is doing, how far it is, how fast, and how long it will take."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gpattention.files import StrPath
from gpattention.runs import distinct_names, find_runs, read_events, read_recipe
from gpattention.training.folder import SHARED, TAKEN, in_use

State = Literal["waiting", "training", "finished", "failed", "stopped", "cut off", "shared", "unknown"]
ENDS: tuple[State, ...] = ("finished", "failed", "stopped", SHARED)  # events that are states
BREAKS = ("phase", "resumed", "stopped", "failed")  # between two validations: their times say nothing


@dataclass(frozen=True)
class RunStatus:
    """Where one run stands, by its folder.

    Attributes:
        run: its name.
        folder: where it lies.
        state: what it is doing.
        phase: kernel or gp; None before the first.
        epoch: epoch of the last validation, or where a first phase that was taken over ended.
        epochs: epochs of both phases.
        accuracy: accuracy of the last validation.
        nll: nll of the last validation.
        steps_per_second: between the last two validations of this phase.
        seconds_left: at that rate.
        at_least: whether a second phase, whose rate nobody knows yet, comes after.
        silent: seconds since anything was written down.
        reason: why it failed, or what asked it to stop.
        evaluated: suites.
    """

    run: str
    folder: Path
    state: State
    phase: str | None = None
    epoch: int = 0
    epochs: int = 0
    accuracy: float | None = None
    nll: float | None = None
    steps_per_second: float | None = None
    seconds_left: float | None = None
    at_least: bool = False
    silent: float | None = None
    reason: str | None = None
    evaluated: tuple[str, ...] = ()


def read_statuses(folders: Sequence[StrPath], *, now: float | None = None) -> tuple[RunStatus, ...]:
    """Where every run in or below the folders stands, finished or not.

    Args:
        folders: folders of runs, or folders that hold runs.
        now: seconds since the epoch; the clock's if not given.

    Returns:
        One entry for each run.

    Raises:
        FileNotFoundError: a folder is missing, or there is no run in any of them.
    """
    found = list(dict.fromkeys(run for folder in folders for run in find_runs(folder, unfinished=True)))
    if not found:
        raise FileNotFoundError(f"expected runs in {', '.join(map(str, folders))}, found none")
    moment = time.time() if now is None else now
    names = distinct_names(found)
    return tuple(_described(name, folder, moment) for name, folder in zip(names, found, strict=True))


def _described(name: str, folder: Path, now: float) -> RunStatus:
    """A damaged folder says so in its place; the others are described all the same."""
    try:
        return _status(name, folder, now)
    except (ValueError, KeyError, TypeError, OSError) as error:
        reason = f"{folder / 'events.jsonl'} lacks {error}" if isinstance(error, KeyError) else str(error)
        return RunStatus(name, folder, "unknown", reason=reason)


def _status(name: str, folder: Path, now: float) -> RunStatus:
    recipe, events = read_recipe(folder), read_events(folder)
    last = events[-1] if events else {}
    row = next((event for event in reversed(events) if event["event"] == "validated"), None)
    phase = next((event["phase"] for event in reversed(events) if event["event"] == "phase"), None)
    state = _state(folder, last)
    rate = _rate(events)
    # epochs before the first validation: those of a first phase that another run has trained
    begun = recipe.phases.kernel_epochs if any(event["event"] == TAKEN for event in events) else 0
    why = {"failed": "reason", "stopped": "signal"}.get(state, "")
    validated = {} if row is None else {"accuracy": row["validation_accuracy"], "nll": row["validation_nll"]}
    return RunStatus(
        name,
        folder,
        state,
        phase,
        begun if row is None else row["epoch"],
        recipe.epochs,
        **validated,
        steps_per_second=rate,
        seconds_left=_left(row, recipe.epochs, rate, now) if state == "training" else None,
        at_least=phase == "kernel" and recipe.phases.epochs > 0,
        silent=max(0.0, now - last["time"]) if last else None,  # another machine's clock may be ahead
        reason=last.get(why),
        evaluated=tuple(sorted(file.stem for file in (folder / "evaluation").glob("*.json"))),
    )


def _state(folder: Path, last: Mapping[str, Any]) -> State:
    """Whoever trains holds the folder's lock; a process that was killed does not."""
    trains = in_use(folder)
    if trains:
        return "training"
    if (end := last.get("event")) in ENDS:
        return end
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
    # steps of an epoch depend on the data, which are not opened here: the row says how many its epochs had
    steps = row["step"] / row["epoch"] * epochs - row["step"]
    return max(steps / rate - max(now - row["time"], 0.0), 0.0)
