"""Data that the models were not trained on: corrupted images, and unknown data to be noticed."""

from collections.abc import Mapping
from itertools import product
from typing import Any

from gpattention.evaluation import SCORES, Strangeness, predictor_name, score_name
from gpattention.metrics import metric_of
from gpattention.reports import html
from gpattention.reports.comparison import (
    Comparison,
    Model,
    Table,
    evaluate_command,
    figure_text,
    heading,
    listed,
)
from gpattention.reports.figures import (
    corruption_figure,
    outlier_figure,
    p_value_figure,
    roc_figure,
    severity_figure,
    shares_at,
    shares_up_to,
)
from gpattention.reports.sections.registry import section
from gpattention.reports.style import Style
from gpattention.runs import OverSeeds, Results

CORRUPTED = ("accuracy", "nll", "ece")  # always together: a collapsed model has the lowest ECE
UNKNOWN = ("auroc", "aupr_in", "aupr_out", "fpr95")
RATES = (0.01, 0.02, 0.05, *(i / 10 for i in range(1, 11)))  # where curves are read for their tables
DRAWN = ("entropy", "max_softmax", "mutual_information", "strangeness")  # scores; tables have them all
READ = 5  # bins between two points of a distribution's table
ALARMS = (0.01, 0.05)  # rates at which flags are counted


@section(
    "corruptions", "Corrupted images", 
    "The same models on damaged test images; bands and bars are 95 % intervals. Read accuracy, NLL and "
    "ECE together: a model that always gives the same answer can have the lowest ECE.",
    place=40, suite="corrupted",
)  # fmt: skip
def corruptions(comparison: Comparison, name: str) -> "html.Markup":
    """Calibration by severity, by kind of corruption and by category, a tab per predictor."""
    panels = {}
    for i, predictor in enumerate(comparison.predictors("corrupted")):
        severity = (_by_severity(f"{name}-severity-{i}-{m}", comparison, m, predictor) for m in CORRUPTED)
        kind = (_by_type(f"{name}-type-{i}-{m}", comparison, m, predictor) for m in CORRUPTED)
        panels[predictor_name(predictor)] = html.join(
            html.charts(*severity), html.charts(*kind), _by_category(comparison, predictor)
        )
    return html.tabs(f"{name}-predictors", "whose prediction", panels)


def _by_severity(name: str, comparison: Comparison, metric: str, predictor: str) -> "html.Markup | None":
    of, found = metric_of(metric), dict[str, dict[int, OverSeeds]]()
    for model in comparison.models:
        places = {int(s): f"corrupted/*/{s}" for s in sorted(_parts(model.results, model.label, 2))}
        known = {s: model.find("corrupted", place, metric, predictor) for s, place in places.items()}
        if any(known.values()):  # clean alone makes no line
            known[0] = model.find("clean", "test", metric, predictor)
            scaled = {s: each.times(of.scale) for s, each in known.items() if each is not None}
            found[model.label] = {s: scaled[s] for s in sorted(scaled)}
    if not found:
        return None
    values: dict[str, list[dict[int, float]]] = {}
    for label, of_model in found.items():
        seeds = dict.fromkeys(seed for severity, each in of_model.items() if severity for seed in each.values)
        values[label] = [
            {s: each.values[seed] for s, each in of_model.items() if seed in each.values} for seed in seeds
        ]
    bands = {
        label: [(float(s), *each.interval) for s, each in of_model.items() if each.interval]
        for label, of_model in found.items()
    }
    series = {
        label: [[(float(s), y) for s, y in seed.items()] for seed in seeds] for label, seeds in values.items()
    }
    levels = sorted({s for of_model in found.values() for s in of_model})
    rows = [
        ["clean" if s == 0 else str(s), *(figure_text(of_model.get(s)) for of_model in found.values())]
        for s in levels
    ]
    figure = severity_figure(values, y=of.named, bands=bands, styles=comparison.styles)
    words = f"{of.named} by severity, test set, mean over the corruptions: at the highest"
    table = Table(["severity", *found], rows)
    return html.line_chart(name, figure, "severity", series, words, f"{of.named} by severity", table=table)


