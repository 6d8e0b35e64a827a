"""Confidence: is 80 % right in 80 % of the cases, and what does it buy to answer only when certain?"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpattention.evaluation import predictor_name
from gpattention.metrics import metric_of
from gpattention.reports import html
from gpattention.reports.comparison import Comparison, Model, heading, listed, number
from gpattention.reports.figures import reliability_figure, risk_coverage_figure

if TYPE_CHECKING:
    from markupsafe import Markup

COVERAGES = tuple(i / 20 for i in range(1, 21))  # where a curve is read for its table


def reliability(comparison: Comparison, name: str) -> "Markup":
    """One diagram per model, a tab per predictor."""
    panels: dict[str, Markup] = {}
    for predictor in comparison.predictors("clean"):
        drawn = [
            _diagram(f"{name}-{len(panels)}-{j}", model, predictor, bins)
            for j, model in enumerate(comparison.models)
            if (bins := _bins(model, predictor))
        ]
        if drawn:
            panels[predictor_name(predictor)] = html.charts(*drawn)
    if not panels:
        return html.render("missing", *comparison.what_is_missing("clean", "reliability of the test set"))
    return html.tabs(f"{name}-predictors", "whose prediction", panels)


def _diagram(name: str, model: Model, predictor: str, bins: Mapping[str, Sequence[Any]]) -> "Markup":
    found = ((m, model.find("clean", "test", m, predictor)) for m in ("accuracy", "nll", "ece"))
    numbers = ", ".join(f"{metric_of(metric).label} {each.text()}" for metric, each in found if each)
    edges = bins["edges"]
    rows = [
        [f"{edges[i]:.3g} to {edges[i + 1]:.3g}", bins["confidence"][i], bins["accuracy"][i], f"{count:g}"]
        for i, count in enumerate(bins["count"])
    ]
    table = html.Table(["confidence", "mean confidence", "accuracy", "items"], rows)
    return html.chart(
        name, reliability_figure(bins, style=model.style), table, title=html.render("swatch", model),
        caption=numbers,
        alternative=f"Reliability diagram of {model.label}, {predictor_name(predictor)}: {numbers}",
    )  # fmt: skip


def _bins(model: Model, predictor: str) -> dict[str, list[Any]] | None:
    """Bins of all seeds together; None where no run has them."""
    found = [curve[predictor] for curve in model.curves("clean", "reliability") if predictor in curve]
    return pooled_bins(found) if found else None


def pooled_bins(several: Sequence[Mapping[str, Sequence[Any]]]) -> dict[str, list[Any]]:
    """Bins of several runs as if all their items were one set; those with other edges are left out."""
    edges = list(several[0]["edges"])
    alike = [bins for bins in several if list(bins["edges"]) == edges]
    pooled: dict[str, list[Any]] = {"edges": edges, "confidence": [], "accuracy": [], "count": []}
    for k in range(len(edges) - 1):
        counts = [number(bins["count"][k]) or 0.0 for bins in alike]
        total = sum(counts)
        pooled["count"].append(total)
        for key in ("confidence", "accuracy"):
            parts = ((number(bins[key][k]) or 0.0) * n for bins, n in zip(alike, counts, strict=True))
            pooled[key].append(sum(parts) / total if total else None)
    return pooled


def selective(comparison: Comparison, name: str) -> "Markup":
    """Risk against coverage for each predictor, then every number of the suite."""
    drawable = {p for m in comparison.models for c in m.curves("selective", "risk_coverage") for p in c}
    predictors = [p for p in comparison.predictors("selective") if p in drawable]
    rows = []
    for what in comparison.numbers("selective"):
        set_, predictor, metric = (what[key] for key in ("set", "predictor", "metric"))
        detail = {k: v for k, v in what.items() if k not in ("recipe", "suite", "set", "predictor", "metric")}
        found = (m.find("selective", set_, metric, predictor, **detail) for m in comparison.models)
        extra = "".join(f", {word} {value}" for word, value in detail.items())
        row = f"{set_}, {predictor_name(predictor)}, {metric_of(metric).label}{extra}"
        rows.append([row, *map(html.seeds_text, found)])
    return html.join(
        html.charts(*(_risk(f"{name}-{i}", comparison, predictor) for i, predictor in enumerate(predictors))),
        html.folded(
            "Conformal sets and coverage at a given risk",
            html.Table(["set, prediction, metric", *comparison.labels], rows),
        ),
    )


def _risk(name: str, comparison: Comparison, predictor: str) -> "Markup":
    found = {}
    for model in comparison.models:
        whole = model.curves("selective", "risk_coverage")
        if seeds := [curve[predictor] for curve in whole if curve.get(predictor)]:
            found[model.label] = seeds
    series = {
        label: [html.read_at(list(zip(c["coverage"], c["risk"], strict=True)), COVERAGES) for c in seeds]
        for label, seeds in found.items()
    }
    at_half = {
        label: [risk for line in lines for coverage, risk in line if coverage == 0.5]
        for label, lines in series.items()
    }
    words = [f"{label} {sum(risks) / len(risks):.3g}" for label, risks in at_half.items() if risks]
    return html.chart(
        name, risk_coverage_figure(found, styles=comparison.styles),
        html.lines_table("share answered", series), title=heading(predictor_name(predictor)),
        alternative=f"Error rate among the items answered, {predictor_name(predictor)}: at half of the items "
        f"{listed(words) if words else 'not measured'}",
    )  # fmt: skip
