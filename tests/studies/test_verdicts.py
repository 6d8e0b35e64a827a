"""Holm's correction and the paired bootstrap against slower ways to the same numbers."""

import itertools
import math
import random
from statistics import fmean

import pytest

from gpattention.runs.results import OverSeeds, difference
from gpattention.studies.verdicts import LEVEL, holm, paired_bootstrap
from tests.refusals import refusals


def closed_tests(chances: list[float]) -> list[float]:
    """By the closure principle: of all sets of hypotheses with this one, the largest Bonferroni p-value."""
    places = range(len(chances))
    sets = [some for size in range(1, len(chances) + 1) for some in itertools.combinations(places, size)]
    return [
        max(min(1.0, len(some) * min(chances[i] for i in some)) for some in sets if place in some)
        for place in places
    ]


@pytest.mark.parametrize("seed", range(5))
def test_holm_is_the_closed_test_of_bonferroni(seed: int) -> None:
    drawn = random.Random(seed)
    chances = [drawn.random() ** 4 for _ in range(6)] + [0.01, 0.01]
    found = holm({str(i): chance for i, chance in enumerate(chances)})
    assert list(found.values()) == pytest.approx(closed_tests(chances), abs=1e-15)
    assert list(found) == [str(i) for i in range(8)]  # in the order in which they came


def test_holm_in_numbers_of_a_textbook() -> None:
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005}) == pytest.approx(
        {"a": 0.03, "b": 0.06, "c": 0.06, "d": 0.02}
    )
    assert holm({}) == {}


def test_the_bootstrap_of_a_few_items_is_all_sets_of_them() -> None:
    """Of four items there are 256 ordered sets, which can be counted instead of drawn."""
    one, other = [0.13, 0.91, 0.4, 0.3], [0.2, 0.5, 0.1, 0.47]
    gaps = [a - b for a, b in zip(one, other, strict=True)]
    every = sorted(fmean(some) for some in itertools.product(gaps, repeat=4))
    found = paired_bootstrap(one, other, resamples=40_000)
    mean = fmean(every)
    assert found.mean == pytest.approx(mean, abs=1e-12)
    assert found.error == pytest.approx(math.sqrt(fmean((x - mean) ** 2 for x in every)), rel=0.02)
    ends = (every[round((1 - LEVEL) / 2 * 255)], every[round((1 + LEVEL) / 2 * 255)])
    assert found.interval == pytest.approx(ends, abs=0.02)
    below = 2 * min(fmean(x <= 0 for x in every), fmean(x >= 0 for x in every))
    assert found.chance == pytest.approx(min(1, below), abs=0.02)
    assert not found.clear


def test_many_items_are_student_s_t() -> None:
    """Where the mean of items is as good as normal, both say the same."""
    drawn = random.Random(0)
    one = [drawn.gauss(1.0, 1) for _ in range(400)]
    other = [a + drawn.gauss(0.05, 0.3) for a in one]
    t = difference(OverSeeds(dict(enumerate(one))), OverSeeds(dict(enumerate(other))))
    found = paired_bootstrap(one, other, resamples=4000)
    assert (found.mean, found.clear) == (pytest.approx(t.mean), t.clear)
    assert found.error == pytest.approx(t.error, rel=0.05)
    assert found.chance == pytest.approx(t.chance, abs=0.01)
    again = paired_bootstrap(one, other, resamples=4000)
    assert (again, paired_bootstrap(one, other, resamples=4000, seed=1)) != (found, found)
    assert again == found
    assert found.text(2).count("[") == 1


test_refusals = refusals([
    (lambda: holm({"a": 1.5}), "p-value of a", "1.5"),
    (lambda: holm({"b": math.nan}), "p-value of b", "nan"),
    (lambda: paired_bootstrap([1.0], [1.0, 2.0]), "the same items", "1 and 2"),
    (lambda: paired_bootstrap([], []), "the same items", "0 and 0"),
])  # fmt: skip
