"""Numbers of several runs together: mean and standard deviation where they differ by their seed alone."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from gpattention.data.places import StrPath
from gpattention.evaluation.records import SuiteResult, read_suites
from gpattention.experiments.runs import read_recipe
from gpattention.training.differences import flat_recipe


@dataclass(frozen=True)
class SummaryRow:
    """One number over several seeds."""

    run: str  # the recipe's name without its seed, of the first run
    differs: Mapping[str, Any]  # by which values of its recipe it differs from others of that name
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
    """Mean and standard deviation over the seeds of every record in these runs' folders.

    Runs whose recipes differ by more than seed and name have rows of their own.  Of several with the same
    recipe and seed the last counts.
    """
    rows = []
    for group in _groups(folders):
        grouped: dict[str, dict[int, float]] = {}
        fields: dict[str, dict[str, Any]] = {}
        for suites in group.suites:
            for name, result in suites.items():
                for record in result.records:
                    told = {
                        "data": result.data,
                        "attention": result.attention,
                        "suite": name,
                        "set": record.set,
                        "predictor": record.predictor,
                        "metric": record.metric,
                        "detail": {key: x for key, x in record.detail.items() if key != "temperature"},
                    }
                    key = json.dumps(told, sort_keys=True)
                    grouped.setdefault(key, {})[result.seed] = record.value
                    fields[key] = told
        for key, found in grouped.items():
            seeds, values = zip(*sorted(found.items()), strict=True)
            spread = stdev(values) if len(values) > 1 else None
            rows.append(
                SummaryRow(
                    group.run, group.differs, **fields[key], mean=fmean(values), std=spread, values=values,
                    seeds=seeds,
                )
            )  # fmt: skip
    return Summary(tuple(rows))


def name_without_seed(name: str) -> str:
    """`cifar10-cgp-seed3` is `cifar10-cgp`."""
    return re.sub(r"[-_. ]+(seed|s)[-_. ]?\d+$", "", name)


def _has(row: SummaryRow, key: str, value: Any) -> bool:
    return (getattr(row, key) if hasattr(row, key) else row.detail.get(key)) == value


@dataclass
class _Group:
    """Runs that differ by their seed alone."""

    run: str
    values: Mapping[str, Any]  # of the recipe, but for name and seed
    suites: list[dict[str, SuiteResult]]
    differs: Mapping[str, Any]


def _groups(folders: Sequence[StrPath]) -> list[_Group]:
    found: dict[str, _Group] = {}
    for folder in folders:
        suites = read_suites(Path(folder))
        if not suites:
            continue
        first = next(iter(suites.values()))
        values = _values(Path(folder), first)
        key = json.dumps(values, sort_keys=True)
        found.setdefault(key, _Group(name_without_seed(first.run), values, [], {})).suites.append(suites)
    for group in found.values():
        namesakes = [other.values for other in found.values() if other.run == group.run]
        group.differs = {
            key: value
            for key, value in group.values.items()
            if any(key not in values or values[key] != value for values in namesakes)
        }
    return list(found.values())


def _values(folder: Path, result: SuiteResult) -> dict[str, Any]:
    """What runs have in common that differ by their seed alone; suites without a recipe tell their own."""
    if not (folder / "recipe.json").is_file():
        return {
            "name": name_without_seed(result.run),
            "data.name": result.data,
            "model.attention": result.attention,
        }
    flat = flat_recipe(read_recipe(folder))
    return {key: value for key, value in flat.items() if key not in ("name", "seed")}
