"""Figures of one size and look: margins in pixels, a legend below the axes, words as they are.

One unit of a figure is one CSS pixel, so that letters on a page have the size that is written here.
Figures are made without `pyplot`, which would keep them for ever.  On a page they are SVG in its colours.
"""

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from io import BytesIO, StringIO
from typing import TYPE_CHECKING, Any, ParamSpec
from xml.etree import ElementTree as Xml

from gpattention.reports.style import GRID, INK, NEUTRAL, QUIET, VARIABLES, Style

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

# of SVG: what every element would repeat, and the page's style sheet says once
LINK = "{http://www.w3.org/1999/xlink}href"
REPEATED = re.compile(r"(stroke-linecap|stroke-linejoin|stroke-miterlimit|font-family): [^;]+(; |$)")
FONT = re.compile(r"font: (?:(bold|\d+) )?([\d.]+)px [^;]+")
LEVEL = re.compile(r"rotate\(-?0 [^)]*\)")
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
    root = _plain(Xml.fromstring(file.getvalue()))
    _drop(root, {"metadata", "style"})
    _rename_ids(root, name)
    for element in root.iter():
        _recolour(element)
        _round(element)
    _flatten(root)
    box = root.attrib["viewBox"]
    root.attrib = {"viewBox": box, "role": "img", "aria-label": alternative, "focusable": "false"}
    return Xml.tostring(root, encoding="unicode")


def _plain(element: Xml.Element) -> Xml.Element:
    """Without namespaces, which HTML knows by itself."""
    attributes = {("href" if key == LINK else key): value for key, value in element.attrib.items()}
    copy = Xml.Element(element.tag.rpartition("}")[2], attributes)
    copy.text = element.text if element.text and element.text.strip() else None
    copy.extend(_plain(child) for child in element)
    return copy


def _drop(element: Xml.Element, tags: set[str]) -> None:
    for child in list(element):
        if child.tag in tags:
            element.remove(child)
        else:
            _drop(child, tags)
            if child.tag == "defs" and len(child) == 0:
                element.remove(child)


def _rename_ids(root: Xml.Element, name: str) -> None:
    """Only what is pointed at keeps an id: a marker, a clipping box."""
    pointed = set()
    for element in root.iter():
        pointed |= set(re.findall(r"#([\w-]+)", element.get("href", "") + element.get("clip-path", "")))
    short = {old: f"{name}-{i}" for i, old in enumerate(sorted(pointed))}
    for element in root.iter():
        if element.get("id") in short:
            element.set("id", short[element.attrib["id"]])
        else:
            element.attrib.pop("id", None)
        for key in ("href", "clip-path"):
            if key in element.attrib:
                element.set(key, re.sub(r"#([\w-]+)", lambda at: "#" + short[at[1]], element.attrib[key]))


def _recolour(element: Xml.Element) -> None:
    style = element.get("style")
    if style is None:
        return
    style = REPEATED.sub("", style)
    style = FONT.sub(lambda at: f"font-size: {at[2]}px" + (f"; font-weight: {at[1]}" if at[1] else ""), style)
    for colour, variable in VARIABLES.items():
        style = style.replace(colour, f"var({variable})")
    style = style.strip().rstrip(";").replace(": ", ":").replace("; ", ";")
    if style:
        element.set("style", style)
    else:
        del element.attrib["style"]


def _round(element: Xml.Element) -> None:
    """A tenth of a pixel is enough."""
    for key in ("d", "x", "y", "transform", "width", "height", "points"):
        if key in element.attrib:
            element.set(
                key, NUMBER.sub(lambda at: f"{float(at[0]):.1f}".removesuffix(".0"), element.attrib[key])
            )
    if LEVEL.fullmatch(element.get("transform", "")):
        del element.attrib["transform"]
    if "d" in element.attrib:
        element.set("d", re.sub(r"\s+", " ", element.attrib["d"]).strip())


def _flatten(element: Xml.Element) -> None:
    """Groups without any attribute say nothing."""
    children: list[Xml.Element] = []
    for child in element:
        _flatten(child)
        children.extend(child if child.tag == "g" and not child.attrib else [child])
    element[:] = children
