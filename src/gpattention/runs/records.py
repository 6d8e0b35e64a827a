"""What a run's folder records: training, and what evaluations found.

`metrics.csv` is for people and plots, `events.jsonl` for everything that happened, `evaluation/SUITE.json`
for reports and tables.  There a `Record` is one number: which set, whose prediction, which metric.
Everything that is not one number (curves, histograms, tables by layer) stands in `SuiteResult.curves`.
"""

import csv
import io
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from gpattention.checks import check_name
from gpattention.files import (
    StrPath,
    decoded,
    file_digest,
    make_folder,
    parse_json,
    read_json,
    write_atomically,
)
from gpattention.runs.recipe import Recipe

COLUMNS = (
    "epoch", "step", "phase", "learning_rate", "alpha", "train_loss", "train_regularizer",
    "validation_accuracy", "validation_nll", "floor_share",
)  # fmt: skip
FORMAT = "gpattention-evaluation-1"
OTHER_WEIGHTS = "computed with other weights than the run has now: evaluate it again"  # a suite's note
# of the fields of a record and of a suite, where a file may hold something else
_KINDS: dict[str, Any] = {
    **dict.fromkeys(("set", "predictor", "metric", "suite", "run", "data", "attention"), str),
    **dict.fromkeys(("seed", "samples"), int),
    **dict.fromkeys(("value", "seconds"), (int, float)),
    **dict.fromkeys(("detail", "curves", "environment"), Mapping),
}


