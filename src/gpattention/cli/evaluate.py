"""`gpattention evaluate`."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from json import dumps
from pathlib import Path
from typing import Any

from gpattention.cli.console import Bar, Bars, say, table
from gpattention.cli.main import App
from gpattention.cli.options import Data, Engine, Json, goes_on, takes, working
from gpattention.evaluation import EvaluationSettings, evaluate_runs
from gpattention.evaluation.suites.findings import STEP
from gpattention.files import visible
from gpattention.runs import (
    Column,
    Group,
    OverSeeds,
    Results,
    RunData,
    SuiteResult,
    compared,
    distinct_names,
    read_results,
)
from gpattention.runs.tables import Bold
from gpattention.studies import runs_below
from gpattention.studies.evaluating import SHARDS, evaluate_many

app = App()
OUT_OF_DOMAIN = "ood/out-of-domain"
OOD_SCORE = "entropy"  # the one score that the table shows; the files have all
MEASURES = {"accuracy": "acc.", "nll": "NLL", "ece": "ECE", "mcc": "MCC"}
COLUMNS = (
    *(Column("clean", "test", m, head=m if m == "accuracy" else short) for m, short in MEASURES.items()),
    *(Column("clean", OUT_OF_DOMAIN, m, head=f"out {short}") for m, short in MEASURES.items()),
    *(
        Column("corrupted", "corrupted/mean", m, head=f"corr. {short}")
        for m, short in MEASURES.items()
        if m != "mcc"
    ),
    Column("ood", "ood/*", "auroc", OOD_SCORE, head="OOD AUROC"),
    Column("selective", "test", "aurc", head="AURC"),
    Column("efficiency", "train", "train_epoch_seconds", head="s/epoch"),
    Column("efficiency", "train", "train_peak_mib", head="train MiB"),
)
NOTE = f"OOD AUROC: mean over the sets, by {OOD_SCORE}; corr.: mean over the corruptions"
SEEDS = "on test items, mean ± standard error over seeds:"


@app.command("evaluate")
@goes_on(drop="--fresh")
@takes(EvaluationSettings, "settings", skip=("root",), flags={"suites": "--suite"})
def evaluate(
    runs: list[str],
    settings: EvaluationSettings,
    json: Json = False,
    jobs: int = 1,
    engine: Engine = "local",
    data: Data = None,
) -> None:
    """Evaluate finished runs.

    Options:
        runs (RUN): run folders, or folders of runs.
        jobs: processes at once, each at a corruption or the other suites of a run.

    Examples:
      gpattention evaluate runs/digits-cgp
      gpattention evaluate runs/digits-cgp --suite clean,ood --samples 20
      gpattention evaluate runs --suite corrupted --jobs 16 --engine ray     on a cluster's nodes
      gpattention evaluate runs/cgp-seed0 runs/cgp-seed1     each, their ensemble, mean and standard error
      gpattention evaluate runs --suite corrupted --limit 1000 --data ~/data
      gpattention evaluate runs --suite clean,corrupted --shift-temperature

    A stopped evaluation goes on where it stopped: what is finished with the same settings is kept. Results
    are in RUN/evaluation.
    """
    folders = runs_below(runs)
    with closing(Bars(_bar)) as bars:
        if engine == "local" and jobs == 1:
            found = evaluate_runs(folders, replace(settings, root=data), progress=bars)
        else:
            given = str(settings.device)
            with working(engine, folders, jobs=jobs, device=given, data=data) as (at, on, root):
                asked = replace(settings, root=root, device=on)
                found = evaluate_many(folders, asked, jobs=jobs, engine=at, progress=bars)
    if json:
        plain: dict[str, dict[str, dict[str, Any]]] = {
            str(folder): {name: result.to_dict() for name, result in suites.items()}
            for folder, suites in found.items()
        }
        for result in (each for suites in plain.values() for each in suites.values()):
            del result["curves"]  # the files have them
        print(dumps(plain, indent=1))
        return
    bold = sys.stdout.isatty()
    names = distinct_names([folder.resolve() for folder in found])
    print("on test items:")
    print(evaluation_table(dict(zip(names, found.values(), strict=True)), bold=bold))
    done = list(next(iter(found.values())))
    if several := seeds_table(read_results(folders), done, bold=bold):
        print(f"\n{several}")
    _print_notes(found)
    for folder in found:
        say(f"results: {folder / 'evaluation'}")


def _bar(what: str) -> Bar:
    units = {"regenerating": "images", "efficiency": "sizes", SHARDS: ""}
    unit = units.get(what.rpartition(" ")[2], "predictions")
    return Bar(what, unit, scale=STEP if unit == "predictions" else 1.0)


def _print_notes(found: dict[Path, dict[str, SuiteResult]]) -> None:
    """What is missing, reduced, regenerated or a stand-in: once, however many runs say it."""
    notes: dict[str, dict[str, None]] = {}
    for name, result in (pair for suites in found.values() for pair in suites.items()):
        for note in result.notes:
            notes.setdefault(note, {})[name] = None
    if notes:
        lines = (f"  {', '.join(suites_of)}: {note}" for note, suites_of in notes.items())
        print("\nnotes:", *map(visible, lines), "", sep="\n")


def evaluation_table(runs: Mapping[str, Mapping[str, SuiteResult]], *, bold: bool) -> str:
    """A row for every run and predictor; the best of each column in bold, or with a star."""
    groups = [Group(name, (RunData(name, suites=suites),)) for name, suites in runs.items()]
    return results_table("run", Results.of(groups), COLUMNS, bold=bold)


def seeds_table(results: Results, suites: Sequence[str], *, bold: bool) -> str:
    """Mean and standard error of recipes with several seeds; empty where there is none."""
    columns = [column for column in COLUMNS if column.suite in suites]
    drawn = results_table("recipe", results, columns, bold=bold, fewest=2)
    return f"{SEEDS}\n{drawn}" if drawn else ""


def results_table(
    head: str, results: Results, columns: Sequence[Column], *, bold: bool, fewest: int = 1, note: str = NOTE,
    fold: bool = False,
) -> str:  # fmt: skip
    """A table for each data set: only numbers on the same data can be better than others.

    Numbers of fewer than so many seeds, lines without any number, and with `fold` those that are the same as
    an earlier line of the recipe are left out.
    """
    tables: dict[str, dict[tuple[str, str], list[OverSeeds | None]]] = {}
    for recipe, data in results.frame[["recipe", "data"]].drop_duplicates("recipe").itertuples(index=False):
        for predictor in results.predictors(recipe):
            found = (column.find(results, recipe, predictor) for column in columns)
            figures = [x if x and x.count >= fewest else None for x in found]
            earlier = (of for (r, _), of in tables.get(data, {}).items() if r == recipe)
            if any(figures) and not (fold and figures in earlier):
                tables.setdefault(data, {})[recipe, predictor] = figures
    return "\n\n".join(_drawn(head, lines, columns, bold=bold, note=note) for lines in tables.values())


def _drawn(
    head: str, lines: Mapping[tuple[str, str], Sequence[OverSeeds | None]], columns: Sequence[Column], *,
    bold: bool, note: str,
) -> str:  # fmt: skip
    filled = [(c, of) for c, of in zip(columns, zip(*lines.values(), strict=True), strict=True) if any(of)]
    sentences = any(column.set == OUT_OF_DOMAIN for column, _ in filled)
    shown = [(column, of) for column, of in filled if sentences or column.metric != "mcc"]
    rows = [[*labels] for labels in lines]
    aside = dict[str, None]()
    for column, figures in shown:
        rivals = compared(figures)
        means = {figures[place].mean for place in rivals}  # only what is there
        best = column.shown.best(list(means)) if len(means) > 1 else None
        for place, (row, figure) in enumerate(zip(rows, figures, strict=True)):
            text = "-" if figure is None else figure.text(3 if abs(figure.mean) < 100 else 0)
            is_best = figure is not None and place in rivals and figure.mean == best
            row.append(Bold(text) if is_best else text)
            if figure is not None and place not in rivals:
                aside[visible(f"{' '.join(row[:2])} ({figure.basis_text()})")] = None
    heads = [head, "prediction", *(column.head or column.shown.label for column, _ in shown)]
    drawn = table(heads, rows, right=range(2, len(heads)), bold=bold)
    notes = [note] if any(column.suite in ("ood", "corrupted") for column, _ in shown) else []
    notes += [f"on other items than most, so not compared: {', '.join(aside)}"] if aside else []
    return "\n".join([drawn, *notes])
