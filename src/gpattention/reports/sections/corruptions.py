"""Calibration on corrupted images: by severity, by kind of corruption, and by category."""

from statistics import fmean

from gpattention.reports.charts import chart, charts, last_values
from gpattention.reports.figures import corruption_figure, severity_figure
from gpattention.reports.groups import Comparison, spread_of
from gpattention.reports.inputs import RunData, number
from gpattention.reports.markup import Safe, join, tag
from gpattention.reports.missing import has, missing, remarks
from gpattention.reports.tables import Table, lines_table, spread_text, table_html
from gpattention.reports.tabs import tabs
from gpattention.reports.words import heading, metric_name, predictor_name

METRICS = ("accuracy", "nll", "ece")  # always together: a collapsed model has the lowest ECE
CATEGORIES = ("noise", "blur", "weather", "digital", "extra", "mean")


def content(comparison: Comparison, name: str) -> Safe:
    """A tab per predictor."""
    if not has(comparison, "corrupted"):
        return missing(comparison, "corrupted", "evaluation of corrupted images")
    panels = {}
    for i, predictor in enumerate(comparison.predictors("corrupted")):
        severity = (_by_severity(f"{name}-severity-{i}-{m}", comparison, m, predictor) for m in METRICS)
        kind = (_by_type(f"{name}-type-{i}-{m}", comparison, m, predictor) for m in METRICS)
        shown = join(charts(*severity), charts(*kind), _by_category(comparison, predictor))
        panels[predictor_name(predictor)] = shown
    return join(tabs(f"{name}-predictors", "whose prediction", panels), remarks(comparison, "corrupted"))


def _by_severity(name: str, comparison: Comparison, metric: str, predictor: str) -> Safe | None:
    values = {m.label: [severities(run, metric, predictor) for run in m.runs] for m in comparison.models}
    values = {label: known for label, seeds in values.items() if (known := [seed for seed in seeds if seed])}
    if not values:
        return None
    series = {
        label: [[(float(s), seed[s]) for s in sorted(seed)] for seed in seeds]
        for label, seeds in values.items()
    }
    title = f"{metric_name(metric)} by severity"
    figure = severity_figure(values, y=metric_name(metric), styles=comparison.styles)
    alternative = f"Lines of {title}, mean over the corruptions: at the highest {last_values(series)}"
    return chart(name, figure, lines_table("severity", series), title=heading(title), alternative=alternative)


def severities(run: RunData, metric: str, predictor: str) -> dict[int, float]:
    """Mean over the corruptions at each severity; 0 is the clean test set."""
    found: dict[int, list[float]] = {}
    for _, severity, value in _types(run, metric, predictor):
        found.setdefault(severity, []).append(value)
    if not found:
        return {}
    clean = run.value("clean", "test", metric, predictor)
    return {**({} if clean is None else {0: clean}), **{s: fmean(found[s]) for s in sorted(found)}}


def _by_type(name: str, comparison: Comparison, metric: str, predictor: str) -> Safe | None:
    values: dict[str, dict[str, list[float]]] = {m.label: {} for m in comparison.models}
    for model in comparison.models:
        for run in model.runs:
            of_run: dict[str, list[float]] = {}
            for kind, _, value in _types(run, metric, predictor):
                of_run.setdefault(kind, []).append(value)
            for kind, numbers in of_run.items():
                values[model.label].setdefault(kind, []).append(fmean(numbers))
    values = {label: of_model for label, of_model in values.items() if of_model}
    kinds = list(dict.fromkeys(kind for of_model in values.values() for kind in of_model))
    if not kinds:
        return None
    rows = []
    for kind in kinds:
        spreads = (spread_of(of_model.get(kind, [])) for of_model in values.values())
        rows.append([kind.replace("_", " "), *(spread_text(spread) for spread in spreads)])
    title = f"{metric_name(metric)} by corruption"
    figure = corruption_figure(values, x=metric_name(metric), styles=comparison.styles)
    alternative = f"Dots of {title}, mean over the severities: {len(kinds)} corruptions, {len(values)} models"
    return chart(
        name, figure, Table(["corruption", *values], rows), title=heading(title), alternative=alternative
    )


def _by_category(comparison: Comparison, predictor: str) -> Safe | None:
    rows = []
    for category in CATEGORIES:
        for metric in METRICS:
            spreads = [
                m.spread("corrupted", f"corrupted/{category}", metric, predictor) for m in comparison.models
            ]
            if any(spreads):
                name = "all" if category == "mean" else category
                rows.append(
                    [f"{name}, {metric_name(metric)}", *(None if s is None else s.text() for s in spreads)]
                )
    if not rows:
        return None
    caption = "Means by category"
    table = Table(["category, metric", *(m.label for m in comparison.models)], rows)
    return tag("details", tag("summary", caption), table_html(table, caption))


def _types(run: RunData, metric: str, predictor: str) -> list[tuple[str, int, float]]:
    """Kind, severity and value of every `corrupted/TYPE/SEVERITY`."""
    found = []
    for record in run.records("corrupted"):
        parts = str(record["set"]).split("/")
        value = number(record["value"])
        mine = (record["metric"], record["predictor"]) == (metric, predictor)
        if mine and len(parts) == 3 and parts[2].isdecimal() and value is not None:
            found.append((parts[1], int(parts[2]), value))
    return found
