"""Tables of measurements: for a terminal, as Markdown, as CSV; the same numbers in all three."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpattention.reports.escaping import csv_text, markdown, markdown_line, markdown_table

EMPTY = "-"


@dataclass(frozen=True)
class Column:
    """One quantity."""

    key: str  # in CSV and JSON
    head: str
    form: str = ""  # of `format`; a text has none
    suffix: str = ""

    def shown(self, value: Any) -> str:
        """For a reader."""
        if value is None:
            return EMPTY
        return f"{value:{self.form}}{self.suffix}" if self.form else str(value)


@dataclass(frozen=True)
class BenchTable:
    """Rows by column key, with a title and notes that stand below."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[dict[str, Any], ...]
    notes: tuple[str, ...] = ()

    @property
    def filled(self) -> tuple[Column, ...]:
        """Columns in which some row has a value."""
        return tuple(c for c in self.columns if any(row.get(c.key) is not None for row in self.rows))

    @property
    def cells(self) -> list[list[str]]:
        """Text of every row."""
        return [[column.shown(row.get(column.key)) for column in self.filled] for row in self.rows]

    @property
    def right(self) -> tuple[int, ...]:
        """Columns of numbers."""
        return tuple(i for i, column in enumerate(self.filled) if column.form)


def to_markdown(tables: Sequence[BenchTable], facts: str, command: str | None = None) -> str:
    """One page."""
    parts = [facts] + ([f"Made by `{command}`."] if command else [])
    for table in tables:
        heads = [column.head for column in table.filled]
        shown = markdown_table(heads, table.cells, right=table.right)
        parts += [f"## {markdown(table.title)}", shown, *(f"{markdown_line(note)}." for note in table.notes)]
    return "\n\n".join(parts) + "\n"


def to_csv(table: BenchTable) -> str:
    """Nothing rounded."""
    keys = [column.key for column in table.filled]
    return csv_text(keys, ([row.get(key) for key in keys] for row in table.rows))
