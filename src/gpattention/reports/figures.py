"""The figures of a report: functions of plain data that return matplotlib figures.

Each takes a mapping from a model's name to its data, one entry per seed; several seeds are drawn as their
mean with the interval of 95 % by Student's t.  `title` stands above the axes; `styles` default to the models'
order.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from gpattention.metrics import share_interval
from gpattention.reports import drawing
from gpattention.reports.comparison import number
from gpattention.reports.drawing import HEIGHT, WIDTH, drawn, dress, few_ticks, name_axes, new_figure, shorten
from gpattention.reports.style import (
    DASHES,
    GAP,
    GRID,
    INK,
    MARKERS,
    NEUTRAL,
    NEUTRAL_STYLE,
    QUIET,
    Style,
    style_of,
    styles_for,
)
from gpattention.runs import OverSeeds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Points = Sequence[tuple[float, float]]  # x and y
Band = Sequence[tuple[float, float, float]]  # x, low, high
Bins = Mapping[str, Sequence[float | None]]  # edges [K+1], confidence, accuracy, count [K]
Curves = Mapping[str, Sequence[Mapping[str, Sequence[float]]]]  # by model: of each seed, two rows of numbers
Histogram = Mapping[str, Sequence[float]]  # edges [K+1], in and out [K]
FEW = 13  # points that are marked one by one
FEW_ITEMS = 10  # of a bin, below which it is grey
STRIP = 40  # pixels of the strip of counts below a reliability diagram


class Look(TypedDict, total=False):
    """What every figure takes: a title above its axes, and the models' styles."""

    title: str | None
    styles: Mapping[str, Style] | None


@drawn
def lines_figure(
    series: Mapping[str, Sequence[Points]], *, x: str, y: str, x_names: Mapping[float, str] | None = None,
    whole_x: bool = False, square: bool = False, boundary: float | None = None,
    bands: Mapping[str, Band] | None = None, **look: Unpack[Look],
) -> "Figure":  # fmt: skip
    """One line per model, or one per seed.

    Args:
        series: for each model its lines, one per seed, as pairs (x, y).
        x: name of the horizontal axis.
        y: name of the vertical axis.
        x_names: ticks by name, e.g. `{0: "clean"}`; only these are shown.
        whole_x: ticks at whole numbers only.
        square: both axes are shares from 0 to 1, with y = x, e.g. chance in a ROC.
        boundary: the epoch after which draws begin.
        bands: intervals (x, low, high) of each model, in place of Student's t over its lines.
        look: see `Look`.
    """
    title, styles = _look(look, series)
    legend = {label: styles[label] for label in series}
    figure, axes = new_figure(title, legend, height=300 if square else HEIGHT)
    few_ticks(axes, whole_x=whole_x)
    for label, lines in series.items():
        own = None if bands is None else bands.get(label, ())
        _draw_lines(axes, [line for line in lines if line], styles[label], own)
    _limit(axes, [y for lines in series.values() for line in lines for _, y in line])
    if x_names is not None:
        axes.set_xticks(list(x_names), labels=list(x_names.values()))
    if square:
        axes.set(xlim=(-0.01, 1.01), ylim=(-0.01, 1.02))
        axes.plot([0, 1], [0, 1], color=NEUTRAL, linestyle=(0, (4, 3)), linewidth=1.2, zorder=1)
    if boundary is not None:
        axes.axvline(boundary, color=NEUTRAL, linestyle=(0, (2, 3)), linewidth=1.2, zorder=1)
        place: dict[str, Any] = {"ha": "center", "va": "bottom", "transform": axes.get_xaxis_transform()}
        axes.text(boundary, 1.01, "draws begin", color=QUIET, fontsize=11, **place)
    name_axes(axes, x, y)
    return figure


def _look(look: Look, models: Iterable[str]) -> tuple[str | None, Mapping[str, Style]]:
    return look.get("title"), look.get("styles") or styles_for(models)


def _over_seeds(values: Mapping[str, Sequence[float]]) -> dict[str, OverSeeds]:
    return {label: OverSeeds(dict(enumerate(seeds))) for label, seeds in values.items()}


