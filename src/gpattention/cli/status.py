"""`gpattention status`."""

import json
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from gpattention.cli.console import duration, shortened, table
from gpattention.cli.main import App
from gpattention.files import visible
from gpattention.training import RunStatus, read_statuses

app = App()
HEADS = ("Run", "State", "Phase", "Epoch", "Val. acc.", "Val. NLL", "Steps/s", "Left", "Evaluated")
LONGEST = 160  # characters of a reason


@app.command("status")
def status(
    runs: Annotated[list[str] | None, typer.Argument()] = None, json: bool = False, watch: float | None = None
) -> None:
    """Show how far runs are.

    Options:
        runs (RUN): a run folder, or a folder that holds runs (default: runs).
        json: one JSON object for every run and line.
        watch (SECONDS): look again and again, until no run trains any more.

    Examples:
      gpattention status                              every run in or below runs/
      gpattention status runs/cifar10-60 --watch 30   again every half minute, until none trains
      gpattention status runs --json                  for scripts

    Val. acc. and Val. NLL are those of the last validation; figures of test items come from evaluate. Steps
    a second and the time left are those of the last two validations; in the first of two phases the
    time left is a lower bound. A run that was cut off was killed: train --resume, or the same reproduce
    or sweep call, goes on with it.
    """
    if watch is not None and not watch > 0:
        raise ValueError(f"expected --watch to be a number of seconds > 0, got {watch}")
    while True:
        found = read_statuses(runs or ["runs"])
        if watch is not None and sys.stdout.isatty():
            print("\x1b[2J\x1b[H", end="")
        print(_lines(found) if json else _page(found), flush=True)
        if watch is None or not any(each.state in ("training", "waiting") for each in found):
            return
        time.sleep(watch)


def _lines(found: Sequence[RunStatus]) -> str:
    plain = ({name: _plain(value) for name, value in asdict(status).items()} for status in found)
    return "\n".join(map(json.dumps, plain))


def _plain(value: Any) -> Any:
    """What JSON can hold; a loss that overflowed is null there."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def _page(found: Sequence[RunStatus]) -> str:
    rows = table(HEADS, [_row(status) for status in found], right=(3, 4, 5, 6, 7))
    counts = Counter(status.state for status in found).most_common()
    reasons = [f"{visible(each.run)}: {shortened(each.reason, LONGEST)}" for each in found if each.reason]
    return "\n".join([rows, "", ", ".join(f"{count} {state}" for state, count in counts), *reasons])


def _row(status: RunStatus) -> tuple[str, ...]:
    left = "" if status.seconds_left is None else duration(status.seconds_left)
    measured = ((status.accuracy, 3), (status.nll, 3), (status.steps_per_second, 1))
    return (
        status.run,
        status.state,
        status.phase or "",
        f"{status.epoch}/{status.epochs}" if status.epochs else "",
        *("" if value is None else f"{value:.{digits}f}" for value, digits in measured),
        f"> {left}" if left and status.at_least else left,
        ", ".join(status.evaluated),
    )
