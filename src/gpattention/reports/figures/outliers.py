"""Histograms of a score on known and on unknown items, one line per model."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from gpattention.reports.canvas import RIGHT, WIDTH, drawn, dress, few_ticks, shorten
from gpattention.reports.palette import INK, NEUTRAL, Style, styles_for

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

AXIS, HEAD, FOOT, SIDE = 18, 26, 22, 12  # pixels
LOWEST, TALL = 36, 320  # of a line, and of the figure that few lines fill
Histogram = Mapping[str, Sequence[float]]  # edges [K+1], in and out [K]


@drawn
def outlier_figure(
    histograms: Mapping[str, Histogram],
    *,
    x: str,
    title: str | None = None,
    styles: Mapping[str, Style] | None = None,
) -> "Figure":
    """How a score separates known items (grey) from unknown ones (the model's colour).

    Each line has its own scale, since scores of different models need not be comparable; the less grey
    and colour overlap, the better.

    Args:
        histograms: for each model `edges`, `in` and `out`.
        x: name of the score.
        title: above the axes.
        styles: of the models; by their order if not given.
    """
    from matplotlib.figure import Figure

    styles = styles or styles_for(list(histograms))
    longest = max((len(shorten(label)) for label in histograms), default=0)
    left = min(16 + 6.9 * longest, WIDTH * 0.42)
    top = HEAD + (22 if title else 0)
    high = max(LOWEST, (TALL - HEAD - FOOT) / max(len(histograms), 3) - AXIS)
    whole = top + len(histograms) * (high + AXIS) + FOOT
    figure = Figure(figsize=(WIDTH / 72, whole / 72), dpi=72)
    figure.patch.set_alpha(0.0)
    if title:
        figure.text(SIDE / WIDTH, 1 - 18 / whole, shorten(title), color=INK, weight="bold")
    _legend(figure, left, 1 - (top - 14) / whole)
    for row, (label, histogram) in enumerate(histograms.items()):
        bottom = whole - top - (row + 1) * high - row * AXIS
        axes = figure.add_axes((left / WIDTH, bottom / whole, 1 - (left + RIGHT) / WIDTH, (high - 4) / whole))
        dress(axes)
        _draw(axes, histogram, styles[label])
        figure.text(
            (left - 8) / WIDTH, (bottom + high / 2 - 4) / whole, shorten(label), color=INK, ha="right",
            va="center",
        )  # fmt: skip
    figure.text((left + WIDTH - RIGHT) / 2 / WIDTH, 5 / whole, x, color=INK, ha="center", va="bottom")
    return figure


def _draw(axes: "Axes", histogram: Histogram, style: Style) -> None:
    edges = list(histogram["edges"])
    known, unknown = (_shares(histogram[part]) for part in ("in", "out"))
    axes.stairs(known, edges, fill=True, color=NEUTRAL, alpha=0.55, linewidth=0)
    axes.stairs(unknown, edges, fill=True, color=style.colour, alpha=0.3, linewidth=0)
    axes.stairs(unknown, edges, color=style.colour, linewidth=1.6)
    axes.set_ylim(0, max([*known, *unknown, 1e-12]) * 1.05)
    axes.set_xlim(edges[0], edges[-1])
    few_ticks(axes, x=5)
    axes.set_yticks([])
    axes.tick_params(labelsize=10, pad=3)


def _shares(counts: Sequence[float]) -> list[float]:
    """Of all items, so that sets of different size compare."""
    total = sum(counts) or 1.0
    return [count / total for count in counts]


def _legend(figure: "Figure", left: float, y: float) -> None:
    from matplotlib.patches import Rectangle

    height = 9 / (figure.get_size_inches()[1] * 72)
    for x, colour, word in ((left, NEUTRAL, "known"), (left + 78, INK, "unknown")):
        box = Rectangle(
            (x / WIDTH, y - height / 2), 14 / WIDTH, height, facecolor=colour if word == "known" else "none",
            edgecolor=colour, alpha=0.7, linewidth=1.4, transform=figure.transFigure,
        )  # fmt: skip
        figure.add_artist(box)
        figure.text((x + 20) / WIDTH, y, word, color=INK, va="center_baseline", fontsize=11.5)
