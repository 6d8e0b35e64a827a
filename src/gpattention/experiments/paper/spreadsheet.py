"""A table of the paper as CSV: one line for each number, nothing rounded."""

from gpattention.experiments.paper.table import PaperCell, PaperRow, PaperTable
from gpattention.reports.escaping import csv_text

COLUMNS = (
    "table", "block", "line", "column", "model", "metric", "part", "better", "ours", "ours_sd", "ours_runs",
    "recipe", "paper", "paper_sd", "paper_recomputed", "winner", "further", "place",
)  # fmt: skip


def to_csv(table: PaperTable) -> str:
    """Long form; notes and claims are not part of it."""
    lines = [
        _line(table, row, column, cell)
        for row in table.rows
        for column, cell in zip(table.columns, row.cells, strict=True)
    ]
    return csv_text(COLUMNS, ([line[name] for name in COLUMNS] for line in lines))


def _line(table: PaperTable, row: PaperRow, column: str, cell: PaperCell) -> dict[str, object]:
    ours, paper = cell.ours, cell.paper
    return {
        "table": table.name,
        "block": row.group,
        "line": row.label,
        "column": column,
        "model": cell.key.model,
        "metric": cell.key.metric,
        "part": cell.key.part,
        "better": "larger" if cell.measure.larger else "smaller",
        "ours": "" if ours is None else ours.mean,
        "ours_sd": "" if ours is None or ours.sd is None else ours.sd,
        "ours_runs": 0 if ours is None else ours.n,
        "recipe": row.recipe or "",
        "paper": "" if paper is None else paper.value,
        "paper_sd": "" if paper is None or paper.sd is None else paper.sd,
        "paper_recomputed": "" if cell.recomputed is None else round(cell.recomputed, cell.digits + 2),
        "winner": cell.winner or "",
        "further": "yes" if row.extra else "no",
        "place": table.place if paper is None else paper.place,
    }
