"""Tables of measurements, for a terminal, as Markdown and CSV, and all results as files.

A folder gets NAME.json with everything, NAME.md, one CSV for each table, and figures.  JSON is what was
measured; the figures are drawn from it, at once or later on a machine with matplotlib.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpattention.models.storage import make_folder, write_atomically
from gpattention.reading import read_json
from gpattention.reports.canvas import picture
from gpattention.runs.tables import csv_text, markdown, markdown_line, markdown_table
from gpattention.studies.bench.machine import in_words
from gpattention.studies.bench.plots import QUANTITIES, length_figure

PICTURES = ("png", "svg")
EMPTY = "-"


@dataclass(frozen=True)
class Quantity:
    """One column."""

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
    columns: tuple[Quantity, ...]
    rows: tuple[dict[str, Any], ...]
    notes: tuple[str, ...] = ()

    @property
    def filled(self) -> tuple[Quantity, ...]:
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
    parts = [f"{facts}\n"] + ([f"Made by `{command}`.\n"] if command else [])
    for table in tables:
        heads = [column.head for column in table.filled]
        parts += [f"## {markdown(table.title)}\n", markdown_table(heads, table.cells, right=table.right)]
        parts += [f"{markdown_line(note)}.\n" for note in table.notes]
    return "\n".join(parts)


def to_csv(table: BenchTable) -> str:
    """Nothing rounded."""
    keys = [column.key for column in table.filled]
    return csv_text(keys, ([row.get(key) for key in keys] for row in table.rows))


def write_json(document: Mapping[str, Any], file: str | Path) -> Path:
    """All numbers of a run."""
    return _write(Path(file), (json.dumps(document, indent=2) + "\n").encode())


def write_folder(
    folder: str | Path,
    name: str,
    document: Mapping[str, Any],
    tables: Mapping[str, BenchTable],
    command: str | None = None,
) -> tuple[Path, ...]:
    """NAME.json, NAME.md, a CSV for each table and, where there is matplotlib, figures."""
    place = Path(folder)
    page = to_markdown(tuple(tables.values()), in_words(dict(document["environment"])), command)
    written = [write_json(document, place / f"{name}.json"), _write(place / f"{name}.md", page.encode())]
    written += [_write(place / f"{each}.csv", to_csv(table).encode()) for each, table in tables.items()]
    if find_spec("matplotlib") is not None:
        written += draw(place, name, document)
    return tuple(written)


def draw_folder(folder: str | Path) -> tuple[Path, ...]:
    """Draw the figures of all results in a folder from their JSON."""
    place = Path(folder)
    files = sorted(place.glob("*.json"))
    written: list[Path] = []
    for file in files:
        document = read_json(file, nonfinite=True)
        if isinstance(document, dict) and "environment" in document:
            written += draw(place, file.stem, document)
    if not written:
        raise ValueError(f"no measured lengths in {place}: gpattention bench length --out {place}")
    return tuple(written)


def draw(folder: Path, name: str, document: Mapping[str, Any]) -> list[Path]:
    """Time and memory over length, where lengths were measured."""
    rows: Sequence[Mapping[str, Any]] = document.get("length", {}).get("rows", ())
    written = []
    for what, (key, _, _) in QUANTITIES.items():
        if not any(row.get(key) for row in rows):
            continue
        figure = length_figure(rows, what)
        written += [_write(folder / f"{name}-{what}.{form}", picture(figure, form)) for form in PICTURES]
    return written


def _write(file: Path, content: bytes) -> Path:
    make_folder(file.parent)
    write_atomically(file, content)
    return file
