"""Calibration on corrupted images: by severity, by kind of corruption, and by category."""

from gpattention.evaluation.named_predictors import predictor_name
from gpattention.metrics import metric_of
from gpattention.reports.charts import chart, charts, last_values
from gpattention.reports.figures import corruption_figure, severity_figure
from gpattention.reports.groups import Comparison
from gpattention.reports.markup import Safe, join, tag
from gpattention.reports.missing import has, missing, remarks
from gpattention.reports.tables import Table, lines_table, seeds_text, table_html
from gpattention.reports.tabs import tabs
from gpattention.reports.words import heading
from gpattention.runs import OverSeeds, Results

METRICS = ("accuracy", "nll", "ece")  # always together: a collapsed model has the lowest ECE
CATEGORIES = ("noise", "blur", "weather", "digital", "extra", "mean")


def content(comparison: Comparison, name: str) -> Safe:
    """A tab per predictor."""
    if not has(comparison, "corrupted"):
        return missing(comparison, "corrupted")
    panels = {}
    for i, predictor in enumerate(comparison.predictors("corrupted")):
        severity = (_by_severity(f"{name}-severity-{i}-{m}", comparison, m, predictor) for m in METRICS)
        kind = (_by_type(f"{name}-type-{i}-{m}", comparison, m, predictor) for m in METRICS)
        shown = join(charts(*severity), charts(*kind), _by_category(comparison, predictor))
        panels[predictor_name(predictor)] = shown
    return join(tabs(f"{name}-predictors", "whose prediction", panels), remarks(comparison, "corrupted"))


def _by_severity(name: str, comparison: Comparison, metric: str, predictor: str) -> Safe | None:
    found = {m.label: severities(m.results, m.label, metric, predictor) for m in comparison.models}
    values = {label: seeds for label, seeds in found.items() if seeds}
    if not values:
        return None
    series = {
        label: [[(float(s), seed[s]) for s in sorted(seed)] for seed in seeds]
        for label, seeds in values.items()
    }
    title = f"{metric_of(metric).label} by severity"
    figure = severity_figure(values, y=metric_of(metric).label, styles=comparison.styles)
    alternative = f"Lines of {title}, mean over the corruptions: at the highest {last_values(series)}"
    return chart(name, figure, lines_table("severity", series), title=heading(title), alternative=alternative)


def severities(results: Results, recipe: str, metric: str, predictor: str) -> list[dict[int, float]]:
    """Of each seed the mean over the corruptions at each severity; 0 is the clean test set."""
    places = {int(s): f"corrupted/*/{s}" for s in sorted(_parts(results, recipe, 2))}
    found = {s: results.find(recipe, "corrupted", place, metric, predictor) for s, place in places.items()}
    whole = {0: results.find(recipe, "clean", "test", metric, predictor), **found}
    known = {severity: each.values for severity, each in whole.items() if each is not None}
    seeds = dict.fromkeys(seed for severity in found for seed in known.get(severity, ()))
    return [{s: values[seed] for s, values in known.items() if seed in values} for seed in seeds]


def _by_type(name: str, comparison: Comparison, metric: str, predictor: str) -> Safe | None:
    found: dict[str, dict[str, OverSeeds]] = {}
    for model in comparison.models:
        for kind in _parts(model.results, model.label, 1):
            each = model.find("corrupted", f"corrupted/{kind}/*", metric, predictor)
            if each is not None:
                found.setdefault(model.label, {})[kind] = each
    kinds = list(dict.fromkeys(kind for of_model in found.values() for kind in of_model))
    if not kinds:
        return None
    rows = [
        [kind.replace("_", " "), *(seeds_text(of_model.get(kind)) for of_model in found.values())]
        for kind in kinds
    ]
    values = {
        label: {kind: list(each.values.values()) for kind, each in of_model.items()}
        for label, of_model in found.items()
    }
    title = f"{metric_of(metric).label} by corruption"
    figure = corruption_figure(values, x=metric_of(metric).label, styles=comparison.styles)
    alternative = f"Dots of {title}, mean over the severities: {len(kinds)} corruptions, {len(values)} models"
    return chart(
        name, figure, Table(["corruption", *values], rows), title=heading(title), alternative=alternative
    )


def _by_category(comparison: Comparison, predictor: str) -> Safe | None:
    rows = []
    for category in CATEGORIES:
        for metric in METRICS:
            found = [
                m.find("corrupted", f"corrupted/{category}", metric, predictor) for m in comparison.models
            ]
            if any(found):
                name = "all" if category == "mean" else category
                cells = (None if each is None else each.text() for each in found)
                rows.append([f"{name}, {metric_of(metric).label}", *cells])
    if not rows:
        return None
    caption = "Means by category"
    table = Table(["category, metric", *(m.label for m in comparison.models)], rows)
    return tag("details", tag("summary", caption), table_html(table, caption))


def _parts(results: Results, recipe: str, place: int) -> list[str]:
    """Types (1) or severities (2) of every `corrupted/TYPE/SEVERITY`."""
    sets = (each.split("/") for each in results.sets(recipe, "corrupted"))
    return list(dict.fromkeys(parts[place] for parts in sets if len(parts) == 3 and parts[2].isdecimal()))
