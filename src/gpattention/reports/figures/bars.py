"""One bar per model."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from gpattention.reports.canvas import LETTER, WIDTH, drawn, few_ticks, name_axes, new_figure, shorten
from gpattention.reports.palette import INK, NEUTRAL, Style, styles_for
from gpattention.runs import OverSeeds

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
    """One bar per model with its number; a line through its end is the standard error over seeds.

    Args:
        values: for each model the values of its seeds.
        x: name and unit of the quantity.
        title: above the axes.
        styles: of the models; by their order if not given.
    """
    styles = styles or styles_for(list(values))
    beside = 20 + LETTER * max((len(shorten(label)) for label in values), default=0)
    above = beside > WIDTH * 0.42  # long names stand above their bars
    thick = 0.46 if above else 0.62
    figure, axes = new_figure(
        title, height=58 + (46 if above else 30) * len(values), left=16 if above else beside
    )
    axes.grid(False, axis="y")
    found = {label: OverSeeds(dict(enumerate(of_model))) for label, of_model in values.items()}
    means = {label: each.mean for label, each in found.items()}
    errors = {label: each.error for label, each in found.items() if each.error is not None}
    largest = max(means.values(), default=0.0)
    furthest = max((means[label] + error for label, error in errors.items()), default=0.0)
    for row, label in enumerate(values):
        axes.barh(row, means[label], thick, color=styles[label].colour, linewidth=0)
        if label in errors:
            axes.errorbar(means[label], row, xerr=errors[label], fmt="none", ecolor=NEUTRAL, elinewidth=2)
        axes.annotate(
            f"{means[label]:.3g}", (means[label], row), (6, 0), textcoords="offset points", va="center",
            color=INK, fontsize=11.5,
        )  # fmt: skip
        if above:
            axes.annotate(
                shorten(label), (0, row - thick / 2), (0, 3), textcoords="offset points", va="bottom",
                color=INK, fontsize=12,
            )  # fmt: skip
    axes.set_ylim(len(values) - 0.5, -0.8 if above else -0.5)
    # room for the numbers; an error that were cut off would look smaller than it is
    axes.set_xlim(0, max(largest * 1.18, furthest * 1.02) or 1)
    few_ticks(axes, x=4)
    axes.set_yticks(range(len(values)), labels=["" if above else shorten(label) for label in values])
    axes.tick_params(axis="y", labelcolor=INK)
    name_axes(axes, x, "")
    return figure
