"""What a suite found: numbers, curves, and what is to be said about them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from gpattention.evaluation.predicted import Predicted
from gpattention.evaluation.records import Record

POINTS = 200  # of a curve, at most


@dataclass(frozen=True)
class Findings:
    """Parts of a `SuiteResult`; add them up with `Findings.merge`."""

    records: tuple[Record, ...] = ()
    curves: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @staticmethod
    def merge(parts: Iterable["Findings"]) -> "Findings":
        """Records and notes one after the other, notes once each; curves of one name joined by their keys."""
        records: list[Record] = []
        curves: dict[str, Any] = {}
        notes: dict[str, None] = {}
        for part in parts:
            records += part.records
            notes |= dict.fromkeys(part.notes)
            _join(curves, part.curves)
        return Findings(tuple(records), curves, tuple(notes))


def detail_of(predicted: Predicted, **more: Any) -> dict[str, Any]:
    """A record's detail: the temperature where there is one, and whatever else."""
    heat = {} if predicted.temperature is None else {"temperature": predicted.temperature}
    return {**heat, **more}


def numbers(x: Tensor) -> list[float | None]:
    """For JSON, which knows neither NaN nor infinity."""
    return [float(v) if v == v and abs(v) != float("inf") else None for v in x.double().tolist()]


def thinned(count: int, points: int = POINTS) -> list[int]:
    """At most so many places of a curve of `count` points, evenly spaced, with the first and the last."""
    if count <= points:
        return list(range(count))
    return [round(i * (count - 1) / (points - 1)) for i in range(points)]


def _join(into: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        if not isinstance(value, Mapping):
            into[key] = value
            continue
        if not isinstance(into.get(key), dict):
            into[key] = {}  # of our own: what is joined stays as it was
        _join(into[key], value)
