"""What several comparisons say together: Holm's correction, and ensembles compared over items.

An ensemble is one prediction, without a spread over seeds.  Two of them on the same items are compared by
the paired bootstrap: items are drawn again with replacement, both ensembles on the same ones, and nothing
is claimed about other seeds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
LEVEL = 0.95  # of intervals, and 1 less it the rate of false alarms of all comparisons together


@dataclass(frozen=True)
class OverItems:
    """The difference of two predictions of the same items.

    Attributes:
        mean: one less the other.
        error: standard deviation over the resampled sets of items.
        interval: between the quantiles that hold 95 % of them.
        chance: how often a difference of the other sign came out, twice; at least 1 / resamples.
    """

    mean: float
    error: float
    interval: tuple[float, float]
    chance: float
    basis: str = "items"

    @property
    def clear(self) -> bool:
        """Whether the interval leaves 0 out."""
        return not self.interval[0] <= 0 <= self.interval[1]

    @property
    def in_errors(self) -> float | None:
        """How many standard errors it is wide."""
        return self.mean / self.error if self.error else None

    def text(self, digits: int = 3, scale: float = 1.0) -> str:
        """With its sign, and its interval."""
        low, high = (f"{scale * end:+.{digits}f}" for end in self.interval)
        return f"{scale * self.mean:+.{digits}f} [{low}, {high}]"


def paired_bootstrap(
    one: Sequence[float], other: Sequence[float], *, resamples: int = RESAMPLES, seed: int = 0
) -> OverItems:
    """Compare the means of two predictions' values, item by item.

    Args:
        one: a value for each item, such as its NLL.
        other: values of the same items in the same order.
        resamples: sets of items.
        seed: seed of the draws: all comparisons of one seed and number of items draw the same sets.

    Returns:
        One less the other.

    Raises:
        ValueError: no items, or not as many of both.
    """
    if len(one) != len(other) or len(one) == 0:
        raise ValueError(f"expected values of the same items, got {len(one)} and {len(other)}")
    gaps = np.asarray(one, np.float64) - np.asarray(other, np.float64)
    generator, items = np.random.default_rng(seed), len(gaps)
    means = np.array([gaps[generator.integers(items, size=items)].mean() for _ in range(resamples)])
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    beyond = min(np.mean(means <= 0), np.mean(means >= 0))
    chance = min(1.0, max(2 * float(beyond), 1 / resamples))
    return OverItems(float(gaps.mean()), float(means.std()), (float(low), float(high)), chance)


def holm(chances: Mapping[str, float]) -> dict[str, float]:
    """Holm's adjusted probabilities: those below .05 stand, with one false alarm in 20 such families at most.

    The smallest is multiplied by how many there are, the next by one less, and so on; none is smaller than
    the one before it.

    Args:
        chances: p-values by the names of the comparisons.

    Returns:
        Adjusted ones, at most 1, by the same names.

    Raises:
        ValueError: one is no probability.
    """
    for name, chance in chances.items():
        if not 0 <= chance <= 1:
            raise ValueError(f"expected the p-value of {name} in [0, 1], got {chance}")
    found, largest = {}, 0.0
    for place, name in enumerate(sorted(chances, key=lambda name: chances[name])):
        largest = max(largest, min(1.0, (len(chances) - place) * chances[name]))
        found[name] = largest
    return {name: found[name] for name in chances}