def _by_type(name: str, comparison: Comparison, metric: str, predictor: str) -> "html.Markup | None":
    of, found = metric_of(metric), dict[str, dict[str, OverSeeds]]()
    for model in comparison.models:
        for kind in _parts(model.results, model.label, 1):
            each = model.find("corrupted", f"corrupted/{kind}/*", metric, predictor)
            if each is not None:
                found.setdefault(model.label, {})[kind] = each
    kinds = list(dict.fromkeys(kind for of_model in found.values() for kind in of_model))
    if not kinds:
        return None
    rows = [
        [kind.replace("_", " "), *(figure_text(of_model.get(kind), of) for of_model in found.values())]
        for kind in kinds
    ]
    shown = {k: {kind: x.times(of.scale) for kind, x in of_model.items()} for k, of_model in found.items()}
    values = {
        k: {kind: list(x.values.values()) for kind, x in of_model.items()} for k, of_model in shown.items()
    }
    ends = {
        label: {kind: each.interval for kind, each in of_model.items() if each.interval}
        for label, of_model in shown.items()
    }
    words = (
        f"Dots of {of.named} by corruption, mean over the severities: {len(kinds)} corruptions, "
        f"{len(values)} models"
    )
    figure = corruption_figure(values, x=of.named, intervals=ends, styles=comparison.styles)
    table = Table(["corruption", *values], rows)
    return html.chart(name, figure, table, heading(f"{of.named} by corruption"), words)


def _by_category(comparison: Comparison, predictor: str) -> "html.Markup | None":
    def named(what: Mapping[str, Any]) -> str | None:
        category = what["set"].removeprefix("corrupted/")
        if "/" in category or what["metric"] not in CORRUPTED:
            return None
        return f"{'all' if category == 'mean' else category}, {metric_of(what['metric']).named}"

    table = comparison.numbers("corrupted", "category, metric", named, predictor=predictor)
    return html.folded("Means by category", table)


def _parts(results: Results, recipe: str, place: int) -> list[str]:
    """Types (1) or severities (2) of every `corrupted/TYPE/SEVERITY`."""
    sets = (each.split("/") for each in results.sets(recipe, "corrupted"))
    return list(dict.fromkeys(parts[place] for parts in sets if len(parts) == 3 and parts[2].isdecimal()))


@section(
    "outliers", "Foreign data", 
    "Data unlike the training data should meet more uncertainty. A larger score means a more unusual item: "
    "the further the coloured curve lies below the grey one, the better. Strangeness also gives p-values: "
    "flagging items with p of at most 0.05 flags about 5 % of usual items.",
    place=50, suite="ood",
)  # fmt: skip
def outliers(comparison: Comparison, name: str) -> "html.Markup":
    """Distributions and ROC of every set, a tab for each of the usual scores; p-values; all numbers."""
    sets_of: dict[str, set[str]] = {}
    for whole in (run.curve("ood", curve) or {} for run in comparison.runs for curve in ("scores", "roc")):
        for part, of_scores in whole.items():
            for score in of_scores:
                sets_of.setdefault(score, set()).add(part)
    panels = {}
    drawn = [score for score in DRAWN if score in sets_of] or sorted(sets_of, key=_score_order)[: len(DRAWN)]
    for i, score in enumerate(drawn):
        sets = list(enumerate(sorted(sets_of[score])))
        shapes = (_shares(f"{name}-scores-{i}-{j}", comparison, part, score) for j, part in sets)
        rocs = (_roc(f"{name}-roc-{i}-{j}", comparison, part, score) for j, part in sets)
        panels[score_name(score)] = html.join(html.charts(*shapes), html.charts(*rocs))
    return html.join(
        html.tabs(f"{name}-by-score", "which score", panels),
        _p_values(f"{name}-p-values", comparison),
        *(_numbers(comparison, metric) for metric in UNKNOWN),
    )


def _shares(name: str, comparison: Comparison, part: str, score: str) -> "html.Markup | None":
    curves = comparison.curves("ood", "scores", part, score)
    found = {label: seeds[0] for label, seeds in curves.items()}
    if not found:
        return None
    rows = [
        [label, f"{edge:.3g}", f"{known:.4g}", f"{unknown:.4g}"]
        for label, h in found.items()
        for edge, known, unknown in list(
            zip(h["edges"][1:], shares_up_to(h["in"]), shares_up_to(h["out"]), strict=True)
        )[READ - 1 :: READ]
    ]
    where, which = _set_name(part), score_name(score, unit=True)
    aurocs = _aurocs(comparison, part, score)
    seed = ", first seed" if comparison.several_seeds else ""
    return html.chart(
        name,
        outlier_figure(found, x=which, styles=comparison.styles),
        Table(["model", f"{which}, at most", "share of the test set", f"share of {where}"], rows),
        f"{where}: {which}",
        f"Shares of the test set and of {where} with at most so much {which}: {aurocs}",
        f"Grey: test set; colour: {where}{seed}.",
    )


