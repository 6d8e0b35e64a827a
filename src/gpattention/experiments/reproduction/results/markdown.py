"""Tables in Markdown."""

from collections.abc import Sequence

from gpattention.reports.escaping import markdown_table


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """The first `left` columns are words, the others numbers, to the right."""
    return markdown_table(headings, rows, right=range(left, len(headings)), left=":---") + "\n"


def words(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """All columns to the left."""
    return table(headings, rows, left=len(headings))
