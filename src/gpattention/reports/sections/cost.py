"""Time and memory: of each model as it is, against inducing points, and against length."""

from dataclasses import dataclass

from gpattention.metrics import metric_of
from gpattention.reports.charts import chart, charts, last_values
from gpattention.reports.figures import bars_figure, cost_figure
from gpattention.reports.figures.lines import Points
from gpattention.reports.groups import Comparison, Model
from gpattention.reports.markup import Safe, join, tag
from gpattention.reports.missing import has, missing, remarks
from gpattention.reports.tables import Table, lines_table, seeds_text
from gpattention.reports.words import heading, listed, number
from gpattention.runs import OverSeeds

METRICS = ("train_epoch_seconds", "predict_seconds", "train_peak_mib", "predict_peak_mib")


@dataclass(frozen=True)
class Cost:
    """One measurement of a model, in the unit of the metric's label."""

    inducing: float | None
    tokens: float | None
    value: OverSeeds


def content(comparison: Comparison, name: str) -> Safe:
    """For each metric a bar per model; lines where it was measured at several sizes."""
    if not has(comparison, "efficiency"):
        return missing(comparison, "efficiency")
    groups = []
    for key, title, make in (
        ("own", "As they are", _bars),
        ("inducing", "Against inducing points", _by_inducing),
        ("length", "Against length", _by_length),
    ):
        drawn = [make(f"{name}-{key}-{metric}", comparison, metric) for metric in METRICS]
        if any(drawn):
            groups.append(join(tag("h4", title), charts(*drawn, pairs=True)))
    return join(*groups, remarks(comparison, "efficiency"))


def costs(model: Model, metric: str) -> list[Cost]:
    """All measurements of a metric; that of the model as it is comes first."""
    found = model.results.figures(recipe=model.label, suite="efficiency", metric=metric)
    return [
        Cost(number(what.get("inducing")), number(what.get("tokens")), figure.times(metric_of(metric).scale))
        for what, figure in found
    ]


def _bars(name: str, comparison: Comparison, metric: str) -> Safe | None:
    first = {m.label: found[0].value for m in comparison.models if (found := costs(m, metric))}
    if not first:
        return None
    label = metric_of(metric).label
    rows = [[model, seeds_text(found)] for model, found in first.items()]
    told = listed([f"{model} {text}" for model, text in rows])
    values = {model: list(found.values.values()) for model, found in first.items()}
    return chart(
        name, bars_figure(values, x=label, styles=comparison.styles), Table(["model", label], rows),
        title=heading(label), alternative=f"Bars of {label}: {told}",
    )  # fmt: skip


def _by_inducing(name: str, comparison: Comparison, metric: str) -> Safe | None:
    """Models with inducing points as lines, the others level, for comparison."""
    found = {model.label: costs(model, metric) for model in comparison.models}
    sizes = sorted({c.inducing for of_model in found.values() for c in of_model if c.inducing is not None})
    if len(sizes) < 2:
        return None
    series: dict[str, list[Points]] = {}
    for label, of_model in found.items():
        here = [c for c in of_model if c.tokens == of_model[0].tokens]
        lines = _by_seed([(c.inducing, c.value) for c in here if c.inducing is not None])
        if not lines and here:
            lines = _by_seed([(size, here[0].value) for size in sizes])
        if lines:
            series[label] = lines
    return _lines(name, comparison, metric, series, "inducing points")


def _by_length(name: str, comparison: Comparison, metric: str) -> Safe | None:
    series: dict[str, list[Points]] = {}
    for model in comparison.models:
        found = costs(model, metric)
        here = [c for c in found if c.inducing == found[0].inducing]
        lines = _by_seed([(c.tokens, c.value) for c in here if c.tokens is not None])
        if any(len(line) > 1 for line in lines):
            series[model.label] = [line for line in lines if len(line) > 1]
    return _lines(name, comparison, metric, series, "tokens") if series else None


def _by_seed(points: list[tuple[float, OverSeeds]]) -> list[Points]:
    """One line for each seed."""
    lines: dict[int | str, dict[float, float]] = {}
    for x, figure in points:
        for seed, value in figure.values.items():
            lines.setdefault(seed, {})[x] = value
    return [sorted(line.items()) for line in lines.values()]


def _lines(name: str, comparison: Comparison, metric: str, series: "dict[str, list[Points]]", x: str) -> Safe:
    label = metric_of(metric).label
    return chart(
        name, cost_figure(series, x=x, y=label, styles=comparison.styles), lines_table(x, series),
        title=heading(label),
        alternative=f"Lines of {label} against {x}: at the largest {last_values(series)}",
    )  # fmt: skip
