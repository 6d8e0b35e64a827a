"""Intervals over items: every replicate against the metric of the items that it draws."""

import numpy as np
import pytest
import torch

from gpattention import metrics
from gpattention.metrics import (
    auroc,
    auroc_replicates,
    classification_replicates,
    interval_about,
    share_interval,
)
from gpattention.metrics.resampling import drawn_counts
from tests.metrics.problems import predictions, seeded

NAMES = ("accuracy", "mcc", "nll", "brier", "ece", "aurc")


def drawn(counts: torch.Tensor) -> torch.Tensor:
    """The items of one replicate."""
    return torch.arange(len(counts)).repeat_interleave(counts.long())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("items", "classes"), [(1, 2), (60, 2), (60, 5)])
def test_a_replicate_is_the_metric_of_what_it_draws(items: int, classes: int, dtype: torch.dtype) -> None:
    probs, labels = predictions(items, classes)
    found = classification_replicates(probs.to(dtype), labels)
    (counts,) = drawn_counts(items)
    assert set(found) == set(NAMES)
    assert (counts.sum(1) == items).all()
    for number in range(0, len(counts), 37):
        some = drawn(counts[number])
        for name in NAMES:
            expected = getattr(metrics, name)(probs[some], labels[some])
            # items drawn twice are ties, among which the curve is stepped through item by item
            tolerance = 0.02 if name == "aurc" else 1e-6
            assert float(found[name][number]) == pytest.approx(expected, abs=tolerance), name


def test_the_bootstrap_one_by_one_says_the_same() -> None:
    probs, labels = predictions(200, 3)
    found = classification_replicates(probs, labels)
    for name in NAMES:
        slow = metrics.bootstrap(getattr(metrics, name), probs, labels, replicates=400, seed=3)
        assert float(found[name].std()) == pytest.approx(slow.standard_error, rel=0.15)


def test_areas_of_replicates_with_ties() -> None:
    inside = torch.randint(6, (40,), generator=seeded(0)).double()
    outside = torch.randint(3, 9, (30,), generator=seeded(1)).double()
    found = auroc_replicates(inside, outside)
    both = drawn_counts(40, 30)
    for number in range(0, len(found), 29):
        known, unknown = (drawn(counts[number]) for counts in both)
        expected = auroc(inside[known], outside[unknown])
        assert float(found[number]) == pytest.approx(expected, abs=1e-12)


def test_an_interval_is_about_the_value_and_in_range() -> None:
    replicates = torch.linspace(0.1, 0.3, 401, dtype=torch.float64)
    assert interval_about(0.15, replicates) == pytest.approx((0.055, 0.245))
    assert interval_about(0.05, replicates)[0] == 0
    assert interval_about(0.98, replicates, 0.0, 1.0)[1] == 1


def test_the_interval_of_a_share_holds_it_as_often_as_it_says() -> None:
    assert share_interval(0.0, 10) == pytest.approx((0, 0.2775), abs=1e-4)  # Wilson's, as in textbooks
    assert share_interval(1.0, 1)[1] == 1
    rng = np.random.default_rng(0)
    true = rng.uniform(0, 1, 2000)  # of one share the coverage oscillates with the items
    ends = (share_interval(right / 40, 40) for right in rng.binomial(40, true))
    held = sum(low <= share <= high for share, (low, high) in zip(true, ends, strict=True))
    assert held / 2000 == pytest.approx(0.95, abs=0.015)
