"""Two sentences on top: what the comparison says, of how many seeds, and which differences are clear.

One model with a posterior stands against one without.  It is chosen by validation items, so that the test
items decide nothing; every figure is of test items.
"""

from collections.abc import Sequence

from gpattention.attention import attention_class
from gpattention.evaluation import score_name
from gpattention.metrics import metric_of
from gpattention.reports import html
from gpattention.reports.comparison import Comparison, Model, figure_text, listed
from gpattention.runs import Column, OverSeeds, difference

CHOICE = ("clean", "validation", "nll")  # by which one of several is chosen
FIRST = tuple(Column("clean", "test", metric) for metric in ("nll", "ece", "accuracy"))
SECOND = (
    Column("corrupted", "corrupted/mean", "nll", head="NLL of corrupted images"),
    Column("corrupted", "corrupted/mean", "accuracy", head="accuracy on them"),
    Column("ood", "ood/*", "auroc", "entropy", head=f"AUROC of foreign data by {score_name('entropy')}"),
)


def has_posterior(model: Model) -> bool:
    """Whether it is of a kind that draws; kinds of somebody else's code count as none."""
    try:
        return attention_class(model.runs[0].attention).draws
    except ValueError:
        return False


def ordered(comparison: Comparison) -> list[Model]:
    """Models with a posterior first, those of the least validation NLL before others."""

    def key(model: Model) -> tuple[bool, float]:
        found = model.find(*CHOICE)
        return not has_posterior(model), float("inf") if found is None else found.mean

    return sorted(comparison.models, key=key)


def rivals(comparison: Comparison) -> tuple[Model, Model | None]:
    """What the page is about, and what it is held against: softmax where it is there."""
    lead, *others = ordered(comparison)
    without = [model for model in others if not has_posterior(model)] or others
    softmax = [model for model in without if model.runs[0].attention == "softmax"]
    return lead, next(iter(softmax or without), None)


def content(comparison: Comparison) -> "html.Markup | None":
    """The sentences; None where nothing was evaluated."""
    lead, other = rivals(comparison)
    sentences = _of_one(lead, comparison) if other is None else _of_two(lead, other, comparison)
    return html.render("verdict", sentences) if sentences else None


def _of_one(model: Model, comparison: Comparison) -> list[str]:
    parts = [
        [f"{_head(c)} {text}" for c in columns if (text := figure_text(_find(c, model), c.shown))]
        for columns in (FIRST, SECOND)
    ]
    if not any(parts):
        return []
    seeds = len({run.seed for run in model.runs})
    kind = "one seed, 95 % bootstrap over items" if seeds == 1 else f"{seeds} seeds, 95 % by Student's t"
    known, shifted = (listed(part) for part in parts)
    first = f"{model.label} on the test set of {comparison.data} ({kind}): {known or 'not evaluated'}."
    missing = "It was not evaluated on corrupted or foreign data."
    return [first, f"On corrupted and foreign data: {shifted}." if shifted else missing]


def _of_two(lead: Model, other: Model, comparison: Comparison) -> list[str]:
    parts = [_judged(lead, other, columns) for columns in (FIRST, SECOND)]
    if not any(parts):
        return []
    seeds = [len({run.seed for run in model.runs}) for model in (lead, other)]
    how = "one seed each" if seeds == [1, 1] else f"{seeds[0]} seeds against {seeds[1]}"
    many = len(comparison.models)
    choice = f" (of {many} models the best by validation NLL)" if many > 2 else ""
    known, shifted = ("; ".join(f"{how} {listed(what)}" for how, what in part.items()) for part in parts)
    end = (
        "margins of error are 95 % bootstrap intervals over test items, and leave out how much seeds differ"
        if min(seeds) == 1
        else "clear means by Student's t over the seeds, at 95 %"
    )
    where = f"Compared with {other.label} on the test set of {comparison.data} ({how}), {lead.label}{choice}"
    second = f"On corrupted and foreign data it is {shifted}" if shifted else "Nothing else was evaluated yet"
    return [f"{where} is {known or 'not evaluated'}.", f"{second}; {end}."]


def _find(column: Column, model: Model) -> OverSeeds | None:
    return column.find(model.results, model.label, "model")


def _head(column: Column) -> str:
    return column.head or metric_of(column.metric).label


def _judged(lead: Model, other: Model, columns: Sequence[Column]) -> dict[str, list[str]]:
    """Numbers that both have, by which is better as far as can be said."""
    found: dict[str, list[str]] = {}
    for column in columns:
        ours, theirs, metric = _find(column, lead), _find(column, other), metric_of(column.metric)
        if ours is None or theirs is None:
            continue
        pair = " vs ".join(f"{x.mean * metric.scale:.{metric.digits}f}" for x in (ours, theirs))
        unit = metric.unit or ("nats" if metric.counted_in == "nats" else "")
        how = _clear(ours, theirs, bool(metric.larger))
        found.setdefault(how, []).append(f"{_head(column)} ({pair}{f' {unit}' if unit else ''})")
    return found


def _clear(ours: OverSeeds, theirs: OverSeeds, larger: bool) -> str:
    if ours.basis != theirs.basis and ours.count == theirs.count == 1:
        return "on other items in"
    word = "better" if (ours.mean > theirs.mean) == larger else "worse"
    if min(ours.count, theirs.count) > 1:
        return f"clearly {word} in" if difference(ours, theirs).clear else "not clearly different in"
    ends = ours.interval, theirs.interval
    if None in ends:
        return f"{word}, by an unknown margin, in"
    (low, high), (least, most) = ends  # type: ignore[misc]
    return f"{word} in" if low > most or least > high else "within the margin of error in"
