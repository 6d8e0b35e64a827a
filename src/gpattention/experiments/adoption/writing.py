"""A comparison as files: a page, two CSV files and a picture."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from gpattention.data.places import StrPath, check_name
from gpattention.experiments.adoption.cells import Cell
from gpattention.experiments.adoption.methods import BASELINE
from gpattention.experiments.adoption.plots import differences_figure
from gpattention.experiments.adoption.summary import Column
from gpattention.experiments.adoption.tables import cells_csv, grouped, summary_csv, to_markdown
from gpattention.models.storage import make_folder, write_atomically
from gpattention.reports.canvas import picture

PICTURES = ("png", "svg")


def write_comparison(
    folder: StrPath,
    name: str,
    cells: Sequence[Cell],
    columns: Sequence[Column],
    panels: Mapping[str, Mapping[str, Column]],
    titles: Mapping[str, str],
    *,
    about: Sequence[str] = (),
    baselines: Sequence[str] = (BASELINE,),
) -> list[Path]:
    """NAME.md with `about` on top, NAME.csv, NAME-cells.csv and, where there is matplotlib, pictures."""
    place = Path(folder)
    page = "\n\n".join([*about, to_markdown(cells, columns, titles, baselines)])
    written = [
        _write(place / f"{name}.md", page.encode()),
        _write(place / f"{name}.csv", summary_csv(cells, columns).encode()),
        _write(place / f"{name}-cells.csv", cells_csv(cells).encode()),
    ]
    if find_spec("matplotlib") is None:
        return written
    several = grouped(cells)
    for group, methods in several.items():
        figure = differences_figure(methods, panels, titles)
        called = name if len(several) == 1 else check_name("the name of a picture", f"{name}-{group}")
        written += [_write(place / f"{called}.{form}", picture(figure, form)) for form in PICTURES]
    return written


def _write(file: Path, content: bytes) -> Path:
    make_folder(file.parent)
    write_atomically(file, content)
    return file
