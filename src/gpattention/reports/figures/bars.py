"""One bar per model."""

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from gpattention.reports.canvas import WIDTH, drawn, few_ticks, name_axes, new_figure, shorten
from gpattention.reports.palette import INK, NEUTRAL, Style, styles_for

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@drawn
def bars_figure(
    values: Mapping[str, Sequence[float]],
    *,
    x: str,
    title: str | None = None,
    styles: Mapping[str, Style] | None = None,
) -> "Figure":
    """One bar per model with its number; a line through its end is the standard deviation over seeds.

    Args:
        values: for each model the values of its seeds.
        x: name and unit of the quantity.
        title: above the axes.
        styles: of the models; by their order if not given.
    """
    styles = styles or styles_for(list(values))
    longest = max((len(shorten(label)) for label in values), default=0)
    left = min(20 + 6.9 * longest, WIDTH * 0.42)
    figure, axes = new_figure(title, height=58 + 30 * len(values), left=left)
    axes.grid(False, axis="y")
    means = {label: fmean(of_model) for label, of_model in values.items()}
    largest = max(means.values(), default=0.0)
    for row, (label, of_model) in enumerate(values.items()):
        axes.barh(row, means[label], 0.62, color=styles[label].colour, linewidth=0)
        if len(of_model) > 1:
            axes.errorbar(means[label], row, xerr=stdev(of_model), fmt="none", ecolor=NEUTRAL, elinewidth=2)
        axes.annotate(
            f"{means[label]:.3g}", (means[label], row), (6, 0), textcoords="offset points", va="center",
            color=INK, fontsize=11.5,
        )  # fmt: skip
    axes.set_ylim(len(values) - 0.5, -0.5)
    axes.set_xlim(0, largest * 1.18 or 1)
    few_ticks(axes, x=4)
    axes.set_yticks(range(len(values)), labels=[shorten(label) for label in values])
    axes.tick_params(axis="y", labelcolor=INK)
    name_axes(axes, x, "")
    return figure
