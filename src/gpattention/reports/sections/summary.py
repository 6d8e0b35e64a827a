"""The numbers first: what they say, then every model in one table, accuracy and NLL always beside ECE."""

from collections.abc import Sequence
from itertools import product
from typing import Any

from gpattention.evaluation import predictor_name
from gpattention.metrics import Metric, metric_of
from gpattention.reports import html
from gpattention.reports.comparison import Comparison, Model, ends_of, heading, listed
from gpattention.reports.sections import verdict
from gpattention.reports.sections.registry import section
from gpattention.runs import Column, OverSeeds, compared

SCORE = "entropy"  # of the table's AUROC
ADVICE = (
    "A model that always answers with the frequencies of the classes is calibrated and useless: read ECE "
    "together with accuracy and NLL."
)
OTHER_ITEMS = (
    "A number from other items than the rest of its column says from how many, and is not compared. "
)
COLUMNS = (
    *(Column("clean", "test", m, group="test") for m in ("accuracy", "mcc", "nll", "ece", "aurc")),
    *(Column("corrupted", "corrupted/mean", m, group="corrupted test") for m in ("accuracy", "nll", "ece")),
    Column("ood", "ood/*", "auroc", SCORE, group="foreign data"),
)
TILES = (
    ("test", "accuracy", "accuracy, test"),
    ("test", "nll", "NLL, test"),
    ("test", "ece", "ECE, test"),
    ("corrupted test", "ece", "ECE, corrupted test"),
    ("foreign data", "auroc", "AUROC, foreign data"),
)


@section(
    "summary", "Summary", "Results on test items: accuracy, confidence, and how well the two agree.",
    place=10,
)  # fmt: skip
def content(comparison: Comparison, name: str) -> "html.Markup":
    """The verdict, tiles, a table per predictor, and every number of the clean test set."""
    predictors = comparison.predictors("clean")
    if not predictors:
        return html.render("missing", *comparison.what_is_missing("clean"))
    panels = {predictor_name(p): _table(comparison, p) for p in predictors}
    best = "Best in bold. " if len(comparison.models) > 1 else ""
    other = OTHER_ITEMS if _mixed(comparison, predictors) else ""
    numbers = comparison.numbers("clean", "set, prediction, metric", _row)
    remarks = comparison.remarks("clean", beside=("corrupted", "ood"))
    return html.join(
        verdict.content(comparison),
        html.render("tiles", _tiles(comparison, predictors[0])),
        html.tabs(f"{name}-predictors", "whose prediction", panels),
        html.render("advice", f"{best}{other}{ADVICE}{_seeds(comparison)}"),
        html.folded("All numbers of the clean suite", numbers),
        html.render("notes", "Read with this in mind", remarks),
    )


def _row(what: dict[str, Any]) -> str:
    return f"{what['set']}, {predictor_name(what['predictor'])}, {metric_of(what['metric']).named}"


def summary_data(comparison: Comparison) -> dict[str, object]:
    """The same numbers for programs."""
    models: dict[str, dict[str, dict[str, object]]] = {label: {} for label in comparison.labels}
    for model, predictor in product(comparison.models, comparison.predictors("clean")):
        numbers = models[model.label].setdefault(predictor, {})
        for column in COLUMNS:
            if found := column.find(model.results, model.label, predictor):
                shown = {
                    "mean": found.mean, "standard_error": found.error, "interval": found.interval,
                    "runs": found.count,
                }  # fmt: skip
                numbers[f"{column.group} {column.metric}"] = shown
    return {"data": comparison.data, "models": models}


def _grid(comparison: Comparison, predictor: str) -> dict[Column, dict[Model, OverSeeds]]:
    """The columns that any model has; the MCC is for text, whose classes are of unequal size."""
    grid: dict[Column, dict[Model, OverSeeds]] = {}
    for column, model in product(COLUMNS, comparison.models):
        found = column.find(model.results, model.label, predictor)
        if found is not None and (comparison.texts or column.metric != "mcc"):
            grid.setdefault(column, {})[model] = found
    return grid


