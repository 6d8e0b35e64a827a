"""Calibration errors against netcal, which shares no code with ours (in the test extra)."""

import pytest
from torch import Tensor

from gpattention.metrics import classwise_ece, ece, mce
from tests.metrics.problems import CASES, predictions

netcal = pytest.importorskip("netcal.metrics", reason="netcal is not installed")


def top(probs: Tensor, labels: Tensor) -> tuple[object, object]:
    """The most probable class as a prediction of being right, which is what top-1 calibration is about."""
    return probs.amax(-1).double().numpy(), (probs.argmax(-1) == labels).long().numpy()


@pytest.mark.parametrize("bins", [5, 10, 15])
@pytest.mark.parametrize("classes", [2, 3, 10])
def test_ece_and_mce(classes: int, bins: int) -> None:
    probs, labels = predictions(700, classes, seed=classes)
    confidence, right = top(probs, labels)
    assert ece(probs, labels, bins=bins) == pytest.approx(
        netcal.ECE(bins, detection=True).measure(confidence, right), abs=1e-12
    )
    assert mce(probs, labels, bins=bins) == pytest.approx(
        netcal.MCE(bins, detection=True).measure(confidence, right), abs=1e-12
    )


@pytest.mark.parametrize("bins", [10, 15])
def test_classwise(bins: int) -> None:
    probs, labels = predictions(500, 4, seed=3)
    each = [
        netcal.ECE(bins, detection=True).measure(probs[:, c].numpy(), (labels == c).long().numpy())
        for c in range(4)
    ]
    assert classwise_ece(probs, labels, bins=bins) == pytest.approx(sum(each) / 4, abs=1e-12)


def test_probabilities_of_zero_and_one() -> None:
    probs, labels = CASES["certain"]
    confidence, right = top(probs, labels)
    assert ece(probs, labels) == pytest.approx(
        netcal.ECE(15, detection=True).measure(confidence, right), abs=1e-12
    )
