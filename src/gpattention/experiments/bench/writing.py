"""Results as files: NAME.json with everything, NAME.md, one CSV for each table, and figures.

JSON is what was measured; the figures are drawn from it, at once or later on a machine with matplotlib.
"""

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpattention.experiments.bench.machine import in_words
from gpattention.experiments.bench.plots import QUANTITIES, length_figure
from gpattention.experiments.bench.tables import BenchTable, to_csv, to_markdown
from gpattention.models.storage import make_folder, write_atomically
from gpattention.reading import read_json
from gpattention.reports.canvas import picture

PICTURES = ("png", "svg")


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
