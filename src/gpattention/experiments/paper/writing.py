"""Tables and figures of the paper as files."""

from pathlib import Path

from gpattention.experiments.paper.latex import to_latex
from gpattention.experiments.paper.markdown import to_markdown
from gpattention.experiments.paper.plotting import paper_figure
from gpattention.experiments.paper.published import FIGURES
from gpattention.experiments.paper.spreadsheet import to_csv
from gpattention.experiments.paper.table import PaperTable
from gpattention.models.storage import make_folder, write_atomically
from gpattention.reports.canvas import picture

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