def _limit(axes: "Axes", values: Sequence[float]) -> None:
    """Two seeds have intervals of twelve standard errors: axes are for the values."""
    if values:
        low, high = min(values), max(values)
        room = (high - low) or abs(high) or 1.0
        bottom, top = axes.get_ylim()
        axes.set_ylim(max(bottom, low - room), min(top, high + room))


def _draw_lines(
    axes: "Axes",
    lines: Sequence[Points],
    style: Style,
    band: Sequence[tuple[float, float, float]] | None = None,
) -> None:
    if band:
        xs, low, high = zip(*band, strict=True)
        axes.fill_between(xs, low, high, color=style.colour, alpha=0.14, linewidth=0)
    # a mean over seeds needs them at the same places
    if len(lines) > 1 and len({tuple(x for x, _ in line) for line in lines}) == 1:
        _draw_band(axes, lines, style, band is None)
        return
    for line in lines:
        xs, ys = zip(*line, strict=True)
        axes.plot(
            xs, ys, color=style.colour, linestyle=style.dash, linewidth=2 if len(lines) == 1 else 1,
            alpha=1 if len(lines) == 1 else 0.75, marker=style.marker if len(line) <= FEW else None,
            markersize=6, markeredgewidth=0, solid_capstyle="round", clip_on=len(line) > FEW,
        )  # fmt: skip


def _draw_band(axes: "Axes", lines: Sequence[Points], style: Style, banded: bool) -> None:
    """The mean of several seeds, and its interval where the caller has drawn none."""
    xs = [x for x, _ in lines[0]]
    found = [
        OverSeeds(dict(enumerate(y))) for y in zip(*([y for _, y in line] for line in lines), strict=True)
    ]
    ends = [each.interval or (each.mean, each.mean) for each in found]
    band = [(x, low, high) for x, (low, high) in zip(xs, ends, strict=True)] if banded else None
    _draw_lines(axes, [[(x, each.mean) for x, each in zip(xs, found, strict=True)]], style, band)


def training_figure(
    runs: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]], column: str, *, y: str | None = None,
    **look: Unpack[Look],
) -> "Figure":  # fmt: skip
    """One column of `metrics.csv` over the epochs, and where draws begin if all rows agree on it.

    Args:
        runs: for each model the rows of each of its seeds.
        column: e.g. `train_loss`.
        y: name of the axis; the column's if not given.
        look: `title` above the axes, and `styles` of the models, which are by their order if not given.

    Returns:
        A matplotlib figure.
    """
    series = {label: [training_points(rows, column) for rows in seeds] for label, seeds in runs.items()}
    starts = {start for seeds in runs.values() for rows in seeds if (start := _second_phase(rows))}
    boundary = starts.pop() if len(starts) == 1 else None
    return lines_figure(series, x="epoch", y=y or column, whole_x=True, boundary=boundary, **look)


def training_points(rows: Sequence[Mapping[str, Any]], column: str) -> Points:
    """Epoch and value where there is one."""
    pairs = ((number(row.get("epoch")), number(row.get(column))) for row in rows)
    return [(epoch, value) for epoch, value in pairs if epoch is not None and value is not None]


