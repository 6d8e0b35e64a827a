"""Tables on a page, each with its caption and inside a box that scrolls where the screen is narrow."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpattention.reports.figures.lines import Points
from gpattention.reports.groups import Model
from gpattention.reports.markup import Safe, join, tag
from gpattention.runs import OverSeeds

Cell = str | float | None
DASH = "\u2013"  # where nothing was measured


@dataclass(frozen=True)
class Table:
    """Heads and rows; the first column names the row."""

    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]


def table_html(table: Table, caption: str, *, key: bool = False) -> Safe:
    """A table; `key` makes it one of the page's own rather than the data of a chart."""
    head = tag("tr", *(tag("th", text, scope="col") for text in table.heads))
    rows = (_row(row) for row in table.rows)
    inner = tag(
        "table", tag("caption", caption, class_=None if key else "hidden"), tag("thead", head),
        tag("tbody", *rows), class_="key" if key else None,
    )  # fmt: skip
    return scrolling(inner, caption)


def scrolling(content: Safe, name: str) -> Safe:
    """A box that scrolls sideways by itself, by keyboard too."""
    return tag("div", content, class_="scroll", tabindex=0, role="region", aria_label=name)


def cell_text(cell: Cell) -> str:
    """Four digits are enough; a dash where nothing was measured."""
    if cell is None:
        return DASH
    return cell if isinstance(cell, str) else f"{cell:#.4g}"


def swatch(model: Model) -> Safe:
    """The model's name after its colour."""
    colour = tag("span", class_="swatch", style=f"background:var({model.style.variable})")
    return tag("span", colour, model.label, class_="model")


def lines_table(x: str, series: Mapping[str, Sequence[Points]]) -> Table:
    """The points of lines: one row per x, one column per model, seeds as mean and standard error."""
    by_model = {label: _by_x(lines) for label, lines in series.items()}
    every = sorted({place for values in by_model.values() for place in values})
    rows = [
        [f"{place:g}", *(seeds_text(OverSeeds.of(by_model[label].get(place, ()))) for label in series)]
        for place in every
    ]
    return Table([x, *series], rows)


def read_at(points: Points, places: Iterable[float]) -> Points:
    """A line read at given x by linear interpolation; a rise counts with its upper end."""
    line = sorted(points)
    return [(place, _interpolated(line, place)) for place in places if line[0][0] <= place <= line[-1][0]]


def _interpolated(line: Points, place: float) -> float:
    before = [point for point in line if point[0] <= place][-1]
    after = next((point for point in line if point[0] > place), before)
    if after[0] == before[0] or before[0] == place:
        return before[1]
    share = (place - before[0]) / (after[0] - before[0])
    return before[1] + share * (after[1] - before[1])


def _by_x(lines: Sequence[Points]) -> dict[float, list[float]]:
    found: dict[float, list[float]] = {}
    for line in lines:
        for x, y in line:
            found.setdefault(x, []).append(y)
    return found


def seeds_text(found: OverSeeds | None) -> str | None:
    """Mean and standard error with four digits."""
    return None if found is None else found.text(None)


def _row(row: Sequence[Cell]) -> Safe:
    first, *others = (text if isinstance(text, Safe) else cell_text(text) for text in row)
    return tag("tr", tag("th", first, scope="row"), join(*(tag("td", text) for text in others)))
