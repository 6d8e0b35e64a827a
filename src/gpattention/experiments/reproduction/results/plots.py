"""Figures of a plan: severities, training, reliability under corruption, items of other kinds."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from gpattention.data.corruptions import SEVERITIES
from gpattention.experiments.reproduction.goals import Candidate
from gpattention.experiments.reproduction.results.choosing import Choice
from gpattention.experiments.reproduction.results.columns import SCORE
from gpattention.experiments.reproduction.results.reading import SEVERITY, EvaluatedModel, PlanResults
from gpattention.reports.figures import bars_figure, reliability_figure, severity_figure, training_figure
from gpattention.reports.palette import Style, styles_for
from gpattention.reports.sections.reliability import pooled_bins
from gpattention.reports.words import metric_name, score_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMS = ("png", "svg")
OWN = "model"  # the predictor of every line


def draw_figures(results: PlanResults, choice: Choice) -> "Iterator[tuple[str, Figure]]":
    """Each figure with the name of its file, as far as the evaluations have what it shows."""
    styles = styles_for([model.name for model in results.models])
    yield from _severities(results, styles)
    yield from _training(results, styles)
    yield from _reliability(results, choice, styles)
    yield from _outside(results, styles)


def _severities(results: PlanResults, styles: Mapping[str, Style]) -> "Iterator[tuple[str, Figure]]":
    for metric in ("accuracy", "nll", "ece"):
        values = {model.name: _by_severity(model, metric) for model in results.models}
        values = {name: seeds for name, seeds in values.items() if any(len(seed) > 1 for seed in seeds)}
        if values:
            title = f"{metric_name(metric)} under corruption"
            figure = severity_figure(
                values, y=metric_name(metric), title=title[:1].upper() + title[1:], styles=styles
            )
            yield f"severity-{metric}", figure


def _by_severity(model: EvaluatedModel, metric: str) -> list[dict[int, float]]:
    """Of each seed; severity 0 are the test items as they are."""
    keys = {0: ("clean", "test", OWN, metric, None)}
    keys |= {s: ("corrupted", f"{SEVERITY}/{s}", OWN, metric, None) for s in SEVERITIES}
    return [{s: run.figures[key] for s, key in keys.items() if key in run.figures} for run in model.runs]


def _training(results: PlanResults, styles: Mapping[str, Style]) -> "Iterator[tuple[str, Figure]]":
    for column, name in (("validation_accuracy", "accuracy"), ("validation_nll", "NLL")):
        rows: dict[str, list[tuple[dict[str, Any], ...]]] = {}
        for model in results.models:
            seeds = [run.rows for run in model.runs if any(row.get(column) is not None for row in run.rows)]
            if seeds:
                rows[model.name] = seeds
        if rows:
            title = f"Validation {name} while training"
            figure = training_figure(rows, column, y=f"validation {name}", title=title, styles=styles)
            yield f"training-{column.removeprefix('validation_')}", figure


def _reliability(
    results: PlanResults, choice: Choice, styles: Mapping[str, Style]
) -> "Iterator[tuple[str, Figure]]":
    """Of the chosen one and the rivals: under corruption, of texts on test items."""
    suite = "clean" if results.texts else "corrupted"
    chosen = choice.chosen
    shown = [*([chosen.candidate] if chosen else []), *results.plan.rivals]
    for candidate in dict.fromkeys(shown):
        bins = _bins(results, candidate, suite)
        if bins is not None:
            figure = reliability_figure(bins, title=str(candidate), style=styles[candidate.model])
            yield f"reliability-{candidate.model}-{candidate.predictor.replace('+', '-')}", figure


def _bins(results: PlanResults, candidate: Candidate, suite: str) -> dict[str, list[Any]] | None:
    """Of all seeds together; None where no run has them."""
    model = results.model(candidate.model)
    curves = [run.suites[suite].curves for run in (model.runs if model else ()) if suite in run.suites]
    found = [by for curve in curves if (by := curve.get("reliability", {}).get(candidate.predictor))]
    return pooled_bins(found) if found else None


def _outside(results: PlanResults, styles: Mapping[str, Style]) -> "Iterator[tuple[str, Figure]]":
    for place in results.places("ood"):
        values = {}
        for model in results.models:
            found = model.estimate(OWN, "ood", place, "auroc", SCORE)
            if found is not None:
                values[model.name] = list(found.values.values())
        if values:
            name = place.removeprefix("ood/")
            x = f"AUROC, {score_name(SCORE)}"
            yield f"ood-{name}", bars_figure(values, x=x, title=f"Against {name}", styles=styles)
