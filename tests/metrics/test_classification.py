"""Accuracy, Matthews' correlation, negative log-likelihood, Brier score and the risk-coverage curve."""

import pytest
import torch
from sklearn import metrics as sklearn

from gpattention.metrics import accuracy, aurc, brier, mcc, nll
from gpattention.metrics.classification import mcc_from_confusion
from tests.metrics.problems import CASES, coarse, predictions, seeded
from tests.oracles import metrics as oracles

TINY = {torch.float64: 2.0**-1022, torch.float32: 2.0**-126, torch.bfloat16: 2.0**-126}


@pytest.mark.parametrize("case", CASES)
def test_against_loops(case: str) -> None:
    probs, labels = CASES[case]
    p, y = probs.double().numpy(), labels.numpy()
    assert accuracy(probs, labels) == pytest.approx(oracles.accuracy(p, y))
    assert mcc(probs, labels) == pytest.approx(oracles.mcc(p, y), abs=1e-12)
    assert nll(probs, labels) == pytest.approx(
        oracles.nll(p, y, least=TINY[probs.dtype]), rel=1e-13, abs=1e-13
    )
    assert brier(probs, labels) == pytest.approx(oracles.brier(p, y), rel=1e-12, abs=1e-15)
    confidence, right = oracles.confidences(p, y)
    assert aurc(probs, labels) == pytest.approx(oracles.aurc(confidence, 1 - right), rel=1e-12, abs=1e-15)


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


def test_mcc_is_exact_where_float32_and_float64_are_not() -> None:
    """A hundred million items would need squares beyond 2^53; counts keep them."""
    n = 10**8
    assert mcc_from_confusion(torch.tensor([[n, 0], [0, n]])) == 1
    assert mcc_from_confusion(torch.tensor([[0, n], [n, 0]])) == -1
    near = mcc_from_confusion(torch.tensor([[n, 1], [1, n]]))
    assert near == pytest.approx(1 - 2 / (n + 1), rel=1e-15)


@pytest.mark.parametrize(
    ("dtype", "nats"),
    [(torch.float64, 708.396), (torch.float32, 87.337), (torch.bfloat16, 87.337), (torch.float16, 87.337)],
)
def test_the_impossible_costs_a_stated_price(dtype: torch.dtype, nats: float) -> None:
    probs = torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=dtype)
    assert nll(probs, torch.tensor([1, 1])) == pytest.approx(nats, abs=1e-3)
    assert nll(probs, torch.tensor([0, 1])) == pytest.approx(nats / 2, abs=1e-3)
    assert nll(probs, torch.tensor([0, 0])) == 0


@pytest.mark.parametrize("metric", [accuracy, mcc, nll, brier])
def test_neither_gradients_nor_the_order_matter(metric) -> None:
    probs, labels = coarse(100, 3)
    found = metric(probs.requires_grad_(), labels)
    assert isinstance(found, float)
    assert found == pytest.approx(metric(probs.flip(0), labels.flip(0)), rel=1e-14)


@pytest.mark.parametrize("seed", range(6))
def test_ties_are_the_mean_over_all_orders(seed: int) -> None:
    probs, labels = coarse(6, 2, parts=4, seed=seed)
    confidence, right = oracles.confidences(probs.numpy(), labels.numpy())
    assert len(set(confidence)) < 6
    assert aurc(probs, labels) == pytest.approx(
        oracles.aurc_over_all_orders(confidence, 1 - right), rel=1e-12
    )


def test_another_certainty_ranks_the_items() -> None:
    probs, labels = predictions(80, 3)
    score = torch.rand(80, generator=seeded(1))
    wrong = (probs.argmax(-1) != labels).double().numpy()
    assert aurc(probs, labels, certainty=score) == pytest.approx(oracles.aurc(score.double().numpy(), wrong))
    best, worst = (aurc(probs, labels, certainty=torch.tensor(s * wrong)) for s in (-1, 1))
    assert best < aurc(probs, labels) < worst