def _roc(name: str, comparison: Comparison, part: str, score: str) -> "html.Markup | None":
    found = comparison.curves("ood", "roc", part, score)
    if not found:
        return None
    table = html.lines_table("unknown accepted", html.read_curves(found, "fpr", "tpr", RATES))
    where, which = _set_name(part), score_name(score)
    words = f"ROC of {which} for {where}: {_aurocs(comparison, part, score)}"
    figure = roc_figure(found, styles=comparison.styles)
    return html.chart(name, figure, table, f"{where}: ROC", words, f"By {which}; dashed: chance.")


def _p_values(name: str, comparison: Comparison) -> "html.Markup":
    """How p-values of strangeness are distributed, a chart per model, and what is flagged by them."""
    found = {model.label: curves for model in comparison.models if (curves := _by_set(model))}
    without = [r for m in comparison.models if m.label not in found for r in m.runs if "ood" in r.suites]
    missing = None
    if without:
        why = (
            f"No p-values of strangeness of {listed([run.name for run in without])}: evaluated before there "
            f"were any, or with fewer than {Strangeness.fewest} validation items. To evaluate again: "
        )
        command = evaluate_command(without, "ood")
        missing = html.render("missing", why, f"{command} --fresh")
    styles = comparison.styles
    charts = (_ecdfs(f"{name}-{i}", m, found[m], styles[m]) for i, m in enumerate(found))
    sets = dict.fromkeys(part for curves in found.values() for part in curves)
    rows: list[list[str | None]] = []
    for part, rate in product(sets, ALARMS):
        of_models = (_flagged(found.get(label, {}), part, rate) for label in comparison.labels)
        where = "test set (false alarms)" if part == "test" else _set_name(part)
        rows.append([f"{where}, at {100 * rate:g} %", *map(figure_text, of_models)])
    table = Table(["set, rate", *comparison.labels], rows)
    flags = html.folded("Share of items that strangeness flags", table, open=True)
    return html.join(html.charts(*charts) if found else None, flags, missing)


def _by_set(model: Model) -> dict[str, list[Mapping[str, Any]]]:
    """The distribution of p-values of each set, of each seed; the test set first."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for of_sets in model.curves("ood", "p_values"):
        for part in sorted(of_sets, key=lambda part: (part != "test", part)):
            found.setdefault(part, []).append(of_sets[part])
    return found


def _flagged(curves: Mapping[str, list[Mapping[str, Any]]], part: str, rate: float) -> OverSeeds | None:
    """The share of items with a p-value of at most a rate; None where no item of any set has one."""
    if not any(curve["p"][0] <= rate for seeds in curves.values() for curve in seeds):
        return None  # so few calibration items that nothing could be flagged
    return OverSeeds.of(share for curve in curves.get(part, ()) for _, share in shares_at(curve, [rate]))


def _ecdfs(
    name: str, model: str, curves: Mapping[str, list[Mapping[str, Any]]], style: Style
) -> "html.Markup":
    named = {_set_name(part): seeds for part, seeds in curves.items()}
    series = {part: [shares_at(curve, RATES) for curve in seeds] for part, seeds in named.items()}
    alarms = ((rate, _flagged(curves, "test", rate)) for rate in ALARMS)
    rates = [f"{100 * each.mean:.1f} % at a rate of {100 * rate:g} %" for rate, each in alarms if each]
    false = f"False alarms on the test set: {listed(rates)}." if rates else "Too few items to flag any."
    table, figure = html.lines_table("p-value", series), p_value_figure(named, style=style)
    words = f"Distributions of p-values of {model}: {false}"
    caption = f"{false} Usual items follow the diagonal, strange ones lie above it."
    return html.chart(name, figure, table, f"{model}: p-values of strangeness", words, caption)


def _aurocs(comparison: Comparison, part: str, score: str) -> str:
    found = ((m.label, m.find("ood", part, "auroc", score=score)) for m in comparison.models)
    known = [f"{label} {figure_text(each, metric_of('auroc'))}" for label, each in found if each is not None]
    return f"AUROC, %: {listed(known)}" if known else "without AUROC"


def _numbers(comparison: Comparison, metric: str) -> "html.Markup | None":
    """One metric of every set and score; the AUROC is open to the eye, the others a click away."""

    def named(what: Mapping[str, Any]) -> str:
        return f"{_set_name(what['set'])}, {score_name(str(what.get('score')))}"

    table = comparison.numbers("ood", "set, score", named, predictor="model", metric=metric)
    return html.folded(f"{metric_of(metric).named}, of every set and score", table, open=metric == "auroc")


def _score_order(score: str) -> tuple[int, str]:
    known = list(SCORES)
    return (known.index(score) if score in known else len(known), score)


def _set_name(part: str) -> str:
    return part.removeprefix("ood/")
