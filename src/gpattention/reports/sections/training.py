"""Training curves out of `metrics.csv`."""

from gpattention.reports.charts import chart, charts, last_values
from gpattention.reports.figures import training_figure
from gpattention.reports.figures.curves import training_points
from gpattention.reports.groups import Comparison
from gpattention.reports.markup import Safe, join, tag
from gpattention.reports.palette import NEUTRAL_STYLE
from gpattention.reports.tables import lines_table
from gpattention.reports.words import heading, number
from gpattention.runs import RunData

# column, name, what to know about it
COLUMNS = (
    ("train_loss", "training loss", "Cross-entropy plus alpha times the regulariser."),
    ("validation_accuracy", "validation accuracy", "Of the mean, without draws."),
    ("validation_nll", "validation NLL", "Of the mean, without draws."),
    ("train_regularizer", "regulariser", "Per head, token and dimension, before alpha."),
    ("alpha", "alpha", "The weight of the regulariser."),
    ("floor_share", "floor share", "Of the worst layer; 1 is collapsed to the noise."),
    ("learning_rate", "learning rate", None),
)

SUMMED = (
    "Before alpha: a sequence's sum where the recipe has normalised = false, "
    "else per head, token and dimension."
)
ALL = "all models"  # where their lines are one and the same


def content(comparison: Comparison, name: str) -> Safe:
    """One chart per column that has numbers."""
    if not any(run.rows for run in comparison.runs):
        return tag(
            "p", "These runs hold no metrics.csv with rows: train them to have curves.", class_="missing"
        )
    drawn = (_chart(f"{name}-{column[0]}", comparison, *column) for column in COLUMNS)
    return join(charts(*drawn), _failures(comparison))


def _chart(name: str, comparison: Comparison, column: str, title: str, caption: str | None) -> Safe | None:
    rows = {
        m.label: [run.rows for run in m.runs if training_points(run.rows, column)] for m in comparison.models
    }
    rows = {label: seeds for label, seeds in rows.items() if seeds}
    series = {label: [training_points(seed, column) for seed in seeds] for label, seeds in rows.items()}
    # a model of nothing but zeros has no such thing, e.g. no regulariser
    series = {k: lines for k, lines in series.items() if any(y for line in lines for _, y in line)}
    rows = {label: rows[label] for label in series}
    if not series:
        return None
    styles = comparison.styles
    if len(series) > 1 and all(lines == next(iter(series.values())) for lines in series.values()):
        series = {ALL: next(iter(series.values()))}
        rows = {ALL: next(iter(rows.values()))}
        styles = {ALL: NEUTRAL_STYLE}
    if column == "train_regularizer" and any(_sums(run) for run in comparison.runs):
        caption = SUMMED
    boundary = _first_phase(comparison)
    return chart(
        name, training_figure(rows, column, y=title, boundary=boundary, styles=styles),
        lines_table("epoch", series),
        title=heading(title), caption=caption,
        alternative=f"Lines of {title} over the epochs: at the end {last_values(series)}",
    )  # fmt: skip


def _sums(run: RunData) -> bool:
    """Whether its regulariser is not normalised."""
    return run.recipe.get("regularizer", {}).get("normalised") is False


def _first_phase(comparison: Comparison) -> float | None:
    """Epochs of kernel attention, where all recipes have the same."""
    found = {number(run.recipe.get("phases", {}).get("kernel_epochs")) for run in comparison.runs}
    epochs = found.pop() if len(found) == 1 else None
    return epochs or None


def _failures(comparison: Comparison) -> Safe | None:
    """Runs that ended before their end."""
    lines = []
    for kind in ("failed", "stopped"):
        for run in comparison.runs:
            last = next(
                (e for e in reversed(run.events) if e.get("event") in ("finished", "failed", "stopped")), {}
            )
            if last.get("event") == kind:
                reason = f": {last['reason']}" if "reason" in last else ""
                lines.append(tag("li", f"{run.name} {kind} at step {last.get('step', '?')}{reason}"))
    if not lines:
        return None
    return tag("aside", tag("h4", "Runs that did not finish"), tag("ul", *lines), class_="notes")
