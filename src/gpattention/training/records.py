"""What a run writes down: `metrics.csv` for people and plots, `events.jsonl` for everything that happened."""

import csv
import io
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpattention.models.storage import write_atomically
from gpattention.reading import decoded, parse_json

COLUMNS = (
    "epoch", "step", "phase", "learning_rate", "alpha", "train_loss", "train_regularizer",
    "validation_accuracy", "validation_nll", "floor_share",
)  # fmt: skip


def write_metrics(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """All rows so far, in one piece, so that a killed run leaves a whole file."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(folder / "metrics.csv", text.getvalue().encode())


def append_event(folder: Path, kind: str, **details: Any) -> None:
    """One line of JSON with the time, in the place of half a line that a full disk or a kill has left."""
    line = json.dumps({"time": round(time.time(), 3), "event": kind, **details})
    path = folder / "events.jsonl"
    whole = path.read_bytes().rfind(b"\n") + 1 if path.is_file() else 0
    try:
        # without a buffer, which would be written once more when the file is closed
        with path.open("r+b" if path.is_file() else "xb", buffering=0) as file:
            file.seek(whole)
            file.truncate()
            try:
                left = memoryview(f"{line}\n".encode())
                while left:
                    left = left[file.write(left) or 0 :]
            except OSError:
                file.truncate(whole)
                raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def read_events(folder: Path) -> tuple[dict[str, Any], ...]:
    """Of a run's `events.jsonl`, of its whole lines."""
    file = folder / "events.jsonl"
    if not file.is_file():
        return ()
    # what follows the last line break is nothing, or half a line of a killed run
    content = file.read_bytes()
    *whole, _ = decoded(content[: content.rfind(b"\n") + 1], file).split("\n")
    # a loss may have been any number
    events = [
        parse_json(line, f"{file}, line {place}", nonfinite=True) for place, line in enumerate(whole, start=1)
    ]
    for place, event in enumerate(events, start=1):
        if not isinstance(event, dict):
            raise ValueError(f"{file}, line {place}: expected a JSON object, got {type(event).__name__}")
        for name, kind in (("time", (int, float)), ("event", str)):
            if name in event and not isinstance(event[name], kind):
                raise ValueError(
                    f"{file}, line {place}: expected {name!r} as we write it, got {event[name]!r}"
                )
    return tuple(events)
