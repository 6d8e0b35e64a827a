"""Figures of a plan: severities, training, reliability under corruption, items of other kinds."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpattention.evaluation.ood_scores import score_name
from gpattention.metrics import metric_of
from gpattention.reports.figures import bars_figure, reliability_figure, severity_figure, training_figure
from gpattention.reports.palette import Style, styles_for
from gpattention.reports.sections.corruptions import severities
from gpattention.reports.sections.reliability import pooled_bins
from gpattention.runs.results import Plain
from gpattention.studies.reproduction.plan import Candidate
from gpattention.studies.reproduction.results.choice import Choice
from gpattention.studies.reproduction.results.reading import PlanResults
from gpattention.studies.reproduction.results.summary import SCORE

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
        values = {m.name: severities(results.table, m.name, metric, OWN) for m in results.models}
        values = {name: seeds for name, seeds in values.items() if any(len(seed) > 1 for seed in seeds)}
        if values:
            title = f"{metric_of(metric).label} under corruption"
            figure = severity_figure(
                values, y=metric_of(metric).label, title=title[:1].upper() + title[1:], styles=styles
            )
            yield f"severity-{metric}", figure


def _training(results: PlanResults, styles: Mapping[str, Style]) -> "Iterator[tuple[str, Figure]]":
    for column, name in (("validation_accuracy", "accuracy"), ("validation_nll", "NLL")):
        rows: dict[str, list[Sequence[Plain]]] = {}
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
    runs = [run for model in results.models if model.name == candidate.model for run in model.runs]
    curves = [run.curve(suite, "reliability") or {} for run in runs]
    found = [by for curve in curves if (by := curve.get(candidate.predictor))]
    return pooled_bins(found) if found else None


def _outside(results: PlanResults, styles: Mapping[str, Style]) -> "Iterator[tuple[str, Figure]]":
    for place in results.table.sets(suite="ood"):
        values = {}
        for model in results.models:
            found = results.table.find(model.name, "ood", place, "auroc", OWN, score=SCORE)
            if found is not None:
                values[model.name] = list(found.values.values())
        if values:
            name = place.removeprefix("ood/")
            x = f"AUROC, {score_name(SCORE)}"
            yield f"ood-{name}", bars_figure(values, x=x, title=f"Against {name}", styles=styles)
