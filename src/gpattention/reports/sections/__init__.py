"""The sections of a report, in their order; each shows one data set's models.

A new section is a function `content(comparison, name)` and a line here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpattention.reports import html
from gpattention.reports.comparison import Comparison
from gpattention.reports.sections import calibration, curves, environment, gallery, shift, summary

if TYPE_CHECKING:
    from markupsafe import Markup


@dataclass(frozen=True)
class Section:
    """A heading, what the reader should know, and what fills it."""

    name: str
    title: str
    lead: str
    content: "Callable[[Comparison, str], Markup]"  # of a comparison, under ids that begin so
    suite: str | None = None  # which it is about: it says what is missing, and what to know of it
    fills: Callable[[Comparison], bool] = lambda _: True  # whether a comparison has a place in it

    def show(self, comparison: Comparison, name: str) -> "Markup":
        """Its content, between what its suite lacks and the remarks on it."""
        if self.suite is None:
            return self.content(comparison, name)
        if not comparison.has(self.suite):
            return html.render("missing", *comparison.what_is_missing(self.suite))
        remarks = html.render("notes", "Read with this in mind", comparison.remarks(self.suite))
        return html.join(self.content(comparison, name), remarks)


SECTIONS = (
    Section("summary", "Summary", "How right, how sure, and how well these agree.", summary.content),
    Section(
        "reliability", "Reliability",
        "Accuracy of the answers given with a certain confidence, on the clean test set. Red is confidence "
        "that accuracy does not reach, pale is accuracy beyond confidence; the grey strip shows where the "
        "items are.",
        calibration.reliability,
    ),
    Section(
        "corruptions", "Corrupted images",
        "The same models on damaged images. Accuracy, NLL and ECE belong together: a collapsed model has the "
        "lowest ECE.",
        shift.corruptions, "corrupted",
    ),
    Section(
        "outliers", "Unknown data",
        "Data of other kinds than the training data should be met with more uncertainty. Larger scores "
        "mean more unknown. Strangeness has p-values too: of usual items a share of p has at most p.",
        shift.outliers, "ood",
    ),
    Section(
        "selective", "Selective prediction",
        "A model that knows when it is wrong makes few errors among the items of which it is most certain.",
        calibration.selective, "selective",
    ),
    Section("training", "Training", "One point per validation.", curves.training),
    Section(
        "health", "Health by layer", "What the attention layers look like from inside, first layer left.",
        curves.health,
    ),
    Section(
        "oversmoothing", "Oversmoothing", "Tokens that grow alike from layer to layer carry less and less.",
        curves.oversmoothing, "oversmoothing",
    ),
    Section("cost", "Time and memory", "Measured on the machine named below.", curves.cost, "efficiency"),
    Section(
        "gallery", "Gallery", "Items of the test set, and how uncertain each token of them is.",
        gallery.content, fills=gallery.fills,
    ),
    Section(
        "environment", "Environment and config", "What the numbers depend on.", environment.content
    ),
)  # fmt: skip

__all__ = ["SECTIONS", "Section"]
