"""Reliability diagrams: is a confidence of 80 % right in 80 % of the cases?"""

from collections.abc import Mapping, Sequence
from typing import Any

from gpattention.evaluation.named_predictors import predictor_name
from gpattention.metrics import metric_of
from gpattention.reports.charts import chart, charts
from gpattention.reports.figures import reliability_figure
from gpattention.reports.groups import Comparison, Model
from gpattention.reports.markup import Safe, join
from gpattention.reports.missing import missing
from gpattention.reports.tables import Table, swatch
from gpattention.reports.tabs import tabs
from gpattention.reports.words import number


def content(comparison: Comparison, name: str) -> Safe:
    """One diagram per model, a tab per predictor."""
    predictors = [p for p in comparison.predictors("clean") if any(_bins(m, p) for m in comparison.models)]
    if not predictors:
        return missing(comparison, "clean", "reliability of the test set")
    panels = {}
    for i, predictor in enumerate(predictors):
        drawn = [_chart(f"{name}-{i}-{j}", m, predictor) for j, m in enumerate(comparison.models)]
        panels[predictor_name(predictor)] = charts(*drawn)
    return join(tabs(f"{name}-predictors", "whose prediction", panels))


def _chart(name: str, model: Model, predictor: str) -> Safe | None:
    bins = _bins(model, predictor)
    if bins is None:
        return None
    found = ((m, model.find("clean", "test", m, predictor)) for m in ("accuracy", "nll", "ece"))
    numbers = ", ".join(f"{metric_of(metric).label} {each.text()}" for metric, each in found if each)
    edges = bins["edges"]
    rows = [
        [f"{edges[i]:.3g} to {edges[i + 1]:.3g}", bins["confidence"][i], bins["accuracy"][i], f"{count:g}"]
        for i, count in enumerate(bins["count"])
    ]
    return chart(
        name, reliability_figure(bins, style=model.style),
        Table(["confidence", "mean confidence", "accuracy", "items"], rows), title=swatch(model),
        caption=numbers,
        alternative=f"Reliability diagram of {model.label}, {predictor_name(predictor)}: {numbers}",
    )  # fmt: skip


def _bins(model: Model, predictor: str) -> dict[str, list[Any]] | None:
    """Of all seeds together; None where no run has them."""
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
