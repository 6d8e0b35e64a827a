"""HTML of a report: jinja2's macros for charts, tables and tabs, and what fills them.

Every text is escaped by jinja2, after control characters were made visible; only `Markup` passes as it is.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from gpattention.files import visible
from gpattention.reports.comparison import Table, figure_text, heading, listed, number
from gpattention.reports.drawing import figure_svg
from gpattention.reports.figures import Curves, Points
from gpattention.runs import OverSeeds

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup as Markup
    from matplotlib.figure import Figure

DASH = "\u2013"  # where nothing was measured


@cache
def environment() -> "Environment":
    """The templates of this package, escaping by default."""
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError as error:
        raise ImportError("reports need jinja2: pip install 'gpattention[train]'", name="jinja2") from error

    def finalize(value: Any) -> Any:
        if value is None:
            return ""
        return visible(value, keep="\n\t") if type(value) is str else value

    made = Environment(
        loader=PackageLoader("gpattention.reports"), autoescape=True, finalize=finalize,
        trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined,
    )  # fmt: skip
    made.filters |= {"cell": cell_text, "short": short}
    # numbers that JSON does not know would end the reader's parser
    made.policies["json.dumps_kwargs"] = {"sort_keys": True, "allow_nan": False}
    return made


def render(macro: str, *arguments: Any, **options: Any) -> "Markup":
    """One macro of parts.html, or of gallery.html, with these arguments."""
    files = (environment().get_template(f"{name}.html").module for name in ("parts", "gallery"))
    found = next(getattr(file, macro) for file in files if hasattr(file, macro))
    return found(*arguments, **options)


def join(*parts: "Markup | None") -> "Markup":
    """Parts one after the other, None left out."""
    from markupsafe import Markup

    return Markup("").join(part for part in parts if part is not None)


def chart(
    name: str, figure: "Figure", table: Table, title: "str | Markup", words: str, caption: str | None = None
) -> "Markup":
    """A figure with words for those who cannot see it and its numbers; `name` is unique on the page."""
    from markupsafe import Markup

    svg = Markup(figure_svg(figure, name, words))  # matplotlib's XML: nothing of a user's is markup in it
    return render("chart", name, svg, table, title, words.split(":")[0], caption)


def line_chart(
    name: str, figure: "Figure", x: str, series: Mapping[str, Sequence[Points]], words: str, title: str,
    caption: str | None = None, table: Table | None = None,
) -> "Markup":  # fmt: skip
    """A chart of lines: their points are its table, and `words` go on with where the lines end."""
    alternative = f"Lines of {words} {last_values(series)}"
    return chart(name, figure, table or lines_table(x, series), heading(title), alternative, caption)


def charts(*drawn: "Markup | None", pairs: bool = False) -> "Markup":
    """Charts beside each other as the screen allows; `pairs` belong together, two by two."""
    return render("charts", join(*drawn), pairs)


def tabs(name: str, label: str, panels: "Mapping[str, Markup]") -> "Markup":
    """One tab per panel; a single panel stands by itself."""
    return render("tabs", name, label, panels) if len(panels) > 1 else join(*panels.values())


def folded(caption: str, table: Table, *, open: bool = False) -> "Markup | None":
    """A table behind its caption; None of a table without rows."""
    return render("folded", caption, table, open) if table.rows else None


def key_table(caption: str, table: Table) -> "Markup | None":
    """A table of the page's own; None of a table without rows."""
    return render("table", table, caption, key=True) if table.rows else None


def cell_text(cell: Any) -> Any:
    """Four digits are enough; a dash where nothing was measured."""
    if cell is None:
        return DASH
    return cell if isinstance(cell, str) else f"{cell:#.4g}"


def short(value: Any) -> str:
    """Three digits after the point; a dash where nothing was measured."""
    known = number(value)
    return DASH if known is None else f"{known:.3f}"


def lines_table(x: str, series: Mapping[str, Sequence[Points]]) -> Table:
    """The points of lines: one row per x, one column per model, several seeds with their interval."""
    rows: dict[float, dict[str, list[float]]] = {}
    for label, lines in series.items():
        for place, value in (point for line in lines for point in line):
            rows.setdefault(place, {}).setdefault(label, []).append(value)
    cells = {
        place: [figure_text(OverSeeds.of(of.get(label, ()))) for label in series]
        for place, of in rows.items()
    }
    return Table([x, *series], [[f"{place:g}", *cells[place]] for place in sorted(cells)])


def read_at(points: Points, places: Iterable[float]) -> Points:
    """A line read at given x by linear interpolation; a rise counts with its upper end."""
    xs, ys = zip(*sorted(points), strict=True)
    return [(place, float(np.interp(place, xs, ys))) for place in places if xs[0] <= place <= xs[-1]]


def read_curves(curves: Curves, x: str, y: str, places: Iterable[float]) -> dict[str, list[Points]]:
    """The lines of two rows of numbers each, read at given x."""
    return {
        label: [read_at(list(zip(c[x], c[y], strict=True)), places) for c in seeds]
        for label, seeds in curves.items()
    }


def last_values(series: Mapping[str, Sequence[Points]]) -> str:
    """Where each model's line ends, for the text alternative."""
    ends = {label: OverSeeds.of(max(line)[1] for line in lines if line) for label, lines in series.items()}
    return listed([f"{label} {end.mean:.3g}" for label, end in ends.items() if end]) or "no values"
