"""Tokens in colours, in a terminal and in HTML: the larger a token's number, the deeper its background.

Texts come from models and files of others, so that control characters and HTML are escaped.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib import import_module
from typing import Any, TextIO

import torch
from torch import Tensor

from gpattention.files import visible

LEVELS = 8  # of colour
DEEPEST = (214, 69, 65)  # red, over white
OPACITY = 0.85  # of the deepest in HTML, so that both dark and light letters read on it
BREAKS = "\n\t"  # the unprintable characters of a text that are not escaped
STRONG = 0.75  # level from which on a piece is in brackets if there are no colours


@dataclass(frozen=True)
class Painted:
    """One line of pieces.

    Attributes:
        pieces: of the text, one for each token.
        levels: from 0 to 1, None for pieces without a number.
        notes: the number of each piece, shown under a pointer.
    """

    pieces: Sequence[str]
    levels: Sequence[float | None]
    notes: Sequence[str]


def levels_of(values: Tensor, *, standardised: bool) -> list[float | None]:
    """Levels from 0 to 1 for one line of numbers [N]; NaN has none.

    Args:
        values: larger ones have deeper colours.
        standardised: they are deviations from what is usual, which are coloured from 1 on and deepest at 5;
            else the upper half of the line's numbers is coloured, by ranks.

    Returns:
        One level for each number.
    """
    known = values.isfinite()
    if standardised:
        level = (values.nan_to_num() - 1) / 4
    else:
        rank = torch.zeros_like(values)
        rank[known] = values[known].argsort().argsort().to(values)
        level = 2 * rank / max(int(known.sum()) - 1, 1) - 1
    found = level.clamp(0, 1).tolist()
    return [x if ok else None for x, ok in zip(found, known.tolist(), strict=True)]


def show_lines(title: str, lines: Sequence[Painted], *, file: TextIO | None = None) -> None:
    """Print lines in colours if the terminal has colours, else with pieces of high levels in brackets.

    In a notebook they are shown as HTML.

    Args:
        title: printed above them.
        lines: to print.
        file: to print to; standard output if not given.
    """
    from rich.console import Console
    from rich.text import Text

    # in a notebook rich would ignore the file
    jupyter = None if file is None else False
    console = Console(file=file, highlight=False, soft_wrap=True, force_jupyter=jupyter)
    if console.is_jupyter:
        display: Any = import_module("IPython.display")  # which every notebook has
        display.display(display.HTML(html_of(title, lines)))
        return
    plain = console.color_system is None
    console.print(Text(title, style="italic"))
    for line in lines:
        text = Text()
        for piece, level in zip(line.pieces, line.levels, strict=True):
            shown, step = visible(piece, BREAKS), round((level or 0.0) * LEVELS)
            if plain:
                text.append(f"[{shown}]" if (level or 0.0) >= STRONG else shown)
            else:
                r, g, b = _mixed(step)
                text.append(shown, style=f"black on rgb({r},{g},{b})" if step else "")
        console.print(text)


def html_of(title: str, lines: Sequence[Painted]) -> str:
    """The same as HTML that needs nothing else; a pointer over a piece shows its number.

    Args:
        title: shown above them.
        lines: to show.

    Returns:
        One `div`.
    """
    rows = []
    for line in lines:
        spans = []
        for piece, level, note in zip(line.pieces, line.levels, line.notes, strict=True):
            # over the page's own background, as a pale red would be the brightest spot of a dark page
            opacity = OPACITY * round((level or 0.0) * LEVELS) / LEVELS
            style = f' style="background:rgba{*DEEPEST, round(opacity, 3)}"' if opacity else ""
            spans.append(f'<span title="{escape(note)}"{style}>{escape(visible(piece, BREAKS))}</span>')
        rows.append(f'<p style="white-space:pre-wrap;line-height:1.6">{"".join(spans)}</p>')
    heading = f'<p style="font-style:italic">{escape(title)}</p>' if title else ""
    return f'<div style="font-family:system-ui,sans-serif">{heading}{"".join(rows)}</div>'


def painted_html(words: Sequence[str], scores: "Sequence[tuple[str, Sequence[float | None]]]") -> str:
    """Words in the colours of their numbers, by ranks, as in `TokenUncertainty.to_html`.

    Args:
        words: of one text.
        scores: titles, each with a number or None for every word.

    Returns:
        One `div` for each title; without scores the plain words.
    """
    pieces = [f"{word} " for word in words]
    plain = [("", [None] * len(pieces))]
    blocks = []
    for title, values in scores or plain:
        known = torch.tensor([float("nan") if v is None else v for v in values], dtype=torch.float64)
        notes = ["" if v is None else f"{title}: {v:.3g}" for v in values]
        blocks.append(html_of(title, [Painted(pieces, levels_of(known, standardised=False), notes)]))
    return "".join(blocks)


def _mixed(step: int) -> tuple[int, int, int]:
    """A mixture of white and the deepest colour."""
    share = step / LEVELS
    r, g, b = (round(255 + share * (deep - 255)) for deep in DEEPEST)
    return r, g, b


def pieces_of(tokenizer: object, ids: Sequence[int]) -> list[str]:
    """The text that each id adds, with spaces; ids in brackets without a tokenizer.

    Args:
        tokenizer: with a method `decode`, or None.
        ids: of one text; negative ones are no tokens and add nothing.

    Returns:
        One piece for each id.
    """
    decode = getattr(tokenizer, "decode", None)
    pieces: list[str] = []
    for place, own in enumerate(ids):
        if own < 0:
            pieces.append("")
        elif decode is None:
            pieces.append(f"<{own}>")
        else:
            before = [x for x in ids[max(0, place - 4) : place] if x >= 0]
            left, whole = decode(before) if before else "", decode([*before, own])
            # half a character is a replacement mark, which changes with the next token
            fits = whole.startswith(left) and len(whole) > len(left)
            pieces.append(whole[len(left) :] if fits else decode([own]))
    return pieces
