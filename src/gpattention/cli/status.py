"""`gpattention status`."""

import argparse
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpattention.cli.arguments import new_command
from gpattention.cli.bar import duration
from gpattention.cli.table import shortened, table
from gpattention.experiments.status import RunStatus, read_statuses
from gpattention.runs.tables import visible

if TYPE_CHECKING:
    from gpattention.cli.arguments import Commands

EXAMPLES = """\
examples:
  gpattention status                              every run in or below runs/
  gpattention status runs/cifar10-60 --watch 30   again every half minute, until none trains
  gpattention status runs --json                  for scripts

Steps a second and the time left are those of the last two validations; in the first of two phases the time
left is a lower bound. A run that was cut off was killed: train --resume, or the same reproduce or sweep
call, goes on with it.
"""
HEADS = ("Run", "State", "Phase", "Epoch", "Accuracy", "NLL", "Steps/s", "Left", "Judged")
LONGEST = 160  # characters of a reason


def add_parser(commands: "Commands") -> None:
    """Arguments of a look at runs."""
    status = new_command(commands, "status", "show how far runs are", EXAMPLES)
    status.add_argument(
        "runs", nargs="*", default=["runs"], metavar="RUN",
        help="a run folder, or a folder that holds runs (default: runs)",
    )  # fmt: skip
    status.add_argument("--json", action="store_true", help="one JSON object for every run and line")
    status.add_argument(
        "--watch", type=float, metavar="SECONDS", help="look again and again, until no run trains any more"
    )
    status.set_defaults(run_command=run)


def run(given: argparse.Namespace) -> None:
    """Folders into a table."""
    if given.watch is not None and not given.watch > 0:
        raise ValueError(f"expected --watch to be a number of seconds > 0, got {given.watch}")
    while True:
        found = read_statuses(given.runs)
        if given.watch is not None and sys.stdout.isatty():
            print("\x1b[2J\x1b[H", end="")
        print(_lines(found) if given.json else _page(found), flush=True)
        if given.watch is None or not any(status.state in ("training", "waiting") for status in found):
            return
        time.sleep(given.watch)


def _lines(found: Sequence[RunStatus]) -> str:
    return "\n".join(
        json.dumps({name: _plain(value) for name, value in asdict(status).items()}) for status in found
    )


def _plain(value: Any) -> Any:
    """What JSON can hold; a loss that overflowed is null there."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def _page(found: Sequence[RunStatus]) -> str:
    counts = Counter(status.state for status in found)
    told = [
        f"{visible(status.run)}: {shortened(status.reason, LONGEST)}" for status in found if status.reason
    ]
    return "\n".join(
        [
            table(HEADS, [_row(status) for status in found], right=(3, 4, 5, 6, 7)),
            "",
            ", ".join(f"{count} {state}" for state, count in counts.most_common()),
            *told,
        ]
    )


def _row(status: RunStatus) -> tuple[str, ...]:
    left = "" if status.seconds_left is None else duration(status.seconds_left)
    return (
        status.run,
        status.state,
        status.phase or "",
        f"{status.epoch}/{status.epochs}" if status.epochs else "",
        "" if status.accuracy is None else f"{status.accuracy:.3f}",
        "" if status.nll is None else f"{status.nll:.3f}",
        "" if status.steps_per_second is None else f"{status.steps_per_second:.1f}",
        f"> {left}" if left and status.at_least else left,
        ", ".join(status.judged),
    )
