"""Tables as text, and third-party text inside what we write: terminals, CSV, Markdown, LaTeX.

Names of runs, classes and sets come from folders, recipes and records that somebody else may have made.  What
they hold stands on a page as the letters that they are: it moves no cursor, computes nothing in a
spreadsheet, and is no markup.  Each kind of page has one function for that, and all its writers use it
(HTML is `reports.html`'s).
"""

import csv
import io
import re
from collections.abc import Iterable, Sequence

from gpattention.files import visible

# what a spreadsheet takes for the beginning of a formula, also in the wide forms of East Asian text
_FORMULA = tuple("=+-@\t\r\n\N{FULLWIDTH EQUALS SIGN}\N{FULLWIDTH PLUS SIGN}\N{FULLWIDTH HYPHEN-MINUS}"
                 "\N{FULLWIDTH COMMERCIAL AT}")  # fmt: skip
# a `<` begins markup only before these, a bracket links only before others, an underscore emphasises only at
# the edge of a word
_MARKDOWN = re.compile(
    r"[\\|*`]|\](?=[(\[:])|<(?=[A-Za-z/!?])|~(?=~)|(?<=~)~|&(?=#?\w+;)|(?<![^\W_])_|_(?![^\W_])"
)
_BLOCK = re.compile(r"^(?:(?=[#>]|[-+=]+(?:\s|$)|-{3}|\[[ xX]\])|\d+(?=[.)](?:\s|$)))")
_LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#",
    "_": r"\_", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}",
    ">": r"\textgreater{}", "|": r"\textbar{}", "±": r"$\pm$", "\N{GREEK SMALL LETTER ALPHA}": r"$\alpha$",
    "→": r"$\rightarrow$", "↑": r"$\uparrow$", "↓": r"$\downarrow$", "†": r"$^\dagger$",
    "‡": r"$^\ddagger$", "`": r"\textasciigrave{}", '"': r"\textquotedbl{}",
}  # fmt: skip


class Markup(str):
    """Markdown already.  Formatting or joining it makes plain text again, which is then escaped."""

    __slots__ = ()


class Bold(str):
    """A cell that stands out; each format writes it in its own way."""

    __slots__ = ()


def csv_text(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A file whose numbers are numbers and whose texts are never formulas; None is an empty cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([_csv_cell(head) for head in heads])
    writer.writerows([_csv_cell(cell) for cell in row] for row in rows)
    return text.getvalue()


def markdown(text: object) -> Markup:
    """A text inside a line of Markdown, on one line."""
    if isinstance(text, Markup):
        return text
    return Markup(_MARKDOWN.sub(r"\\\g<0>", visible(" ".join(str(text).split()))))


def markdown_line(text: object) -> Markup:
    """A text that begins a line of Markdown or an item of a list: no heading, quotation or list itself."""
    inline = markdown(text)
    return inline if isinstance(text, Markup) else Markup(_BLOCK.sub(r"\g<0>\\", inline, count=1))


def markdown_code(text: object) -> Markup:
    """A text as code; what it holds is no markup, so that nothing in it is escaped."""
    plain = visible(" ".join(str(text).split()))
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", plain)), default=0))
    space = " " if "`" in plain or not plain else ""
    return Markup(f"{fence}{space}{plain}{space}{fence}")


def markdown_table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    left: int | None = 1,
    right: Iterable[int] | None = None,
) -> str:
    """The first `left` columns are words, the others numbers, to the right; None: all are words.

    `right` names the columns of numbers instead.  Cells are escaped unless they are `Markup`.
    """
    numbers = range(len(heads) if left is None else left, len(heads)) if right is None else set(right)
    rules = [Markup("---:" if i in numbers else "---") for i in range(len(heads))]
    lines = ([markdown_cell(cell) for cell in line] for line in (heads, rules, *rows))
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def latex_table(heads: Sequence[str], blocks: Iterable[Iterable[Sequence[str]]], left: int = 1) -> str:
    r"""A `tabular` with the rules of booktabs, one between two blocks of rows."""
    lines = [rf"\begin{{tabular}}{{{'l' * left}{'r' * (len(heads) - left)}}}", r"\toprule", _latex_row(heads)]
    for block in blocks:
        lines += [r"\midrule", *map(_latex_row, block)]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"])


def latex(text: object) -> str:
    """Every sign that LaTeX would take for its own as text."""
    plain = "".join(_LATEX.get(sign, sign) for sign in visible(" ".join(str(text).split())))
    return plain.replace("--", "-{}-")  # two hyphens would become a dash


def _csv_cell(cell: object) -> object:
    if cell is None or isinstance(cell, int | float):
        return cell
    text = str(cell)
    if not text.startswith(_FORMULA) and not text.lstrip().startswith(_FORMULA):
        return visible(text)
    try:
        float(text)
    except ValueError:
        return f"'{visible(text)}"
    return text.strip()  # a number in the form that its writer chose


def markdown_cell(cell: object) -> str:
    """Inside a table a bar would end the cell, also in code."""
    text = re.sub(r"(?<!\\)\|", r"\\|", markdown(cell))
    return f"**{text}**" if isinstance(cell, Bold) else text


def _latex_row(cells: Sequence[str]) -> str:
    return " & ".join(rf"\textbf{{{latex(x)}}}" if isinstance(x, Bold) else latex(x) for x in cells) + r" \\"
