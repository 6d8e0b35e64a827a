"""The bootstrap and standard errors."""

import pytest
import torch

from gpattention.metrics import accuracy, auroc, bootstrap
from tests.metrics.problems import SCORES, predictions, seeded


def test_of_a_mean_is_its_standard_error() -> None:
    values = torch.randn(400, dtype=torch.float64, generator=seeded(0))
    found = bootstrap(lambda v: float(v.mean()), values, replicates=2000)
    expected = float(values.std() / len(values) ** 0.5)
    assert found.value == float(values.mean())
    assert found.standard_error == pytest.approx(expected, rel=0.06)
    assert found.high - found.low == pytest.approx(2 * 1.96 * expected, rel=0.08)
    assert found.low < found.value < found.high


def test_items_stay_together() -> None:
    """Accuracy of probabilities with other items' labels would be lower."""
    probs, labels = predictions(200, 5, sharp=6)
    found = bootstrap(accuracy, probs, labels, replicates=200)
    rate = accuracy(probs, labels)
    assert found.value == rate
    assert found.standard_error == pytest.approx((rate * (1 - rate) / 200) ** 0.5, rel=0.2)
    assert found.low <= rate <= found.high


def test_groups_of_different_size() -> None:
    inside, outside = SCORES["overlapping"]
    found = bootstrap(auroc, inside, outside, replicates=100, paired=False)
    assert 0.01 < found.standard_error < 0.05
    assert found == bootstrap(auroc, inside, outside, replicates=100, paired=False)
    assert found != bootstrap(auroc, inside, outside, replicates=100, paired=False, seed=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"replicates": 1}, "replicates.*>= 2, got 1"),
        ({"level": 1.0}, r"level in \(0, 1\), got 1.0"),
    ],
)
def test_refusals(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bootstrap(accuracy, *predictions(10, 2), **arguments)


def test_refused_sizes() -> None:
    with pytest.raises(ValueError, match=r"all alike, got sizes \[180, 120\]"):
        bootstrap(auroc, *SCORES["overlapping"])
    with pytest.raises(ValueError, match=r"at least one item, got sizes \[3, 0\]"):
        bootstrap(auroc, torch.zeros(3), torch.zeros(0), paired=False)
    with pytest.raises(ValueError, match=r"got sizes \[\]"):
        bootstrap(auroc)
