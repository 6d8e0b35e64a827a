"""Columns of text for a terminal."""

from collections.abc import Sequence


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """Aligned columns two spaces apart; those in `right` (numbers) end together, others begin together."""
    widths = [max(len(line[i]) for line in (heads, *rows)) for i in range(len(heads))]
    lines = []
    for line in (heads, *rows):
        cells = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def shortened(text: str, width: int) -> str:
    """The text on one line; its middle left out where it is longer than `width`."""
    text = " ".join(text.split())
    if len(text) <= width:
        return text
    kept = width - 3
    return f"{text[: kept - kept // 2]}...{text[len(text) - kept // 2 :]}"
