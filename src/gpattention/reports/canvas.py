"""Figures of one size and look: margins in pixels, a legend below the axes, words as they are.

One unit of a figure is one CSS pixel, so that letters on a page have the size that is written here.
Figures are made without `pyplot`, which would keep them for ever.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from io import BytesIO
from typing import TYPE_CHECKING, Any, ParamSpec

from gpattention.reports.palette import GRID, INK, NEUTRAL, QUIET, Style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

P = ParamSpec("P")

WIDTH, HEIGHT = 360, 246  # of a chart without its legend
LEFT, RIGHT, TOP, BOTTOM = 68, 12, 14, 42
LINE = 19  # of a legend
LETTER = 6.9  # width of a letter, about
BOLD = 8.0  # of a title
LONGEST, LONGEST_TITLE = 44, 60  # letters of a label and of a title; what is longer ends in dots

SETTINGS: dict[str, Any] = {
    "svg.fonttype": "none",  # letters, not their outlines
    "svg.hashsalt": "gpattention",  # the same figure gives the same bytes
    "text.parse_math": False,  # a dollar in a run's name is a dollar
    "font.family": "sans-serif",
    "font.size": 12.5,
    "axes.labelsize": 12.5,
    "xtick.labelsize": 12,
    "ytick.labelsize": 12,
    "axes.unicode_minus": True,
    "path.simplify": True,
    "path.simplify_threshold": 0.2,
}


@contextmanager
def drawing() -> Iterator[None]:
    """Matplotlib with the settings of this library, whatever the user's own are."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            "charts need matplotlib: pip install 'gpattention[train]'", name="matplotlib"
        ) from error
    with warnings.catch_warnings(), matplotlib.rc_context():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # the browser has its own
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(SETTINGS)  # type: ignore[arg-type]
        yield


def picture(figure: "Figure", form: str) -> bytes:
    """A figure as a PNG or SVG file on white; the same figure gives the same bytes."""
    stream = BytesIO()
    metadata = {"Date": None} if form == "svg" else {"Software": None}
    with drawing():
        figure.savefig(stream, format=form, dpi=150, metadata=metadata, facecolor="white")
    return stream.getvalue()


def drawn(function: "Callable[P, Figure]") -> "Callable[P, Figure]":
    """Let a function draw with the settings of this library."""

    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> "Figure":
        with drawing():
            return function(*args, **kwargs)

    return wrapped


def new_figure(
    title: str | None = None,
    legend: "Mapping[str, Style] | None" = None,
    *,
    height: float = HEIGHT,
    left: float = LEFT,
    bottom: float = BOTTOM,
) -> "tuple[Figure, Axes]":
    """A figure with one pair of axes; the legend makes it taller."""
    from matplotlib.figure import Figure

    top = TOP + (22 if title else 0)
    rows = legend_rows(legend or {})
    whole = height + top - TOP + rows * LINE + (4 if rows else 0)
    figure = Figure(figsize=(WIDTH / 72, whole / 72), dpi=72)
    figure.patch.set_alpha(0.0)
    below = bottom + whole - height - (top - TOP)
    axes = figure.add_axes(
        (left / WIDTH, below / whole, 1 - (left + RIGHT) / WIDTH, 1 - (below + top) / whole)
    )
    dress(axes)
    if title:
        _draw_title(figure, shorten(title, LONGEST_TITLE), left, 1 - 18 / whole)
    _draw_legend(figure, legend or {}, whole)
    return figure, axes


def _draw_title(figure: "Figure", title: str, left: float, y: float) -> None:
    """Above the axes; a long one begins at the margin, in smaller letters if it must."""
    wide = BOLD * len(title)
    start = left if left + wide <= WIDTH else max(RIGHT, WIDTH - wide)
    size = SETTINGS["font.size"] * min(1.0, (WIDTH - 2 * RIGHT) / wide) if wide else None
    figure.text(start / WIDTH, y, title, color=INK, weight="bold", fontsize=size)


def dress(axes: "Axes") -> None:
    """Quiet axes: a thin grid behind the data, no frame."""
    axes.patch.set_alpha(0.0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(NEUTRAL)
    axes.grid(True, color=GRID, linewidth=1)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, pad=5, labelcolor=QUIET)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)


def name_axes(axes: "Axes", x: str, y: str) -> None:
    """Names at fixed distances, so that charts beside each other line up."""
    axes.set_xlabel(x, labelpad=5)
    axes.set_ylabel(y)
    height = axes.get_figure(root=True).get_size_inches()[1] * 72  # type: ignore[union-attr]
    box = axes.get_position()
    axes.yaxis.set_label_coords(9 / WIDTH, box.y0 + box.height / 2, transform=axes.figure.transFigure)
    axes.xaxis.set_label_coords(
        box.x0 + box.width / 2, box.y0 - 22 / height, transform=axes.figure.transFigure
    )
    axes.xaxis.label.set_verticalalignment("top")
    axes.yaxis.label.set_verticalalignment("center")


def few_ticks(axes: "Axes", x: int = 6, y: int = 5) -> None:
    """Round numbers, not many."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(x, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_locator(MaxNLocator(y, steps=[1, 2, 2.5, 5, 10]))


def whole_ticks(axes: "Axes", most: int = 8) -> None:
    """Whole numbers along x."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(most, integer=True))


def legend_rows(labels: Mapping[str, Style]) -> int:
    """Lines that a legend takes."""
    return -(-len(labels) // _legend_columns(labels)) if labels else 0


def shorten(text: str, most: int = LONGEST) -> str:
    """A label that fits, without characters that no XML may hold."""
    text = "".join(letter if letter.isprintable() else "\ufffd" for letter in text)
    return text if len(text) <= most else text[: most - 1] + "…"


def _legend_columns(labels: "Mapping[str, Style] | Sequence[str]") -> int:
    longest = max(len(shorten(label)) for label in labels)
    return max(1, min(4, len(labels), int((WIDTH - 16) // (longest * LETTER + 38))))


def _draw_legend(figure: "Figure", labels: Mapping[str, Style], whole: float) -> None:
    """By hand: a legend of matplotlib's would leave out labels that begin with an underscore."""
    from matplotlib.lines import Line2D

    if not labels:
        return
    columns = _legend_columns(labels)
    wide = (WIDTH - 16) / columns
    rows = legend_rows(labels)
    for i, (label, style) in enumerate(labels.items()):
        row, column = divmod(i, columns)
        x, y = 12 + column * wide, (rows - row - 0.5) * LINE + 2
        key = Line2D(
            [x / WIDTH, (x + 22) / WIDTH], [y / whole] * 2, color=style.colour, linestyle=style.dash,
            linewidth=2, marker=style.marker, markersize=6, markevery=[], transform=figure.transFigure,
        )  # fmt: skip
        figure.add_artist(key)
        figure.add_artist(
            Line2D(
                [(x + 11) / WIDTH], [y / whole], color=style.colour, marker=style.marker, markersize=6,
                markeredgewidth=0, transform=figure.transFigure,
            )
        )  # fmt: skip
        figure.text((x + 29) / WIDTH, y / whole, shorten(label), color=INK, va="center")
