"""Figures of one size and look: margins in pixels, a legend below the axes, words as they are.

One unit of a figure is one CSS pixel, so that letters on a page have the size that is written here.
Figures are made without `pyplot`, which would keep them for ever.  On a page they are SVG in its colours.
"""

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from html import escape
from io import BytesIO, StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

from gpattention.reports.style import GRID, INK, NEUTRAL, QUIET, VARIABLES, Style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

P = ParamSpec("P")

WIDTH, HEIGHT = 360, 246  # of a chart without its legend
LEFT, RIGHT, TOP, BOTTOM = 68, 12, 14, 42
LINE = 19  # of a legend
LETTERS = 12.5  # size of letters, as in the style
LETTER = 6.9  # width of a letter, about
BOLD = 8.0  # of a title
STYLE = Path(__file__).parent / "templates" / "figures.mplstyle"
LONGEST, LONGEST_TITLE = 44, 60  # letters of a label and of a title; what is longer ends in dots

# of a tag of SVG: a group's id, and what every element would repeat and the page's style sheet says once
REPEATED = re.compile(
    r'(?<=<g) id="[^"]*"|(stroke-linecap|stroke-linejoin|stroke-miterlimit|font-family): [^;"]+(; )?'
    r'|transform="rotate\(-?0 [^"]*"|xlink:(?=href)'
)
PLACES = re.compile(r'(?<= )(d|x|y|transform|width|height)="[^"]*"')
NUMBER = re.compile(r"-?\d+\.\d{2,}")


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
        matplotlib.rcParams.update(matplotlib.rc_params_from_file(STYLE, use_default_template=False))
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
    rows, _ = _legend_grid(legend or {})
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
    size = LETTERS * min(1.0, (WIDTH - 2 * RIGHT) / wide) if wide else None
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


def few_ticks(axes: "Axes", x: int = 6, y: int = 5, *, whole_x: bool = False) -> None:
    """A few round numbers along both axes; whole ones along x where asked."""
    from matplotlib.ticker import MaxNLocator

    steps = [1, 2, 2.5, 5, 10]
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True) if whole_x else MaxNLocator(x, steps=steps))
    axes.yaxis.set_major_locator(MaxNLocator(y, steps=steps))


def shorten(text: str, most: int = LONGEST) -> str:
    """A label that fits, without characters that no XML may hold."""
    text = "".join(letter if letter.isprintable() else "\ufffd" for letter in text)
    return text if len(text) <= most else text[: most - 1] + "…"


def _legend_grid(labels: Mapping[str, Style]) -> tuple[int, int]:
    """Rows and columns of a legend."""
    if not labels:
        return 0, 1
    longest = max(len(shorten(label)) for label in labels)
    columns = max(1, min(4, len(labels), int((WIDTH - 16) // (longest * LETTER + 38))))
    return -(-len(labels) // columns), columns


def _draw_legend(figure: "Figure", labels: Mapping[str, Style], whole: float) -> None:
    """Draw by hand: a legend of matplotlib's would leave out labels that begin with an underscore."""
    from matplotlib.lines import Line2D

    rows, columns = _legend_grid(labels)
    for i, (label, style) in enumerate(labels.items()):
        row, column = divmod(i, columns)
        x, y = 12 + column * (WIDTH - 16) / columns, (rows - row - 0.5) * LINE + 2
        look: dict[str, Any] = {
            "color": style.colour, "marker": style.marker, "markersize": 6, "transform": figure.transFigure,
        }  # fmt: skip
        ends = [x / WIDTH, (x + 22) / WIDTH]
        figure.add_artist(
            Line2D(ends, [y / whole] * 2, linestyle=style.dash, linewidth=2, markevery=[], **look)
        )
        figure.add_artist(Line2D([(x + 11) / WIDTH], [y / whole], markeredgewidth=0, **look))
        figure.text((x + 29) / WIDTH, y / whole, shorten(label), color=INK, va="center")


def figure_svg(figure: "Figure", name: str, alternative: str) -> str:
    """The figure as an `<svg>` element whose ids begin with `name`; `alternative` is read aloud for it."""
    file = StringIO()
    with drawing():
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    head, body = file.getvalue().split("</metadata>", 1)
    # on a page the style sheet says it once for all figures
    body = re.sub(r"<style.*?</style>|\n\s+(?=<)", "", body)
    # matplotlib escapes < and > in texts and attributes: what stands between them is a tag of its own
    body = re.sub(r"<[^>]+>", lambda tag: _pages_own(tag[0], name), body)
    box = re.search(r'viewBox="[^"]*"', head)
    return f'<svg {box and box[0]} role="img" aria-label="{escape(alternative)}" focusable="false">{body}'


def _pages_own(tag: str, name: str) -> str:
    """A tag with the page's colours and ids of its own; a tenth of a pixel is enough."""
    tag = REPEATED.sub("", tag)
    tag = PLACES.sub(lambda place: NUMBER.sub(lambda at: f"{float(at[0]):.1f}", place[0]), tag)
    for colour, variable in VARIABLES.items():
        tag = tag.replace(colour, f"var({variable})")
    return re.sub(r'( id="|href="#|url\(#)', rf"\1{name}-", tag).replace("\n", "")
