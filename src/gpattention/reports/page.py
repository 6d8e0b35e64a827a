"""A whole report: one HTML file with everything in it."""

from base64 import b64encode
from collections.abc import Collection, Sequence
from hashlib import sha256
from importlib.resources import files

from gpattention.reports.groups import Comparison, compare
from gpattention.reports.markup import Safe, json_script, tag
from gpattention.reports.sections import SECTIONS, Section
from gpattention.reports.sections.summary import summary_data
from gpattention.reports.theme import theme_css
from gpattention.reports.words import listed
from gpattention.runs import RunData


def build_report(runs: Sequence[RunData], title: str | None = None, *, without: Collection[str] = ()) -> str:
    """The page that shows these runs; the same runs give the same page.

    Runs that differ in nothing but name and seed are one model with a mean and a standard error; each
    data set is compared by itself.  There is no gallery where evaluations kept no items for it.

    Args:
        runs: in the order in which the models should appear.
        title: of the page; made of the data sets if not given.
        without: names of sections to leave out, e.g. "gallery".
    """
    if not runs:
        raise ValueError("expected runs to report on, got none")
    known = [section.name for section in SECTIONS]
    for name in without:
        if name not in known:
            raise ValueError(f"expected without to name sections ({', '.join(known)}), got {name!r}")
    comparisons = compare(runs)
    sections = [
        section
        for section in SECTIONS
        if section.name not in without and any(section.fills(comparison) for comparison in comparisons)
    ]
    title = title or f"Report: {listed([c.data for c in comparisons])}"
    style = Safe(theme_css() + _file("page.css"))
    script = Safe(_file("page.js"))
    digest = b64encode(sha256(script.encode()).digest()).decode()
    # no address may be fetched; only the script of this page may run
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name_="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", style),
    )
    body = tag(
        "body",
        tag("a", "Skip to the summary", href="#summary", class_="skip"),
        _header(title, comparisons),
        tag(
            "div",
            _navigation(sections),
            tag("main", *(_section(section, comparisons) for section in sections)),
            class_="columns",
        ),
        json_script("report-data", [summary_data(comparison) for comparison in comparisons]),
        tag("script", script),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _header(title: str, comparisons: Sequence[Comparison]) -> Safe:
    models = sum(len(comparison.models) for comparison in comparisons)
    runs = sum(len(comparison.runs) for comparison in comparisons)
    counts = f"{_count(models, 'model')} in {_count(runs, 'run')} on {listed([c.data for c in comparisons])}"
    toggle = tag(
        "button",
        tag("span", "◐ ", aria_hidden="true"),
        "Dark theme",
        type="button",
        id="theme",
        aria_pressed="false",
    )
    return tag("header", tag("div", tag("h1", title), tag("p", counts), class_="heading"), toggle)


def _navigation(sections: Sequence[Section]) -> Safe:
    links = (tag("li", tag("a", section.title, href=f"#{section.name}")) for section in sections)
    return tag("nav", tag("ul", *links), aria_label="sections")


def _section(section: Section, comparisons: Sequence[Comparison]) -> Safe:
    parts = []
    for i, comparison in enumerate(comparisons):
        if not section.fills(comparison):
            continue
        if len(comparisons) > 1:
            parts.append(tag("h3", comparison.data))
        parts.append(section.content(comparison, f"{section.name}-{i}"))
    return tag(
        "section",
        tag("h2", section.title, id=f"{section.name}-title"),
        tag("p", section.lead, class_="lead"),
        *parts,
        id=section.name,
        aria_labelledby=f"{section.name}-title",
    )


def _file(name: str) -> str:
    return (files("gpattention.reports") / name).read_text(encoding="utf-8")


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
