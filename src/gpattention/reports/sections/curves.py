"""What runs over something: training over epochs, health and similarity over layers, cost over sizes."""

from itertools import product
from typing import Any, NamedTuple

from gpattention.metrics import metric_of
from gpattention.reports import figures, html
from gpattention.reports.comparison import Comparison, Model, Table, figure_text, heading, listed, number
from gpattention.reports.figures import Points, layer_points, training_points
from gpattention.reports.sections.registry import section
from gpattention.reports.style import NEUTRAL_STYLE
from gpattention.runs import OverSeeds

# column of metrics.csv, name, what to know about it
TRAINING = (
    ("train_loss", "training loss, nats", "Cross-entropy plus alpha times the regulariser."),
    ("validation_accuracy", "validation accuracy, 0 to 1", "Of the mean, without draws."),
    ("validation_nll", "validation NLL, nats", "Of the mean, without draws."),
    ("train_regularizer", "regulariser, nats", "Per head, token and dimension, before alpha."),
    ("alpha", "alpha", "The weight of the regulariser."),
    ("floor_share", "floor share", "Of the worst layer; 1 is collapsed to the noise."),
    ("learning_rate", "learning rate", None),
)
SUMMED = (
    "Before alpha: a sequence's sum where the recipe has normalised = false, "
    "else per head, token and dimension."
)
ALIKE = "Of test items: mean cosine of pairs of tokens; 1 is all alike."
ALL = "all models"  # where their lines are one and the same

# key of a layer's health, name, what to know about it
HEALTH = (
    (
        "kappa_qk",
        "kernel of queries and keys",
        "Mean; near 0 attention is off, near 1 every token is the same.",
    ),
    ("kappa_qq", "kernel of queries", "Mean; near 1 the queries have merged."),
    ("mean_ratio", "output over values", "Norm of the posterior mean over the norm of the values."),
    ("posterior_stddev", "posterior standard deviation", "Mean over heads and tokens."),
    ("stddev_ratio", "posterior over prior", "Near 1 the keys do not change the variance."),
    ("floor_share", "floor share", "1 is collapsed to the noise."),
    ("variance_correlation", "correlation with error", "Rank correlation of the variance and being wrong."),
)
COST = ("train_epoch_seconds", "predict_seconds", "train_peak_mib", "predict_peak_mib")
Layers = dict[str, list[list[dict[str, Any]]]]  # by model, of each seed: the layers' health


@section(
    "training", "Training", "One point per validation; validation items, never test items.",
    place=70,
)  # fmt: skip
def training(comparison: Comparison, name: str) -> "html.Markup":
    """One chart per column of metrics.csv that has numbers, and the runs that did not finish."""
    if not any(run.rows for run in comparison.runs):
        return html.render(
            "missing", "These runs hold no metrics.csv with rows: train them to have curves.", ""
        )
    drawn = (_training_chart(f"{name}-{column[0]}", comparison, *column) for column in TRAINING)
    broken = []
    for kind, run in product(("failed", "stopped"), comparison.runs):
        ends = [event for event in run.events if event.get("event") in ("finished", "failed", "stopped")]
        if ends and ends[-1]["event"] == kind:
            reason = f": {ends[-1]['reason']}" if "reason" in ends[-1] else ""
            broken.append((f"{run.name} {kind} at step {ends[-1].get('step', '?')}{reason}", ""))
    return html.join(html.charts(*drawn), html.render("notes", "Runs that did not finish", broken))


def _training_chart(
    name: str, comparison: Comparison, column: str, title: str, caption: str | None
) -> "html.Markup | None":
    rows = {m.label: [run.rows for run in m.runs] for m in comparison.models}
    found = {label: [training_points(seed, column) for seed in seeds] for label, seeds in rows.items()}
    # a model of nothing but zeros has no such thing, e.g. no regulariser
    series = {k: [x for x in lines if x] for k, lines in found.items() if any(y for x in lines for _, y in x)}
    if not series:
        return None
    styles = comparison.styles
    first = next(iter(series))
    if len(series) > 1 and all(lines == series[first] for lines in series.values()):
        series, rows, styles = {ALL: series[first]}, {ALL: rows[first]}, {ALL: NEUTRAL_STYLE}
    rows = {label: rows[label] for label in series}
    if column == "train_regularizer" and any(
        run.recipe.get("regularizer", {}).get("normalised") is False for run in comparison.runs
    ):
        caption = SUMMED
    figure = figures.training_figure(rows, column, y=title, styles=styles)
    words = f"{title} over the epochs: at the end"
    return html.line_chart(name, figure, "epoch", series, words, title, caption)


@section(
    "health", "Health by layer",
    "What the attention layers look like from inside on test items, first layer left.", place=80,
)  # fmt: skip
def health(comparison: Comparison, name: str) -> "html.Markup":
    """A chart per quantity of the attention layers; all of them as a table; what is worth a look."""
    seeds: Layers = comparison.curves("clean", "health")
    if not seeds:
        return html.render("missing", *comparison.what_is_missing("clean", "health by layer"))
    drawn = []
    for key, title, caption in HEALTH:
        values = {
            label: [[number(layer.get(key)) for layer in layers] for layers in of_model]
            for label, of_model in seeds.items()
        }
        drawn.append(_layer_chart(f"{name}-{key}", comparison, values, title, caption))
    every = [
        (label, f", run {seed}" if len(of_model) > 1 else "", i, layer)
        for label, of_model in seeds.items()
        for seed, layers in enumerate(of_model, 1)
        for i, layer in enumerate(layers, 1)
    ]
    problems = (f"{label}, layer {i}: {text}" for label, _, i, x in every for text in x.get("problems") or ())
    keys = list(dict.fromkeys(k for *_, x in every for k in x if k != "layer" and number(x[k]) is not None))
    rows: list[list[str | float | None]] = [
        [f"{label}{which}, layer {i}", *(number(x.get(key)) for key in keys)] for label, which, i, x in every
    ]
    table = Table(["layer", *(key.replace("_", " ") for key in keys)], rows)
    return html.join(
        html.charts(*drawn),
        html.folded("Every layer and quantity", table),
        html.render("notes", "Worth a look", [(text, "") for text in dict.fromkeys(problems)]),
    )