def write_metrics(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write `metrics.csv` in one piece, so that a killed run leaves a whole file.

    Args:
        folder: folder of the run.
        rows: all so far, by `COLUMNS`.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(folder / "metrics.csv", text.getvalue().encode())


def chosen_row(recipe: Recipe, rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The validation of the weights that a run keeps.

    Args:
        recipe: its `checkpoint.select` says which.
        rows: rows of metrics.csv.

    Returns:
        The last row, or the best of the last phase; of equals the first, as in training.

    Raises:
        ValueError: there is no row.
    """
    if not rows:
        raise ValueError("expected a run with a validation, got none")
    if recipe.checkpoint.select == "last":
        return rows[-1]
    late = [row for row in rows if row["phase"] == rows[-1]["phase"]]
    if recipe.checkpoint.select == "best-nll":
        return min(late, key=lambda row: float(row["validation_nll"]))
    return max(late, key=lambda row: float(row["validation_accuracy"]))


def append_event(folder: Path, kind: str, **details: Any) -> None:
    """Add a line to `events.jsonl`, in the place of half a line that a full disk or a kill has left.

    Args:
        folder: folder of the run.
        kind: what happened.
        details: details of the event, as JSON values.

    Raises:
        OSError: with the file's name; the lines before are whole then.
    """
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
    """Read the events of a run.

    Args:
        folder: folder of the run.

    Returns:
        The whole lines of `events.jsonl`; empty without such a file.

    Raises:
        ValueError: a line is not an event; the message has its number.
    """
    file = folder / "events.jsonl"
    if not file.is_file():
        return ()
    # what follows the last line break is nothing, or half a line of a killed run
    content = file.read_bytes()
    *whole, _ = decoded(content[: content.rfind(b"\n") + 1], file).split("\n")
    events = []
    for place, line in enumerate(whole, start=1):
        event = parse_json(line, f"{file}, line {place}", nonfinite=True)  # a loss may have been any number
        if not isinstance(event, dict):
            raise ValueError(f"{file}, line {place}: expected a JSON object, got {type(event).__name__}")
        for name, kind in (("time", (int, float)), ("event", str)):
            if name in event and not isinstance(event[name], kind):
                raise ValueError(
                    f"{file}, line {place}: expected {name!r} of another type, got {event[name]!r}"
                )
        events.append(event)
    return tuple(events)


@dataclass(frozen=True)
class Record:
    """One number, e.g. the NLL on `test` of the model's own draws.

    Attributes:
        set: validation, test, ood/NAME, corrupted/TYPE/SEVERITY, corrupted/CATEGORY, corrupted/mean.
        predictor: model, mean, mc_dropout, ensemble; each may end in +temperature,
            +shift_temperature or +adaptive_temperature.
        metric: accuracy, nll, ece, ..., batch_ece (the paper's batch means), auroc, fpr95, ...
        value: the number.
        detail: e.g. score of an OOD metric, temperature.
    """

    set: str
    predictor: str
    metric: str
    value: float
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SuiteResult:
    """One suite over one run.

    Attributes:
        suite: its name.
        run: the recipe's name.
        data: the data set's name.
        seed: seed of the run.
        attention: the kind.
        samples: draws of a prediction.
        records: all numbers.
        curves: what is not one number, by name.
        notes: what is missing, reduced, regenerated or a stand-in.
        environment: versions, device and settings of the evaluation.
        seconds: that it took.
    """

    suite: str
    run: str
    data: str
    seed: int
    attention: str
    samples: int
    records: tuple[Record, ...]
    curves: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def value(self, set: str, metric: str, predictor: str = "model", **detail: Any) -> float | None:
        """The number of one record; None where there is none."""
        for record in self.records:
            same = (record.set, record.metric, record.predictor) == (set, metric, predictor)
            if same and all(record.detail.get(key) == value for key, value in detail.items()):
                return record.value
        return None

    def to_dict(self) -> dict[str, Any]:
        """The result as its file holds it."""
        return {"format": FORMAT, **asdict(self)}


def suite_from_dict(plain: Mapping[str, Any]) -> SuiteResult:
    """The inverse of `SuiteResult.to_dict`.

    Args:
        plain: as the file holds it.

    Returns:
        The result.

    Raises:
        KeyError, TypeError, ValueError: it is none.
    """
    if not isinstance(plain, Mapping):
        raise ValueError(f"expected an object, got {type(plain).__name__}")
    if plain.get("format") != FORMAT:
        raise ValueError(f"expected an evaluation of format {FORMAT}, got {plain.get('format')!r}")
    values = {key: value for key, value in plain.items() if key != "format"}
    for table in (values, *values["records"]):  # tables and reports calculate with them
        for name in table:
            if name in _KINDS and not isinstance(table[name], _KINDS[name]):
                raise ValueError(f"expected {name} of another type, got {table[name]!r}")
    values["records"] = tuple(Record(**record) for record in values["records"])
    values["notes"] = tuple(str(note) for note in values.get("notes", ()))
    return SuiteResult(**values)


def write_suite(folder: StrPath, result: SuiteResult) -> Path:
    """Write `RUN/evaluation/SUITE.json`.

    Args:
        folder: folder of the run.
        result: result of a suite.

    Returns:
        The file.
    """
    path = Path(folder) / "evaluation" / check_name("the file of a suite", f"{result.suite}.json")
    make_folder(path.parent)
    write_atomically(path, (json.dumps(result.to_dict(), indent=1) + "\n").encode())
    return path


def read_suite(path: Path) -> SuiteResult:
    """Read the result of a suite.

    Args:
        path: path of the file.

    Returns:
        The result.

    Raises:
        ValueError: the file is damaged; the message says what helps.
    """
    try:
        return suite_from_dict(read_json(path, nonfinite=True))
    except (KeyError, TypeError, ValueError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else error
        raise ValueError(
            f"{path} is not an evaluation of this library: {reason}. Evaluate with --fresh (fresh=True) to "
            "compute it anew, or remove it"
        ) from error


def read_suites(folder: StrPath) -> dict[str, SuiteResult]:
    """Read all results of a run.

    Args:
        folder: folder of the run.

    Returns:
        All suites by name; empty when none was run.

    Raises:
        ValueError: a file is damaged.
    """
    paths = sorted((Path(folder) / "evaluation").glob("*.json"))
    return {result.suite: result for result in map(read_suite, paths)}


def recorded_settings(result: SuiteResult) -> dict[str, Any]:
    """The settings that a suite was computed with.

    Args:
        result: result of a suite.

    Returns:
        Its settings; empty where it has none.
    """
    try:
        found = parse_json(result.environment.get("settings", "{}"), "settings", nonfinite=True)
    except (TypeError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def recorded_weights(result: SuiteResult) -> str | None:
    """SHA-256 of the weights that a suite was computed with; None where it does not say."""
    found = recorded_settings(result).get("model")
    return found if isinstance(found, str) else None


def digest_of_weights(folder: StrPath) -> str | None:
    """SHA-256 of the file with a run's weights, as it is now; None where there is none."""
    file = Path(folder) / "model" / "model.safetensors"
    return file_digest(file) if file.is_file() else None


def read_noted_suites(folder: StrPath) -> dict[str, SuiteResult]:
    """`read_suites`, with a note on those of weights that training has replaced since."""
    found, weights = read_suites(folder), digest_of_weights(folder)
    for name, result in found.items():
        if None not in (recorded_weights(result), weights) and recorded_weights(result) != weights:
            found[name] = replace(result, notes=(OTHER_WEIGHTS, *result.notes))
    return found
