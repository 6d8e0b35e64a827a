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
    """One line of JSON with the time."""
    line = json.dumps({"time": round(time.time(), 3), "event": kind, **details})
    with (folder / "events.jsonl").open("a") as file:
        file.write(line + "\n")
