"""Unknown data: how well scores of uncertainty tell it from the test set."""

from collections.abc import Mapping
from typing import Any

from gpattention.evaluation.ood_scores import SCORES, score_name
from gpattention.metrics import metric_of
from gpattention.reports.charts import chart, charts
from gpattention.reports.figures import outlier_figure, roc_figure
from gpattention.reports.groups import Comparison
from gpattention.reports.markup import Safe, join, tag
from gpattention.reports.missing import has, missing, remarks
from gpattention.reports.tables import Table, lines_table, read_at, seeds_text, table_html
from gpattention.reports.tabs import tabs
from gpattention.reports.words import listed

METRICS = ("auroc", "aupr_in", "aupr_out", "fpr95")
RATES = (0.01, 0.02, 0.05, *(i / 10 for i in range(1, 11)))  # where a ROC is read for its table


def content(comparison: Comparison, name: str) -> Safe:
    """Histograms and ROC of every set, a tab per score; then all numbers."""
    if not has(comparison, "ood"):
        return missing(comparison, "ood")
    panels = {}
    for i, score in enumerate(_scores(comparison)):
        sets = list(enumerate(_sets(comparison, score)))
        panels[score_name(score)] = join(
            charts(*(_histograms(f"{name}-scores-{i}-{j}", comparison, part, score) for j, part in sets)),
            charts(*(_roc(f"{name}-roc-{i}-{j}", comparison, part, score) for j, part in sets)),
        )
    return join(
        tabs(f"{name}-by-score", "which score", panels),
        *(_numbers(comparison, metric) for metric in METRICS),
        remarks(comparison, "ood"),
    )


def _curves(comparison: Comparison, curve: str, part: str, score: str) -> dict[str, list[Mapping[str, Any]]]:
    """For each model that has it, the curve of each seed."""
    found = {}
    for model in comparison.models:
        of_sets = (whole.get(part, {}) for whole in model.curves("ood", curve))
        seeds = [of_scores[score] for of_scores in of_sets if of_scores.get(score)]
        if seeds:
            found[model.label] = seeds
    return found


def _histograms(name: str, comparison: Comparison, part: str, score: str) -> Safe | None:
    found = {label: seeds[0] for label, seeds in _curves(comparison, "scores", part, score).items()}
    if not found:
        return None
    rows = []
    for label, histogram in found.items():
        edges = histogram["edges"]
        for k, (known, unknown) in enumerate(zip(histogram["in"], histogram["out"], strict=True)):
            bounds = f"{edges[k]:.3g} to {edges[k + 1]:.3g}"
            rows.append([label, bounds, f"{known:.4g}", f"{unknown:.4g}"])
    seed = ", first seed" if comparison.several_seeds else ""
    return chart(
        name, outlier_figure(found, x=score_name(score), styles=comparison.styles),
        Table(["model", score_name(score), "test set", set_name(part)], rows),
        title=f"{set_name(part)}: {score_name(score)}",
        caption=f"Grey: test set; colour: {set_name(part)}{seed}.",
        alternative=f"Histograms of {score_name(score)} on the test set and on {set_name(part)}: "
        f"{_aurocs(comparison, part, score)}",
    )  # fmt: skip


def _roc(name: str, comparison: Comparison, part: str, score: str) -> Safe | None:
    found = _curves(comparison, "roc", part, score)
    if not found:
        return None
    series = {
        label: [read_at(list(zip(c["fpr"], c["tpr"], strict=True)), RATES) for c in seeds]
        for label, seeds in found.items()
    }
    return chart(
        name, roc_figure(found, styles=comparison.styles), lines_table("unknown accepted", series),
        title=f"{set_name(part)}: ROC",
        caption=f"By {score_name(score)}; dashed: chance.",
        alternative=f"ROC of {score_name(score)} for {set_name(part)}: {_aurocs(comparison, part, score)}",
    )  # fmt: skip


def _aurocs(comparison: Comparison, part: str, score: str) -> str:
    found = ((m.label, m.find("ood", part, "auroc", score=score)) for m in comparison.models)
    known = [f"{label} {each.mean:.3f}" for label, each in found if each is not None]
    return f"AUROC of {listed(known)}" if known else "without AUROC"


def _numbers(comparison: Comparison, metric: str) -> Safe | None:
    """One metric of every set and score; the AUROC is open to the eye, the others a click away."""
    keys = dict.fromkeys(
        (what["set"], what.get("score"))
        for what in comparison.numbers("ood")
        if what["metric"] == metric and what["predictor"] == "model"
    )
    if not keys:
        return None
    rows = []
    for part, score in sorted(keys, key=lambda key: (key[0], _score_order(str(key[1])))):
        found = (m.find("ood", part, metric, score=score) for m in comparison.models)
        rows.append([f"{set_name(part)}, {score_name(str(score))}", *map(seeds_text, found)])
    table = Table(["set, score", *(m.label for m in comparison.models)], rows)
    caption = f"{metric_of(metric).label} of every set and score"
    return tag("details", tag("summary", caption), table_html(table, caption), open=metric == "auroc")


def _scores(comparison: Comparison) -> list[str]:
    found = {
        score
        for run in comparison.runs
        for curve in ("scores", "roc")
        for of_scores in (run.curve("ood", curve) or {}).values()
        for score in of_scores
    }
    return sorted(found, key=_score_order)


def _sets(comparison: Comparison, score: str) -> list[str]:
    found = {
        part
        for run in comparison.runs
        for curve in ("scores", "roc")
        for part, of_scores in (run.curve("ood", curve) or {}).items()
        if score in of_scores
    }
    return sorted(found)


def _score_order(score: str) -> tuple[int, str]:
    known = list(SCORES)
    return (known.index(score) if score in known else len(known), score)


def set_name(part: str) -> str:
    """`ood/near` is near."""
    return part.removeprefix("ood/")
