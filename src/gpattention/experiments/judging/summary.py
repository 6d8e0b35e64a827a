"""Numbers of several runs together: mean and standard deviation over their seeds."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from gpattention.data.places import StrPath
from gpattention.evaluation.records import read_suites


@dataclass(frozen=True)
class SummaryRow:
    """One number over several seeds."""

    run: str  # the recipe's name without its seed
    data: str
    attention: str
    suite: str
    set: str
    predictor: str
    metric: str
    detail: Mapping[str, Any]  # without temperatures, which differ between seeds
    mean: float
    std: float | None  # of single runs, with n - 1; None for one run
    values: tuple[float, ...]
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class Summary:
    """All numbers of some runs, seeds together."""

    rows: tuple[SummaryRow, ...] = ()

    def find(self, **wanted: Any) -> list[SummaryRow]:
        """Rows with these fields; unknown ones are looked for in the detail.

        >>> summary.find(suite="ood", set="ood/near", metric="auroc", score="entropy")
        """
        return [row for row in self.rows if all(_has(row, key, value) for key, value in wanted.items())]


def summarise(folders: Sequence[StrPath]) -> Summary:
    """Mean and standard deviation over the seeds of every record in these runs' folders."""
    grouped: dict[str, list[tuple[int, float]]] = {}
    fields: dict[str, dict[str, Any]] = {}
    for folder in folders:
        for name, result in read_suites(Path(folder)).items():
            for record in result.records:
                told = {
                    "run": name_without_seed(result.run),
                    "data": result.data,
                    "attention": result.attention,
                    "suite": name,
                    "set": record.set,
                    "predictor": record.predictor,
                    "metric": record.metric,
                    "detail": {key: x for key, x in record.detail.items() if key != "temperature"},
                }
                key = json.dumps(told, sort_keys=True)
                grouped.setdefault(key, []).append((result.seed, record.value))
                fields[key] = told
    rows = []
    for key, found in grouped.items():
        seeds, values = zip(*sorted(found), strict=True)
        spread = stdev(values) if len(values) > 1 else None
        rows.append(SummaryRow(**fields[key], mean=fmean(values), std=spread, values=values, seeds=seeds))
    return Summary(tuple(rows))


def name_without_seed(name: str) -> str:
    """`cifar10-cgp-seed3` is `cifar10-cgp`."""
    return re.sub(r"[-_. ]+(seed|s)[-_. ]?\d+$", "", name)


def _has(row: SummaryRow, key: str, value: Any) -> bool:
    return (getattr(row, key) if hasattr(row, key) else row.detail.get(key)) == value
