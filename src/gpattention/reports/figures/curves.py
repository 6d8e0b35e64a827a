"""Figures that are lines: training, layers, corruption by severity, ROC, risk against coverage, cost."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpattention.reports.figures.lines import Points, lines_figure
from gpattention.reports.palette import Style
from gpattention.reports.words import number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Styles = Mapping[str, Style] | None


def training_figure(
    runs: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]],
    column: str,
    *,
    y: str | None = None,
    boundary: float | None = None,
    title: str | None = None,
    styles: Styles = None,
) -> "Figure":
    """One column of `metrics.csv` over the epochs.

    Args:
        runs: for each model the rows of each of its seeds.
        column: e.g. `train_loss`.
        y: name of the axis; the column's if not given.
        boundary: epochs of the first phase; the last one that has a row if not given.
        title: above the axes.
        styles: of the models; by their order if not given.
    """
    series = {label: [training_points(rows, column) for rows in seeds] for label, seeds in runs.items()}
    if boundary is None:
        starts = {start for seeds in runs.values() for rows in seeds if (start := _second_phase(rows))}
        boundary = starts.pop() if len(starts) == 1 else None
    return lines_figure(
        series, x="epoch", y=y or column, title=title, styles=styles, whole_x=True,
        boundary=None if boundary is None else (boundary, "draws begin"),
    )  # fmt: skip


def training_points(rows: Sequence[Mapping[str, Any]], column: str) -> Points:
    """Epoch and value where there is one."""
    pairs = ((number(row.get("epoch")), number(row.get(column))) for row in rows)
    return [(epoch, value) for epoch, value in pairs if epoch is not None and value is not None]


def _second_phase(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """The last epoch of kernel attention, where draws follow it."""
    kernel = [number(row.get("epoch")) for row in rows if row.get("phase") == "kernel"]
    return kernel[-1] if kernel and len(kernel) < len(rows) else None


def layers_figure(
    layers: Mapping[str, Sequence[Sequence[float | None]]],
    *,
    y: str,
    title: str | None = None,
    styles: Styles = None,
) -> "Figure":
    """A quantity of each layer, counted from 1; None where a layer has none.

    Args:
        layers: for each model the values of each of its seeds, first layer first.
        y: name of the quantity.
        title: above the axes.
        styles: of the models; by their order if not given.
    """
    series = {label: [layer_points(values) for values in seeds] for label, seeds in layers.items()}
    return lines_figure(series, x="layer", y=y, title=title, styles=styles, whole_x=True)


def layer_points(values: Sequence[float | None]) -> Points:
    """Layer and value where there is one."""
    return [(float(i), known) for i, value in enumerate(values, 1) if (known := number(value)) is not None]


def severity_figure(
    values: Mapping[str, Sequence[Mapping[int, float]]],
    *,
    y: str,
    title: str | None = None,
    styles: Styles = None,
) -> "Figure":
    """A metric against the severity of corruption; severity 0 is the clean test set.

    Args:
        values: for each model, of each of its seeds, the metric by severity.
        y: name of the metric.
        title: above the axes.
        styles: of the models; by their order if not given.
    """
    series = {
        label: [[(float(s), seed[s]) for s in sorted(seed)] for seed in seeds]
        for label, seeds in values.items()
    }
    severities = sorted({s for seeds in values.values() for seed in seeds for s in seed})
    names = {float(s): "clean" if s == 0 else str(s) for s in severities}
    return lines_figure(series, x="severity", y=y, title=title, styles=styles, x_names=names)


def roc_figure(
    curves: Mapping[str, Sequence[Mapping[str, Sequence[float]]]],
    *,
    title: str | None = None,
    styles: Styles = None,
) -> "Figure":
    """How many known items are accepted against how many unknown ones slip through.

    Args:
        curves: for each model, of each of its seeds, `fpr` (unknown accepted) and `tpr` (known accepted).
        title: above the axes.
        styles: of the models; by their order if not given.
    """
    series = {
        label: [list(zip(c["fpr"], c["tpr"], strict=True)) for c in seeds] for label, seeds in curves.items()
    }
    return lines_figure(
        series, x="share of unknown items accepted", y="share of known items accepted", title=title,
        styles=styles,
        x_limits=(-0.01, 1.01), y_limits=(-0.01, 1.02), diagonal=True, height=300,
    )  # fmt: skip


def risk_coverage_figure(
    curves: Mapping[str, Sequence[Mapping[str, Sequence[float]]]],
    *,
    title: str | None = None,
    styles: Styles = None,
) -> "Figure":
    """The error rate among the most certain items against how many these are.

    Args:
        curves: for each model, of each of its seeds, `coverage` and `risk`.
        title: above the axes.
        styles: of the models; by their order if not given.
    """
    series = {
        label: [list(zip(c["coverage"], c["risk"], strict=True)) for c in seeds]
        for label, seeds in curves.items()
    }
    return lines_figure(
        series, x="share of items answered", y="error rate among them", title=title, styles=styles,
        x_limits=(-0.01, 1.01),
    )  # fmt: skip


def cost_figure(
    values: Mapping[str, Sequence[Points]],
    *,
    x: str,
    y: str,
    title: str | None = None,
    styles: Styles = None,
) -> "Figure":
    """Time or memory against a size.

    Args:
        values: for each model the points of each of its seeds.
        x: name of the size, e.g. inducing points.
        y: name and unit of the cost.
        title: above the axes.
        styles: of the models; by their order if not given.
    """
    sizes = sorted({point[0] for seeds in values.values() for points in seeds for point in points})
    names = {size: f"{size:g}" for size in sizes}
    lines = {label: [sorted(points) for points in seeds] for label, seeds in values.items()}
    return lines_figure(lines, x=x, y=y, title=title, styles=styles, x_names=names)
