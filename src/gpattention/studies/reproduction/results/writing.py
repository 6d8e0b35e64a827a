"""All results of a plan into one folder; the same records of runs give the same bytes."""

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from gpattention.data.places import StrPath, check_name
from gpattention.models.storage import make_folder, remove_leftovers, write_atomically
from gpattention.reports import build_report
from gpattention.reports.canvas import picture
from gpattention.runs import Group, RunData
from gpattention.runs.tables import csv_text
from gpattention.studies.paper import FIGURES, TABLES, paper_table, write_table
from gpattention.studies.reproduction.plan import Plan
from gpattention.studies.reproduction.results.account import listed_files, readme, shown_path
from gpattention.studies.reproduction.results.archive import ARCHIVE, Records, gather
from gpattention.studies.reproduction.results.choice import choice_markdown, choose
from gpattention.studies.reproduction.results.plots import FORMS, draw_figures
from gpattention.studies.reproduction.results.reading import PlanResults, read_results
from gpattention.studies.reproduction.results.summary import summary_csv, summary_markdown

LARGEST = 3_000_000  # bytes of the report
LEFT_OUT = (  # one after the other, until it is not larger; records have no gallery of images at all
    ("the gallery of items", "clean", "gallery"),
    ("histograms of scores", "ood", "scores"),
    ("ROC curves", "ood", "roc"),
)


def write_results(
    plan: Plan,
    runs: StrPath,
    out: StrPath,
    *,
    plan_file: StrPath | None = None,
    on_file: Callable[[Path], object] | None = None,
    on_archived: Callable[[tuple[str, ...]], object] | None = None,
) -> list[Path]:
    """Tables, the choice, figures, the paper's tables, the report, and a README that tells how all was made.

    The records of the runs are packed beside them, into `records.tar.xz`.  A later call takes from
    that file the runs that are not evaluated in `runs`, and keeps in it those that it is not asked for.

    Args:
        plan: whose runs, or some of them (`Plan.only`).
        runs: the folder of the plan's runs; nothing is written there, and with records it need not be there.
        out: the folder to write; what an earlier call left there and this one does not write again is removed
            (the picture of a model no longer chosen), files of others are left alone.
        plan_file: the plan's own file, for the commands in the README.
        on_file: told each file as it is written.
        on_archived: told the runs that are taken from the records of an earlier call, if any.
    """
    runs, out = Path(runs), Path(out)
    with tempfile.TemporaryDirectory(prefix="gpattention-records-") as place:
        records = gather(plan, runs, out / ARCHIVE, Path(place))
        if records.archived and on_archived is not None:
            on_archived(records.archived)
        # of the records alone, so that results do not depend on where these came from
        results = read_results(plan, records.runs)
        commands = _commands(results, runs, out, Path(plan_file) if plan_file else None)
        return _write(results, records, out, commands, on_file)


def _write(
    results: PlanResults,
    records: Records,
    out: Path,
    commands: list[str],
    on_file: Callable[[Path], object] | None,
) -> list[Path]:
    choice = choose(results)
    written: list[Path] = []

    def write(name: str, content: bytes) -> None:
        write_atomically(out / check_name("the name of a file of results", name), content)
        note(out / name)

    def note(file: Path) -> None:
        written.append(file)
        if on_file is not None:
            on_file(file)

    remove_leftovers(make_folder(out))
    write(ARCHIVE, records.archive)
    write("summary.md", summary_markdown(results).encode())
    write("summary.csv", summary_csv(results).encode())
    write("choice.md", choice_markdown(results, choice).encode())
    for name, figure in draw_figures(results, choice):
        for form in FORMS:
            write(f"{name}.{form}", picture(figure, form))
    logged = [model for model in results.models if any(run.rows for run in model.runs)]  # not of shared ones
    for model in logged:
        write(f"training-{model.name}.csv", _training(model).encode())
    write("configs.json", _configs(results).encode())
    for file in _paper(results, out):
        note(file)
    report, left_out = report_page(results)
    write("report.html", report)
    names = [file.name for file in written]
    page = out / "README.md"
    earlier = listed_files(page.read_text(errors="replace")) if page.is_file() else set()
    write("README.md", readme(results, commands, names, left_out).encode())
    for name in earlier - set(names):  # else it would stand there as if it belonged to these results
        (out / name).unlink(missing_ok=True)
    return written


def _training(model: Group) -> str:
    """The rows of all seeds, one after the other."""
    columns = list(dict.fromkeys(key for run in model.runs for row in run.rows for key in row))
    lines = ([run.seed, *(row.get(key) for key in columns)] for run in model.runs for row in run.rows)
    return csv_text(["seed", *columns], lines)


def _configs(results: PlanResults) -> str:
    plain = {}
    for model in results.models:
        recipe = model.runs[0].parsed.to_dict()
        del recipe["seed"]
        plain[model.name] = {"seeds": [run.seed for run in model.runs], "recipe": recipe}
    return json.dumps(plain, indent=1) + "\n"


def _paper(results: PlanResults, out: Path) -> list[Path]:
    """Those tables and figures that have any figure of the plan's models."""
    files: list[Path] = []
    for name in (*TABLES, *FIGURES):
        table = paper_table(name, results.models)
        if any(cell.ours is not None for row in table.rows for cell in row.cells):
            files += write_table(table, out, ("markdown", "csv"))
    return files


def report_page(results: PlanResults) -> tuple[bytes, tuple[str, ...]]:
    """The page, and what was left out to keep it small."""
    found = [replace(run, folder=f"runs/{results.plan.name}/{run.name}") for run in results.runs]
    title = f"{results.plan.name}: {len(results.models)} models"
    left = [] if results.texts else [LEFT_OUT[0]]
    while True:
        for _, suite, curve in left:
            found = [_without(run, suite, curve) for run in found]
        without = ["gallery"] if LEFT_OUT[0] in left else []  # where there never is one
        page = build_report(found, title, without=without).encode(errors="replace")
        if len(page) <= LARGEST or len(left) == len(LEFT_OUT):
            return page, tuple(what for what, _, _ in left)
        left.append(LEFT_OUT[len(left)])


def _without(run: RunData, suite: str, curve: str) -> RunData:
    if suite not in run.suites:
        return run
    told = run.suites[suite]
    curves = {key: value for key, value in told.curves.items() if key != curve}
    return replace(run, suites={**run.suites, suite: replace(told, curves=curves)})


def _commands(results: PlanResults, runs: Path, out: Path, plan_file: Path | None) -> list[str]:
    """What anyone types to get the same."""
    plan = results.plan
    named = f"recipes/plans/{plan.name}.toml" if plan_file is None else shown_path(plan_file)
    devices = [e.get("device", "") for run in results.runs for e in run.events if e.get("event") == "phase"]
    where = " --device cuda" if any(str(device).startswith("cuda") for device in devices) else ""
    place = shown_path(runs)
    folder = "" if place == f"runs/{plan.name}" else f" --runs {place}"
    start = " ".join([f"gpattention reproduce {named}{folder}", *plan.part])
    return [
        f"{start} --stage train{where}",
        f"{start} --stage evaluate{where}",
        f"{start} --stage results -o {shown_path(out)}",
    ]
