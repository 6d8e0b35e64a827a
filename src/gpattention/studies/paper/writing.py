"""Tables and figures of the paper as Markdown, LaTeX, CSV and pictures."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpattention.models.storage import make_folder, write_atomically
from gpattention.reports.canvas import picture
from gpattention.reports.palette import GRID, INK, Style, styles_for
from gpattention.runs.tables import (
    Bold,
    csv_text,
    latex,
    latex_table,
    markdown,
    markdown_line,
    markdown_table,
)
from gpattention.studies.paper.spec import FIGURES, HEADINGS, gathered
from gpattention.studies.paper.table import PaperCell, PaperRow, PaperTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MISSING = "missing"
LEGEND = (
    "Bold is the better of the paper's figure and ours. ± is the standard error over our seeds; in the "
    "paper's own figures it is the standard deviation that the paper prints."
)
CSV_COLUMNS = (
    "table", "block", "line", "column", "model", "metric", "part", "better", "ours", "ours_standard_error",
    "ours_runs", "recipe", "paper", "paper_sd", "paper_recomputed", "winner", "further", "place",
)  # fmt: skip
LETTER, KEY = 0.075, 0.6  # inches that a letter and the line before a name take in a legend


@dataclass(frozen=True)
class Line:
    """One printed line, the better of two figures in bold; `first` opens a block."""

    group: str
    label: str
    whose: str
    texts: tuple[str, ...]
    first: bool


def printed_lines(table: PaperTable) -> Iterator[Line]:
    """Two lines for each of the paper's, one for each of ours; labels stand once."""
    before: tuple[str, str] | tuple[None, None] = (None, None)
    for row in table.rows:
        for whose, texts in _both(row):
            first = row.group != before[0]
            again = before == (row.group, row.label)
            yield Line(row.group if first else "", "" if again else row.label, whose, texts, first)
            before = (row.group, row.label)


def _both(row: PaperRow) -> Iterator[tuple[str, tuple[str, ...]]]:
    if any(cell.paper is not None for cell in row.cells):
        yield "paper", tuple(_theirs(cell) for cell in row.cells)
    runs = "" if row.runs == 0 else f", {row.runs} run{'s' if row.runs > 1 else ''}"
    yield f"ours{runs}", tuple(_ours(cell) for cell in row.cells)


def _theirs(cell: PaperCell) -> str:
    if cell.paper is None:
        return MISSING
    text = f"{cell.paper.printed}{cell.mark}"
    return Bold(text) if cell.winner == "paper" else text


def _ours(cell: PaperCell) -> str:
    if cell.ours is None:
        return MISSING
    text = cell.ours.text(cell.digits)
    return Bold(text) if cell.winner == "ours" else text


def _heads(table: PaperTable) -> list[str]:
    return [*table.headings, "", *(f"{table.across} {column}".strip() for column in table.columns)]


def _legend_text(table: PaperTable) -> str:
    return LEGEND if any(cell.paper is not None for cell in table.cells) else ""


def to_markdown(table: PaperTable) -> str:
    """Table, claims and notes."""
    lines = ([line.group, line.label, line.whose, *line.texts] for line in printed_lines(table))
    claims = [
        [
            claim.text, "no figures" if claim.paper is None else f"{claim.paper}: {claim.paper_verdict}",
            str(claim.ours), Bold(claim.verdict),
        ]
        for claim in table.claims
    ]  # fmt: skip
    parts = [
        f"## {markdown(table.place)}: {markdown(table.title)}\n",
        f"{markdown_line(table.share)} {_legend_text(table)}".rstrip() + "\n",
        markdown_table(_heads(table), lines, left=3),
        markdown_table(["The paper says", "its own figures", "our figures", "ours"], claims, left=None),
        *(
            f"{HEADINGS[kind]}:\n\n" + "".join(f"- {markdown_line(text)}\n" for text in texts)
            for kind, texts in gathered(table.notes).items()
        ),
    ]
    return "\n".join(parts)


def to_latex(table: PaperTable) -> str:
    r"""A `table*` for a document with `\usepackage[T1]{fontenc}` and `\usepackage{booktabs,textcomp}`."""
    blocks: list[list[list[str]]] = []
    for line in printed_lines(table):
        blocks += [[]] if line.first else []
        blocks[-1].append([line.group, line.label, line.whose, *line.texts])
    below = [_legend_text(table)] if _legend_text(table) else []
    for claim in table.claims:
        theirs = "" if claim.paper is None else f"; its own figures: {claim.paper}, {claim.paper_verdict}"
        below.append(f"The paper says: {claim.text}. Ours: {claim.ours}, {claim.verdict}{theirs}.")
    notes = [
        rf"\emph{{{latex(HEADINGS[kind])}}}: {latex('; '.join(texts))}.\par"
        for kind, texts in gathered(table.notes).items()
    ]
    caption = f"{table.title}: beside {table.place} of the paper. {table.share}"
    lines = [
        r"\begin{table*}",
        r"\centering",
        rf"\caption{{{latex(caption)}}}",
        r"\scriptsize",
        latex_table(_heads(table), blocks, left=3),
        r"\par\smallskip",
        r"\begin{minipage}{\linewidth}\raggedright",
        *(latex(text) + r"\par" for text in below),
        *notes,
        r"\end{minipage}",
        r"\end{table*}",
    ]
    return "\n".join(lines) + "\n"


