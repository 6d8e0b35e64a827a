"""The numbers first: every model in one table, accuracy and NLL always beside ECE."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from gpattention.reports.comparable import Basis, Sets, compared
from gpattention.reports.groups import Comparison, Model, Spread
from gpattention.reports.inputs import RunData
from gpattention.reports.markup import Safe, join, tag
from gpattention.reports.missing import missing, remarks
from gpattention.reports.tables import DASH, Table, scrolling, spread_text, swatch, table_html
from gpattention.reports.tabs import tabs
from gpattention.reports.words import LARGER_IS_BETTER, heading, listed, metric_name, predictor_name

SCORE = "entropy"  # of the table's AUROC
ADVICE = (
    "A model that answers with the frequencies of the classes is calibrated and useless: read "
    "ECE beside accuracy and NLL."
)


OTHER_ITEMS = (
    "Numbers on other items than most of their column say on how many, and are not compared with the rest. "
)


@dataclass(frozen=True)
class Column:
    """A number of a run, by predictor."""

    group: str
    metric: str
    measure: Callable[[RunData, str], float | None]
    judged_on: Callable[[RunData, str], Sets]

    def spread(self, model: Model, predictor: str) -> Spread | None:
        """Over the seeds of a model."""
        return model.spread_of(lambda run: self.measure(run, predictor))

    def basis(self, model: Model, predictor: str) -> Basis | None:
        """What the number was computed on; None where there is none."""
        runs = [run for run in model.runs if self.measure(run, predictor) is not None]
        return Basis.of(self.judged_on(run, predictor) for run in runs) if runs else None

    def rivals(self, comparison: Comparison, predictor: str) -> list[Model]:
        """The models whose numbers can be compared, as they are of the same items."""
        places = compared([self.basis(model, predictor) for model in comparison.models])
        return [comparison.models[place] for place in sorted(places)]

    def shown(self, comparison: Comparison, predictor: str) -> bool:
        """Whether any model has it; the MCC is for text, whose classes are of unequal size."""
        wanted = comparison.texts or self.metric != "mcc"
        return wanted and any(self.spread(model, predictor) for model in comparison.models)


def _recorded(suite: str, set: str, metric: str) -> Callable[[RunData, str], float | None]:
    return lambda run, predictor: run.value(suite, set, metric, predictor)


def _on(suite: str, set: str) -> Callable[[RunData, str], Sets]:
    return lambda run, predictor: run.judged_on(suite, [set], predictor)


def _on_corrupted(run: RunData, predictor: str) -> Sets:
    """Each corruption at each severity, as a mean over fewer is another."""
    names = {r["set"] for r in run.records("corrupted") if r["predictor"] == predictor}
    each = sorted(name for name in names if name.count("/") == 2)
    return run.judged_on("corrupted", each or ["corrupted/mean"], predictor)


def _on_outside(run: RunData, predictor: str) -> Sets:
    names = {r["set"] for r in run.records("ood") if r["predictor"] == predictor and r["metric"] == "auroc"}
    return run.judged_on("ood", sorted(names), predictor)


def _mean_auroc(run: RunData, predictor: str) -> float | None:
    """Over the out-of-distribution sets."""
    sets = {record["set"] for record in run.records("ood")}
    values = (run.value("ood", part, "auroc", predictor, score=SCORE) for part in sorted(sets))
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


COLUMNS = (
    *(
        Column("test", m, _recorded("clean", "test", m), _on("clean", "test"))
        for m in ("accuracy", "mcc", "nll", "ece", "aurc")
    ),
    *(
        Column("corrupted", m, _recorded("corrupted", "corrupted/mean", m), _on_corrupted)
        for m in ("accuracy", "nll", "ece")
    ),
    Column("unknown data", "auroc", _mean_auroc, _on_outside),
)


def content(comparison: Comparison, name: str) -> Safe:
    """Tiles, a table per predictor, and every number of the clean test set."""
    predictors = comparison.predictors("clean")
    if not predictors:
        return missing(comparison, "clean", "evaluation of the test set")
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
    columns = [c for c in COLUMNS if c.shown(comparison, predictor)]
    rivals = {column: column.rivals(comparison, predictor) for column in columns}
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
            _cell(column.spread(model, predictor), best[column])
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
    spreads = [column.spread(model, predictor) for model in rivals]
    means = [spread.mean for spread in spreads if spread is not None]
    if len(means) < 2:
        return None
    return f"{max(means) if column.metric in LARGER_IS_BETTER else min(means):.3f}"


def summary_data(comparison: Comparison) -> dict[str, object]:
    """The same numbers for programs."""
    models = {}
    for model in comparison.models:
        models[model.label] = {
            predictor: {
                f"{column.group} {column.metric}": {"mean": s.mean, "stddev": s.stddev, "runs": s.count}
                for column in COLUMNS
                if (s := column.spread(model, predictor)) is not None
            }
            for predictor in comparison.predictors("clean")
        }
    return {"data": comparison.data, "models": models}


def _head(column: Column) -> Safe:
    arrow, words = ("↑", "larger") if column.metric in LARGER_IS_BETTER else ("↓", "smaller")
    mark = tag(
        "span", arrow, class_="arrow", title=f"{words} is better", aria_label=f"{words} is better", role="img"
    )
    return tag("th", metric_name(column.metric), " ", mark, scope="col")


def _cell(spread: Spread | None, best: str | None) -> Safe:
    if spread is None:
        return tag("td", DASH)
    text = spread.text()
    return tag("td", tag("b", text) if f"{spread.mean:.3f}" == best else text)


def _aside(column: Column, model: Model, predictor: str) -> Safe:
    """A number on other items than most of its column."""
    spread, basis = column.spread(model, predictor), column.basis(model, predictor)
    if spread is None or basis is None:
        return _cell(None, None)
    return tag("td", spread.text(), tag("small", f" ({basis.text()})"))


def _mixed(comparison: Comparison, predictors: Sequence[str]) -> bool:
    """Whether any table has a column of numbers on different items."""
    return any(
        column.shown(comparison, predictor)
        and len({column.basis(model, predictor) for model in comparison.models} - {None}) > 1
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
        rivals = column.rivals(comparison, predictor)
        known = [(m, s) for m in rivals if (s := column.spread(m, predictor)) is not None]
        if known:
            sign = -1 if metric in LARGER_IS_BETTER else 1
            model, spread = min(known, key=lambda pair: sign * pair[1].mean)
            tiles.append(_tile(what, model, spread, _company(model, column, predictor), len(known) > 1))
    return tag("ul", *tiles, class_="tiles")


def _tile(what: str, model: Model, spread: Spread, company: str, several: bool) -> Safe:
    deviation = None if spread.stddev is None else tag("small", f" ± {spread.stddev:.3f}")
    return tag(
        "li",
        tag("span", f"Best {what}" if several else heading(what), class_="tile-name"),
        tag("span", f"{spread.mean:.3f}", deviation, class_="tile-value"),
        swatch(model),
        tag("span", company, class_="tile-company") if company else None,
    )


def _company(model: Model, column: Column, predictor: str) -> str:
    """An ECE never stands alone."""
    if column.metric != "ece":
        return ""
    beside = [c for c in COLUMNS if c.group == column.group and c.metric in ("accuracy", "nll")]
    known = ((c.metric, c.spread(model, predictor)) for c in beside)
    return ", ".join(f"{metric_name(metric)} {s.mean:.3f}" for metric, s in known if s is not None)


def _seeds(comparison: Comparison) -> str:
    if not comparison.several_seeds:
        return ""
    counts = ", ".join(f"{model.label} {len(model.runs)}" for model in comparison.models)
    told = f" Mean ± standard deviation over runs with different seeds ({counts})."
    repeated = [m.label for m in comparison.models if len({run.seed for run in m.runs}) < len(m.runs)]
    # runs of one seed differ by rounding alone: they say nothing of how much seeds differ
    return (
        f"{told} Some runs of {listed(repeated)} have the same seed, all are counted." if repeated else told
    )


def _all_numbers(comparison: Comparison) -> Safe:
    keys = dict.fromkeys(
        (record["set"], record["predictor"], record["metric"])
        for run in comparison.runs
        for record in run.records("clean")
    )
    rows = []
    for part, predictor, metric in keys:
        spreads = (model.spread("clean", part, metric, predictor) for model in comparison.models)
        cells = (spread_text(spread) for spread in spreads)
        rows.append([f"{part}, {predictor_name(predictor)}, {metric_name(metric)}", *cells])
    table = Table(["set, prediction, metric", *(model.label for model in comparison.models)], rows)
    return tag(
        "details",
        tag("summary", "All numbers of the clean suite"),
        table_html(table, "All numbers of the clean suite"),
    )