def _second_phase(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """The last epoch of kernel attention, where draws follow it."""
    kernel = [number(row.get("epoch")) for row in rows if row.get("phase") == "kernel"]
    return kernel[-1] if kernel and len(kernel) < len(rows) else None


def layers_figure(
    layers: Mapping[str, Sequence[Sequence[float | None]]], *, y: str, **look: Unpack[Look]
) -> "Figure":
    """A quantity of each layer, counted from 1; None where a layer has none.

    Args:
        layers: for each model the values of each of its seeds, first layer first.
        y: name of the quantity.
        look: `title` above the axes, and `styles` of the models, which are by their order if not given.

    Returns:
        A matplotlib figure.
    """
    series = {label: [layer_points(values) for values in seeds] for label, seeds in layers.items()}
    return lines_figure(series, x="layer", y=y, **look, whole_x=True)


def layer_points(values: Sequence[float | None]) -> Points:
    """Layer and value where there is one."""
    return [(float(i), known) for i, value in enumerate(values, 1) if (known := number(value)) is not None]


def severity_figure(
    values: Mapping[str, Sequence[Mapping[int, float]]], *, y: str,
    bands: Mapping[str, Band] | None = None, **look: Unpack[Look],
) -> "Figure":  # fmt: skip
    """A metric against the severity of corruption; severity 0 is the clean test set.

    Args:
        values: for each model, of each of its seeds, the metric by severity.
        y: name of the metric.
        bands: intervals (severity, low, high) of each model; by Student's t over its seeds if not given.
        look: `title` above the axes, and `styles` of the models, which are by their order if not given.

    Returns:
        A matplotlib figure.
    """
    series = {
        label: [[(float(s), seed[s]) for s in sorted(seed)] for seed in seeds]
        for label, seeds in values.items()
    }
    severities = sorted({s for seeds in values.values() for seed in seeds for s in seed})
    names = {float(s): "clean" if s == 0 else str(s) for s in severities}
    return lines_figure(series, x="severity", y=y, **look, x_names=names, bands=bands)


def roc_figure(curves: Curves, **look: Unpack[Look]) -> "Figure":
    """How many known items are accepted against how many unknown ones slip through.

    Args:
        curves: for each model, of each of its seeds, `fpr` (unknown accepted) and `tpr` (known accepted).
        look: `title` above the axes, and `styles` of the models, which are by their order if not given.

    Returns:
        A matplotlib figure.
    """
    return lines_figure(
        _pairs(curves, "fpr", "tpr"), x="share of unknown items accepted", y="share of known items accepted",
        square=True, **look,
    )  # fmt: skip


def _pairs(curves: Curves, x: str, y: str) -> dict[str, list[Points]]:
    return {label: [list(zip(c[x], c[y], strict=True)) for c in seeds] for label, seeds in curves.items()}


def p_value_figure(curves: Curves, *, title: str | None = None, style: Style | None = None) -> "Figure":
    """Which share of each set's items has at most a p-value: its empirical distribution function.

    Items of the kind that was trained on should follow the diagonal, others lie above it; above the diagonal
    at p is also what is flagged beyond the rate p of false alarms.

    Args:
        curves: for each set (`test` is what was trained on), of each seed, `p` in rising order and `share`.
        title: above the axes.
        style: style of the model; other sets than `test` have its colour.

    Returns:
        A matplotlib figure.
    """
    style = style or style_of(0)
    others = [name for name in curves if name != "test"]
    styles = {"test": NEUTRAL_STYLE} | {
        name: replace(style, marker=MARKERS[i % len(MARKERS)], dash=DASHES[i % len(DASHES)])
        for i, name in enumerate(others)
    }
    series = {}
    for name in sorted(curves, key=lambda name: name != "test"):
        places = sorted({0.0, 1.0, *(p for curve in curves[name] for p in curve["p"])})
        series[name] = [shares_at(curve, places) for curve in curves[name]]
    figure = lines_figure(
        series, x="p-value", y="share of items up to it", square=True, title=title, styles=styles
    )
    # an empirical distribution has hundreds of points: a marker at each would be a smear
    for name, line in zip(series, figure.axes[0].lines, strict=False):  # the diagonal is the last line
        line.set(marker=styles[name].marker, markevery=0.2)  # of a long line few, so that dashes may repeat
    return figure


def shares_at(curve: Mapping[str, Sequence[float]], places: Iterable[float]) -> Points:
    """Which share has at most each of these p-values; between the curve's points that of the lower one."""
    counts = ((place, bisect_right(curve["p"], place)) for place in places)
    return [(place, curve["share"][count - 1] if count else 0.0) for place, count in counts]


def risk_coverage_figure(curves: Curves, **look: Unpack[Look]) -> "Figure":
    """The error rate among the most certain items against how many these are.

    Args:
        curves: for each model, of each of its seeds, `coverage` and `risk`.
        look: `title` above the axes, and `styles` of the models, which are by their order if not given.

    Returns:
        A matplotlib figure.
    """
    x, y = "share of items answered", "error rate among them"
    figure = lines_figure(_pairs(curves, "coverage", "risk"), x=x, y=y, **look)
    figure.axes[0].set_xlim(-0.01, 1.01)
    return figure


def cost_figure(values: Mapping[str, Sequence[Points]], *, x: str, y: str, **look: Unpack[Look]) -> "Figure":
    """Time or memory against a size.

    Args:
        values: for each model the points of each of its seeds.
        x: name of the size, e.g. inducing points.
        y: name and unit of the cost.
        look: `title` above the axes, and `styles` of the models, which are by their order if not given.

    Returns:
        A matplotlib figure.
    """
    sizes = sorted({point[0] for seeds in values.values() for points in seeds for point in points})
    names = {size: f"{size:g}" for size in sizes}
    lines = {label: [sorted(points) for points in seeds] for label, seeds in values.items()}
    return lines_figure(lines, x=x, y=y, **look, x_names=names)


@drawn
def bars_figure(values: Mapping[str, Sequence[float]], *, x: str, **look: Unpack[Look]) -> "Figure":
    """One bar per model with its number; a line through its end is the interval by Student's t over seeds.

    Args:
        values: for each model the values of its seeds.
        x: name and unit of the quantity.
        look: `title` above the axes, and `styles` of the models, which are by their order if not given.

    Returns:
        A matplotlib figure.
    """
    title, styles = _look(look, values)
    beside = 20 + drawing.LETTER * max((len(shorten(label)) for label in values), default=0)
    above = beside > WIDTH * 0.42  # long names stand above their bars
    thick = 0.46 if above else 0.62
    figure, axes = new_figure(
        title, height=58 + (46 if above else 30) * len(values), left=16 if above else beside
    )
    axes.grid(False, axis="y")
    found = _over_seeds(values)
    offset: dict[str, Any] = {"textcoords": "offset points", "color": INK}
    for row, (label, each) in enumerate(found.items()):
        axes.barh(row, each.mean, thick, color=styles[label].colour, linewidth=0)
        low, high = each.interval or (each.mean, each.mean)
        if high > low:
            axes.errorbar(each.mean, row, xerr=high - each.mean, fmt="none", ecolor=NEUTRAL, elinewidth=2)
        written = f"{each.mean:#.3g}".rstrip(".")
        axes.annotate(written, (max(each.mean, high), row), (6, 0), va="center", fontsize=11.5, **offset)
        if above:
            axes.annotate(shorten(label), (0, row - thick / 2), (0, 3), va="bottom", fontsize=12, **offset)
    axes.set_ylim(len(values) - 0.5, -0.8 if above else -0.5)
    # room for the numbers; an interval of two seeds, of twelve standard errors, may leave the axes
    ends = (
        max(1.18 * each.mean, min(2 * each.mean, 1.15 * (each.interval or (0, 0))[1]))
        for each in found.values()
    )
    axes.set_xlim(0, max(ends, default=0.0) or 1)
    few_ticks(axes, x=4)
    axes.set_yticks(range(len(values)), labels=["" if above else shorten(label) for label in values])
    axes.tick_params(axis="y", labelcolor=INK)
    name_axes(axes, x, "")
    return figure


@drawn
def reliability_figure(bins: Bins, *, title: str | None = None, style: Style | None = None) -> "Figure":
    """Accuracy of the items in each bin of confidence, and below it how many items a bin holds.

    The full bar and what stands on it end at confidence and accuracy, whichever is higher: red is confidence
    beyond accuracy, the pale colour accuracy beyond confidence.  The line through the accuracy is its
    interval of 95 %.  Bins of fewer than ten items are grey: they say next to nothing.

    Args:
        bins: `edges`, `confidence`, `accuracy` and `count`, e.g. `curves["reliability"]["model"]`; may have
            the ends `low` and `high` of the accuracies' intervals, which are Wilson's if not given.
        title: above the axes.
        style: whose colour the bars have.

    Returns:
        A matplotlib figure.
    """
    from matplotlib.colors import to_rgb

    colour = (style or style_of(0)).colour
    figure, axes = new_figure(title, height=320, bottom=drawing.BOTTOM + STRIP + 10)
    axes.plot([0, 1], [0, 1], color=NEUTRAL, linestyle=(0, (4, 3)), linewidth=1.3, zorder=3)
    edges = [float(edge or 0.0) for edge in bins["edges"]]
    counts = [float(count or 0.0) for count in bins["count"]]
    for i, (confidence, accuracy) in enumerate(zip(bins["confidence"], bins["accuracy"], strict=True)):
        sure, right = number(confidence), number(accuracy)
        if counts[i] == 0 or sure is None or right is None:
            continue
        left, width, few = edges[i], edges[i + 1] - edges[i], counts[i] < FEW_ITEMS
        fill, gap = (NEUTRAL, NEUTRAL) if few else (colour, GAP if sure > right else colour)
        opacity = 0.35 if few else 0.85
        axes.bar(left, min(sure, right), width * 0.92, align="edge", color=fill, alpha=opacity, linewidth=0)
        axes.bar(
            left, sure - right, width * 0.92, right, align="edge", facecolor=(*to_rgb(gap), 0.3 * opacity),
            edgecolor=(*to_rgb(gap), opacity), linewidth=1,
        )  # fmt: skip
        low, high = (number(bins[key][i]) if key in bins else None for key in ("low", "high"))
        if low is None or high is None:
            low, high = share_interval(min(1.0, max(0.0, right)), counts[i])
        error = [[max(0.0, right - low)], [max(0.0, high - right)]]
        axes.errorbar(
            left + width * 0.46, right, yerr=error, fmt="none", ecolor=NEUTRAL if few else INK,
            elinewidth=1.3, capsize=2, zorder=4,
        )  # fmt: skip
    axes.set(xlim=(0, 1), ylim=(0, 1.0))
    few_ticks(axes)
    axes.tick_params(labelbottom=False)
    box = axes.get_position()
    whole = figure.get_size_inches()[1] * 72
    strip = figure.add_axes((box.x0, drawing.BOTTOM / whole, box.width, STRIP / whole), sharex=axes)
    dress(strip)
    total = sum(counts) or 1.0
    shares = [count / total for count in counts]
    widths = [b - a for a, b in pairwise(edges)]
    strip.bar(edges[:-1], shares, [w * 0.92 for w in widths], align="edge", color=NEUTRAL, linewidth=0)
    strip.set_yticks([0, max(shares)], labels=["0", f"{max(shares):.0%}"])
    strip.set_ylim(0, max(shares) * 1.05 or 1)
    name_axes(strip, "confidence, 0 to 1", "items")
    name_axes(axes, "", "accuracy, 0 to 1")
    return figure


@drawn
def corruption_figure(
    values: Mapping[str, Mapping[str, Sequence[float]]], *, x: str,
    intervals: Mapping[str, Mapping[str, tuple[float, float]]] | None = None, **look: Unpack[Look],
) -> "Figure":  # fmt: skip
    """One line of dots per corruption; a bar through a dot is its interval of 95 %.

    Args:
        values: for each model, of each corruption, the values of its seeds.
        x: name of the metric.
        intervals: intervals of each model and corruption; by Student's t over the seeds if not given.
        look: `title` above the axes, and `styles` of the models, which are by their order if not given.

    Returns:
        A matplotlib figure.
    """
    title, styles = _look(look, values)
    types = list(dict.fromkeys(kind for of_model in values.values() for kind in of_model))
    legend = {label: styles[label] for label in values}
    figure, axes = new_figure(title, legend, height=60 + 22 * len(types), left=128)
    axes.grid(False, axis="y")
    step, shown = 0.6 / max(len(values), 1), list[float]()
    for place, (label, of_model) in enumerate(values.items()):
        found = _over_seeds({kind: seeds for kind, seeds in of_model.items() if seeds})
        means = [each.mean for each in found.values()]
        given = {} if intervals is None else intervals.get(label, {})
        ends = [given.get(kind) or each.interval or (each.mean, each.mean) for kind, each in found.items()]
        low, high = ([max(0.0, sign * (end[at] - m)) for end, m in zip(ends, means, strict=True)]
                     for at, sign in ((0, -1), (1, 1)))  # fmt: skip
        shown += means
        heights = [types.index(kind) + (place - (len(values) - 1) / 2) * step for kind in found]
        style = styles[label]
        if any(low) or any(high):
            axes.errorbar(
                means, heights, xerr=[low, high], fmt="none", ecolor=style.colour, elinewidth=1, alpha=0.6
            )
        axes.plot(
            means, heights, linestyle="none", marker=style.marker, color=style.colour, markersize=6,
            markeredgewidth=0, clip_on=False,
        )  # fmt: skip
    for row in range(len(types)):
        axes.axhline(row + 0.5, color=GRID, linewidth=1, zorder=0)
    axes.set_ylim(len(types) - 0.5, -0.5)
    if shown:  # intervals of two seeds may leave the axes, values do not
        room, (left, right) = (max(shown) - min(shown)) or abs(shown[0]) or 1.0, axes.get_xlim()
        axes.set_xlim(max(left, min(shown) - room / 2), min(right, max(shown) + room / 2))
    few_ticks(axes, x=5)
    axes.set_yticks(range(len(types)), labels=[shorten(kind.replace("_", " ")) for kind in types])
    axes.tick_params(axis="y", labelcolor=INK, labelsize=11)
    name_axes(axes, x, "")
    return figure


@drawn
def outlier_figure(histograms: Mapping[str, Histogram], *, x: str, **look: Unpack[Look]) -> "Figure":
    """Which share of known items (grey) and of foreign ones (the model's colour) has at most a score.

    Empirical distribution functions, read at the edges of a histogram's bins.  Each model has its own scale,
    since scores of different models need not be comparable; the further colour lies below grey, the better.

    Args:
        histograms: for each model `edges`, `in` and `out`.
        x: name of the score.
        look: `title` above the axes, and `styles` of the models, which are by their order if not given.

    Returns:
        A matplotlib figure.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    title, styles = _look(look, histograms)
    whole = 70 + max(250, 84 * len(histograms))
    figure = Figure(figsize=(WIDTH / 72, whole / 72), dpi=72, layout="constrained")
    figure.patch.set_alpha(0.0)
    figure.suptitle(shorten(title or ""), color=INK, weight="bold")
    for axes, (label, histogram) in zip(
        figure.subplots(len(histograms), squeeze=False).flat, histograms.items(), strict=True
    ):
        dress(axes)
        axes.set_title(shorten(label), loc="left", color=INK, fontsize=12)
        _draw_shares(axes, histogram, styles[label])
    lines = [
        Line2D([], [], color=NEUTRAL, linewidth=2.5, label="known"),
        Line2D([], [], color=INK, linewidth=2, label="foreign"),
    ]
    figure.legend(handles=lines, loc="outside upper left", ncols=2, frameon=False, labelcolor=INK)
    figure.supxlabel(shorten(x), color=INK, fontsize=12.5)
    figure.supylabel("share of items, at most", color=INK, fontsize=12.5)
    return figure


def _draw_shares(axes: "Axes", histogram: Histogram, style: Style) -> None:
    edges = list(histogram["edges"])
    for key, colour, wide in (("in", NEUTRAL, 2.5), ("out", style.colour, 2.0)):
        axes.plot(edges, [0.0, *shares_up_to(histogram[key])], color=colour, linewidth=wide)
    known, foreign = ([0.0, *shares_up_to(histogram[key])] for key in ("in", "out"))
    axes.fill_between(edges, known, foreign, color=style.colour, alpha=0.15, linewidth=0)
    axes.set(xlim=(edges[0], edges[-1]), ylim=(0, 1.02))
    few_ticks(axes, x=5)
    axes.set_yticks([0, 1])
    axes.tick_params(labelsize=10, pad=3)


def shares_up_to(counts: Sequence[float]) -> list[float]:
    """The share of all items up to the end of each bin, so that sets of different size compare."""
    whole = sum(counts) or 1.0
    return [total / whole for total in accumulate(counts)]
