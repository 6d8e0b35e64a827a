"""A table of the paper as Markdown."""

from gpattention.experiments.paper.lines import LEGEND, Line, printed_lines
from gpattention.experiments.paper.notes import HEADINGS, gathered
from gpattention.experiments.paper.table import PaperTable
from gpattention.reports.escaping import Markup, markdown, markdown_line, markdown_table


def to_markdown(table: PaperTable) -> str:
    """Table, claims and notes."""
    printed = any(cell.paper is not None for cell in table.cells)
    parts = [
        f"## {markdown(table.place)}: {markdown(table.title)}",
        f"{markdown_line(table.share)}{f' {LEGEND}' if printed else ''}",
        _table(table),
        _claims(table),
        *_notes(table),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(table: PaperTable) -> str:
    columns = [f"{table.across} {column}".strip() for column in table.columns]
    rows, before = [], ""
    for line in printed_lines(table):
        rows.append(_cells(line, before))
        before = line.group + line.label
    heads = [*table.headings, "", *columns]
    return markdown_table(heads, rows, right=range(3, len(heads)))


def _cells(line: Line, before: str) -> list[str]:
    """Labels stand once, on the first line that they are of."""
    again = before == line.group + line.label
    figures = [Markup(f"**{markdown(x.text)}**") if x.better else x.text for x in line.texts]
    return [line.group if line.first else "", "" if again else line.label, line.whose, *figures]


def _claims(table: PaperTable) -> str:
    rows = []
    for claim in table.claims:
        theirs = "no figures" if claim.paper is None else f"{claim.paper}: {claim.paper_verdict}"
        verdict = Markup(f"**{markdown(claim.verdict)}**")
        rows.append([claim.text, theirs, str(claim.ours), verdict])
    return markdown_table(["The paper says", "its own figures", "our figures", "ours"], rows)


def _notes(table: PaperTable) -> list[str]:
    return [
        f"{HEADINGS[kind]}:\n\n" + "\n".join(f"- {markdown_line(text)}" for text in texts)
        for kind, texts in gathered(table.notes).items()
    ]
