"""Powers fitted to measurements, and where two of them cross."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

Points = Sequence[tuple[float, float]]  # size and what it took


@dataclass(frozen=True)
class PowerLaw:
    """y = factor * x^exponent, by least squares of the logarithms."""

    exponent: float
    factor: float
    low: float  # smallest and largest x it was fitted to
    high: float

    def __call__(self, x: float) -> float:
        """The fitted y."""
        return self.factor * x**self.exponent


def fit_power(points: Points) -> PowerLaw | None:
    """None for fewer than two sizes."""
    if len({x for x, _ in points}) < 2:
        return None
    logs = [(math.log(x), math.log(y)) for x, y in points]
    mean_x, mean_y = (sum(column) / len(logs) for column in zip(*logs, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in logs)
    exponent = sum((x - mean_x) * (y - mean_y) for x, y in logs) / spread
    xs = [x for x, _ in points]
    return PowerLaw(exponent, math.exp(mean_y - exponent * mean_x), min(xs), max(xs))


def faster_from(ours: Points, theirs: Points) -> float | None:
    """The smallest common size from which ours takes less at every larger one; None if at none."""
    own, other = dict(ours), dict(theirs)
    found = None
    for x in sorted(own.keys() & other.keys(), reverse=True):
        if own[x] >= other[x]:
            break
        found = x
    return found


def crossing(ours: Points, theirs: Points) -> float | None:
    """Where the lines between measured points cross last, in logarithms; None if they do not."""
    own, other = dict(ours), dict(theirs)
    sizes = sorted(own.keys() & other.keys())
    gaps = [math.log(own[x] / other[x]) for x in sizes]  # above 0: ours takes longer
    for i in range(len(sizes) - 1, 0, -1):
        if gaps[i - 1] >= 0 > gaps[i]:
            share = gaps[i - 1] / (gaps[i - 1] - gaps[i])
            low, high = math.log(sizes[i - 1]), math.log(sizes[i])
            return math.exp(low + share * (high - low))
    return None
