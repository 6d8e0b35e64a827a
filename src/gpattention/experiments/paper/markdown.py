"""A table of the paper as Markdown."""

import re

from gpattention.experiments.paper.lines import LEGEND, Line, printed_lines
from gpattention.experiments.paper.notes import HEADINGS, gathered
from gpattention.experiments.paper.table import PaperTable


def to_markdown(table: PaperTable) -> str:
    """Table, claims and notes."""
    printed = any(cell.paper is not None for cell in table.cells)
    parts = [
        f"## {_escaped(table.place)}: {_escaped(table.title)}",
        f"{_escaped(table.share)}{f' {LEGEND}' if printed else ''}",
        _table(table),
        _claims(table),
        *_notes(table),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(table: PaperTable) -> str:
    columns = [f"{table.across} {column}".strip() for column in table.columns]
    heads = [*table.headings, "", *columns]
    lines = [_joined([_escaped(head) for head in heads]), _joined(["---"] * 3 + ["---:"] * len(columns))]
    before = ""
    for line in printed_lines(table):
        lines.append(_joined(_cells(line, before)))
        before = line.group + line.label
    return "\n".join(lines)


def _cells(line: Line, before: str) -> list[str]:
    """Labels stand once, on the first line that they are of."""
    again = before == line.group + line.label
    figures = [f"**{_escaped(x.text)}**" if x.better else _escaped(x.text) for x in line.texts]
    return [
        _escaped(line.group) if line.first else "",
        "" if again else _escaped(line.label),
        line.whose,
        *figures,
    ]


def _claims(table: PaperTable) -> str:
    lines = [_joined(["The paper says", "its own figures", "our figures", "ours"]), _joined(["---"] * 4)]
    for claim in table.claims:
        theirs = "no figures" if claim.paper is None else f"{claim.paper}: {claim.paper_verdict}"
        lines.append(_joined([_escaped(claim.text), theirs, str(claim.ours), f"**{claim.verdict}**"]))
    return "\n".join(lines)


def _notes(table: PaperTable) -> list[str]:
    return [
        f"{HEADINGS[kind]}:\n\n" + "\n".join(f"- {_escaped(text)}" for text in texts)
        for kind, texts in gathered(table.notes).items()
    ]


def _joined(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _escaped(text: str) -> str:
    """Names come from recipes: what Markdown or HTML would read otherwise is taken as it stands."""
    return re.sub(r"([\\|*<\[\]])", r"\\\1", " ".join(text.split()))
