"""Cells over seeds: mean and standard error, and differences from the baseline seed by seed."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch

from gpattention.experiments.adoption.cells import Cell
from gpattention.metrics import standard_error


@dataclass(frozen=True)
class Mean:
    """Of some seeds; the error is None for one."""

    value: float
    error: float | None
    seeds: int


@dataclass(frozen=True)
class Column:
    """One number of a cell."""

    set: str  # a set's name, or a beginning with "*": the mean over all such sets
    metric: str
    head: str
    larger: bool = False  # whether larger is better

    def of(self, cell: Cell) -> float | None:
        """None where the cell has no such number."""
        if not self.set.endswith("*"):
            return cell.values.get(self.set, {}).get(self.metric)
        found = [
            values[self.metric]
            for name, values in cell.values.items()
            if name.startswith(self.set[:-1]) and self.metric in values
        ]
        return fmean(found) if found else None


def column_mean(cells: Sequence[Cell], column: Column) -> Mean | None:
    """Over the cells of one method."""
    return _mean([value for cell in cells if (value := column.of(cell)) is not None])


def paired_difference(cells: Sequence[Cell], baseline: Sequence[Cell], column: Column) -> Mean | None:
    """Over the seeds that both have: the method minus the baseline."""
    before = {cell.seed: column.of(cell) for cell in baseline}
    found = []
    for cell in cells:
        value, other = column.of(cell), before.get(cell.seed)
        if value is not None and other is not None:
            found.append(value - other)
    return _mean(found)


def _mean(values: list[float]) -> Mean | None:
    if not values:
        return None
    error = standard_error(torch.tensor(values, dtype=torch.float64)) if len(values) > 1 else None
    return Mean(fmean(values), error, len(values))
