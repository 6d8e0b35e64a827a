"""Layer by layer: are the attention layers alive, and do the tokens grow alike?"""

from gpattention.reports.charts import chart, charts, last_values
from gpattention.reports.figures import layers_figure
from gpattention.reports.figures.curves import layer_points
from gpattention.reports.groups import Comparison
from gpattention.reports.markup import Safe, join, tag
from gpattention.reports.missing import has, missing, remarks
from gpattention.reports.tables import Table, lines_table, table_html
from gpattention.reports.words import heading, number

# key, name, what to know about it
QUANTITIES = (
    (
        "kappa_qk",
        "kernel of queries and keys",
        "Mean; near 0 attention is off, near 1 every token is the same.",
    ),
    ("kappa_qq", "kernel of queries", "Mean; near 1 the queries have merged."),
    ("mean_ratio", "output over values", "Norm of the posterior mean over the norm of the values."),
    ("posterior_stddev", "posterior standard deviation", "Mean over heads and tokens."),
    ("stddev_ratio", "posterior over prior", "Near 1 the keys tell the variance nothing."),
    ("floor_share", "floor share", "1 is collapsed to the noise."),
    ("variance_correlation", "correlation with error", "Rank correlation of the variance and being wrong."),
)


def health(comparison: Comparison, name: str) -> Safe:
    """A chart per quantity; all of them as a table."""
    seeds = {
        m.label: [curve for curve in m.curves("clean", "health") if isinstance(curve, list)]
        for m in comparison.models
    }
    if not any(seeds.values()):
        return missing(comparison, "clean", "health by layer")
    drawn = []
    for key, title, caption in QUANTITIES:
        values = {
            label: [[number(layer.get(key)) for layer in layers] for layers in of_model]
            for label, of_model in seeds.items()
        }
        drawn.append(_chart(f"{name}-{key}", comparison, values, title, caption))
    return join(charts(*drawn), _all_layers(seeds), _problems(seeds))


def oversmoothing(comparison: Comparison, name: str) -> Safe:
    """Similarity of the tokens after attention and after the block."""
    if not has(comparison, "oversmoothing"):
        return missing(comparison, "oversmoothing")
    drawn = []
    for after in ("attention", "block"):
        values = {
            m.label: [curve[after] for curve in m.curves("oversmoothing", "similarity") if curve.get(after)]
            for m in comparison.models
        }
        title = f"token similarity after the {after}"
        drawn.append(
            _chart(
                f"{name}-{after}",
                comparison,
                values,
                title,
                "Mean cosine of pairs of tokens; 1 is all alike.",
            )
        )
    return join(charts(*drawn), remarks(comparison, "oversmoothing"))


def _chart(
    name: str,
    comparison: Comparison,
    values: "dict[str, list[list[float | None]]]",
    title: str,
    caption: str,
) -> Safe | None:
    values = {label: seeds for label, seeds in values.items() if any(map(layer_points, seeds))}
    if not values:
        return None
    series = {label: [layer_points(seed) for seed in seeds] for label, seeds in values.items()}
    return chart(
        name, layers_figure(values, y=title, styles=comparison.styles), lines_table("layer", series),
        title=heading(title), caption=caption,
        alternative=f"Lines of {title} by layer: in the last {last_values(series)}",
    )  # fmt: skip


def _all_layers(seeds: "dict[str, list[list[dict[str, object]]]]") -> Safe:
    rows: list[list[str | float | None]] = []
    keys = dict.fromkeys(
        key for of_model in seeds.values() for layers in of_model for layer in layers for key in layer
        if key != "layer" and any(number(layer.get(key)) is not None for layer in layers)
    )  # fmt: skip
    for label, of_model in seeds.items():
        for seed, layers in enumerate(of_model, 1):
            which = f", run {seed}" if len(of_model) > 1 else ""
            for i, layer in enumerate(layers, 1):
                rows.append([f"{label}{which}, layer {i}", *(number(layer.get(key)) for key in keys)])
    table = Table(["layer", *(key.replace("_", " ") for key in keys)], rows)
    caption = "Every layer and quantity"
    return tag("details", tag("summary", caption), table_html(table, caption))


def _problems(seeds: "dict[str, list[list[dict[str, object]]]]") -> Safe | None:
    """What an evaluation found worth a look."""
    lines = []
    for label, of_model in seeds.items():
        for layers in of_model:
            for i, layer in enumerate(layers, 1):
                found = layer.get("problems")
                lines += [
                    f"{label}, layer {i}: {text}" for text in (found if isinstance(found, list) else [])
                ]
    if not lines:
        return None
    items = (tag("li", line) for line in dict.fromkeys(lines))
    return tag("aside", tag("h4", "Worth a look"), tag("ul", *items), class_="notes")
