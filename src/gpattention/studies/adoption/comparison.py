"""The comparison of methods: what its tables show, as Markdown, CSV and a picture.

A cell is a row of the table of results: its group (the model) is the recipe, its method the predictor.
"""

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpattention.data.places import StrPath, check_name
from gpattention.models.storage import make_folder, write_atomically
from gpattention.reports.canvas import drawn, dress, picture
from gpattention.reports.palette import INK, NEUTRAL, style_of
from gpattention.runs import Column, Difference, OverSeeds, Results, difference
from gpattention.runs.tables import Bold, Markup, csv_text, markdown, markdown_table
from gpattention.studies.adoption.cells import Cell
from gpattention.studies.adoption.methods import (
    BASELINE,
    CONVERSIONS,
    STARTS,
    TITLES,
    TUNED_ON,
    TUNED_ON_TEMPERATURE,
    converted,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUITE = "adoption"
INSIDE, OUTSIDE = "test", "ood/out-of-domain"
EMPTY = "-"
PICTURES = ("png", "svg")
PANEL, ROW, LETTER = 190, 30, 7.0  # pixels
DIFFERENCES = (
    "Differences are taken seed by seed, method minus {baseline}, ± their standard error; bold ones are "
    "clear (Student's t, 95 %)."
)


def _labelled(place: str, short: str, metrics: Mapping[str, str]) -> list[Column]:
    return [Column(SUITE, place, metric, head=f"{short} {head}".strip()) for metric, head in metrics.items()]


_TEXT = {"mcc": "MCC", "nll": "NLL", "ece": "ECE", "mce": "MCE", "aurc": "AURC"}
COLA_COLUMNS = (*_labelled(INSIDE, "in", _TEXT), *_labelled(OUTSIDE, "out", _TEXT))
COLA_PANELS = {
    head: {"in domain": Column(SUITE, INSIDE, metric), "out of domain": Column(SUITE, OUTSIDE, metric)}
    for metric, head in {"mcc": "MCC", "nll": "NLL", "ece": "ECE", "aurc": "AURC"}.items()
}

_IMAGE = {"accuracy": "accuracy", "nll": "NLL", "ece": "ECE", "mce": "MCE", "aurc": "AURC"}
_OOD = {"entropy": "entropy", "mutual_information": "mutual inf.", "max_softmax": "max-prob"}
IMAGE_COLUMNS = (
    *_labelled("test", "", _IMAGE),
    *_labelled("corrupted/mean", "corr.", _IMAGE),
    *(Column(SUITE, "ood/*", "auroc", score, head=f"AUROC {head}") for score, head in _OOD.items()),
)
IMAGE_PANELS = {
    **{
        head: {"clean": Column(SUITE, "test", m), "corrupted": Column(SUITE, "corrupted/mean", m)}
        for m, head in {"nll": "NLL", "ece": "ECE", "aurc": "AURC"}.items()
    },
    "AUROC of foreign images": {"entropy": Column(SUITE, "ood/*", "auroc", "entropy")},
}

_STARTED = {"host": "tuned on", "pretrained": "fine-tuned"}
_ENDINGS = ("", ", temperature", ", no draws, temperature")
_CONVERTED = {
    name: f"converted to {kind}, {_STARTED[start]}{ending}"
    for start in STARTS
    for kind in CONVERSIONS
    for name, ending in zip(converted(kind, start).methods, _ENDINGS, strict=True)
}
ALL_TITLES = {
    **TITLES, TUNED_ON: "tuned on", TUNED_ON_TEMPERATURE: "tuned on, temperature", **_CONVERTED,
}  # fmt: skip
BASELINES = (BASELINE, TUNED_ON_TEMPERATURE)  # the second is to converted rows what the first is to all


def results_of(cells: Sequence[Cell]) -> Results:
    """Cells as the table of results."""
    return Results.from_rows(row for cell in cells for row in _rows(cell))


def _rows(cell: Cell) -> Iterator[dict[str, Any]]:
    for place, values in cell.values.items():
        for name, value in values.items():
            metric, _, score = name.partition("_") if name.startswith("auroc_") else (name, "", "")
            told = {"metric": metric, "score": score or None, "value": value, "set": place, "suite": SUITE}
            yield {"recipe": cell.group, "seed": cell.seed, "predictor": cell.method, **told}


def to_markdown(
    cells: Sequence[Cell],
    columns: Sequence[Column],
    titles: Mapping[str, str],
    baselines: Sequence[str] = (BASELINE,),
) -> str:
    """For each group a table of means and one of differences from every baseline that it has."""
    results = results_of(cells)
    parts = []
    for group, methods in grouped(cells).items():
        shown = [c for c in columns if any(c.find(results, group, method) for method in methods)]
        parts += [f"## {markdown(group)}\n", means_table(results, group, methods, shown, titles)]
        for baseline in baselines:
            if baseline in methods and len(methods) > 1:
                told = DIFFERENCES.format(baseline=_title(titles, baseline))
                parts += [
                    f"{told}\n",
                    differences_table(results, group, list(methods), shown, titles, baseline),
                ]
    return "\n".join(parts)


def grouped(cells: Sequence[Cell]) -> dict[str, dict[str, int]]:
    """Methods of each group and how many seeds they have, in the order in which they come."""
    seeds: dict[str, dict[str, set[int]]] = {}
    for cell in cells:
        seeds.setdefault(cell.group, {}).setdefault(cell.method, set()).add(cell.seed)
    return {group: {method: len(of) for method, of in methods.items()} for group, methods in seeds.items()}


def means_table(
    results: Results,
    group: str,
    methods: Mapping[str, int],
    columns: Sequence[Column],
    titles: Mapping[str, str],
) -> str:
    """Mean ± standard error; the best mean of a column is bold."""
    figures = {method: [c.find(results, group, method) for c in columns] for method in methods}
    best = []
    for column, of in zip(columns, zip(*figures.values(), strict=True), strict=True):
        means = [figure.mean for figure in of if figure is not None]
        best.append(column.shown.best(means) if len(set(means)) > 1 else None)
    rows = []
    for method, seeds in methods.items():
        cells = [
            _shown(x, bold=x is not None and x.mean == most)
            for x, most in zip(figures[method], best, strict=True)
        ]
        rows.append([_title(titles, method), *cells, str(seeds)])
    return markdown_table(["", *(c.head for c in columns), "seeds"], rows)


def differences_table(
    results: Results,
    group: str,
    methods: Sequence[str],
    columns: Sequence[Column],
    titles: Mapping[str, str],
    baseline: str = BASELINE,
) -> str:
    """Every method against the baseline."""
    rows = []
    for method in methods:
        if method != baseline:
            gaps = [gap_of(results, group, method, baseline, column) for column in columns]
            # what rounds to nothing is not to stand out
            cells = [
                _shown(gap, bold=gap is not None and gap.clear and abs(gap.mean) >= 0.0005) for gap in gaps
            ]
            rows.append([_title(titles, method), *cells])
    return markdown_table([Markup(f"minus {_title(titles, baseline)}"), *(c.head for c in columns)], rows)


def gap_of(results: Results, group: str, method: str, baseline: str, column: Column) -> Difference | None:
    """A method less the baseline; None where one of them has no such number."""
    one, other = (column.find(results, group, each) for each in (method, baseline))
    return None if one is None or other is None else difference(one, other)


def summary_csv(cells: Sequence[Cell], columns: Sequence[Column]) -> str:
    """One line for each number of the tables, nothing rounded."""
    results = results_of(cells)
    lines = []
    for group, methods in grouped(cells).items():
        for method in methods:
            for column in columns:
                figure = column.find(results, group, method)
                gap = gap_of(results, group, method, BASELINE, column)
                if figure is not None:
                    lines.append([
                        group, method, column.set, _name(column), figure.count, figure.mean, figure.error,
                        gap and gap.mean, gap and gap.error,
                    ])  # fmt: skip
    heads = ["group", "method", "set", "metric", "seeds", "mean", "standard_error", "difference"]
    return csv_text([*heads, "difference_standard_error"], lines)


def cells_csv(cells: Sequence[Cell]) -> str:
    """Every number of every cell, but for single corruptions, of which there are hundreds."""
    lines = (
        [cell.group, cell.seed, cell.method, name, metric, value]
        for cell in cells
        for name, values in cell.values.items()
        if name.count("/") < 2
        for metric, value in values.items()
    )
    return csv_text(["group", "seed", "method", "set", "metric", "value"], lines)


def write_comparison(
    folder: StrPath,
    name: str,
    cells: Sequence[Cell],
    columns: Sequence[Column],
    panels: Mapping[str, Mapping[str, Column]],
    titles: Mapping[str, str],
    *,
    about: Sequence[str] = (),
    baselines: Sequence[str] = (BASELINE,),
) -> list[Path]:
    """NAME.md with `about` on top, NAME.csv, NAME-cells.csv and, where there is matplotlib, pictures."""
    place = Path(folder)
    page = "\n\n".join([*about, to_markdown(cells, columns, titles, baselines)])
    written = [
        _write(place / f"{name}.md", page.encode()),
        _write(place / f"{name}.csv", summary_csv(cells, columns).encode()),
        _write(place / f"{name}-cells.csv", cells_csv(cells).encode()),
    ]
    if find_spec("matplotlib") is None:
        return written
    several, results = grouped(cells), results_of(cells)
    for group, methods in several.items():
        figure = differences_figure(results, group, list(methods), panels, titles)
        called = name if len(several) == 1 else check_name("the name of a picture", f"{name}-{group}")
        written += [_write(place / f"{called}.{form}", picture(figure, form)) for form in PICTURES]
    return written


def _write(file: Path, content: bytes) -> Path:
    make_folder(file.parent)
    write_atomically(file, content)
    return file


def _title(titles: Mapping[str, str], method: str) -> Markup:
    """Titles are ours, and may be Markdown; names of methods may be anyone's."""
    return Markup(titles[method]) if method in titles else markdown(method)


def _name(column: Column) -> str:
    return column.metric if column.score is None else f"{column.metric}_{column.score}"


def _shown(figure: OverSeeds | Difference | None, *, bold: bool = False) -> str:
    text = EMPTY if figure is None else figure.text()
    return Bold(text) if bold else text


@drawn
def differences_figure(
    results: Results,
    group: str,
    methods: Sequence[str],
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
                gap = gap_of(results, group, name, BASELINE, column)
                if gap is None:
                    continue
                shift = 0.24 * (line - (len(columns) - 1) / 2)
                axes.errorbar(
                    gap.mean, row + shift, xerr=gap.error, color=styles[kind].colour, markersize=6,
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
