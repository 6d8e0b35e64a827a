"""Calibration errors: definitions, bins, ties, and what averaging over batches does."""

from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch
from sklearn.calibration import calibration_curve
from torch import Tensor

from gpattention.metrics import adaptive_ece, classwise_ece, ece, mce, reliability_bins
from tests.metrics.problems import CASES, predictions, seeded
from tests.oracles import metrics as oracles

FUNCTIONS = {
    "ece": (ece, oracles.ece),
    "mce": (mce, oracles.mce),
    "classwise": (classwise_ece, oracles.classwise_ece),
    "adaptive": (adaptive_ece, oracles.adaptive_ece),
}
every_error = pytest.mark.parametrize(("metric", "oracle"), FUNCTIONS.values(), ids=FUNCTIONS)


@pytest.mark.parametrize("bins", [1, 3, 10, 15, 50])
@every_error
@pytest.mark.parametrize("case", CASES)
def test_against_loops(case: str, metric, oracle, bins: int) -> None:
    probs, labels = CASES[case]
    expected = oracle(probs.double().numpy(), labels.numpy(), bins)
    assert metric(probs, labels, bins=bins) == pytest.approx(expected, rel=1e-11, abs=1e-14)


@pytest.mark.parametrize("bins", [5, 10, 15])
@pytest.mark.parametrize("classes", [2, 3, 10, "certain"])
def test_against_netcal(classes: int | str, bins: int) -> None:
    """Which shares no code with ours (in the test extra)."""
    netcal = pytest.importorskip("netcal.metrics", reason="netcal is not installed")
    probs, labels = CASES["certain"] if classes == "certain" else predictions(700, classes, seed=classes)
    # the most probable class as a prediction of being right is what top-1 calibration is about
    confidence, right = probs.amax(-1).double().numpy(), (probs.argmax(-1) == labels).long().numpy()
    expected = netcal.ECE(bins, detection=True).measure(confidence, right)
    assert ece(probs, labels, bins=bins) == pytest.approx(expected, abs=1e-12)
    if classes != "certain":
        expected = netcal.MCE(bins, detection=True).measure(confidence, right)
        assert mce(probs, labels, bins=bins) == pytest.approx(expected, abs=1e-12)
        each = [
            netcal.ECE(bins, detection=True).measure(probs[:, c].numpy(), (labels == c).long().numpy())
            for c in range(classes)
        ]
        assert classwise_ece(probs, labels, bins=bins) == pytest.approx(sum(each) / classes, abs=1e-12)


class TestBins:
    @pytest.mark.parametrize("bins", [5, 10, 15])
    def test_against_scikit_learn(self, bins: int) -> None:
        """Whose bins hold their upper edges; these confidences lie inside."""
        probs, labels = predictions(500, 2)
        found = reliability_bins(probs, labels, bins=bins)
        right = (probs.argmax(-1) == labels).numpy()
        accuracy, confidence = calibration_curve(right, probs.amax(-1).numpy(), n_bins=bins)
        full = found.counts > 0
        assert found.accuracy[full].numpy() == pytest.approx(accuracy)
        assert found.confidence[full].numpy() == pytest.approx(confidence)

    @pytest.mark.parametrize("case", CASES)
    def test_add_up_to_the_errors(self, case: str) -> None:
        probs, labels = CASES[case]
        found = reliability_bins(probs, labels)
        gap = (found.accuracy - found.confidence).abs().nan_to_num()
        assert int(found.counts.sum()) == len(probs)
        assert float((gap * found.counts).sum() / len(probs)) == pytest.approx(ece(probs, labels), abs=1e-14)
        assert float(gap.max()) == pytest.approx(mce(probs, labels), abs=1e-14)
        with pytest.raises(FrozenInstanceError):
            found.counts = torch.zeros(15)  # type: ignore[misc]

    def test_hold_lower_edges_and_the_last_one_holds_1(self) -> None:
        top = torch.tensor([0.5, 0.6, 0.6999, 0.7, 0.9, 0.9999, 1.0, 1.0], dtype=torch.float64)
        found = reliability_bins(torch.stack([top, 1 - top], 1), torch.zeros(8, dtype=torch.int64), bins=10)
        assert found.counts.tolist() == [0, 0, 0, 0, 0, 1, 2, 1, 0, 4]
        assert found.edges.tolist() == [k / 10 for k in range(11)]
        # two items of 1.0, one of them wrong, and two of .9 that are right: .95 against .75
        probs = torch.tensor([[1.0, 0], [1.0, 0], [0.9, 0.1], [0.9, 0.1]], dtype=torch.float64)
        for metric in (ece, mce):
            assert metric(probs, torch.tensor([0, 1, 0, 0]), bins=10) == pytest.approx(0.2)


def test_known_values() -> None:
    top = torch.tensor([0.9, 0.6, 0.8, 0.7], dtype=torch.float64)
    probs = torch.tensor([[0.7, 0.3]], dtype=torch.float64).expand(10, 2)
    for metric, _ in FUNCTIONS.values():
        assert metric(probs, torch.tensor([0] * 3 + [1] * 7)) == pytest.approx(0.4)  # right in 3 of 10
        assert metric(torch.eye(3), torch.arange(3)) == 0
        wrong = 2 / 3 if metric is classwise_ece else 1
        assert metric(torch.eye(3), torch.arange(3).roll(1)) == pytest.approx(wrong)
    # two adaptive bins of two: (.6, .7) with one right, (.8, .9) with both
    probs, labels = torch.stack([top, 1 - top], 1), torch.tensor([0, 1, 0, 0])
    assert adaptive_ece(probs, labels, bins=2) == pytest.approx((abs(0.65 - 0.5) + abs(0.85 - 1)) / 2)


@pytest.mark.parametrize("batch_size", [1, 7, 32, 100, 500])
@pytest.mark.parametrize("metric", [ece, mce])
def test_batch_mean_is_the_mean_over_batches(metric, batch_size: int) -> None:
    probs, labels = predictions(100, 3)
    parts = [metric(p, y) for p, y in zip(probs.split(batch_size), labels.split(batch_size), strict=True)]
    found = metric(probs, labels, batch_size=batch_size)
    assert found == pytest.approx(np.mean(parts), rel=1e-12)


# Perfectly calibrated: p uniform, the label drawn with it.  The table of docs/metrics.md.
@pytest.mark.parametrize(
    ("batch_size", "bins", "expected", "largest"),
    [(1000, 15, 0.028, 0.073), (1000, 10, 0.022, 0.046), (32, 15, 0.155, 0.460), (32, 10, 0.124, 0.283)],
)
def test_batch_mean_punishes_the_perfectly_calibrated(
    batch_size: int, bins: int, expected: float, largest: float
) -> None:
    probs, labels = calibrated(600_000)
    batches = {"bins": bins, "batch_size": batch_size}
    assert ece(probs, labels, **batches) == pytest.approx(expected, abs=0.001)
    assert mce(probs, labels, **batches) == pytest.approx(largest, abs=0.002)
    assert ece(probs, labels, bins=bins) < 0.002
    assert mce(probs, labels, bins=bins) < 0.006


def calibrated(count: int) -> tuple[Tensor, Tensor]:
    p = torch.rand(count, dtype=torch.float64, generator=seeded(0))
    labels = (torch.rand(count, dtype=torch.float64, generator=seeded(1)) < p).long()
    return torch.stack([1 - p, p], 1), labels
