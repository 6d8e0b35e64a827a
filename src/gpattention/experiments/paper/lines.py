"""The printed lines of a table, shared by every format: the paper's figures, and ours below them."""

from collections.abc import Iterator
from dataclasses import dataclass

from gpattention.experiments.paper.table import PaperCell, PaperRow, PaperTable

MISSING = "missing"
LEGEND = "Bold is the better of the paper's figure and ours; ± is the standard deviation over runs."


@dataclass(frozen=True)
class Text:
    """One figure as printed, and whether it is the better of the two."""

    text: str
    better: bool = False


@dataclass(frozen=True)
class Line:
    """One printed line; `first` opens a block."""

    group: str
    label: str
    whose: str
    texts: tuple[Text, ...]
    first: bool


def printed_lines(table: PaperTable) -> Iterator[Line]:
    """Two lines for each of the paper's, one for each of ours."""
    before = None
    for row in table.rows:
        for whose, texts in _both(row):
            yield Line(row.group, row.label, whose, texts, first=row.group != before)
            before = row.group


def _both(row: PaperRow) -> Iterator[tuple[str, tuple[Text, ...]]]:
    if any(cell.paper is not None for cell in row.cells):
        yield "paper", tuple(_theirs(cell) for cell in row.cells)
    runs = "" if row.runs == 0 else f", {row.runs} run{'s' if row.runs > 1 else ''}"
    yield f"ours{runs}", tuple(_ours(cell) for cell in row.cells)


def _theirs(cell: PaperCell) -> Text:
    if cell.paper is None:
        return Text(MISSING)
    return Text(f"{cell.paper.printed}{cell.mark}", cell.winner == "paper")


def _ours(cell: PaperCell) -> Text:
    if cell.ours is None:
        return Text(MISSING)
    sd = "" if cell.ours.sd is None else f" ± {cell.ours.sd:.{cell.digits}f}"
    return Text(f"{cell.ours.mean:.{cell.digits}f}{sd}", cell.winner == "ours")
