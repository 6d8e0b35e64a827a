"""The colours of a page, light and dark, as variables of its style sheet."""

from gpattention.reports.palette import COLOURS, GAP, GRID, INK, NEUTRAL, QUIET

LIGHT = {
    "--page": "#f6f7f9",
    "--card": "#ffffff",
    "--ink": INK,
    "--quiet": QUIET,
    "--line": "#d5dae0",
    "--grid": GRID,
    "--neutral": NEUTRAL,
    "--gap": GAP,
    "--link": "#0b57b0",
    "--right": "#08734f",
    "--wrong": "#b3261e",
    "--note": "#fdf6e0",
    "--note-line": "#e0c064",
    "--heat": "#d9480f",
    **{f"--series-{i}": light for i, (light, _) in enumerate(COLOURS)},
}
DARK = {
    "--page": "#0b0f14",
    "--card": "#11161c",
    "--ink": "#e8ebef",
    "--quiet": "#a3adb8",
    "--line": "#2c343d",
    "--grid": "#252c34",
    "--neutral": "#7d8793",
    "--gap": "#ff7a6e",
    "--link": "#82b6ff",
    "--right": "#5fd6a2",
    "--wrong": "#ff8f85",
    "--note": "#221d0f",
    "--note-line": "#6d5b22",
    "--heat": "#ff7a33",
    **{f"--series-{i}": dark for i, (_, dark) in enumerate(COLOURS)},
}


def theme_css() -> str:
    """The reader's system decides, the button overrules it, and paper is light."""
    light, dark = ("".join(f"{name}:{value};" for name, value in theme.items()) for theme in (LIGHT, DARK))
    return (
        f":root{{color-scheme:light;{light}}}\n"
        f'@media screen{{:root[data-theme="dark"]{{color-scheme:dark;{dark}}}}}\n'
        f'@media screen and (prefers-color-scheme:dark){{:root:not([data-theme="light"])'
        f"{{color-scheme:dark;{dark}}}}}\n"
    )
