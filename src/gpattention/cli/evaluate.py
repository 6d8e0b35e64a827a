"""`gpattention evaluate`."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from json import dumps
from pathlib import Path
from typing import Any

from gpattention.cli.console import Bar, Bars, say, table
from gpattention.cli.main import App
from gpattention.cli.options import GOES_ON, Data, Json, goes_on, takes
from gpattention.evaluation import EvaluationSettings, evaluate_runs
from gpattention.evaluation.suites.findings import STEP
from gpattention.runs import (
    Column,
    Group,
    OverSeeds,
    Results,
    RunData,
    SuiteResult,
    compared,
    distinct_names,
    find_runs,
    read_results,
)
from gpattention.runs.tables import Bold, visible

app = App()
OUT_OF_DOMAIN = "ood/out-of-domain"
OOD_SCORE = "entropy"  # the one score that the table shows; the files have all
COLUMNS = (
    Column("clean", "test", "accuracy", head="accuracy"),
    Column("clean", "test", "nll", head="NLL"),
    Column("clean", "test", "ece", head="ECE"),
    Column("clean", "test", "mcc", head="MCC"),
    Column("clean", OUT_OF_DOMAIN, "accuracy", head="out acc."),
    Column("clean", OUT_OF_DOMAIN, "nll", head="out NLL"),
    Column("clean", OUT_OF_DOMAIN, "ece", head="out ECE"),
    Column("clean", OUT_OF_DOMAIN, "mcc", head="out MCC"),
    Column("corrupted", "corrupted/mean", "accuracy", head="corr. acc."),
    Column("corrupted", "corrupted/mean", "nll", head="corr. NLL"),
    Column("corrupted", "corrupted/mean", "ece", head="corr. ECE"),
    Column("ood", "ood/*", "auroc", OOD_SCORE, head="OOD AUROC"),
    Column("selective", "test", "aurc", head="AURC"),
    Column("efficiency", "train", "train_epoch_seconds", head="s/epoch"),
    Column("efficiency", "train", "train_peak_mib", head="train MiB"),
)
NOTE = f"OOD AUROC: mean over the sets, by {OOD_SCORE}; corr.: mean over the corruptions"
SEEDS = "mean ± standard error over seeds"


@app.command("evaluate")
@goes_on(f"{GOES_ON} (without --fresh)")
@takes(EvaluationSettings, "settings", skip=("root",), flags={"suites": "--suite"})
def evaluate(runs: list[str], settings: EvaluationSettings, json: Json = False, data: Data = None) -> None:
    """Evaluate finished runs.

    Options:
        runs (RUN): run folders, or folders of runs.

    Examples:
      gpattention evaluate runs/digits-cgp
      gpattention evaluate runs/digits-cgp --suite clean,ood --samples 20
      gpattention evaluate runs/cgp-seed0 runs/cgp-seed1     each, their ensemble, mean and standard error
      gpattention evaluate runs --suite corrupted --limit 1000 --data ~/data
      gpattention evaluate runs --suite clean,corrupted --shift-temperature

    A stopped evaluation goes on where it stopped: what is finished with the same settings is kept. Results
    are in RUN/evaluation.
    """
    folders = _folders(runs)
    with closing(Bars(_bar)) as bars:
        found = evaluate_runs(folders, replace(settings, root=data), progress=bars)
    if json:
        # numbers and notes; the curves are in the files
        plain = {
            str(folder): {name: _without_curves(result) for name, result in suites.items()}
            for folder, suites in found.items()
        }
        print(dumps(plain, indent=1))
        return
    bold = sys.stdout.isatty()
    names = distinct_names([folder.resolve() for folder in found])
    print(evaluation_table(dict(zip(names, found.values(), strict=True)), bold=bold))
    done = list(next(iter(found.values())))
    if several := seeds_table(read_results(folders), done, bold=bold):
        print(f"\n{several}")
    _print_notes(found)
    for folder in found:
        say(f"results: {folder / 'evaluation'}")


def _folders(given: list[str]) -> list[Path]:
    """Every run that is meant, once."""
    found: dict[Path, Path] = {}
    for name in given:
        folder = Path(name)
        below = [folder] if (folder / "recipe.json").is_file() else find_runs(folder)
        if not below:
            raise FileNotFoundError(f"expected a run in {folder} or below, got none with a model")
        for run in below:
            found.setdefault(run.resolve(), run)
    return list(found.values())


def _bar(what: str) -> Bar:
    if what.endswith("regenerating"):
        return Bar(what, "images")
    if what.endswith("efficiency"):
        return Bar(what, "sizes")
    return Bar(what, "predictions", scale=STEP)


def _print_notes(found: dict[Path, dict[str, SuiteResult]]) -> None:
    """What is missing, reduced, regenerated or a stand-in: once, however many runs say it."""
    notes: dict[str, list[str]] = {}
    for suites in found.values():
        for name, result in suites.items():
            for note in result.notes:
                of = notes.setdefault(note, [])
                of += [] if name in of else [name]
    if notes:
        print("\nnotes:")
    for note, suites_of in notes.items():
        say(f"  {', '.join(suites_of)}: {note}")
    if notes:
        print()


def _without_curves(result: SuiteResult) -> dict[str, Any]:
    return {key: value for key, value in result.to_dict().items() if key != "curves"}


@dataclass(frozen=True)
class Line:
    """One row: whose numbers, on which data, and the number of each column."""

    labels: tuple[str, str]
    data: str
    figures: tuple[OverSeeds | None, ...]


def evaluation_table(runs: Mapping[str, Mapping[str, SuiteResult]], *, bold: bool) -> str:
    """A row for every run and predictor; the best of each column in bold, or with a star."""
    groups = [Group(name, (RunData(name, suites=suites),)) for name, suites in runs.items()]
    return _by_data(("run", "prediction"), _lines(Results.of(groups), COLUMNS), bold=bold)


def seeds_table(results: Results, suites: Sequence[str], *, bold: bool) -> str:
    """Mean and standard error of recipes with several seeds; empty where there is none."""
    columns = tuple(column for column in COLUMNS if column.suite in suites)
    lines = [
        Line(line.labels, line.data, tuple(x if x and x.count > 1 else None for x in line.figures))
        for line in _lines(results, columns)
    ]
    lines = [line for line in lines if any(line.figures)]
    if not lines:
        return ""
    return f"{SEEDS}\n{_by_data(('recipe', 'prediction'), lines, bold=bold, columns=columns)}"


def _lines(results: Results, columns: Sequence[Column]) -> list[Line]:
    frame = results.frame[["recipe", "data"]].drop_duplicates("recipe")
    return [
        Line((recipe, predictor), data, tuple(c.find(results, recipe, predictor) for c in columns))
        for recipe, data in frame.itertuples(index=False)
        for predictor in results.predictors(recipe)
    ]


def _by_data(
    heads: tuple[str, str], lines: Sequence[Line], *, bold: bool, columns: Sequence[Column] = COLUMNS
) -> str:
    """A table for each data set: only numbers on the same data can be better than others."""
    each = [[line for line in lines if line.data == data] for data in dict.fromkeys(x.data for x in lines)]
    return "\n\n".join(_drawn(heads, some, columns, bold=bold) for some in each)


def _drawn(heads: tuple[str, str], lines: Sequence[Line], columns: Sequence[Column], *, bold: bool) -> str:
    filled = [i for i in range(len(columns)) if any(line.figures[i] for line in lines)]
    sentences = any(columns[i].set == OUT_OF_DOMAIN for i in filled)
    shown = [i for i in filled if sentences or columns[i].metric != "mcc"]
    rivals = {i: compared([line.figures[i] for line in lines]) for i in shown}
    best = {i: _best(columns[i], [lines[place].figures[i] for place in rivals[i]]) for i in shown}
    rows, aside = [], dict[str, None]()
    for place, line in enumerate(lines):
        cells = []
        for i in shown:
            figure = line.figures[i]
            text = "-" if figure is None else figure.text(3 if abs(figure.mean) < 100 else 0)
            is_best = figure is not None and place in rivals[i] and figure.mean == best[i]
            cells.append(Bold(text) if is_best else text)
            if figure is not None and place not in rivals[i]:
                aside[visible(f"{' '.join(line.labels)} ({figure.basis_text()})")] = None
        rows.append([*line.labels, *cells])
    drawn = table(
        [*heads, *(columns[i].head for i in shown)], rows, right=range(2, 2 + len(shown)), bold=bold
    )
    notes = [NOTE] if any(columns[i].suite in ("ood", "corrupted") for i in shown) else []
    notes += [f"on other items than most, so not compared: {', '.join(aside)}"] if aside else []
    return "\n".join([drawn, *notes])


def _best(column: Column, figures: Sequence[OverSeeds | None]) -> float | None:
    means = [figure.mean for figure in figures if figure is not None]
    return column.shown.best(means) if len(set(means)) > 1 else None
