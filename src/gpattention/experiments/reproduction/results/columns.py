"""What the summary shows: tables of columns, each one figure of an evaluation."""

from dataclasses import dataclass

from gpattention.experiments.reproduction.results.reading import PlanResults
from gpattention.reports.words import LARGER_IS_BETTER, metric_name

SCORE = "entropy"  # of other items, in the table; the CSV has every score
CLASSIFIED = ("accuracy", "nll", "ece", "mce", "batch_ece", "batch_mce", "aurc")
DETECTED = ("auroc", "fpr95")
PER_CENT = {"accuracy", "mcc", "auroc", "fpr95"}
HEADINGS = {"batch_ece": "ECE, batches", "batch_mce": "MCE, batches", "fpr95": "FPR95"}


@dataclass(frozen=True)
class Column:
    """One figure of every row."""

    heading: str
    suite: str
    place: str
    metric: str
    score: str | None = None

    @property
    def larger(self) -> bool:
        """Whether larger is better."""
        return self.metric in LARGER_IS_BETTER

    @property
    def scale(self) -> float:
        """Fractions of items are shown in per cent."""
        return 100.0 if self.metric in PER_CENT else 1.0

    @property
    def digits(self) -> int:
        """After the point."""
        return 2 if self.metric in PER_CENT else 3


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
    if results.texts:
        for place in _named(results, "clean", "ood/"):
            title = f"Out of domain: {place.removeprefix('ood/')}"
            found.append(TableLayout(title, _classified(results, "clean", place)))
    if "corrupted/mean" in results.places("corrupted"):
        note = "Mean over all corruptions at all severities, each type weighing the same."
        columns = _classified(results, "corrupted", "corrupted/mean")
        found.append(TableLayout("Corrupted: test items", columns, note))
    outside = _named(results, "ood", "ood/")
    if outside:
        columns = tuple(
            Column(f"{place.removeprefix('ood/')}: {heading_of(metric)}", "ood", place, metric, SCORE)
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
    return tuple(Column(heading_of(metric), suite, place, metric) for metric in metrics)


def heading_of(metric: str) -> str:
    """With its unit and which way is better."""
    name = HEADINGS.get(metric, metric_name(metric))
    name = name[:1].upper() + name[1:]
    unit = ", %" if metric in PER_CENT else ""
    return f"{name}{unit} {'↑' if metric in LARGER_IS_BETTER else '↓'}"


def _named(results: PlanResults, suite: str, start: str) -> list[str]:
    return [place for place in results.places(suite) if place.startswith(start)]
