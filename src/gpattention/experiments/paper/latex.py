"""A table of the paper as LaTeX, with the rules of booktabs."""

from gpattention.experiments.paper.lines import LEGEND, Line, printed_lines
from gpattention.experiments.paper.notes import HEADINGS, gathered
from gpattention.experiments.paper.table import PaperTable
from gpattention.reports.escaping import latex


def to_latex(table: PaperTable) -> str:
    r"""A `table*` for a document with `\usepackage[T1]{fontenc}` and `\usepackage{booktabs,textcomp}`."""
    columns = [f"{table.across} {column}".strip() for column in table.columns]
    heads = [*table.headings, "", *columns]
    lines = [
        r"\begin{table*}",
        r"\centering",
        rf"\caption{{{latex(f'{table.title}: beside {table.place} of the paper. {table.share}')}}}",
        r"\scriptsize",
        rf"\begin{{tabular}}{{lll{'r' * len(columns)}}}",
        r"\toprule",
        _joined([latex(head) for head in heads]),
    ]
    before = ""
    for line in printed_lines(table):
        if line.first:
            lines.append(r"\midrule")
        lines.append(_joined(_cells(line, before)))
        before = line.group + line.label
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", *_below(table), r"\end{table*}"]) + "\n"


def _cells(line: Line, before: str) -> list[str]:
    again = before == line.group + line.label
    figures = [rf"\textbf{{{latex(x.text)}}}" if x.better else latex(x.text) for x in line.texts]
    labels = [latex(line.group) if line.first else "", "" if again else latex(line.label)]
    return [*labels, latex(line.whose), *figures]


def _joined(cells: list[str]) -> str:
    return " & ".join(cells) + r" \\"


def _below(table: PaperTable) -> list[str]:
    """Claims and notes as a small paragraph."""
    lines = [r"\par\smallskip", r"\begin{minipage}{\linewidth}\raggedright"]
    if any(cell.paper is not None for cell in table.cells):
        lines.append(latex(LEGEND) + r"\par")
    for claim in table.claims:
        theirs = "" if claim.paper is None else f"; its own figures: {claim.paper}, {claim.paper_verdict}"
        told = f"The paper says: {claim.text}. Ours: {claim.ours}, {claim.verdict}{theirs}."
        lines.append(latex(told) + r"\par")
    for kind, texts in gathered(table.notes).items():
        lines.append(rf"\emph{{{latex(HEADINGS[kind])}}}: {latex('; '.join(texts))}.\par")
    return [*lines, r"\end{minipage}"]