def to_csv(table: PaperTable) -> str:
    """Long form, one line for each number, nothing rounded; notes and claims are not part of it."""
    lines = (
        _csv_line(table, row, column, cell)
        for row in table.rows
        for column, cell in zip(table.columns, row.cells, strict=True)
    )
    return csv_text(CSV_COLUMNS, lines)


def _csv_line(table: PaperTable, row: PaperRow, column: str, cell: PaperCell) -> list[object]:
    ours, paper = cell.ours, cell.paper
    return [
        table.name, row.group, row.label, column, *cell.key,
        "larger" if cell.measure.metric.larger else "smaller",
        ours and ours.mean, ours and ours.error, 0 if ours is None else ours.count, row.recipe,
        paper and paper.value, paper and paper.sd,
        None if cell.recomputed is None else round(cell.recomputed, cell.digits + 2),
        cell.winner, "yes" if row.extra else "no", table.place if paper is None else paper.place,
    ]  # fmt: skip


FORMATS = {"markdown": to_markdown, "csv": to_csv, "latex": to_latex}
SUFFIXES = {".md": "markdown", ".csv": "csv", ".tex": "latex"}
PICTURES = (".png", ".svg")
ENDINGS = (*SUFFIXES, *PICTURES)  # of files


def rendered(table: PaperTable, form: str) -> str:
    """As text in one of `FORMATS`."""
    if form not in FORMATS:
        raise ValueError(f"expected format to be one of {', '.join(FORMATS)}, got {form!r}")
    return FORMATS[form](table)


def write_table(
    table: PaperTable, out: str | Path, forms: tuple[str, ...] = tuple(FORMATS)
) -> tuple[Path, ...]:
    """Write into a file if `out` ends in .md, .csv, .tex, .png or .svg, else into that folder.

    A folder gets NAME.md, NAME.csv and NAME.tex as far as `forms` has them and, of a figure, NAME.png and
    NAME.svg.
    """
    out = Path(out)
    if out.suffix in ENDINGS:
        return (_write(table, out),)
    ends = [end for end, form in SUFFIXES.items() if form in forms]
    if table.name in FIGURES:
        ends += PICTURES
    return tuple(_write(table, out / f"{table.name}{end}") for end in ends)


def _write(table: PaperTable, file: Path) -> Path:
    if file.suffix in PICTURES:
        content = picture(paper_figure(table), file.suffix.removeprefix("."))
    else:
        content = rendered(table, SUFFIXES[file.suffix]).encode()
    make_folder(file.parent)
    write_atomically(file, content)
    return file


def paper_figure(table: PaperTable) -> "Figure":
    """One panel for each block of the table, one line for each model, bars of one standard error."""
    if table.name not in FIGURES:
        raise ValueError(f"expected one of the figures {', '.join(FIGURES)}, got {table.name!r}")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install 'gpattention[train]'") from error
    groups = list(dict.fromkeys(row.group for row in table.rows))
    styles = styles_for(list(dict.fromkeys(row.label for row in table.rows)))
    figure = Figure(figsize=(4.6 * len(groups), 4.0), layout="constrained")
    panels = figure.subplots(1, len(groups), squeeze=False)[0]
    for panel, group in zip(panels, groups, strict=True):
        _draw(panel, table, [row for row in table.rows if row.group == group], styles)
        panel.set_title(group, color=INK, fontsize=10)
    figure.suptitle(f"{table.title} ({table.place.partition(',')[0]} of the paper, our runs)", fontsize=10)
    _legend(figure, panels)
    return figure


def _draw(panel: Any, table: PaperTable, rows: list[PaperRow], styles: Mapping[str, Style]) -> None:
    for row in rows:
        found = [(int(cell.key.part), cell.ours) for cell in row.cells if cell.ours is not None]
        if not found:
            continue
        style = styles[row.label]
        panel.errorbar(
            [place for place, _ in found],
            [ours.mean for _, ours in found],
            yerr=[ours.error or 0.0 for _, ours in found],
            label=row.label, color=style.colour, marker=style.marker, linestyle=style.dash, capsize=3,
        )  # fmt: skip
    panel.set_xlabel(table.across, color=INK)
    panel.set_xticks([int(column) for column in table.columns])
    panel.grid(color=GRID, linewidth=0.6)
    panel.set_axisbelow(True)
    if rows[0].cells[0].measure.metric.unit not in ("", "%"):  # costs are compared from nothing
        panel.set_ylim(bottom=0)
    if not panel.get_legend_handles_labels()[1]:
        panel.text(0.5, 0.5, "no runs", transform=panel.transAxes, ha="center", color=INK)


def _legend(figure: "Figure", panels: Sequence[Any]) -> None:
    """One for all panels, below them and never over a line; as many columns as its longest name leaves."""
    keys: dict[str, Any] = {}
    for panel in panels:
        handles, labels = panel.get_legend_handles_labels()
        keys |= dict(zip(labels, handles, strict=True))
    if not keys:
        return
    wide = LETTER * max(map(len, keys)) + KEY
    columns = max(1, min(len(keys), int(figure.get_figwidth() // wide)))
    figure.legend(
        list(keys.values()), list(keys), loc="outside lower center", ncols=columns, frameon=False, fontsize=8
    )
