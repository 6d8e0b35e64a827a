"""Differences from the baseline with their errors: one panel for each metric, a mark for each set."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from gpattention.experiments.adoption.cells import Cell
from gpattention.experiments.adoption.methods import BASELINE
from gpattention.experiments.adoption.summary import Column, paired_difference
from gpattention.reports.canvas import drawn, dress
from gpattention.reports.palette import INK, NEUTRAL, style_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANEL, ROW, LETTER = 190, 30, 7.0  # pixels


@drawn
def differences_figure(
    methods: Mapping[str, Sequence[Cell]],
    panels: Mapping[str, Mapping[str, Column]],
    titles: Mapping[str, str],
) -> "Figure":
    """A panel by the name of a metric, in it a column for each kind of set; a line is the standard error.

    Left of 0 is less than the baseline, whether that is better or not is for the panel's name to say.
    """
    from matplotlib.figure import Figure

    names = [method for method in methods if method != BASELINE]
    words = [titles.get(name, name).replace("`", "") for name in names]
    left = 20 + LETTER * max((len(word) for word in words), default=0)
    width, height = left + PANEL * len(panels), 100 + ROW * len(names)
    figure = Figure(figsize=(width / 72, height / 72), dpi=72)
    kinds = list(dict.fromkeys(kind for columns in panels.values() for kind in columns))
    styles = {kind: style_of(place) for place, kind in enumerate(kinds)}
    for place, (metric, columns) in enumerate(panels.items()):
        box = ((left + PANEL * place) / width, 62 / height, (PANEL - 24) / width, 1 - 92 / height)
        axes = figure.add_axes(box)
        dress(axes)
        axes.axvline(0, color=NEUTRAL, linewidth=1.5)
        for line, (kind, column) in enumerate(columns.items()):
            for row, name in enumerate(names):
                gap = paired_difference(methods[name], methods.get(BASELINE, []), column)
                if gap is None:
                    continue
                shift = 0.24 * (line - (len(columns) - 1) / 2)
                axes.errorbar(
                    gap.value, row + shift, xerr=gap.error, color=styles[kind].colour, markersize=6,
                    marker=styles[kind].marker, elinewidth=2, linestyle="none",
                )  # fmt: skip
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_yticks(range(len(names)), labels=words if place == 0 else [""] * len(names))
        axes.tick_params(axis="y", labelcolor=INK)
        axes.locator_params(axis="x", nbins=4)
        axes.set_title(metric, color=INK, fontsize=12.5)
    for place, kind in enumerate(kinds):
        x = (left + 150 * place) / width
        figure.text(x, 12 / height, "●■▲◆"[place % 4], color=styles[kind].colour)
        figure.text(x + 16 / width, 12 / height, kind, color=INK)
    figure.text(left / width, 34 / height, f"difference from {titles.get(BASELINE, BASELINE)}", color=INK)
    return figure
