"""Colours, markers and dashes of models: told apart with any colour vision, and without colour at all.

A colour has a light and a dark form for pages of either theme.  Figures are drawn in the light form; a page
replaces it by the variable that holds the form of its theme.
"""

from dataclasses import dataclass
from typing import Literal

# hue by hue: on white, on dark
COLOURS = (
    ("#1257c4", "#4f86ff"),  # blue
    ("#9c3409", "#c8703f"),  # rust
    ("#0a9a72", "#52dc9c"),  # green
    ("#cf5fb4", "#e457b4"),  # pink
    ("#a38a10", "#ecd04a"),  # ochre
    ("#26292e", "#f2f5fa"),  # near the ink
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
Dash = Literal["-"] | tuple[float, tuple[float, ...]]
DASHES: tuple[Dash, ...] = ("-", (0, (5, 1.6)), (0, (1.4, 1.4)), (0, (6, 1.6, 1.2, 1.6)))

INK = "#1c2128"  # words
QUIET = "#59636e"  # numbers at axes
GRID = "#dde2e7"
NEUTRAL = "#8b949e"  # what belongs to no model: chance, perfect calibration, in-distribution
GAP = "#c8453a"  # what is missing to perfect calibration

# colour in a figure -> variable of the page
VARIABLES = {
    INK: "--ink",
    QUIET: "--quiet",
    GRID: "--grid",
    NEUTRAL: "--neutral",
    GAP: "--gap",
    **{light: f"--series-{i}" for i, (light, _) in enumerate(COLOURS)},
}


@dataclass(frozen=True)
class Style:
    """How one model is drawn everywhere."""

    colour: str
    marker: str
    dash: Dash
    variable: str  # the page's name of the colour


def style_of(place: int) -> Style:
    """Of the model at this place; markers and dashes go on where colours repeat."""
    colour = place % len(COLOURS)
    rounds = place // len(COLOURS)
    return Style(
        colour=COLOURS[colour][0],
        marker=MARKERS[place % len(MARKERS)],
        dash=DASHES[(colour + rounds) % len(DASHES)] if rounds else "-",
        variable=f"--series-{colour}",
    )


NEUTRAL_STYLE = Style(NEUTRAL, "o", "-", "--neutral")  # of no model, or of all


def styles_for(labels: list[str]) -> dict[str, Style]:
    """One each, in order."""
    return {label: style_of(place) for place, label in enumerate(labels)}
