"""Every model with every way to predict: mean and standard error over seeds, as Markdown and CSV."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpattention.data.corruptions import SEVERITIES
from gpattention.evaluation.named_predictors import predictor_order
from gpattention.metrics import metric_of
from gpattention.runs import Column, Group, OverSeeds, Results, compared, difference
from gpattention.runs.tables import Bold, csv_text, markdown, markdown_table
from gpattention.studies.reproduction.plan import Candidate
from gpattention.studies.reproduction.results.reading import PlanResults

SCORE = "entropy"  # of other items, in the table; the CSV has every score
CLASSIFIED = ("accuracy", "nll", "ece", "mce", "batch_ece", "batch_mce", "aurc")
DETECTED = ("auroc", "fpr95")
HOW_TO_READ = """\
± is the standard error of the mean over seeds. ECE and MCE are pooled with 15 bins; "batches" are means
over batches (1000 images or 32 sentences, 10 bins), as in the paper, and only there to compare with it.
Bold is the best of the single models where its difference from the next is clear (Student's t, 95 %), seed
by seed where both have the same seeds. An ensemble is one prediction of all seeds together: it has no
standard error, takes as many passes as it has members, and is left out of the comparison.
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

    model: Group
    predictor: str
    table: Results

    @property
    def is_ensemble(self) -> bool:
        """Whether it takes several runs to predict."""
        return Candidate(self.model.name, self.predictor).is_ensemble

    def find(self, column: Column) -> OverSeeds | None:
        """What stands in a column."""
        return column.find(self.table, self.model.name, self.predictor)

    def single(self, column: Column) -> OverSeeds | None:
        """The same where it may be compared: ensembles are not."""
        return None if self.is_ensemble else self.find(column)

    def seeds(self, found: OverSeeds) -> str:
        """How many runs a line is made of."""
        return f"1 of {len(self.model.runs)}" if self.is_ensemble else str(found.count)


@dataclass(frozen=True)
class TableLayout:
    """A table of the summary."""

    title: str
    columns: tuple[Column, ...]
    note: str = ""


def layouts(results: PlanResults) -> list[TableLayout]:
    """The tables that these evaluations can fill."""
    first = "In domain" if results.texts else "Clean"
    found = [TableLayout(f"{first}: test items", _classified(results, "clean", "test"))]
    outside = [place for place in results.table.sets(suite="clean") if place.startswith("ood/")]
    for place in outside if results.texts else ():
        title = f"Out of domain: {place.removeprefix('ood/')}"
        found.append(TableLayout(title, _classified(results, "clean", place)))
    if "corrupted/mean" in results.table.sets(suite="corrupted"):
        note = "Mean over all corruptions at all severities, each type weighing the same."
        columns = _classified(results, "corrupted", "corrupted/mean")
        found.append(TableLayout("Corrupted: test items", columns, note))
    outside = [place for place in results.table.sets(suite="ood") if place.startswith("ood/")]
    if outside:
        columns = tuple(
            Column(
                "ood", place, metric, SCORE, head=f"{place.removeprefix('ood/')}: {metric_of(metric).heading}"
            )
            for place in outside
            for metric in DETECTED
        )
        note = (
            f"Items are told apart by the {SCORE} of the prediction; FPR95 takes test items as positive. "
            "summary.csv has the other scores."
        )
        found.append(TableLayout("Items of other kinds, against test items", columns, note))
    return found


def _classified(results: PlanResults, suite: str, place: str) -> tuple[Column, ...]:
    metrics = ("mcc", *CLASSIFIED) if results.texts else CLASSIFIED
    return tuple(Column(suite, place, metric, head=metric_of(metric).heading) for metric in metrics)


def summary_lines(results: PlanResults) -> list[SummaryLine]:
    """In the plan's order, single models before ensembles."""
    lines = [
        SummaryLine(model, predictor, results.table)
        for model in results.models
        for predictor in sorted(results.table.predictors(model.name), key=predictor_order)
    ]
    return sorted(lines, key=lambda line: line.is_ensemble)  # sorting keeps the order of equals


def summary_markdown(results: PlanResults) -> str:
    """The page."""
    lines = summary_lines(results)
    parts = [f"# {markdown(results.plan.name)}: all models\n\n{HOW_TO_READ}"]
    parts += [_table(layout, lines) for layout in layouts(results)]
    return "\n".join(parts)


def summary_csv(results: PlanResults) -> str:
    """One line for each figure, in fractions; severities are means over the types."""
    lines = sorted(summary_lines(results), key=lambda line: results.models.index(line.model))
    return csv_text(FIELDS, (row for line in lines for row in _figures(line)))


def best_place(column: Column, lines: Sequence[SummaryLine]) -> int | None:
    """The line whose figure is clearly the best of the single models; None where no one is.

    Compared are those that are judged on as many items as most.
    """
    singles = [line.single(column) for line in lines]
    found = [(i, figure) for i in sorted(compared(singles)) if (figure := singles[i]) is not None]
    if len(found) < 2:
        return None
    sign = -1 if column.shown.larger else 1
    (place, first), (_, second) = sorted(found, key=lambda pair: sign * pair[1].mean)[:2]
    gap = difference(first, second)
    return place if gap.clear and sign * gap.mean < 0 and gap.basis in ("paired", "unpaired") else None


def _table(layout: TableLayout, lines: Sequence[SummaryLine]) -> str:
    shown = [line for line in lines if any(line.find(column) for column in layout.columns)]
    best = {column: best_place(column, shown) for column in layout.columns}
    rows = []
    for place, line in enumerate(shown):
        cells = []
        for column in layout.columns:
            figure = line.find(column)
            text = "" if figure is None else figure.text(column.shown.digits, column.shown.scale)
            cells.append(Bold(text) if best[column] == place else text)
        known = next(figure for column in layout.columns if (figure := line.find(column)) is not None)
        rows.append([line.model.name, line.predictor, line.seeds(known), known.items, *cells])
    headings = ["Model", "Predictor", "Seeds", "Items", *(column.head for column in layout.columns)]
    bases = [{f.basis for line in shown if (f := line.single(column))} for column in layout.columns]
    told = [layout.note, OTHER_ITEMS if any(len(of_column) > 1 for of_column in bases) else ""]
    note = "".join(f"\n{text}\n" for text in told if text)
    return f"## {markdown(layout.title)}\n{note}\n{markdown_table(headings, rows, left=2)}"


def _figures(line: SummaryLine) -> Iterator[list[object]]:
    name, predictor = line.model.name, line.predictor
    severe: dict[str, None] = {}
    for what, figure in line.table.figures(recipe=name, predictor=predictor):
        suite, place, metric = what["suite"], what["set"], what["metric"]
        if (suite == "ood" and metric in DETECTED) or (
            suite in ("clean", "corrupted") and metric in ("mcc", *CLASSIFIED) and place.count("/") < 2
            and (suite == "clean" or place == "corrupted/mean")  # categories are in the paper's tables
        ):  # fmt: skip
            yield _csv_row(name, predictor, suite, place, metric, what.get("score"), figure)
        if suite == "corrupted" and metric in ("mcc", *CLASSIFIED):
            severe[metric] = None
    for severity in SEVERITIES:
        for metric in severe:
            found = line.table.find(name, "corrupted", f"corrupted/*/{severity}", metric, predictor)
            if found is not None:
                place = f"corrupted/severity/{severity}"
                yield _csv_row(name, predictor, "corrupted", place, metric, None, found)


def _csv_row(
    name: str, predictor: str, suite: str, place: str, metric: str, score: str | None, figure: OverSeeds
) -> list[object]:
    error = "" if figure.error is None else f"{figure.error:.3g}"
    seeds, items = " ".join(map(str, figure.values)), figure.items.replace(",", "")
    told = [name, predictor, suite, place, metric, score]
    return [*told, f"{figure.mean:.6g}", error, figure.count, seeds, items]
