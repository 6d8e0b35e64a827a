"""What a run writes down: `metrics.csv` for people and plots, `events.jsonl` for everything that happened."""

import csv
import io
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpattention.models.storage import write_atomically

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
    *whole, _ = file.read_text().split("\n")
    try:
        events = [json.loads(line) for line in whole]
    except ValueError as error:
        raise ValueError(f"{file}: expected one JSON object a line, got {error}") from None
    return tuple(events)
