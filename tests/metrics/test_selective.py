"""The risk-coverage curve and the area under it."""

import numpy as np
import pytest
import torch

from gpattention.metrics import aurc, risk_coverage
from tests.metrics.problems import CASES, coarse, predictions, seeded
from tests.oracles import metrics as oracles


@pytest.mark.parametrize("case", CASES)
def test_against_loops(case: str) -> None:
    probs, labels = CASES[case]
    confidence, right = oracles.confidences(probs.double().numpy(), labels.numpy())
    assert aurc(probs, labels) == pytest.approx(oracles.aurc(confidence, 1 - right), rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("seed", range(6))
def test_ties_are_the_mean_over_all_orders(seed: int) -> None:
    probs, labels = coarse(6, 2, parts=4, seed=seed)
    confidence, right = oracles.confidences(probs.numpy(), labels.numpy())
    assert len(set(confidence)) < 6
    assert aurc(probs, labels) == pytest.approx(
        oracles.aurc_over_all_orders(confidence, 1 - right), rel=1e-12
    )


def test_by_hand() -> None:
    """Surest first: right, wrong, right, wrong."""
    top = torch.tensor([0.6, 0.9, 0.7, 0.8], dtype=torch.float64)
    probs, labels = torch.stack([top, 1 - top], 1), torch.tensor([1, 0, 0, 1])
    curve = risk_coverage(probs, labels)
    assert curve.coverage.tolist() == [0.25, 0.5, 0.75, 1.0]
    assert curve.risk.tolist() == pytest.approx([0, 1 / 2, 1 / 3, 1 / 2])
    assert aurc(probs, labels) == pytest.approx((1 / 2 + 1 / 3 + 1 / 2) / 4)


def test_equal_certainties_have_the_overall_risk_everywhere() -> None:
    probs, labels = predictions(50, 3)
    curve = risk_coverage(probs, labels, certainty=torch.zeros(50))
    wrong = float((probs.argmax(-1) != labels).double().mean())
    assert curve.risk.tolist() == pytest.approx([wrong] * 50)


def test_another_certainty_ranks_the_items() -> None:
    probs, labels = predictions(80, 3)
    score = torch.rand(80, generator=seeded(1))
    wrong = (probs.argmax(-1) != labels).double().numpy()
    assert aurc(probs, labels, certainty=score) == pytest.approx(oracles.aurc(score.double().numpy(), wrong))
    best, worst = (aurc(probs, labels, certainty=torch.tensor(s * wrong)) for s in (-1, 1))
    assert best < aurc(probs, labels) < worst


def test_limits() -> None:
    assert aurc(torch.eye(3), torch.arange(3)) == 0
    assert aurc(torch.eye(3), torch.arange(3).roll(1)) == 1
    assert aurc(torch.tensor([[0.4, 0.6]]), torch.tensor([0])) == 1


def test_the_whole_curve_ends_at_the_error_rate() -> None:
    probs, labels = coarse(64, 3)
    curve = risk_coverage(probs, labels)
    assert float(curve.risk[-1]) == pytest.approx(np.mean((probs.argmax(-1) != labels).numpy()))
    assert float(curve.coverage[-1]) == 1
