"""Time and memory: of each model as it is, against inducing points, and against length."""

from dataclasses import dataclass

from gpattention.reports.charts import chart, charts, last_values
from gpattention.reports.figures import bars_figure, cost_figure
from gpattention.reports.figures.lines import Points
from gpattention.reports.groups import Comparison, Model, spread_of
from gpattention.reports.inputs import RunData, number
from gpattention.reports.markup import Safe, join, tag
from gpattention.reports.missing import has, missing, remarks
from gpattention.reports.tables import Table, lines_table, spread_text
from gpattention.reports.words import heading, listed

# metric, its name, and how many of the name's unit one of the metric's is
METRICS = {
    "train_epoch_seconds": ("training, seconds per epoch", 1),
    "predict_seconds": ("prediction, milliseconds per item", 1000),
    "train_peak_mib": ("training, peak memory in MiB", 1),
    "predict_peak_mib": ("prediction, peak memory in MiB", 1),
}


@dataclass(frozen=True)
class Cost:
    """One measurement of one run."""

    inducing: float | None
    tokens: float | None
    value: float


def content(comparison: Comparison, name: str) -> Safe:
    """For each metric a bar per model; lines where it was measured at several sizes."""
    if not has(comparison, "efficiency"):
        return missing(comparison, "efficiency", "measurement of time and memory")
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


def costs(run: RunData, metric: str) -> list[Cost]:
    """All measurements of a metric, in the unit of its name."""
    _, unit = METRICS[metric]
    found = []
    for record in run.records("efficiency"):
        value = number(record["value"])
        if record["metric"] == metric and value is not None:
            detail = record.get("detail", {})
            found.append(Cost(number(detail.get("inducing")), number(detail.get("tokens")), unit * value))
    return found


def own_size(found: list[Cost]) -> tuple[float | None, float | None]:
    """Inducing points and length of the model as it is, which is measured first."""
    return (found[0].inducing, found[0].tokens) if found else (None, None)


def _bars(name: str, comparison: Comparison, metric: str) -> Safe | None:
    values: dict[str, list[float]] = {}
    for model in comparison.models:
        for run in model.runs:
            if found := costs(run, metric):
                values.setdefault(model.label, []).append(found[0].value)
    if not values:
        return None
    spreads = {label: spread_of(of_model) for label, of_model in values.items()}
    rows = [[label, spread_text(spread)] for label, spread in spreads.items()]
    told = listed([f"{label} {text}" for label, text in rows])
    return chart(
        name, bars_figure(values, x=METRICS[metric][0], styles=comparison.styles),
        Table(["model", METRICS[metric][0]], rows), title=heading(METRICS[metric][0]),
        alternative=f"Bars of {METRICS[metric][0]}: {told}",
    )  # fmt: skip


def _by_inducing(name: str, comparison: Comparison, metric: str) -> Safe | None:
    """Models with inducing points as lines, the others level, for comparison."""
    sizes = sorted(
        {c.inducing for run in comparison.runs for c in costs(run, metric) if c.inducing is not None}
    )
    if len(sizes) < 2:
        return None
    series: dict[str, list[Points]] = {}
    for model in comparison.models:
        for run in model.runs:
            found = costs(run, metric)
            length = own_size(found)[1]
            here = [c for c in found if c.tokens == length]
            line = [(c.inducing, c.value) for c in here if c.inducing is not None]
            if not line and here:
                line = [(size, here[0].value) for size in sizes]
            if line:
                series.setdefault(model.label, []).append(sorted(line))
    return _lines(name, comparison, metric, series, "inducing points")


def _by_length(name: str, comparison: Comparison, metric: str) -> Safe | None:
    series: dict[str, list[Points]] = {}
    for model in comparison.models:
        for line in _lengths(model, metric):
            series.setdefault(model.label, []).append(line)
    return _lines(name, comparison, metric, series, "tokens") if series else None


def _lengths(model: Model, metric: str) -> list[Points]:
    lines: list[Points] = []
    for run in model.runs:
        found = costs(run, metric)
        inducing = own_size(found)[0]
        line = {c.tokens: c.value for c in found if c.inducing == inducing and c.tokens is not None}
        if len(line) > 1:
            lines.append(sorted(line.items()))
    return lines


def _lines(name: str, comparison: Comparison, metric: str, series: "dict[str, list[Points]]", x: str) -> Safe:
    return chart(
        name, cost_figure(series, x=x, y=METRICS[metric][0], styles=comparison.styles),
        lines_table(x, series), title=heading(METRICS[metric][0]),
        alternative=f"Lines of {METRICS[metric][0]} against {x}: at the largest {last_values(series)}",
    )  # fmt: skip
