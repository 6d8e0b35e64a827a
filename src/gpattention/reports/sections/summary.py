"""The numbers first: every model in one table, accuracy and NLL always beside ECE."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gpattention.evaluation import predictor_name
from gpattention.metrics import metric_of
from gpattention.reports.comparison import Comparison, Model, heading, listed
from gpattention.reports.html import DASH, Table, folded, join, render, seeds_text, tabs
from gpattention.runs import Column, OverSeeds, compared

if TYPE_CHECKING:
    from markupsafe import Markup

SCORE = "entropy"  # of the table's AUROC
ADVICE = (
    "A model that answers with the frequencies of the classes is calibrated and useless: read "
    "ECE beside accuracy and NLL."
)
OTHER_ITEMS = (
    "Numbers on other items than most of their column say on how many, and are not compared with the rest. "
)
COLUMNS = (
    *(Column("clean", "test", m, group="test") for m in ("accuracy", "mcc", "nll", "ece", "aurc")),
    *(Column("corrupted", "corrupted/mean", m, group="corrupted") for m in ("accuracy", "nll", "ece")),
    Column("ood", "ood/*", "auroc", SCORE, group="unknown data"),
)
TILES = (
    ("test", "accuracy", "accuracy"),
    ("test", "nll", "NLL"),
    ("test", "ece", "ECE"),
    ("corrupted", "ece", "ECE, corrupted"),
    ("unknown data", "auroc", "AUROC, unknown"),
)


def content(comparison: Comparison, name: str) -> "Markup":
    """Tiles, a table per predictor, and every number of the clean test set."""
    predictors = comparison.predictors("clean")
    if not predictors:
        return render("missing", *comparison.what_is_missing("clean"))
    panels = {predictor_name(p): _table(comparison, p) for p in predictors}
    best = "Best in bold. " if len(comparison.models) > 1 else ""
    other = OTHER_ITEMS if _mixed(comparison, predictors) else ""
    rows = []
    for what in comparison.numbers("clean"):
        part, predictor, metric = (what[key] for key in ("set", "predictor", "metric"))
        found = (model.find("clean", part, metric, predictor) for model in comparison.models)
        row = f"{part}, {predictor_name(predictor)}, {metric_of(metric).label}"
        rows.append([row, *map(seeds_text, found)])
    numbers = Table(["set, prediction, metric", *comparison.labels], rows)
    remarks = comparison.remarks("clean", beside=("corrupted", "ood"))
    return join(
        render("tiles", _tiles(comparison, predictors[0])),
        tabs(f"{name}-predictors", "whose prediction", panels),
        render("advice", f"{best}{other}{ADVICE}{_seeds(comparison)}"),
        folded("All numbers of the clean suite", numbers),
        render("notes", "Read with this in mind", remarks),
    )


def summary_data(comparison: Comparison) -> dict[str, object]:
    """The same numbers for programs."""
    models = {}
    for model in comparison.models:
        models[model.label] = {
            predictor: {
                f"{column.group} {column.metric}": {
                    "mean": found.mean, "standard_error": found.error, "runs": found.count,
                }
                for column in COLUMNS
                if (found := _find(column, model, predictor)) is not None
            }
            for predictor in comparison.predictors("clean")
        }  # fmt: skip
    return {"data": comparison.data, "models": models}


def _find(column: Column, model: Model, predictor: str) -> OverSeeds | None:
    return column.find(model.results, model.label, predictor)


def _rivals(column: Column, comparison: Comparison, predictor: str) -> list[Model]:
    """The models whose numbers can be compared, as they are of the same items."""
    places = compared([_find(column, model, predictor) for model in comparison.models])
    return [comparison.models[place] for place in sorted(places)]


def _columns(comparison: Comparison, predictor: str) -> list[Column]:
    """The columns that any model has; the MCC is for text, whose classes are of unequal size."""
    return [
        column
        for column in COLUMNS
        if (comparison.texts or column.metric != "mcc")
        and any(_find(column, model, predictor) for model in comparison.models)
    ]


def _table(comparison: Comparison, predictor: str) -> "Markup":
    """One row per model, the best of each column in bold."""
    columns = _columns(comparison, predictor)
    rivals = {column: _rivals(column, comparison, predictor) for column in columns}
    best = {column: _best_text(column, rivals[column], predictor) for column in columns}
    groups = [(g, sum(c.group == g for c in columns)) for g in dict.fromkeys(c.group for c in columns)]

    def cell(column: Column, model: Model) -> tuple[str, bool, str]:
        found = _find(column, model, predictor)
        if found is None:
            return DASH, False, ""
        if model not in rivals[column]:  # on other items than most of its column
            return found.text(), False, found.basis_text()
        return found.text(), f"{found.mean:.3f}" == best[column], ""

    rows = [(model, [cell(column, model) for column in columns]) for model in comparison.models]
    caption = f"{comparison.data}: {predictor_name(predictor)}"
    return render("summary_table", caption, groups, [column.shown for column in columns], rows)


def _best_text(column: Column, rivals: Sequence[Model], predictor: str) -> str | None:
    """The best mean as it is printed, so that what looks equal is bold alike; None for a single model."""
    means = [found.mean for model in rivals if (found := _find(column, model, predictor)) is not None]
    best = column.shown.best(means) if len(means) > 1 else None
    return None if best is None else f"{best:.3f}"


def _mixed(comparison: Comparison, predictors: Sequence[str]) -> bool:
    """Whether any table has a column of numbers on different items."""
    return any(
        len({found.basis for m in comparison.models if (found := _find(column, m, predictor))}) > 1
        for predictor in predictors
        for column in _columns(comparison, predictor)
    )


def _tiles(comparison: Comparison, predictor: str) -> list[dict[str, Any]]:
    tiles = []
    for group, metric, what in TILES:
        column = next(c for c in COLUMNS if (c.group, c.metric) == (group, metric))
        rivals = _rivals(column, comparison, predictor)
        known = [(m, found) for m in rivals if (found := _find(column, m, predictor)) is not None]
        if not known:
            continue
        sign = -1 if metric_of(metric).larger else 1
        model, found = min(known, key=lambda pair: sign * pair[1].mean)
        company = ""
        if metric == "ece":  # an ECE never stands alone
            beside = [c for c in COLUMNS if c.group == group and c.metric in ("accuracy", "nll")]
            pairs = ((c.shown.label, _find(c, model, predictor)) for c in beside)
            company = ", ".join(f"{label} {each.mean:.3f}" for label, each in pairs if each is not None)
        tiles.append(
            {
                "name": f"Best {what}" if len(known) > 1 else heading(what),
                "value": f"{found.mean:.3f}",
                "error": None if found.error is None else f"{found.error:.3f}",
                "model": model,
                "company": company,
            }
        )
    return tiles


def _seeds(comparison: Comparison) -> str:
    if not comparison.several_seeds:
        return ""
    counts = ", ".join(f"{model.label} {len(model.runs)}" for model in comparison.models)
    text = f" Mean ± standard error over runs with different seeds ({counts})."
    repeated = [m.label for m in comparison.models if len({run.seed for run in m.runs}) < len(m.runs)]
    # they differ by rounding alone, which says nothing of how much seeds differ
    if repeated:
        text += f" Some runs of {listed(repeated)} have the same seed: these count once, by their mean."
    return text
