"""Every model with every way to predict: mean and standard error over seeds, as Markdown and CSV."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpattention.experiments.reproduction.goals import Candidate
from gpattention.experiments.reproduction.results.columns import (
    CLASSIFIED,
    DETECTED,
    Column,
    TableLayout,
    layouts,
)
from gpattention.experiments.reproduction.results.estimates import Estimate, difference
from gpattention.experiments.reproduction.results.markdown import table
from gpattention.experiments.reproduction.results.reading import SEVERITY, EvaluatedModel, PlanResults
from gpattention.reports.comparable import Basis, compared
from gpattention.reports.escaping import Markup, csv_text, markdown

HOW_TO_READ = """\
± is the standard error of the mean over seeds. ECE and MCE are pooled with 15 bins; "batches" are means
over batches (1000 images or 32 sentences, 10 bins), as in the paper, and only there to compare with it.
Bold is the best of the single models where it differs from the next by more than two standard errors of the
difference, seed by seed where both have the same seeds. An ensemble is one prediction of all seeds
together: it has no standard error, takes as many passes as it has members, and is left out of the
comparison. Standard errors of few seeds are uncertain themselves: for 95 % it takes 4.3 of them with three
seeds, 2.8 with five.
"""
OTHER_ITEMS = (
    "Not all single models are judged on as many items: bold is the best of those that most are judged on."
)
FIELDS = (
    "model", "predictor", "suite", "set", "metric", "score", "mean", "standard_error", "runs", "seeds",
    "items",
)  # fmt: skip


@dataclass(frozen=True)
class SummaryLine:
    """A model with one way to predict."""

    model: EvaluatedModel
    predictor: str

    @property
    def is_ensemble(self) -> bool:
        """Whether it takes several runs to predict."""
        return Candidate(self.model.name, self.predictor).is_ensemble

    def estimate(self, column: Column) -> Estimate | None:
        """What stands in a column."""
        return self.model.estimate(self.predictor, column.suite, column.place, column.metric, column.score)

    def basis(self, column: Column) -> Basis | None:
        """What its figure is computed on; None where there is none, or where it is not compared."""
        if self.is_ensemble or self.estimate(column) is None:
            return None
        return self.model.basis(self.predictor, column.suite, column.place)

    def seeds(self, found: Estimate | None) -> str:
        """How many runs a line is made of."""
        if self.is_ensemble:
            return f"1 of {len(self.model.runs)}"
        return "" if found is None else str(found.count)


def summary_lines(results: PlanResults) -> list[SummaryLine]:
    """In the plan's order, single models before ensembles."""
    lines = [SummaryLine(model, each) for model in results.models for each in model.predictors]
    return sorted(lines, key=lambda line: line.is_ensemble)  # sorting keeps the order of equals


def summary_markdown(results: PlanResults) -> str:
    """The page."""
    lines = summary_lines(results)
    parts = [f"# {markdown(results.plan.name)}: all models\n\n{HOW_TO_READ}"]
    parts += [_table(layout, lines) for layout in layouts(results)]
    return "\n".join(parts)


def summary_csv(results: PlanResults) -> str:
    """One line for each figure, in fractions; severities are means over the types."""
    lines = (
        figure
        for model in results.models
        for predictor in model.predictors
        for figure in _figures(model, predictor)
    )
    return csv_text(FIELDS, ([line[name] for name in FIELDS] for line in lines))


def best_place(column: Column, lines: Sequence[SummaryLine]) -> int | None:
    """The line whose figure is clearly the best of the single models; None where no one is.

    Compared are those that are judged on as many items as most.
    """
    found = [
        (place, estimate)
        for place in sorted(compared([line.basis(column) for line in lines]))
        if (estimate := lines[place].estimate(column)) is not None
    ]
    if len(found) < 2:
        return None
    sign = -1 if column.larger else 1
    (place, first), (_, second) = sorted(found, key=lambda pair: sign * pair[1].mean)[:2]
    gap = difference(first, second)
    return place if gap.clear and sign * gap.mean < 0 and gap.basis in ("paired", "unpaired") else None


def _table(layout: TableLayout, lines: Sequence[SummaryLine]) -> str:
    shown = [line for line in lines if any(line.estimate(column) for column in layout.columns)]
    best = {column: best_place(column, shown) for column in layout.columns}
    rows = []
    for place, line in enumerate(shown):
        found = [line.estimate(column) for column in layout.columns]
        first = layout.columns[0]
        known = next((estimate for estimate in found if estimate is not None), None)
        cells = [
            _cell(estimate, column, bold=best[column] == place)
            for estimate, column in zip(found, layout.columns, strict=True)
        ]
        items = line.model.items(line.predictor, first.suite, first.place)
        rows.append([line.model.name, line.predictor, line.seeds(known), items, *cells])
    headings = ["Model", "Predictor", "Seeds", "Items", *(column.heading for column in layout.columns)]
    bases = [{line.basis(column) for line in shown} - {None} for column in layout.columns]
    told = [layout.note, OTHER_ITEMS if any(len(of_column) > 1 for of_column in bases) else ""]
    note = "".join(f"\n{text}\n" for text in told if text)
    return f"## {markdown(layout.title)}\n{note}\n{table(headings, rows, left=2)}"


def _cell(estimate: Estimate | None, column: Column, *, bold: bool) -> str:
    if estimate is None:
        return ""
    told = estimate.text(column.digits, column.scale)
    return Markup(f"**{told}**") if bold else told


def _figures(model: EvaluatedModel, predictor: str) -> Iterator[dict[str, object]]:
    keys = dict.fromkeys(key for run in model.runs for key in run.figures if key[2] == predictor)
    for suite, place, _, metric, score in keys:
        if not _in_csv(suite, place, metric):
            continue
        found = model.estimate(predictor, suite, place, metric, score)
        assert found is not None
        yield {
            "model": model.name,
            "predictor": predictor,
            "suite": suite,
            "set": place,
            "metric": metric,
            "score": score or "",
            "mean": f"{found.mean:.6g}",
            "standard_error": "" if found.error is None else f"{found.error:.3g}",
            "runs": found.count,
            "seeds": " ".join(map(str, found.values)),
            "items": model.items(predictor, suite, place).replace(",", ""),
        }


def _in_csv(suite: str, place: str, metric: str) -> bool:
    if suite == "ood":
        return metric in DETECTED
    if suite == "corrupted" and not (place.startswith(SEVERITY) or place == "corrupted/mean"):
        return False  # types and categories are in the paper's tables and in the report
    return suite in ("clean", "corrupted") and metric in ("mcc", *CLASSIFIED)
