"""Figures of calibration: confidence against accuracy, and every corruption by itself."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from gpattention.reports.canvas import BOTTOM, drawn, dress, few_ticks, name_axes, new_figure, shorten
from gpattention.reports.palette import GAP, GRID, INK, NEUTRAL, Style, style_of, styles_for
from gpattention.reports.words import number
from gpattention.runs import OverSeeds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Bins = Mapping[str, Sequence[float | None]]  # edges [K+1], confidence, accuracy, count [K]
STRIP = 40  # pixels of the strip of counts


@drawn
def reliability_figure(bins: Bins, *, title: str | None = None, style: Style | None = None) -> "Figure":
    """Accuracy of the items in each bin of confidence, and below it how many items a bin holds.

    The full bar and what stands on it end at confidence and accuracy, whichever is higher: red is confidence
    beyond accuracy, the pale colour accuracy beyond confidence.

    Args:
        bins: `edges`, `confidence`, `accuracy` and `count`, e.g. `curves["reliability"]["model"]`.
        title: above the axes.
        style: whose colour the bars have.
    """
    from matplotlib.colors import to_rgb

    colour = (style or style_of(0)).colour
    figure, axes = new_figure(title, height=320, bottom=BOTTOM + STRIP + 10)
    axes.plot([0, 1], [0, 1], color=NEUTRAL, linestyle=(0, (4, 3)), linewidth=1.3, zorder=3)
    edges = [float(edge or 0.0) for edge in bins["edges"]]
    counts = [float(count or 0.0) for count in bins["count"]]
    for i, (confidence, accuracy) in enumerate(zip(bins["confidence"], bins["accuracy"], strict=True)):
        sure, right = number(confidence), number(accuracy)
        if counts[i] == 0 or sure is None or right is None:
            continue
        left, width = edges[i], edges[i + 1] - edges[i]
        axes.bar(left, min(sure, right), width * 0.92, align="edge", color=colour, alpha=0.85, linewidth=0)
        gap = GAP if sure > right else colour
        axes.bar(
            left, sure - right, width * 0.92, right, align="edge", facecolor=(*to_rgb(gap), 0.3),
            edgecolor=gap, linewidth=1,
        )  # fmt: skip
    axes.set(xlim=(0, 1), ylim=(0, 1.0))
    few_ticks(axes)
    axes.tick_params(labelbottom=False)
    box = axes.get_position()
    whole = figure.get_size_inches()[1] * 72
    strip = figure.add_axes((box.x0, BOTTOM / whole, box.width, STRIP / whole), sharex=axes)
    dress(strip)
    total = sum(counts) or 1.0
    shares = [count / total for count in counts]
    widths = [b - a for a, b in pairwise(edges)]
    strip.bar(edges[:-1], shares, [w * 0.92 for w in widths], align="edge", color=NEUTRAL, linewidth=0)
    strip.set_yticks([0, max(shares)], labels=["0", f"{max(shares):.0%}"])
    strip.set_ylim(0, max(shares) * 1.05 or 1)
    name_axes(strip, "confidence", "items")
    name_axes(axes, "", "accuracy")
    return figure


@drawn
def corruption_figure(
    values: Mapping[str, Mapping[str, Sequence[float]]],
    *,
    x: str,
    title: str | None = None,
    styles: Mapping[str, Style] | None = None,
) -> "Figure":
    """One line of dots per corruption; a bar through a dot is the standard error over seeds.

    Args:
        values: for each model, of each corruption, the values of its seeds.
        x: name of the metric.
        title: above the axes.
        styles: of the models; by their order if not given.
    """
    styles = styles or styles_for(list(values))
    types = list(dict.fromkeys(kind for of_model in values.values() for kind in of_model))
    legend = {label: styles[label] for label in values}
    figure, axes = new_figure(title, legend, height=60 + 22 * len(types), left=128)
    axes.grid(False, axis="y")
    step = 0.6 / max(len(values), 1)
    for place, (label, of_model) in enumerate(values.items()):
        rows = [row for row, kind in enumerate(types) if of_model.get(kind)]
        found = [OverSeeds(dict(enumerate(of_model[types[row]]))) for row in rows]
        means, errors = [each.mean for each in found], [each.error or 0.0 for each in found]
        heights = [row + (place - (len(values) - 1) / 2) * step for row in rows]
        style = styles[label]
        if any(errors):
            axes.errorbar(means, heights, xerr=errors, fmt="none", ecolor=style.colour, elinewidth=1)
        axes.plot(
            means, heights, linestyle="none", marker=style.marker, color=style.colour, markersize=6,
            markeredgewidth=0, clip_on=False,
        )  # fmt: skip
    for row in range(len(types)):
        axes.axhline(row + 0.5, color=GRID, linewidth=1, zorder=0)
    axes.set_ylim(len(types) - 0.5, -0.5)
    few_ticks(axes, x=5)
    axes.set_yticks(range(len(types)), labels=[shorten(kind.replace("_", " ")) for kind in types])
    axes.tick_params(axis="y", labelcolor=INK, labelsize=11)
    name_axes(axes, x, "")
    return figure
