"""The numbers first: every model in one table, accuracy and NLL always beside ECE."""

from collections.abc import Sequence

from gpattention.evaluation.named_predictors import predictor_name
from gpattention.metrics import metric_of
from gpattention.reports.groups import Comparison, Model
from gpattention.reports.markup import Safe, join, tag
from gpattention.reports.missing import missing, remarks
from gpattention.reports.tables import DASH, Table, scrolling, seeds_text, swatch, table_html
from gpattention.reports.tabs import tabs
from gpattention.reports.words import heading, listed
from gpattention.runs import Column, OverSeeds, compared

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


def find(column: Column, model: Model, predictor: str) -> OverSeeds | None:
    """A column's number of a model."""
    return column.find(model.results, model.label, predictor)


def rivals_of(column: Column, comparison: Comparison, predictor: str) -> list[Model]:
    """The models whose numbers can be compared, as they are of the same items."""
    places = compared([find(column, model, predictor) for model in comparison.models])
    return [comparison.models[place] for place in sorted(places)]


def is_shown(column: Column, comparison: Comparison, predictor: str) -> bool:
    """Whether any model has it; the MCC is for text, whose classes are of unequal size."""
    wanted = comparison.texts or column.metric != "mcc"
    return wanted and any(find(column, model, predictor) for model in comparison.models)


def content(comparison: Comparison, name: str) -> Safe:
    """Tiles, a table per predictor, and every number of the clean test set."""
    predictors = comparison.predictors("clean")
    if not predictors:
        return missing(comparison, "clean")
    panels = {predictor_name(p): summary_table(comparison, p) for p in predictors}
    return join(
        _tiles(comparison, predictors[0]),
        tabs(f"{name}-predictors", "whose prediction", panels),
        tag(
            "p",
            "Best in bold. " if len(comparison.models) > 1 else None,
            OTHER_ITEMS if _mixed(comparison, predictors) else None,
            ADVICE,
            _seeds(comparison),
            class_="advice",
        ),
        _all_numbers(comparison),
        remarks(comparison, "clean", beside=("corrupted", "ood")),
    )


def summary_table(comparison: Comparison, predictor: str) -> Safe:
    """One row per model, the best of each column in bold; columns that nobody has are left out."""
    columns = [c for c in COLUMNS if is_shown(c, comparison, predictor)]
    rivals = {column: rivals_of(column, comparison, predictor) for column in columns}
    best = {column: best_text(column, rivals[column], predictor) for column in columns}
    groups = [(g, sum(c.group == g for c in columns)) for g in dict.fromkeys(c.group for c in columns)]
    heads = tag(
        "thead",
        tag("tr", tag("td"), *(tag("th", g, scope="colgroup", colspan=n, class_="group") for g, n in groups)),
        tag("tr", tag("th", "model", scope="col"), *(_head(column) for column in columns)),
    )
    rows = []
    for model in comparison.models:
        cells = [
            _cell(find(column, model, predictor), best[column])
            if model in rivals[column]
            else _aside(column, model, predictor)
            for column in columns
        ]
        rows.append(tag("tr", tag("th", swatch(model), scope="row"), *cells))
    caption = f"{comparison.data}: {predictor_name(predictor)}"
    table = tag("table", tag("caption", caption), heads, tag("tbody", *rows), class_="key summary")
    return scrolling(table, caption)


def best_text(column: Column, rivals: Sequence[Model], predictor: str) -> str | None:
    """The best mean as it is printed, so that what looks equal is bold alike; None for a single model."""
    found = [find(column, model, predictor) for model in rivals]
    means = [each.mean for each in found if each is not None]
    best = column.shown.best(means) if len(means) > 1 else None
    return None if best is None else f"{best:.3f}"


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
                if (found := find(column, model, predictor)) is not None
            }
            for predictor in comparison.predictors("clean")
        }  # fmt: skip
    return {"data": comparison.data, "models": models}


