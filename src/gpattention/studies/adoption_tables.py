"""Pages of adoption studies: means over seeds, differences seed by seed, and a picture of these.

A cell is a row of the table of results whose recipe is the model and whose predictor is the method.
"""

from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from gpattention.checks import check_name
from gpattention.files import StrPath
from gpattention.metrics import metric_of
from gpattention.reports.drawing import drawn, dress, picture
from gpattention.reports.style import INK, NEUTRAL, styles_for
from gpattention.runs import Column, Difference, Results, difference
from gpattention.runs.tables import Bold, Markup, csv_text, markdown, markdown_table
from gpattention.studies import write_file
from gpattention.studies.adoption import TEMPERATURE, TEMPERED, TITLES, Cell

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUITE = "adoption"
PICTURES = ("png", "svg")
# metrics that have a panel in the picture, and the panel's name
PANELS = {"mcc": "MCC", "nll": "NLL", "ece": "ECE", "aurc": "AURC", "auroc": "AUROC of foreign images"}
SPLITS = "Figures are on test items; all that is fitted or chosen uses validation items alone.\n"
# one number, fitted in a second; and the same of what was tuned for as long as the converted models
BASELINES = (TEMPERATURE, f"tuned-on{TEMPERED}")


def columns_of(place: str, short: str, legend: str, metrics: Sequence[str]) -> list[Column]:
    """Columns of one set; `short` begins their heads, `legend` names the set in pictures."""
    heads = {name: f"{short} {metric_of(name).label}" for name in metrics}
    return [Column(SUITE, place, name, head=head, group=legend) for name, head in heads.items()]


def results_of(cells: Iterable[Cell]) -> Results:
    """Cells as the table of results; `auroc_SCORE` of a cell is the metric auroc by that score."""
    rows = []
    for cell, place, name, value in _numbers(cells):
        metric, _, score = name.partition("_") if name.startswith("auroc_") else (name, "", None)
        rows.append({
            "recipe": cell.group, "seed": cell.seed, "predictor": cell.method, "suite": SUITE, "set": place,
            "metric": metric, "score": score, "value": value,
        })  # fmt: skip
    return Results.from_rows(rows)


def _numbers(cells: Iterable[Cell]) -> Iterator[tuple[Cell, str, str, float]]:
    return ((c, place, name, x) for c in cells for place, of in c.values.items() for name, x in of.items())


def seeds_of(cells: Iterable[Cell]) -> dict[str, dict[str, int]]:
    """Methods of each group and how many seeds they have, in the order in which they come."""
    found: dict[str, dict[str, int]] = {}
    for cell in cells:
        methods = found.setdefault(cell.group, {})
        methods[cell.method] = methods.get(cell.method, 0) + 1
    return found


def to_markdown(
    cells: Sequence[Cell], columns: Sequence[Column], baselines: Sequence[str] = (TEMPERATURE,)
) -> str:
    """Tables of a comparison.

    Args:
        cells: cells of any groups.
        columns: those without any figure are left out.
        baselines: methods that differences are taken from, seed by seed.

    Returns:
        For each group a table of means and one of differences from every baseline that it has.
    """
    results, parts = results_of(cells), list[str]()
    for group, methods in seeds_of(cells).items():
        shown = [c for c in columns if any(c.find(results, group, method) for method in methods)]
        heads, rows = [column.head for column in shown], []
        for method, seeds in methods.items():
            figures = (column.find(results, group, method) for column in shown)
            rows.append([_title(method), *("-" if x is None else x.text() for x in figures), str(seeds)])
        parts += [f"## {markdown(group)}\n", SPLITS, markdown_table(["", *heads, "seeds"], rows)]
        for baseline in baselines if len(methods) > 1 else ():
            if baseline not in methods:
                continue
            rows = []
            for method in (method for method in methods if method != baseline):
                gaps = (gap_of(results, group, method, baseline, column) for column in shown)
                rows.append([_title(method), *map(_gap_text, gaps)])
            parts += [
                f"Differences are taken seed by seed, method minus {_title(baseline)}, ± their standard "
                "error; bold ones are clear (Student's t, 95 %).\n",
                markdown_table([Markup(f"minus {_title(baseline)}"), *heads], rows),
            ]
    return "\n".join(parts)


def gap_of(results: Results, group: str, method: str, baseline: str, column: Column) -> Difference | None:
    """A method less the baseline; None where one of them has no such number."""
    one, other = (column.find(results, group, each) for each in (method, baseline))
    return None if one is None or other is None else difference(one, other)


def _title(method: str) -> Markup:
    """Titles are ours, and may be Markdown; names of methods may be anyone's."""
    return Markup(TITLES[method]) if method in TITLES else markdown(method)


def _gap_text(gap: Difference | None) -> str:
    if gap is None:
        return "-"
    # what rounds to nothing is not to stand out
    return Bold(gap.text()) if gap.clear and abs(gap.mean) >= 0.0005 else gap.text()


