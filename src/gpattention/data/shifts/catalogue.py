"""Twelve shifts at three severities.  None is one of the 19 corruptions of CIFAR-10-C."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from gpattention.data.corruptions.random_fields import RandomFields
from gpattention.data.shifts.colour import posterised, recoloured, solarised
from gpattention.data.shifts.geometry import moved, sheared, shrunk, turned
from gpattention.data.shifts.patterns import chequered, covered, ghosted, striped, waved

SEVERITIES = (1, 2, 3)


@dataclass(frozen=True)
class Shift:
    """One kind of shift; `apply` takes float64 images in [0, 1], [B, C, H, W], and gives such images back."""

    name: str
    strengths: tuple[float, float, float]  # of severity 1 to 3
    apply: Callable[[Tensor, float, RandomFields], Tensor]
    coloured: bool = False  # whether it takes images in colour alone


_ALL = (
    Shift("turned", (10, 20, 30), turned),  # degrees
    Shift("sheared", (0.15, 0.3, 0.45), sheared),  # slope
    Shift("shrunk", (0.85, 0.7, 0.55), shrunk),  # factor
    Shift("moved", (0.1, 0.2, 0.3), moved),  # share of the sides
    Shift("recoloured", (30, 90, 180), recoloured, coloured=True),  # degrees
    Shift("posterised", (8, 4, 3), posterised),  # tones of each colour
    Shift("solarised", (0.85, 0.7, 0.55), solarised),  # threshold
    Shift("covered", (0.25, 0.375, 0.5), covered),  # share of the sides
    Shift("waved", (0.06, 0.12, 0.2), waved),  # strength
    Shift("chequered", (0.2, 0.4, 0.6), chequered),  # how much darker
    Shift("striped", (1 / 16, 1 / 8, 1 / 4), striped),  # share of the rows
    Shift("ghosted", (0.15, 0.25, 0.35), ghosted),  # share
)
SHIFTS = {each.name: each for each in _ALL}


def shifts_of(channels: int) -> tuple[str, ...]:
    """Names of the shifts that images of so many channels can have."""
    return tuple(each.name for each in _ALL if channels == 3 or not each.coloured)
