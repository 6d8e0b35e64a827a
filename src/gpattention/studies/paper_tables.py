"""Write the paper's tables and figures as Markdown, LaTeX, CSV and pictures."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpattention.reports.drawing import picture
from gpattention.reports.style import GRID, INK, styles_for
from gpattention.runs.tables import Bold, csv_text, latex_table, markdown_table
from gpattention.studies import write_file
from gpattention.studies.model_card import page
from gpattention.studies.paper import FIGURES, Kind, Note, PaperCell, PaperTable, Winner

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
# kinds of notes in the order in which they are printed
HEADINGS: dict[Kind, str] = {
    "missing": "Missing",
    "reduced": "Reduced, or otherwise than in the paper",
    "stand-in": "Stand-ins, subsets and what the evaluations say of themselves",
    "paper": "The paper's own figures",
    "reading": "How to read",
}


def gathered(notes: Iterable[Note]) -> dict[Kind, list[str]]:
    """Sort notes by kind; the same remark about several recipes stands once, with their names.

    Args:
        notes: in the order in which they came up.

    Returns:
        Texts by kind, in the order of printing; kinds without any are left out.
    """
    about: dict[tuple[Kind, str], dict[str, None]] = {}
    for note in notes:
        about.setdefault((note.kind, note.text), {}).update({note.recipe: None} if note.recipe else {})
    found: dict[Kind, list[str]] = {}
    for (kind, text), recipes in sorted(about.items(), key=lambda each: [*HEADINGS].index(each[0][0])):
        found.setdefault(kind, []).append(f"{', '.join(recipes)}: {text}" if recipes else text)
    return found


def _lines(table: PaperTable) -> Iterator[tuple[bool, list[str]]]:
    """Printed lines, two for each of the paper's and one for each of ours; True: it opens a block."""
    before: tuple[str | None, str | None] = (None, None)
    for row in table.rows:
        runs = "" if row.runs == 0 else f", {row.runs} run{'s' if row.runs > 1 else ''}"
        both = [(f"ours{runs}", [_text(cell, "ours") for cell in row.cells])]
        if any(cell.paper is not None for cell in row.cells):
            both.insert(0, ("paper", [_text(cell, "paper") for cell in row.cells]))
        for whose, texts in both:
            first, again = row.group != before[0], before == (row.group, row.label)
            yield first, [row.group if first else "", "" if again else row.label, whose, *texts]
            before = (row.group, row.label)


def _text(cell: PaperCell, whose: Winner) -> str:
    """One of its two figures, bold if it is the better one."""
    if whose == "ours":
        text = MISSING if cell.ours is None else cell.ours.text(cell.digits)
    else:
        text = MISSING if cell.paper is None else f"{cell.paper.printed}{cell.paper.mark}"
    return Bold(text) if cell.winner == whose else text


def _heads(table: PaperTable) -> list[str]:
    return [*table.headings, "", *(f"{table.spec.across} {column}".strip() for column in table.columns)]


def to_markdown(table: PaperTable) -> str:
    """Render a table, its claims and its notes.

    Args:
        table: result of `paper_table`.

    Returns:
        A section of a Markdown page.
    """
    return _page(
        "paper.md", table, markdown_table(_heads(table), (line for _, line in _lines(table)), left=3)
    )


def to_latex(table: PaperTable) -> str:
    r"""Render a table, its claims and its notes as a `table*`.

    The document needs `\usepackage[T1]{fontenc}` and `\usepackage{booktabs,textcomp}`.

    Args:
        table: result of `paper_table`.

    Returns:
        The LaTeX source.
    """
    blocks: list[list[list[str]]] = []
    for first, line in _lines(table):
        blocks += [[]] if first else []
        blocks[-1].append(line)
    return _page("paper.tex", table, latex_table(_heads(table), blocks, left=3))


def _page(template: str, table: PaperTable, figures: str) -> str:
    """The figures with claims and notes below."""
    legend = LEGEND if any(cell.paper is not None for cell in table.cells) else ""
    notes = gathered(table.notes)
    return page(template, table=table, figures=figures, legend=legend, notes=notes, headings=HEADINGS)


