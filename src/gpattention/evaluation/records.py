"""What an evaluation found, as data: one JSON file per suite in a run's folder, read by reports and tables.

A `Record` is one number: which set, whose prediction, which metric.  Everything that is not one number
(curves, histograms, tables by layer) stands in `SuiteResult.curves` under a name.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpattention.data.places import check_name
from gpattention.models.storage import make_folder, write_atomically
from gpattention.reading import read_json

FORMAT = "gpattention-evaluation-1"


@dataclass(frozen=True)
class Record:
    """One number, e.g. the NLL on `test` of the model's own draws."""

    set: str  # validation, test, ood/NAME, corrupted/TYPE/SEVERITY, corrupted/CATEGORY, corrupted/mean
    predictor: str  # model, mean, mc_dropout, ensemble; each may end in +temperature or +shift_temperature
    metric: str  # accuracy, nll, ece, ..., batch_ece (the paper's batch means), auroc, fpr95, ...
    value: float
    detail: Mapping[str, Any] = field(default_factory=dict)  # e.g. score of an OOD metric, temperature


@dataclass(frozen=True)
class SuiteResult:
    """One suite over one run."""

    suite: str
    run: str  # the recipe's name
    data: str
    seed: int
    attention: str
    samples: int  # draws of a prediction
    records: tuple[Record, ...]
    curves: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # what is missing, reduced, regenerated or a stand-in
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
        """As the file holds it."""
        return {"format": FORMAT, **asdict(self)}


def suite_from_dict(plain: Mapping[str, Any]) -> SuiteResult:
    """The inverse of `SuiteResult.to_dict`."""
    if not isinstance(plain, Mapping):
        raise ValueError(f"expected an object, got {type(plain).__name__}")
    if plain.get("format") != FORMAT:
        raise ValueError(f"expected an evaluation of format {FORMAT}, got {plain.get('format')!r}")
    values = {key: value for key, value in plain.items() if key != "format"}
    for record in values["records"]:
        _check_types(record, _RECORD)
    values["records"] = tuple(Record(**record) for record in values["records"])
    _check_types(values, _SUITE)
    values["notes"] = tuple(str(note) for note in values.get("notes", ()))
    return SuiteResult(**values)


_RECORD = {"set": str, "predictor": str, "metric": str, "value": (int, float), "detail": Mapping}
_SUITE = {
    **dict.fromkeys(("suite", "run", "data", "attention"), str),
    **dict.fromkeys(("seed", "samples"), int),
    **dict.fromkeys(("curves", "environment"), Mapping),
    "seconds": (int, float),
}


def _check_types(values: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    """Tables and reports calculate with them."""
    for name, kind in kinds.items():
        if name in values and not isinstance(values[name], kind):
            raise ValueError(f"expected {name} of another type, got {values[name]!r}")


def write_suite(folder: str | Path, result: SuiteResult) -> Path:
    """Write `RUN/evaluation/SUITE.json`."""
    path = Path(folder) / "evaluation" / check_name("the file of a suite", f"{result.suite}.json")
    make_folder(path.parent)
    write_atomically(path, (json.dumps(result.to_dict(), indent=1) + "\n").encode())
    return path


def read_suite(path: Path) -> SuiteResult:
    """One file; a damaged one is refused with its name and what helps."""
    try:
        return suite_from_dict(read_json(path, nonfinite=True))
    except (KeyError, TypeError, ValueError) as error:
        told = f"no {error}" if isinstance(error, KeyError) else error
        raise ValueError(
            f"{path} is not an evaluation of this library: {told}. Evaluate with --fresh (fresh=True) to "
            "compute it anew, or remove it"
        ) from error


def read_suites(folder: str | Path) -> dict[str, SuiteResult]:
    """All suites of a run folder by name; empty when none was run."""
    paths = sorted((Path(folder) / "evaluation").glob("*.json"))
    return {result.suite: result for result in map(read_suite, paths)}
