"""A chart on a page: picture, words for those who cannot see it, and its numbers as a table."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from gpattention.reports.figures.lines import Points
from gpattention.reports.markup import Safe, join, tag
from gpattention.reports.svg import figure_svg
from gpattention.reports.tables import Table, table_html
from gpattention.reports.words import listed
from gpattention.runs import OverSeeds

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def chart(
    name: str,
    figure: "Figure",
    table: Table,
    *,
    title: str | Safe,
    alternative: str,
    caption: str | None = None,
) -> Safe:
    """A figure with its data; `name` is unique on the page."""
    plain = alternative.split(":")[0]
    return tag(
        "figure",
        tag("figcaption", tag("strong", title), tag("span", caption) if caption else None),
        figure_svg(figure, name, alternative),
        tag(
            "details",
            tag("summary", "Data", tag("span", f": {plain}", class_="hidden")),
            table_html(table, plain),
        ),
        class_="chart",
        id=name,
    )


def charts(*drawn: Safe | None, pairs: bool = False) -> Safe:
    """Charts beside each other as the screen allows; `pairs` belong together, two by two."""
    return tag("div", join(*drawn), class_="charts pairs" if pairs else "charts")


def last_values(series: Mapping[str, Sequence[Points]]) -> str:
    """Where each model's line ends, for the text alternative."""
    ends = []
    for label, lines in series.items():
        found = OverSeeds.of(max(line)[1] for line in lines if line)
        if found is not None:
            ends.append(f"{label} {found.mean:.3g}")
    return listed(ends) if ends else "no values"
