"""Selective prediction: what it buys to answer only when certain, and to answer with sets."""

from gpattention.evaluation.named_predictors import predictor_name
from gpattention.metrics import metric_of
from gpattention.reports.charts import chart, charts
from gpattention.reports.figures import risk_coverage_figure
from gpattention.reports.figures.lines import Points
from gpattention.reports.groups import Comparison
from gpattention.reports.markup import Safe, join, tag
from gpattention.reports.missing import has, missing, remarks
from gpattention.reports.tables import Table, lines_table, read_at, seeds_text, table_html
from gpattention.reports.words import heading, listed

COVERAGES = tuple(i / 20 for i in range(1, 21))  # where a curve is read for its table


def content(comparison: Comparison, name: str) -> Safe:
    """Risk against coverage for each predictor, then every number of the suite."""
    if not has(comparison, "selective"):
        return missing(comparison, "selective")
    drawable = {p for m in comparison.models for c in m.curves("selective", "risk_coverage") for p in c}
    predictors = [p for p in comparison.predictors("selective") if p in drawable]
    drawn = (_chart(f"{name}-{i}", comparison, predictor) for i, predictor in enumerate(predictors))
    return join(charts(*drawn), _numbers(comparison), remarks(comparison, "selective"))


def _chart(name: str, comparison: Comparison, predictor: str) -> Safe:
    found = {}
    for model in comparison.models:
        whole = model.curves("selective", "risk_coverage")
        if seeds := [curve[predictor] for curve in whole if curve.get(predictor)]:
            found[model.label] = seeds
    series = {
        label: [read_at(list(zip(c["coverage"], c["risk"], strict=True)), COVERAGES) for c in seeds]
        for label, seeds in found.items()
    }
    return chart(
        name, risk_coverage_figure(found, styles=comparison.styles),
        lines_table("share answered", series), title=heading(predictor_name(predictor)),
        alternative=f"Error rate among the items answered, {predictor_name(predictor)}: at half of the items "
        f"{_at_half(series)}",
    )  # fmt: skip


def _at_half(series: "dict[str, list[Points]]") -> str:
    told = []
    for label, lines in series.items():
        values = [risk for line in lines for coverage, risk in line if coverage == 0.5]
        if values:
            told.append(f"{label} {sum(values) / len(values):.3g}")
    return listed(told) if told else "not measured"


def _numbers(comparison: Comparison) -> Safe | None:
    rows = []
    for what in comparison.numbers("selective"):
        set_, predictor, metric = (what[key] for key in ("set", "predictor", "metric"))
        detail = {k: v for k, v in what.items() if k not in ("recipe", "suite", "set", "predictor", "metric")}
        found = (m.find("selective", set_, metric, predictor, **detail) for m in comparison.models)
        extra = "".join(f", {word} {value}" for word, value in detail.items())
        name = f"{set_}, {predictor_name(predictor)}, {metric_of(metric).label}{extra}"
        rows.append([name, *map(seeds_text, found)])
    if not rows:
        return None
    table = Table(["set, prediction, metric", *(m.label for m in comparison.models)], rows)
    caption = "Conformal sets and coverage at a given risk"
    return tag("details", tag("summary", caption), table_html(table, caption))