def summary_csv(cells: Sequence[Cell], columns: Sequence[Column]) -> str:
    """Numbers of the tables, nothing rounded: one line each, with its difference from the temperature."""
    results, lines = results_of(cells), list[list[object]]()
    for group, methods in seeds_of(cells).items():
        for method, column in ((method, column) for method in methods for column in columns):
            figure = column.find(results, group, method)
            gap = gap_of(results, group, method, TEMPERATURE, column)
            if figure is not None:
                name = column.metric if column.score is None else f"{column.metric}_{column.score}"
                less = [gap and gap.mean, gap and gap.error]
                own = [figure.count, figure.mean, figure.error]
                lines.append([group, method, column.set, name, *own, *less])
    heads = ["group", "method", "set", "metric", "seeds", "mean", "standard_error", "difference"]
    return csv_text([*heads, "difference_standard_error"], lines)


def cells_csv(cells: Sequence[Cell]) -> str:
    """Every number of every cell, but for single corruptions, of which there are hundreds."""
    lines = ([c.group, c.seed, c.method, place, name, x] for c, place, name, x in _numbers(cells)
             if place.count("/") < 2)  # fmt: skip
    return csv_text(["group", "seed", "method", "set", "metric", "value"], lines)


def write_comparison(
    folder: StrPath,
    name: str,
    cells: Sequence[Cell],
    columns: Sequence[Column],
    *,
    about: Sequence[str] = (),
    baselines: Sequence[str] = (TEMPERATURE,),
) -> list[Path]:
    """Write NAME.md, NAME.csv, NAME-cells.csv and, where there is matplotlib, pictures of the differences.

    Args:
        folder: where to.
        name: how files begin.
        cells: cells of any groups.
        columns: columns of the tables; those with a `group` and a metric of `PANELS` are drawn.
        about: paragraphs above the tables.
        baselines: methods that differences are taken from.

    Returns:
        The files.

    Raises:
        ValueError: a group cannot be part of a file's name.
    """
    place, several, results = Path(folder), seeds_of(cells), results_of(cells)
    page = "\n\n".join([*about, to_markdown(cells, columns, baselines)])
    contents = {".md": page, ".csv": summary_csv(cells, columns), "-cells.csv": cells_csv(cells)}
    written = [write_file(place / f"{name}{ending}", text.encode()) for ending, text in contents.items()]
    for group, methods in several.items() if find_spec("matplotlib") is not None else ():
        figure = differences_figure(results, group, list(methods), columns)
        called = name if len(several) == 1 else check_name("the name of a picture", f"{name}-{group}")
        written += [write_file(place / f"{called}.{form}", picture(figure, form)) for form in PICTURES]
    return written


@drawn
def differences_figure(
    results: Results, group: str, methods: Sequence[str], columns: Sequence[Column]
) -> "Figure":
    """Differences from the temperature: a panel for each metric, a colour for each kind of set.

    Left of 0 is less than the baseline; whether that is better or not is for the panel's name to say.  A
    line is the standard error.
    """
    from matplotlib.figure import Figure

    names = [method for method in methods if method != TEMPERATURE]
    words = [TITLES.get(name, name).replace("`", "") for name in names]
    panels = {title: [c for c in columns if c.metric == m and c.group] for m, title in PANELS.items()}
    panels = {title: of for title, of in panels.items() if of}
    styles = styles_for(list(dict.fromkeys(column.group for of in panels.values() for column in of)))
    size = 2.6 * len(panels) + 0.1 * max(map(len, words), default=0), 1.4 + 0.42 * len(names)
    figure, keys = Figure(figsize=size, dpi=72, layout="constrained"), {}
    drawn_on = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, (title, of) in zip(drawn_on, panels.items(), strict=True):
        dress(axes)
        axes.axvline(0, color=NEUTRAL, linewidth=1.5)
        for line, column in enumerate(of):
            style, shift = styles[column.group], 0.24 * (line - (len(of) - 1) / 2)
            look = {"color": style.colour, "marker": style.marker, "markersize": 6, "linestyle": "none"}
            for row, name in enumerate(names):
                if (gap := gap_of(results, group, name, TEMPERATURE, column)) is not None:
                    mark = axes.errorbar(gap.mean, row + shift, xerr=gap.error, elinewidth=2, **look)
                    keys[column.group] = mark
        axes.set_yticks(range(len(names)), labels=words)
        axes.tick_params(axis="y", labelcolor=INK)
        axes.locator_params(axis="x", nbins=4)
        axes.set_title(title, color=INK, fontsize=12.5)
    drawn_on[0].set_ylim(len(names) - 0.5, -0.5)
    look = {"title": f"difference from {TITLES[TEMPERATURE]}", "ncols": max(1, len(keys)), "frameon": False}
    figure.legend(list(keys.values()), list(keys), loc="outside lower center", **look)
    return figure
