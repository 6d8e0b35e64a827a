"""Colours, markers and dashes of models, distinct under any colour vision and without colour at all.

A colour has a light and a dark form for pages of either theme.  Figures are drawn in the light form; a page
replaces it by the variable that holds the form of its theme.
"""

from collections.abc import Iterable
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

# variable of the page -> its colour on white, on dark
THEME = {
    "--page": ("#f6f7f9", "#0b0f14"),
    "--card": ("#ffffff", "#11161c"),
    "--ink": (INK, "#e8ebef"),
    "--quiet": (QUIET, "#a3adb8"),
    "--line": ("#d5dae0", "#2c343d"),
    "--grid": (GRID, "#252c34"),
    "--neutral": (NEUTRAL, "#7d8793"),
    "--gap": (GAP, "#ff7a6e"),
    "--link": ("#0b57b0", "#82b6ff"),
    "--right": ("#08734f", "#5fd6a2"),
    "--wrong": ("#b3261e", "#ff8f85"),
    "--note": ("#fdf6e0", "#221d0f"),
    "--note-line": ("#e0c064", "#6d5b22"),
    "--heat": ("#d9480f", "#ff7a33"),
    **{f"--series-{i}": pair for i, pair in enumerate(COLOURS)},
}
LIGHT, DARK = ({name: pair[theme] for name, pair in THEME.items()} for theme in (0, 1))
# colour in a figure -> variable of the page
VARIABLES = {
    colour: name
    for name, colour in LIGHT.items()
    if colour in (INK, QUIET, GRID, NEUTRAL, GAP) or name.startswith("--series")
}


@dataclass(frozen=True)
class Style:
    """How one model is drawn everywhere."""

    colour: str
    marker: str
    dash: Dash
    variable: str  # the page's name of the colour


NEUTRAL_STYLE = Style(NEUTRAL, "o", "-", "--neutral")  # of no model, or of all


def style_of(place: int) -> Style:
    """The style of the model at this place; markers and dashes vary where colours repeat."""
    rounds, colour = divmod(place, len(COLOURS))
    return Style(
        colour=COLOURS[colour][0],
        marker=MARKERS[place % len(MARKERS)],
        dash=DASHES[(colour + rounds) % len(DASHES)] if rounds else "-",
        variable=f"--series-{colour}",
    )


def styles_for(labels: Iterable[str]) -> dict[str, Style]:
    """One style per label, in order."""
    return {label: style_of(place) for place, label in enumerate(labels)}


def theme_css() -> str:
    """The reader's system decides on the theme, the button overrules it, and paper is light."""
    light, dark = ("".join(f"{name}:{value};" for name, value in theme.items()) for theme in (LIGHT, DARK))
    return (
        f":root{{color-scheme:light;{light}}}\n"
        f'@media screen{{:root[data-theme="dark"]{{color-scheme:dark;{dark}}}}}\n'
        f'@media screen and (prefers-color-scheme:dark){{:root:not([data-theme="light"])'
        f"{{color-scheme:dark;{dark}}}}}\n"
    )