def to_csv(table: PaperTable) -> str:
    """Render a table in long form: one line for each number, nothing rounded, no notes and claims.

    Args:
        table: result of `paper_table`.

    Returns:
        The CSV text.
    """
    lines = []
    for row in table.rows:
        for column, cell in zip(table.columns, row.cells, strict=True):
            ours, paper = cell.ours, cell.paper
            better = "larger" if cell.measure.metric.larger else "smaller"
            lines.append([
                table.spec.name, row.group, row.label, column, *cell.key, better,
                ours and ours.mean, ours and ours.error, 0 if ours is None else ours.count, row.recipe,
                paper and paper.value, paper and paper.sd, paper and paper.recomputed,
                cell.winner, "yes" if row.extra else "no", table.spec.place if paper is None else paper.place,
            ])  # fmt: skip
    return csv_text(CSV_COLUMNS, lines)


FORMATS = {"markdown": to_markdown, "csv": to_csv, "latex": to_latex}
SUFFIXES = {".md": "markdown", ".csv": "csv", ".tex": "latex"}
PICTURES = (".png", ".svg")
ENDINGS = (*SUFFIXES, *PICTURES)  # of files


def write_table(
    table: PaperTable, out: str | Path, forms: tuple[str, ...] = tuple(FORMATS)
) -> tuple[Path, ...]:
    """Write a table into a file if `out` ends in .md, .csv, .tex, .png or .svg, else into that folder.

    Args:
        table: result of `paper_table`.
        out: a file, or a folder that gets NAME.md, NAME.csv and NAME.tex and, of a figure, NAME.png and
            NAME.svg.
        forms: which formats of text a folder gets.

    Returns:
        The files that were written.
    """
    out = Path(out)
    ends = [end for end, form in SUFFIXES.items() if form in forms]
    ends += PICTURES if table.spec.name in FIGURES else ()
    files = [out] if out.suffix in ENDINGS else [out / f"{table.spec.name}{end}" for end in ends]
    return tuple(write_file(file, _content(table, file.suffix)) for file in files)


def _content(table: PaperTable, ending: str) -> bytes:
    if ending in PICTURES:
        return picture(paper_figure(table), ending.removeprefix("."))
    return FORMATS[SUFFIXES[ending]](table).encode()


def paper_figure(table: PaperTable) -> "Figure":
    """Draw a figure: a panel for each block of the table, a line for each model, bars of a standard error.

    Args:
        table: result of `paper_table` for one of `FIGURES`.

    Returns:
        The matplotlib figure.

    Raises:
        ValueError: the table is no figure.
        ImportError: matplotlib is not installed.
    """
    if table.spec.name not in FIGURES:
        raise ValueError(f"expected one of the figures {', '.join(FIGURES)}, got {table.spec.name!r}")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install 'gpattention[train]'") from error
    groups = list(dict.fromkeys(row.group for row in table.rows))
    styles = styles_for(list(dict.fromkeys(row.label for row in table.rows)))
    figure = Figure(figsize=(4.6 * len(groups), 4.0), layout="constrained")
    keys: dict[str, Any] = {}
    for panel, group in zip(figure.subplots(1, len(groups), squeeze=False)[0], groups, strict=True):
        rows = [row for row in table.rows if row.group == group]
        for row in rows:
            found = [(int(cell.key.part), cell.ours) for cell in row.cells if cell.ours is not None]
            if found:
                style = styles[row.label]
                keys[row.label] = panel.errorbar(
                    [place for place, _ in found],
                    [ours.mean for _, ours in found],
                    yerr=[ours.error or 0.0 for _, ours in found],
                    label=row.label, color=style.colour, marker=style.marker, linestyle=style.dash,
                    capsize=3,
                )  # fmt: skip
        panel.set_xlabel(table.spec.across, color=INK)
        panel.set_xticks([int(column) for column in table.columns])
        panel.grid(color=GRID, linewidth=0.6)
        panel.set_axisbelow(True)
        if rows[0].cells[0].measure.metric.unit not in ("", "%"):  # costs are compared from nothing
            panel.set_ylim(bottom=0)
        if not panel.get_legend_handles_labels()[1]:
            panel.text(0.5, 0.5, "no runs", transform=panel.transAxes, ha="center", color=INK)
        panel.set_title(group, color=INK, fontsize=10)
    figure.suptitle(
        f"{table.spec.title} ({table.spec.place.partition(',')[0]} of the paper, our runs)", fontsize=10
    )
    if keys:  # below all panels, never over a line; two long names fit beside each other
        look: dict[str, Any] = {"loc": "outside lower center", "ncols": 2, "frameon": False, "fontsize": 8}
        figure.legend(list(keys.values()), list(keys), **look)
    return figure
