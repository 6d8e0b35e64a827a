"""Results of evaluations as tables for a terminal: accuracy and NLL always beside the calibration error."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpattention.cli.table import table
from gpattention.evaluation.records import SuiteResult
from gpattention.runs import Column, Group, OverSeeds, Results, RunData, compared
from gpattention.runs.tables import Bold, visible

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
            told = "-" if figure is None else figure.text(3 if abs(figure.mean) < 100 else 0)
            is_best = figure is not None and place in rivals[i] and figure.mean == best[i]
            cells.append(Bold(told) if is_best else told)
            if figure is not None and place not in rivals[i]:
                aside[visible(f"{' '.join(line.labels)} ({figure.basis.text()})")] = None
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
