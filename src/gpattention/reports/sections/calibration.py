"""Confidence: is 80 % right in 80 % of the cases, and what does it buy to answer only when certain?"""

from collections.abc import Mapping, Sequence
from typing import Any

from gpattention.evaluation import predictor_name
from gpattention.metrics import metric_of, share_interval
from gpattention.reports import html
from gpattention.reports.comparison import Comparison, Model, Table, figure_text, heading, number
from gpattention.reports.figures import reliability_figure, risk_coverage_figure
from gpattention.reports.sections.registry import section
from gpattention.runs import OverSeeds

COVERAGES = tuple(i / 20 for i in range(1, 21))  # where a curve is read for its table


@section(
    "reliability", "Reliability", 
    "Accuracy of the answers given with a certain confidence, on the clean test set, with 95 % intervals. "
    "Red: confidence above accuracy; pale: accuracy above confidence; grey: fewer than ten items. The strip "
    "below shows how many items have which confidence.",
    place=30,
)  # fmt: skip
def reliability(comparison: Comparison, name: str) -> "html.Markup":
    """One diagram per model, a tab per predictor."""
    panels: dict[str, html.Markup] = {}
    for predictor in comparison.predictors("clean"):
        drawn = [
            _diagram(f"{name}-{len(panels)}-{j}", model, predictor, pooled_bins(bins))
            for j, model in enumerate(comparison.models)
            if (bins := model.curves("clean", "reliability", predictor))
        ]
        if drawn:
            panels[predictor_name(predictor)] = html.charts(*drawn)
    if not panels:
        return html.render("missing", *comparison.what_is_missing("clean", "reliability of the test set"))
    return html.tabs(f"{name}-predictors", "whose prediction", panels)


def _diagram(name: str, model: Model, predictor: str, bins: Mapping[str, Sequence[Any]]) -> "html.Markup":
    found = ((m, model.find("clean", "test", m, predictor)) for m in ("accuracy", "nll", "ece"))
    numbers = ", ".join(
        f"{metric_of(metric).named} {figure_text(each, metric_of(metric))}" for metric, each in found if each
    )
    edges = bins["edges"]
    rows = [
        [
            f"{edges[i]:.3g} to {edges[i + 1]:.3g}", bins["confidence"][i], bins["accuracy"][i],
            None if bins["low"][i] is None else f"{bins['low'][i]:.3f} to {bins['high'][i]:.3f}",
            f"{count:g}",
        ]
        for i, count in enumerate(bins["count"])
    ]  # fmt: skip
    table = Table(["confidence", "mean confidence", "accuracy, 0 to 1", "95 % interval", "items"], rows)
    words = f"Reliability diagram of {model.label}, {predictor_name(predictor)}: {numbers}"
    figure = reliability_figure(bins, style=model.style)
    return html.chart(name, figure, table, html.render("swatch", model), words, numbers)


def pooled_bins(several: Sequence[Mapping[str, Sequence[Any]]]) -> dict[str, list[Any]]:
    """Bins of several runs as if all their items were one set; those with other edges are left out.

    The interval of an accuracy is Student's t over the runs that have items in the bin; of one run Wilson's.
    """
    edges = list(several[0]["edges"])
    alike = [bins for bins in several if list(bins["edges"]) == edges]
    pooled: dict[str, list[Any]] = {key: [] for key in ("confidence", "accuracy", "count", "low", "high")}
    pooled["edges"] = edges
    for k in range(len(edges) - 1):
        counts = [number(bins["count"][k]) or 0.0 for bins in alike]
        total = sum(counts)
        pooled["count"].append(total)
        for key in ("confidence", "accuracy"):
            parts = ((number(bins[key][k]) or 0.0) * n for bins, n in zip(alike, counts, strict=True))
            pooled[key].append(sum(parts) / total if total else None)
        own = [number(bins["accuracy"][k]) for bins, n in zip(alike, counts, strict=True) if n]
        over = OverSeeds.of(own)
        ends: tuple[float | None, float | None] = (None, None)
        if over is not None:
            ends = over.interval or share_interval(min(1.0, max(0.0, over.mean)), total)
        for key, end in zip(("low", "high"), ends, strict=True):
            pooled[key].append(None if end is None else min(1.0, max(0.0, end)))
    return pooled


@section(
    "selective", "Selective prediction", 
    "A model that knows when it is wrong makes few errors among the test items of which it is "
    "most certain. Thresholds and conformal sets come from validation items.",
    place=60, suite="selective",
)  # fmt: skip
def selective(comparison: Comparison, name: str) -> "html.Markup":
    """Risk against coverage for each predictor, then every number of the suite."""
    predictors = comparison.predictors("selective")
    drawn = (_risk(f"{name}-{i}", comparison, predictor) for i, predictor in enumerate(predictors))
    table = comparison.numbers("selective", "set, prediction, metric", _row)
    return html.join(html.charts(*drawn), html.folded("Conformal sets and coverage at a given risk", table))


def _row(what: Mapping[str, Any]) -> str:
    named = f"{what['set']}, {predictor_name(what['predictor'])}, {metric_of(what['metric']).named}"
    known = ("recipe", "suite", "set", "predictor", "metric")
    return named + "".join(f", {word} {value}" for word, value in what.items() if word not in known)


def _risk(name: str, comparison: Comparison, predictor: str) -> "html.Markup | None":
    found = comparison.curves("selective", "risk_coverage", predictor)
    if not found:
        return None
    series = html.read_curves(found, "coverage", "risk", COVERAGES)
    halves = {label: [line[: len(COVERAGES) // 2] for line in lines] for label, lines in series.items()}
    whose, figure = predictor_name(predictor), risk_coverage_figure(found, styles=comparison.styles)
    words = f"Error rate among the items answered, {whose}: at half of the items {html.last_values(halves)}"
    return html.chart(name, figure, html.lines_table("share answered", series), heading(whose), words)
