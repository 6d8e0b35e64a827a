"""Lines of several models over one quantity; several seeds as their mean within a band, or as thin lines."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from gpattention.reports.canvas import HEIGHT, drawn, few_ticks, name_axes, new_figure, whole_ticks
from gpattention.reports.palette import NEUTRAL, QUIET, Style, styles_for
from gpattention.runs import OverSeeds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Points = Sequence[tuple[float, float]]  # x and y
FEW = 13  # points that are marked one by one


@drawn
def lines_figure(
    series: Mapping[str, Sequence[Points]],  # by model: one line per seed
    *,
    x: str,
    y: str,
    title: str | None = None,
    styles: Mapping[str, Style] | None = None,
    x_names: Mapping[float, str] | None = None,
    x_limits: tuple[float, float] | None = None,
    y_limits: tuple[float, float] | None = None,
    diagonal: bool = False,
    whole_x: bool = False,
    boundary: tuple[float, str] | None = None,
    height: float = HEIGHT,
) -> "Figure":
    """One line per model, or one per seed.

    Args:
        series: for each model its lines, as pairs (x, y).
        x: name of the horizontal axis.
        y: name of the vertical axis.
        title: above the axes.
        styles: of the models; by their order if not given.
        x_names: ticks by name, e.g. `{0: "clean"}`; only these are shown.
        x_limits: of the horizontal axis.
        y_limits: of the vertical axis.
        diagonal: draw y = x, e.g. chance in a ROC.
        whole_x: ticks at whole numbers only.
        boundary: an x to mark, and what happens there.
        height: in pixels, without title and legend.
    """
    styles = styles or styles_for(list(series))
    figure, axes = new_figure(title, {label: styles[label] for label in series}, height=height)
    few_ticks(axes)
    if whole_x:
        whole_ticks(axes)
    for label, lines in series.items():
        _draw(axes, [line for line in lines if line], styles[label])
    if x_names is not None:
        axes.set_xticks(list(x_names), labels=list(x_names.values()))
    if x_limits is not None:
        axes.set_xlim(*x_limits)
    if y_limits is not None:
        axes.set_ylim(*y_limits)
    if diagonal:
        axes.plot([0, 1], [0, 1], color=NEUTRAL, linestyle=(0, (4, 3)), linewidth=1.2, zorder=1)
    if boundary is not None:
        axes.axvline(boundary[0], color=NEUTRAL, linestyle=(0, (2, 3)), linewidth=1.2, zorder=1)
        axes.text(
            boundary[0], 1.01, boundary[1], color=QUIET, fontsize=11, ha="center", va="bottom",
            transform=axes.get_xaxis_transform(),
        )  # fmt: skip
    name_axes(axes, x, y)
    return figure


def _draw(axes: "Axes", lines: Sequence[Points], style: Style) -> None:
    if len(lines) > 1 and len({tuple(x for x, _ in line) for line in lines}) == 1:
        _draw_band(axes, lines, style)
        return
    for line in lines:
        xs, ys = zip(*line, strict=True)
        axes.plot(
            xs, ys, color=style.colour, linestyle=style.dash, linewidth=2 if len(lines) == 1 else 1,
            alpha=1 if len(lines) == 1 else 0.75, marker=style.marker if len(line) <= FEW else None,
            markersize=6, markeredgewidth=0, solid_capstyle="round", clip_on=len(line) > FEW,
        )  # fmt: skip


def _draw_band(axes: "Axes", lines: Sequence[Points], style: Style) -> None:
    """The mean of several seeds, and one standard error to either side."""
    xs = [x for x, _ in lines[0]]
    found = [
        OverSeeds(dict(enumerate(y))) for y in zip(*([y for _, y in line] for line in lines), strict=True)
    ]
    low, high = ([each.mean + sign * (each.error or 0.0) for each in found] for sign in (-1, 1))
    axes.fill_between(xs, low, high, color=style.colour, alpha=0.18, linewidth=0)
    _draw(axes, [[(x, each.mean) for x, each in zip(xs, found, strict=True)]], style)
