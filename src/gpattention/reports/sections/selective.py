"""Selective prediction: what it buys to answer only when certain, and to answer with sets."""

from gpattention.reports.charts import chart, charts
from gpattention.reports.figures import risk_coverage_figure
from gpattention.reports.figures.lines import Points
from gpattention.reports.groups import Comparison
from gpattention.reports.markup import Safe, join, tag
from gpattention.reports.missing import has, missing, remarks
from gpattention.reports.tables import Table, lines_table, read_at, spread_text, table_html
from gpattention.reports.words import heading, listed, metric_name, predictor_name

COVERAGES = tuple(i / 20 for i in range(1, 21))  # where a curve is read for its table


def content(comparison: Comparison, name: str) -> Safe:
    """Risk against coverage for each predictor, then every number of the suite."""
    if not has(comparison, "selective"):
        return missing(comparison, "selective", "evaluation of selective prediction")
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
    keys = {}
    for run in comparison.runs:
        for record in run.records("selective"):
            # temperatures differ from run to run
            detail = {k: v for k, v in record.get("detail", {}).items() if k != "temperature"}
            key = (record["set"], record["predictor"], record["metric"], tuple(sorted(detail.items())))
            keys[key] = detail
    if not keys:
        return None
    rows = []
    for (part, predictor, metric, settings), detail in keys.items():
        spreads = (m.spread("selective", part, metric, predictor, **detail) for m in comparison.models)
        extra = "".join(f", {word} {value}" for word, value in settings)
        name = f"{part}, {predictor_name(predictor)}, {metric_name(metric)}{extra}"
        rows.append([name, *(spread_text(spread) for spread in spreads)])
    table = Table(["set, prediction, metric", *(m.label for m in comparison.models)], rows)
    caption = "Conformal sets and coverage at a given risk"
    return tag("details", tag("summary", caption), table_html(table, caption))
