"""What a section of the report is: its heading, what it is about, and what fills it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from gpattention.reports import html
from gpattention.reports.comparison import Comparison

Content = Callable[[Comparison, str], "html.Markup"]
C = TypeVar("C", bound=Content)


@dataclass(frozen=True)
class Section:
    """One part of the page.

    Attributes:
        name: name in its address.
        title: above it.
        lead: what a reader must know to read it.
        content: makes the content from a comparison, and the beginning of its ids.
        place: sections stand in rising order.
        suite: which it is about: it says what is missing, and what to know of it.
        fills: whether a comparison has a place in it.
    """

    name: str
    title: str
    lead: str
    content: Content
    place: int
    suite: str | None = None
    fills: Callable[[Comparison], bool] = lambda _: True

    def show(self, comparison: Comparison, name: str) -> "html.Markup":
        """Its content, between what its suite lacks and the remarks on it."""
        if self.suite is None:
            return self.content(comparison, name)
        if not comparison.has(self.suite):
            return html.render("missing", *comparison.what_is_missing(self.suite))
        remarks = html.render("notes", "Read with this in mind", comparison.remarks(self.suite))
        return html.join(self.content(comparison, name), remarks)


REGISTERED: dict[str, Section] = {}


def section(
    name: str, title: str, lead: str, *, place: int, suite: str | None = None,
    fills: Callable[[Comparison], bool] = lambda _: True,
) -> Callable[[C], C]:  # fmt: skip
    """Make a function of a file in `reports/sections`, where every file is read, a section of the report."""

    def register(content: C) -> C:
        REGISTERED[name] = Section(name, title, lead, content, place, suite, fills)
        return content

    return register
