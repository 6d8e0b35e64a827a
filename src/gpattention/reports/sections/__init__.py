"""The sections of a report, in their order; each shows one data set's models.

A new section is a function `content(comparison, name)`, a line here, and its heading in page.html.
"""

from collections.abc import Callable
from dataclasses import dataclass

from gpattention.reports import html
from gpattention.reports.comparison import Comparison
from gpattention.reports.sections import calibration, curves, environment, gallery, shift, summary


@dataclass(frozen=True)
class Section:
    """What fills a part of the page; its heading and lead are in page.html."""

    name: str
    content: "Callable[[Comparison, str], html.Markup]"  # of a comparison, under ids that begin so
    suite: str | None = None  # which it is about: it says what is missing, and what to know of it
    fills: Callable[[Comparison], bool] = lambda _: True  # whether a comparison has a place in it

    def show(self, comparison: Comparison, name: str) -> "html.Markup":
        """Its content, between what its suite lacks and the remarks on it."""
        if self.suite is None:
            return self.content(comparison, name)
        if not comparison.has(self.suite):
            return html.render("missing", *comparison.what_is_missing(self.suite))
        remarks = html.render("notes", "Read with this in mind", comparison.remarks(self.suite))
        return html.join(self.content(comparison, name), remarks)


SECTIONS = (
    Section("summary", summary.content),
    Section("reliability", calibration.reliability),
    Section("corruptions", shift.corruptions, "corrupted"),
    Section("outliers", shift.outliers, "ood"),
    Section("selective", calibration.selective, "selective"),
    Section("training", curves.training),
    Section("health", curves.health),
    Section("oversmoothing", curves.oversmoothing, "oversmoothing"),
    Section("cost", curves.cost, "efficiency"),
    Section("gallery", gallery.content, fills=gallery.fills),
    Section("environment", environment.content),
)

__all__ = ["SECTIONS", "Section"]
