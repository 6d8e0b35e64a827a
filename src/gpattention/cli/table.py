"""Text for a terminal: lines and columns in which names of others move no cursor."""

import sys
from collections.abc import Sequence

from gpattention.reports.escaping import visible


def say(line: str = "", *, error: bool = False) -> None:
    """One line, at once; what names in it would do to a terminal is shown instead."""
    print(visible(line), file=sys.stderr if error else sys.stdout, flush=True)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """Aligned columns two spaces apart; those in `right` (numbers) end together, others begin together."""
    shown = [[visible(cell) for cell in line] for line in (heads, *rows)]
    widths = [max(len(line[i]) for line in shown) for i in range(len(heads))]
    lines = []
    for line in shown:
        cells = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def shortened(text: str, width: int) -> str:
    """The text on one line; its middle left out where it is longer than `width`."""
    text = visible(" ".join(text.split()))
    if len(text) <= width:
        return text
    kept = width - 3
    return f"{text[: kept - kept // 2]}...{text[len(text) - kept // 2 :]}"