def _head(column: Column) -> Safe:
    metric = column.shown
    words = f"{'larger' if metric.larger else 'smaller'} is better"
    mark = tag("span", metric.arrow, class_="arrow", title=words, aria_label=words, role="img")
    return tag("th", metric.label, " ", mark, scope="col")


def _cell(found: OverSeeds | None, best: str | None) -> Safe:
    if found is None:
        return tag("td", DASH)
    return tag("td", tag("b", found.text()) if f"{found.mean:.3f}" == best else found.text())


def _aside(column: Column, model: Model, predictor: str) -> Safe:
    """A number on other items than most of its column."""
    found = find(column, model, predictor)
    if found is None:
        return _cell(None, None)
    return tag("td", found.text(), tag("small", f" ({found.basis.text()})"))


def _mixed(comparison: Comparison, predictors: Sequence[str]) -> bool:
    """Whether any table has a column of numbers on different items."""
    return any(
        is_shown(column, comparison, predictor)
        and len({found.basis for m in comparison.models if (found := find(column, m, predictor))}) > 1
        for predictor in predictors
        for column in COLUMNS
    )


def _tiles(comparison: Comparison, predictor: str) -> Safe:
    tiles = []
    for group, metric, what in (
        ("test", "accuracy", "accuracy"),
        ("test", "nll", "NLL"),
        ("test", "ece", "ECE"),
        ("corrupted", "ece", "ECE, corrupted"),
        ("unknown data", "auroc", "AUROC, unknown"),
    ):
        column = next(c for c in COLUMNS if (c.group, c.metric) == (group, metric))
        rivals = rivals_of(column, comparison, predictor)
        known = [(m, found) for m in rivals if (found := find(column, m, predictor)) is not None]
        if known:
            sign = -1 if metric_of(metric).larger else 1
            model, found = min(known, key=lambda pair: sign * pair[1].mean)
            tiles.append(_tile(what, model, found, _company(model, column, predictor), len(known) > 1))
    return tag("ul", *tiles, class_="tiles")


def _tile(what: str, model: Model, found: OverSeeds, company: str, several: bool) -> Safe:
    error = None if found.error is None else tag("small", f" ± {found.error:.3f}")
    return tag(
        "li",
        tag("span", f"Best {what}" if several else heading(what), class_="tile-name"),
        tag("span", f"{found.mean:.3f}", error, class_="tile-value"),
        swatch(model),
        tag("span", company, class_="tile-company") if company else None,
    )


def _company(model: Model, column: Column, predictor: str) -> str:
    """An ECE never stands alone."""
    if column.metric != "ece":
        return ""
    beside = [c for c in COLUMNS if c.group == column.group and c.metric in ("accuracy", "nll")]
    known = ((c.shown.label, find(c, model, predictor)) for c in beside)
    return ", ".join(f"{label} {found.mean:.3f}" for label, found in known if found is not None)


def _seeds(comparison: Comparison) -> str:
    if not comparison.several_seeds:
        return ""
    counts = ", ".join(f"{model.label} {len(model.runs)}" for model in comparison.models)
    told = f" Mean ± standard error over runs with different seeds ({counts})."
    repeated = [m.label for m in comparison.models if len({run.seed for run in m.runs}) < len(m.runs)]
    # they differ by rounding alone, which says nothing of how much seeds differ
    if repeated:
        told += f" Some runs of {listed(repeated)} have the same seed: these count once, by their mean."
    return told


def _all_numbers(comparison: Comparison) -> Safe:
    rows = []
    for what in comparison.numbers("clean"):
        part, predictor, metric = (what[key] for key in ("set", "predictor", "metric"))
        found = (model.find("clean", part, metric, predictor) for model in comparison.models)
        name = f"{part}, {predictor_name(predictor)}, {metric_of(metric).label}"
        rows.append([name, *map(seeds_text, found)])
    table = Table(["set, prediction, metric", *(model.label for model in comparison.models)], rows)
    return tag(
        "details",
        tag("summary", "All numbers of the clean suite"),
        table_html(table, "All numbers of the clean suite"),
    )
