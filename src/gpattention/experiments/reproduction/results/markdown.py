"""Tables in Markdown."""

from collections.abc import Sequence


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """The first `left` columns are words, the others numbers, to the right."""
    rule = [":---" if i < left else "---:" for i in range(len(headings))]
    lines = [headings, rule, *([_safe(cell) for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def words(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """All columns to the left."""
    return table(headings, rows, left=len(headings))


def _safe(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", " ")