@section(
    "oversmoothing", "Oversmoothing", "Tokens that become alike from layer to layer carry less information.",
    place=90, suite="oversmoothing",
)  # fmt: skip
def oversmoothing(comparison: Comparison, name: str) -> "html.Markup":
    """Similarity of the tokens after attention and after the block."""
    drawn = []
    for after in ("attention", "block"):
        values = comparison.curves("oversmoothing", "similarity", after)
        title = f"token similarity after the {after}"
        drawn.append(_layer_chart(f"{name}-{after}", comparison, values, title, ALIKE))
    return html.charts(*drawn)


def _layer_chart(
    name: str,
    comparison: Comparison,
    values: dict[str, list[list[float | None]]],
    title: str,
    caption: str,
) -> "html.Markup | None":
    values = {label: seeds for label, seeds in values.items() if any(map(layer_points, seeds))}
    if not values:
        return None
    series = {label: [layer_points(seed) for seed in seeds] for label, seeds in values.items()}
    figure = figures.layers_figure(values, y=title, styles=comparison.styles)
    return html.line_chart(name, figure, "layer", series, f"{title} by layer: in the last", title, caption)


class Cost(NamedTuple):
    """One measurement of a model, in the unit of the metric's label."""

    inducing: float | None
    tokens: float | None
    value: OverSeeds


@section(
    "cost", "Time and memory", "Measured on the machine named below.",
    place=100, suite="efficiency",
)  # fmt: skip
def cost(comparison: Comparison, name: str) -> "html.Markup":
    """For each metric a bar per model; lines where it was measured at several sizes."""
    groups = []
    for key, title, make in (
        ("own", "As they are", _bars),
        ("inducing", "Against inducing points", _by_inducing),
        ("length", "Against length", _by_length),
    ):
        drawn = [make(f"{name}-{key}-{metric}", comparison, metric) for metric in COST]
        if any(drawn):
            groups.append(html.render("group", title, html.charts(*drawn, pairs=True)))
    return html.join(*groups)


def _costs(model: Model, metric: str) -> list[Cost]:
    """All measurements of a metric; that of the model as it is comes first."""
    found = model.results.figures(recipe=model.label, suite="efficiency", metric=metric)
    return [
        Cost(number(what.get("inducing")), number(what.get("tokens")), figure.times(metric_of(metric).scale))
        for what, figure in found
    ]


def _bars(name: str, comparison: Comparison, metric: str) -> "html.Markup | None":
    first = {m.label: found[0].value for m in comparison.models if (found := _costs(m, metric))}
    if not first:
        return None
    label = metric_of(metric).label
    rows = [[model, figure_text(found)] for model, found in first.items()]
    values = {model: list(found.values.values()) for model, found in first.items()}
    figure = figures.bars_figure(values, x=label, styles=comparison.styles)
    words = f"Bars of {label}: {listed([f'{model} {text}' for model, text in rows])}"
    return html.chart(name, figure, Table(["model", label], rows), heading(label), words)


def _by_inducing(name: str, comparison: Comparison, metric: str) -> "html.Markup | None":
    """Models with inducing points as lines, the others level, for comparison."""
    found = {m.label: costs for m in comparison.models if (costs := _costs(m, metric))}
    sizes = sorted({c.inducing for of_model in found.values() for c in of_model if c.inducing is not None})
    if len(sizes) < 2:
        return None
    series: dict[str, list[Points]] = {}
    for label, of_model in found.items():
        here = [c for c in of_model if c.tokens == of_model[0].tokens]
        own = [(c.inducing, c.value) for c in here if c.inducing is not None]
        series[label] = _by_seed(own or [(size, here[0].value) for size in sizes])
    return _cost_lines(name, comparison, metric, series, "inducing points")


def _by_length(name: str, comparison: Comparison, metric: str) -> "html.Markup | None":
    series: dict[str, list[Points]] = {}
    for model in comparison.models:
        found = _costs(model, metric)
        here = [c for c in found if c.inducing == found[0].inducing]
        lines = _by_seed([(c.tokens, c.value) for c in here if c.tokens is not None])
        if long := [line for line in lines if len(line) > 1]:
            series[model.label] = long
    return _cost_lines(name, comparison, metric, series, "tokens") if series else None


def _by_seed(points: list[tuple[float, OverSeeds]]) -> list[Points]:
    """One line for each seed."""
    lines: dict[int | str, dict[float, float]] = {}
    for x, figure in points:
        for seed, value in figure.values.items():
            lines.setdefault(seed, {})[x] = value
    return [sorted(line.items()) for line in lines.values()]


def _cost_lines(
    name: str, comparison: Comparison, metric: str, series: dict[str, list[Points]], x: str
) -> "html.Markup":
    label = metric_of(metric).label
    figure = figures.cost_figure(series, x=x, y=label, styles=comparison.styles)
    return html.line_chart(name, figure, x, series, f"{label} against {x}: at the largest", label)
