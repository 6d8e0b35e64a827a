"""Means, standard errors and differences against numpy and scipy-free oracles."""

import numpy as np
import pytest

from gpattention.experiments.reproduction.results.estimates import Estimate, beyond, difference


def estimate(values: np.ndarray) -> Estimate:
    return Estimate(dict(enumerate(values.tolist())))


@pytest.mark.parametrize("count", [2, 3, 7])
def test_means_and_standard_errors(count: int) -> None:
    values = np.random.default_rng(count).normal(size=count)
    found = estimate(values)
    assert found.mean == pytest.approx(values.mean())
    assert found.error == pytest.approx(values.std(ddof=1) / np.sqrt(count))
    assert found.text(2).split(" ± ") == [
        f"{values.mean():.2f}",
        f"{values.std(ddof=1) / np.sqrt(count):.2f}",
    ]


def test_pairs_take_away_what_seeds_share() -> None:
    rng = np.random.default_rng(0)
    shared, own = 5 * rng.normal(size=5), 0.01 * rng.normal(size=5)
    one, other = estimate(shared + 1), estimate(shared + own)
    gap = difference(one, other)
    assert gap.basis == "paired"
    assert gap.mean == pytest.approx(np.mean(1 - own))
    assert gap.error == pytest.approx(np.std(own, ddof=1) / np.sqrt(5))
    assert gap.clear
    shifted = difference(one, Estimate({seed + 10: value for seed, value in other.values.items()}))
    assert shifted.basis == "unpaired"
    assert shifted.mean == pytest.approx(gap.mean)
    assert one.error is not None
    assert other.error is not None
    assert shifted.error == pytest.approx(np.hypot(one.error, other.error))
    assert not shifted.clear


def test_differences_change_their_sign_with_their_order() -> None:
    rng = np.random.default_rng(1)
    one, other = estimate(rng.normal(size=3)), estimate(rng.normal(size=4))
    there, back = difference(one, other), difference(other, one)
    assert there.mean == pytest.approx(-back.mean)
    assert there.error == pytest.approx(back.error)
    assert there.basis == back.basis == "paired"  # over the three seeds that both have


def test_single_figures_have_no_error() -> None:
    single, several = Estimate({0: 1.0}), Estimate({0: 2.0, 1: 4.0})
    assert single.text(1) == "1.0"
    alone = difference(single, Estimate({0: 0.0}))
    assert (alone.error, alone.basis, alone.clear, alone.in_errors) == (None, "unknown", False, None)
    assert alone.text(2) == "+1.00"
    mixed = difference(several, single)
    assert (mixed.mean, mixed.basis) == (2.0, "one side")
    assert mixed.error == pytest.approx(1.0)
    assert not mixed.clear  # two standard errors are not beyond two
    assert mixed.in_errors == pytest.approx(2.0)
    assert mixed.text(1, 100) == "+200.0 ± 100.0"


def test_against_a_printed_figure() -> None:
    found = beyond(Estimate({0: 1.0, 1: 1.2}), 0.7)
    assert found.mean == pytest.approx(0.4)
    assert found.clear
    assert not beyond(Estimate({0: 1.0}), 0.7).clear
