"""Accuracy, Matthews' correlation, negative log-likelihood and Brier score."""

import math

import pytest
import torch
from sklearn import metrics as sklearn

from gpattention.metrics import accuracy, brier, mcc, nll
from tests.metrics.problems import CASES, coarse, predictions
from tests.oracles import metrics as oracles

TINY = {torch.float64: 2.0**-1022, torch.float32: 2.0**-126, torch.bfloat16: 2.0**-126}


@pytest.mark.parametrize("case", CASES)
class TestOracles:
    def test_accuracy(self, case: str) -> None:
        probs, labels = CASES[case]
        assert accuracy(probs, labels) == pytest.approx(
            oracles.accuracy(probs.double().numpy(), labels.numpy())
        )

    def test_mcc(self, case: str) -> None:
        probs, labels = CASES[case]
        expected = oracles.mcc(probs.double().numpy(), labels.numpy())
        assert mcc(probs, labels) == pytest.approx(expected, abs=1e-12)

    def test_nll(self, case: str) -> None:
        probs, labels = CASES[case]
        expected = oracles.nll(probs.double().numpy(), labels.numpy(), least=TINY[probs.dtype])
        assert nll(probs, labels) == pytest.approx(expected, rel=1e-13, abs=1e-13)

    def test_brier(self, case: str) -> None:
        probs, labels = CASES[case]
        expected = oracles.brier(probs.double().numpy(), labels.numpy())
        assert brier(probs, labels) == pytest.approx(expected, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("case", ["binary", "three", "ten", "ties", "labels of one class", "certain"])
def test_against_scikit_learn(case: str) -> None:
    probs, labels = CASES[case]
    p, y, classes = probs.numpy(), labels.numpy(), list(range(probs.shape[1]))
    assert accuracy(probs, labels) == pytest.approx(sklearn.accuracy_score(y, p.argmax(1)))
    assert mcc(probs, labels) == pytest.approx(sklearn.matthews_corrcoef(y, p.argmax(1)), abs=1e-12)
    if case not in ("certain", "ties"):  # zeros are clamped elsewhere
        assert nll(probs, labels) == pytest.approx(sklearn.log_loss(y, p, labels=classes))
    if probs.shape[1] > 2:
        expected = sklearn.brier_score_loss(y, p, labels=classes, scale_by_half=False)
    else:
        expected = 2 * sklearn.brier_score_loss(y, p[:, 1])
    assert brier(probs, labels) == pytest.approx(expected)


def test_the_first_of_equal_classes_counts() -> None:
    probs = torch.tensor([[0.4, 0.4, 0.2], [0.2, 0.4, 0.4]])
    assert accuracy(probs, torch.tensor([0, 1])) == 1
    assert accuracy(probs, torch.tensor([1, 2])) == 0


def test_mcc_is_exact_where_float32_and_float64_are_not() -> None:
    """A hundred million items would need squares beyond 2^53; counts keep them."""
    from gpattention.metrics.classification import mcc_from_confusion

    n = 10**8
    assert mcc_from_confusion(torch.tensor([[n, 0], [0, n]])) == 1
    assert mcc_from_confusion(torch.tensor([[0, n], [n, 0]])) == -1
    near = mcc_from_confusion(torch.tensor([[n, 1], [1, n]]))
    assert near == pytest.approx(1 - 2 / (n + 1), rel=1e-15)


def test_mcc_of_constant_labels_or_predictions_is_zero() -> None:
    probs, labels = predictions(30, 3)
    assert mcc(probs, torch.zeros_like(labels)) == 0
    assert mcc(torch.tensor([[0.6, 0.4]]).expand(4, 2), torch.tensor([0, 1, 1, 0])) == 0


@pytest.mark.parametrize(
    ("dtype", "nats"),
    [(torch.float64, 708.396), (torch.float32, 87.337), (torch.bfloat16, 87.337), (torch.float16, 87.337)],
)
def test_the_impossible_costs_a_stated_price(dtype: torch.dtype, nats: float) -> None:
    probs = torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=dtype)
    assert nll(probs, torch.tensor([1, 1])) == pytest.approx(nats, abs=1e-3)
    assert nll(probs, torch.tensor([0, 1])) == pytest.approx(nats / 2, abs=1e-3)
    assert nll(probs, torch.tensor([0, 0])) == 0


def test_small_probabilities_of_half_precision_are_not_clamped() -> None:
    probs = torch.tensor([[1.0, 2.0**-24]], dtype=torch.float16)  # its smallest number
    assert nll(probs, torch.tensor([1])) == pytest.approx(24 * math.log(2))


def test_brier_runs_from_0_to_2_and_leaves_its_argument_alone() -> None:
    probs = torch.eye(3).double()
    assert brier(probs, torch.tensor([0, 1, 2])) == 0
    assert brier(probs, torch.tensor([1, 2, 0])) == 2
    assert probs.equal(torch.eye(3).double())


def test_gradients_are_no_obstacle() -> None:
    probs, labels = predictions(10, 3)
    tracked = probs.requires_grad_()
    for metric in (accuracy, mcc, nll, brier):
        assert isinstance(metric(tracked, labels), float)


def test_the_order_of_items_does_not_matter() -> None:
    probs, labels = coarse(100, 3)
    for metric in (accuracy, mcc, nll, brier):
        assert metric(probs, labels) == pytest.approx(metric(probs.flip(0), labels.flip(0)), rel=1e-14)
