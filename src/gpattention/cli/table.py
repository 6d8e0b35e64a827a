"""Text for a terminal: lines and columns in which names of others move no cursor."""

import sys
from collections.abc import Sequence

from gpattention.runs.tables import Bold, visible


def say(line: str = "", *, error: bool = False) -> None:
    """One line, at once; what names in it would do to a terminal is shown instead."""
    print(visible(line), file=sys.stderr if error else sys.stdout, flush=True)


def table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = (), bold: bool = False
) -> str:
    """Aligned columns two spaces apart; those in `right` (numbers) end together, others begin together.

    Cells that are `Bold` are so with `bold`, else they have a star.
    """
    best = [[isinstance(cell, Bold) for cell in line] for line in (heads, *rows)]
    shown = [
        [
            f"*{visible(cell)}" if mark and not bold else visible(cell)
            for cell, mark in zip(*both, strict=True)
        ]
        for both in zip((heads, *rows), best, strict=True)
    ]
    widths = [max(len(line[i]) for line in shown) for i in range(len(heads))]
    lines = []
    for line, marks in zip(shown, best, strict=True):
        cells = []
        for i, (cell, width) in enumerate(zip(line, widths, strict=True)):
            padded = cell.rjust(width) if i in right else cell.ljust(width)
            cells.append(f"\x1b[1m{padded}\x1b[0m" if bold and marks[i] else padded)
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def shortened(text: str, width: int) -> str:
    """The text on one line; its middle left out where it is longer than `width`."""
    text = visible(" ".join(text.split()))
    if len(text) <= width:
        return text
    kept = width - 3
    return f"{text[: kept - kept // 2]}...{text[len(text) - kept // 2 :]}"
