"""Run folders as plain data, as the table of results, and as one HTML report."""

from collections.abc import Sequence
from pathlib import Path

from gpattention.data.places import StrPath
from gpattention.experiments.judging.weights import read_noted_suites
from gpattention.experiments.run_names import distinct_names
from gpattention.experiments.runs import find_runs, read_rows
from gpattention.models.storage import make_folder, write_atomically
from gpattention.reading import read_object
from gpattention.reports import build_report
from gpattention.runs import Results, RunData, group
from gpattention.training.records import read_events


def write_report(folders: Sequence[StrPath], output: StrPath, *, title: str | None = None) -> Path:
    """Read runs and write the page that compares them; returns its path.

    A run needs no more than its `recipe.json`: what was not trained or evaluated yet is said on the page.

    Args:
        folders: of runs, or folders that hold runs; a run given twice counts once.
        output: the HTML file; its folder is made if need be.
        title: of the page; made of the data sets if not given.
    """
    output = Path(output)
    if output.is_dir():
        raise IsADirectoryError(f"expected output (-o) to be a file, got the folder {output}")
    runs = read_runs(folders)
    page = build_report(runs, title)
    make_folder(output.parent)
    write_atomically(
        output, page.encode(errors="replace")
    )  # half a character of a broken text is no reason to fail
    return output


def read_results(folders: Sequence[StrPath]) -> Results:
    """The table of everything that was evaluated in or below these folders; see `gpattention.runs`.

    Runs whose recipes differ by seed and name alone are one recipe in it.
    """
    return Results.of(group(read_runs(folders)))


def read_runs(folders: Sequence[StrPath]) -> list[RunData]:
    """The runs in or below these folders, as plain data."""
    found: dict[Path, Path] = {}
    for folder in folders:
        below = find_runs(folder, unfinished=True)
        if not below:
            raise FileNotFoundError(f"expected a run in or below {folder}, got no recipe.json there")
        for run in below:
            found.setdefault(run.resolve(), run)
    return [
        read_run(run, name) for run, name in zip(found.values(), distinct_names(list(found)), strict=True)
    ]


def read_run(folder: Path, name: str | None = None) -> RunData:
    """Everything of a run but its weights; suites that are not of these say so."""
    return RunData(
        name=folder.name if name is None else name,
        recipe=read_object(folder / "recipe.json", nonfinite=True),  # as it stands: also of older versions
        rows=read_rows(folder / "metrics.csv"),
        events=read_events(folder),
        suites=read_noted_suites(folder),
        folder=str(folder),
    )
