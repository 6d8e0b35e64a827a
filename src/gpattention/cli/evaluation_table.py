"""Results of evaluations as tables for a terminal: accuracy and NLL always beside the calibration error."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from gpattention.evaluation.records import Record, SuiteResult
from gpattention.experiments.judging.ensembles import REDUCED
from gpattention.experiments.judging.summary import Summary, SummaryRow
from gpattention.experiments.judging.weights import recorded_settings
from gpattention.reports.comparable import Basis, compared, judged_items
from gpattention.reports.escaping import visible

Suites = Mapping[str, SuiteResult]
OUT_OF_DOMAIN = "ood/out-of-domain"
OOD_SCORE = "entropy"  # the one score that the table shows; the files have all


@dataclass(frozen=True)
class Column:
    """A number of one suite; a set that ends in a star is a mean over all sets that begin so."""

    heading: str
    suite: str
    set: str
    metric: str
    larger: bool  # is better
    score: str | None = None
    texts: bool = False  # shown for texts only


COLUMNS = (
    Column("accuracy", "clean", "test", "accuracy", True),
    Column("NLL", "clean", "test", "nll", False),
    Column("ECE", "clean", "test", "ece", False),
    Column("MCC", "clean", "test", "mcc", True, texts=True),
    Column("out acc.", "clean", OUT_OF_DOMAIN, "accuracy", True),
    Column("out NLL", "clean", OUT_OF_DOMAIN, "nll", False),
    Column("out ECE", "clean", OUT_OF_DOMAIN, "ece", False),
    Column("out MCC", "clean", OUT_OF_DOMAIN, "mcc", True),
    Column("corr. acc.", "corrupted", "corrupted/mean", "accuracy", True),
    Column("corr. NLL", "corrupted", "corrupted/mean", "nll", False),
    Column("corr. ECE", "corrupted", "corrupted/mean", "ece", False),
    Column("OOD AUROC", "ood", "ood/*", "auroc", True, OOD_SCORE),
    Column("AURC", "selective", "test", "aurc", False),
    Column("s/epoch", "efficiency", "train", "train_epoch_seconds", False),
    Column("train MiB", "efficiency", "train", "train_peak_mib", False),
)
NOTE = f"OOD AUROC: mean over the sets, by {OOD_SCORE}; corr.: mean over the corruptions"


@dataclass(frozen=True)
class Line:
    """One row: whose numbers, on which data, and of each column number, text and what it is of."""

    labels: tuple[str, str]
    data: str
    cells: tuple[tuple[float, str] | None, ...]
    bases: tuple[Basis | None, ...]  # only numbers of the same can be better than others; None without one


def evaluation_table(runs: Mapping[str, Suites], *, bold: bool) -> str:
    """A row for every run and predictor; the best of each column in bold, or with a star."""
    lines = []
    for name, suites in runs.items():
        data = next((result.data for result in suites.values()), "")
        for predictor in _predictors(suites):
            found = [_records(suites, column, predictor) for column in COLUMNS]
            cells = tuple(_cell(_value(records)) for records in found)
            bases = tuple(
                _basis(suites.get(column.suite), records)
                for column, records in zip(COLUMNS, found, strict=True)
            )
            lines.append(Line((name, predictor), data, cells, bases))
    return _by_data(("run", "prediction"), lines, bold=bold)


def seeds_table(summary: Summary, suites: Sequence[str], *, bold: bool) -> str:
    """Mean and standard deviation of recipes with several seeds; empty where there is none."""
    several = [row for row in summary.rows if len(row.seeds) > 1 and row.suite in suites]
    grouped: dict[tuple[str, str, str], list[SummaryRow]] = {}
    for row in several:
        grouped.setdefault((_recipe_name(row), row.predictor, row.data), []).append(row)
    lines = []
    for (recipe, predictor, data), mine in grouped.items():
        cells = tuple(_spread([row for row in mine if _matches(row, column)]) for column in COLUMNS)
        same = tuple(None if cell is None else Basis.of([]) for cell in cells)  # one call evaluates all alike
        lines.append(Line((recipe, predictor), data, cells, same))
    if not lines:
        return ""
    return "mean and standard deviation over seeds\n" + _by_data(("recipe", "prediction"), lines, bold=bold)


def _recipe_name(row: SummaryRow) -> str:
    return " ".join([row.run, *(f"{key}={value}" for key, value in row.differs.items())])


def _predictors(suites: Suites) -> list[str]:
    found = (record.predictor for result in suites.values() for record in result.records)
    return list(dict.fromkeys(found))


def _basis(result: SuiteResult | None, records: Sequence[Record]) -> Basis | None:
    """How many items records are of, and of how many test items where an ensemble leaves some out."""
    if result is None or not records:
        return None
    if result.suite == "efficiency":  # which is of no items
        return Basis.of([])
    settings = recorded_settings(result)
    sets = [
        (each.set, judged_items(result.suite, each.set, each.predictor, result.curves, settings))
        for each in records
    ]
    unseen = {each.detail[REDUCED] for each in records if REDUCED in each.detail}
    return Basis.of([tuple(sets) if not unseen else tuple(("test", count) for count in sorted(unseen))])


def _records(suites: Suites, column: Column, predictor: str) -> list[Record]:
    """What a column shows: the mean over several sets, else the first."""
    result = suites.get(column.suite)
    found = [
        record
        for record in (() if result is None else result.records)
        if record.predictor == predictor
        and record.metric == column.metric
        and _in_set(record.set, column)
        and (column.score is None or record.detail.get("score") == column.score)
    ]
    return found if column.set.endswith("*") else found[:1]


def _value(records: Sequence[Record]) -> float | None:
    return fmean(record.value for record in records) if records else None


def _matches(row: SummaryRow, column: Column) -> bool:
    scored = column.score is None or row.detail.get("score") == column.score
    return (row.suite, row.metric) == (column.suite, column.metric) and _in_set(row.set, column) and scored


def _in_set(name: str, column: Column) -> bool:
    return name.startswith(column.set[:-1]) if column.set.endswith("*") else name == column.set


def _cell(value: float | None) -> tuple[float, str] | None:
    return None if value is None else (value, _text(value))


def _spread(rows: Sequence[SummaryRow]) -> tuple[float, str] | None:
    """Several sets are averaged seed by seed first; of several sizes of a cost the first is the run's.

    A seed that lacks one of the sets would be a mean over others: it is left out, and with one seed all are.
    """
    if not rows:
        return None
    if rows[0].suite != "ood":
        rows = rows[:1]
    each = [dict(zip(row.seeds, row.values, strict=True)) for row in rows]
    seeds = [fmean(values[seed] for values in each) for seed in each[0] if all(seed in v for v in each)]
    return (fmean(seeds), f"{_text(fmean(seeds))} ± {_text(stdev(seeds))}") if len(seeds) > 1 else None


def _text(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.0f}"


def _by_data(heads: tuple[str, str], lines: Sequence[Line], *, bold: bool) -> str:
    """A table for each data set: only numbers on the same data can be better than others."""
    each = [[line for line in lines if line.data == data] for data in dict.fromkeys(x.data for x in lines)]
    return "\n\n".join(_drawn(heads, some, bold=bold) for some in each)


def _drawn(heads: tuple[str, str], lines: Sequence[Line], *, bold: bool) -> str:
    """Names begin together, numbers end together."""
    sentences = any(COLUMNS[i].set == OUT_OF_DOMAIN for i in _filled(lines))
    shown = [i for i in _filled(lines) if sentences or not COLUMNS[i].texts]
    table = [[(text, False) for text in (*heads, *(COLUMNS[i].heading for i in shown))]]
    for line in lines:
        names = [(visible(text), False) for text in line.labels]
        table.append(names + [_marked(line, lines, i, star=not bold) for i in shown])
    widths = [max(len(text) for text, _ in column) for column in zip(*table, strict=True)]
    drawn = []
    for row in table:
        cells = [
            _padded(*cell, width, left=i < 2) for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        drawn.append("  ".join(cells).rstrip())
    told = [NOTE] if any(COLUMNS[i].suite in ("ood", "corrupted") for i in shown) else []
    return "\n".join([*drawn, *told, *_left_out(lines, shown)])


def _marked(line: Line, lines: Sequence[Line], place: int, *, star: bool) -> tuple[str, bool]:
    """A cell's text, and whether it is to be bold; `star` marks the best where bold cannot be shown."""
    cell = line.cells[place]
    if cell is None:
        return "-", False
    rivals = _rivals(lines, place)
    values = [rival[0] for other in rivals if (rival := other.cells[place]) is not None]
    choose: Callable[[list[float]], float] = max if COLUMNS[place].larger else min
    best = line in rivals and len(set(values)) > 1 and cell[0] == choose(values)
    return (f"*{cell[1]}", False) if best and star else (cell[1], best)


def _rivals(lines: Sequence[Line], place: int) -> list[Line]:
    """Those whose numbers in a column are of the same items."""
    return [lines[i] for i in sorted(compared([line.bases[place] for line in lines]))]


def _left_out(lines: Sequence[Line], shown: Sequence[int]) -> list[str]:
    """Which rows are not compared, as their numbers are of other items than most."""
    found: dict[str, None] = {}
    for place in shown:
        rivals = _rivals(lines, place)
        for line in lines:
            basis = line.bases[place]
            if basis is not None and line not in rivals:
                found[visible(f"{' '.join(line.labels)} ({basis.text()})")] = None
    return [f"on other items than most, so not compared: {', '.join(found)}"] if found else []


def _filled(lines: Sequence[Line]) -> list[int]:
    return [i for i in range(len(COLUMNS)) if any(line.cells[i] is not None for line in lines)]


def _padded(text: str, bold: bool, width: int, *, left: bool) -> str:
    padded = text.ljust(width) if left else text.rjust(width)
    return f"\x1b[1m{padded}\x1b[0m" if bold else padded
