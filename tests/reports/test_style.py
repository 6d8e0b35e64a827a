"""Colours differ clearly with any colour vision, and read on either background."""

from itertools import combinations

import numpy as np
import pytest

from gpattention.hosts.painting import DEEPEST, OPACITY
from gpattention.reports.style import COLOURS, DARK, LIGHT, VARIABLES, style_of, theme_css

# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB
VISION = {
    "usual": np.eye(3),
    "protan": [
        [0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998],
    ],
    "deutan": [
        [0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881],
    ],
    "tritan": [
        [1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900],
    ],
}  # fmt: skip
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colour: str) -> np.ndarray:
    values = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    x = TO_XYZ @ np.clip(rgb, 0, 1) / np.array([0.9505, 1.0, 1.089])
    f = np.where(x > 0.008856, np.cbrt(x), 7.787 * x + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def contrast(a: str, b: str) -> float:
    """As WCAG has it."""
    light, dark = sorted((float(linear(c) @ TO_XYZ[1]) + 0.05 for c in (a, b)), reverse=True)
    return light / dark


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("theme", [0, 1])
def test_models_look_different(theme: int, vision: str) -> None:
    seen = [lab(np.array(VISION[vision]) @ linear(pair[theme])) for pair in COLOURS]
    assert min(float(np.linalg.norm(a - b)) for a, b in combinations(seen, 2)) > 15


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_everything_stands_out(theme: dict[str, str]) -> None:
    for background in ("--page", "--card"):
        for name in ("--ink", "--quiet", "--link", "--right", "--wrong"):
            assert contrast(theme[name], theme[background]) >= 4.5, name  # text
        for name in (name for name in theme if name.startswith("--series") or name in ("--neutral", "--gap")):
            assert contrast(theme[name], theme[background]) >= 2.8, name  # lines and bars
    assert contrast(theme["--ink"], theme["--note"]) >= 4.5


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("share", [1, 0.5, 0.125])
def test_painted_words_can_be_read(theme: dict[str, str], share: float) -> None:
    below = [int(theme["--card"][i : i + 2], 16) for i in (1, 3, 5)]
    opacity = share * OPACITY
    mixed = (round(opacity * a + (1 - opacity) * b) for a, b in zip(DEEPEST, below, strict=True))
    assert contrast(theme["--ink"], "#{:02x}{:02x}{:02x}".format(*mixed)) >= 4.5


def test_both_themes_hold_every_variable_of_a_figure() -> None:
    assert set(LIGHT) == set(DARK)
    assert set(VARIABLES.values()) <= set(LIGHT)
    assert all(LIGHT[variable] == colour for colour, variable in VARIABLES.items())
    assert theme_css().count("--series-0:") == 3


def test_without_colour_markers_and_dashes_differ() -> None:
    assert len({style_of(place).marker for place in range(6)}) == 6
    looks = [(style.colour, style.marker, style.dash) for style in map(style_of, range(24))]
    assert len(set(looks)) == 24