def _rivals(figures: dict[Model, OverSeeds]) -> dict[Model, OverSeeds]:
    """Those that can be compared, as they are of the same items."""
    places = compared(list(figures.values()))
    return {m: figure for place, (m, figure) in enumerate(figures.items()) if place in places}


def _table(comparison: Comparison, predictor: str) -> "html.Markup":
    """One row per model, the best of each column in bold."""
    grid = _grid(comparison, predictor)
    rows: list[tuple[Model, list[tuple[str, str, bool, str]]]] = [(model, []) for model in comparison.models]
    for column, figures in grid.items():
        rivals = _rivals(figures)
        first = column.shown.best([each.mean for each in rivals.values()]) if len(rivals) > 1 else None
        best = next((_cell(each, column.shown)[0] for each in rivals.values() if each.mean == first), None)
        for model, cells in rows:
            found = figures.get(model)
            # what looks equal is bold alike; what is on other items than most says on how many
            bold = model in rivals and _cell(rivals[model], column.shown)[0] == best
            aside = found.basis_text() if found and model not in rivals else ""
            cells.append((*_cell(found, column.shown), bold, aside))
    groups = [(g, sum(c.group == g for c in grid)) for g in dict.fromkeys(c.group for c in grid)]
    caption = f"{comparison.data}: {predictor_name(predictor)}"
    return html.render("summary_table", caption, groups, [column.shown for column in grid], rows)


def _cell(found: OverSeeds | None, metric: Metric) -> tuple[str, str]:
    """A number and the ends of its interval."""
    if found is None:
        return html.DASH, ""
    shape, ends = f".{metric.digits}f", ends_of(found, metric)
    return (
        f"{found.mean * metric.scale:{shape}}",
        "" if ends is None else f"{ends[0]:{shape}} to {ends[1]:{shape}}",
    )


def _mixed(comparison: Comparison, predictors: Sequence[str]) -> bool:
    """Whether any table has a column of numbers on different items."""
    columns = (figures for predictor in predictors for figures in _grid(comparison, predictor).values())
    return any(len({found.basis for found in figures.values()}) > 1 for figures in columns)


def _tiles(comparison: Comparison, predictor: str) -> list[dict[str, Any]]:
    tiles = []
    grid = {(c.group, c.metric): figures for c, figures in _grid(comparison, predictor).items()}
    for group, metric, what in TILES:
        rivals = _rivals(grid.get((group, metric), {}))
        if not rivals:
            continue
        sign = -1 if metric_of(metric).larger else 1
        model, found = min(rivals.items(), key=lambda pair: sign * pair[1].mean)
        company = ""
        if metric == "ece":  # an ECE never stands alone
            beside = {m: grid.get((group, m), {}).get(model) for m in ("accuracy", "nll")}
            known = ((metric_of(m), x) for m, x in beside.items() if x)
            company = ", ".join(f"{of.label} {_cell(x, of)[0]} {of.unit or of.counted_in}" for of, x in known)
        value, ends = _cell(found, metric_of(metric))
        tiles.append({
            "name": f"Best {what}" if len(rivals) > 1 else heading(what), "value": value, "ends": ends,
            "unit": metric_of(metric).unit or metric_of(metric).counted_in, "model": model,
            "company": company,
        })  # fmt: skip
    return tiles


def _seeds(comparison: Comparison) -> str:
    """How the intervals were made."""
    text = (
        " Small numbers are 95 % intervals: for one seed by bootstrap over test items, which leaves out how "
        "much seeds differ"
    )
    if not comparison.several_seeds:
        return text + "."
    counts = ", ".join(f"{model.label} {len(model.runs)}" for model in comparison.models)
    text += f"; for several by Student's t over the seeds ({counts})."
    repeated = [m.label for m in comparison.models if len({run.seed for run in m.runs}) < len(m.runs)]
    # they differ by rounding alone, which says nothing of how much seeds differ
    if repeated:
        text += f" Some runs of {listed(repeated)} have the same seed: these count once, by their mean."
    return text
