"""Out-of-distribution metrics against loops over pairs and thresholds, and against scikit-learn."""

import numpy as np
import pytest
import torch
from sklearn import metrics as sklearn

from gpattention.metrics import aupr_in, aupr_out, auroc, fpr_at_tpr
from tests.metrics.problems import SCORES
from tests.oracles import metrics as oracles

METRICS = (auroc, aupr_in, aupr_out, fpr_at_tpr)

FINITE = [name for name in SCORES if name != "infinite"]


def arrays(case: str) -> tuple[np.ndarray, np.ndarray]:
    inside, outside = SCORES[case]
    return inside.double().numpy(), outside.double().numpy()


@pytest.mark.parametrize("case", SCORES)
def test_against_loops(case: str) -> None:
    scores, (inside, outside) = SCORES[case], arrays(case)
    assert auroc(*scores) == pytest.approx(oracles.auroc(inside, outside), rel=1e-14)
    assert aupr_out(*scores) == pytest.approx(oracles.average_precision(outside, inside))
    assert aupr_in(*scores) == pytest.approx(oracles.average_precision(-inside, -outside))
    for tpr in (0.05, 0.5, 0.8, 0.95, 1.0):
        assert fpr_at_tpr(*scores, tpr=tpr) == pytest.approx(oracles.fpr_at_tpr(-inside, -outside, tpr))
        found = fpr_at_tpr(*scores, tpr=tpr, positive="out")
        assert found == pytest.approx(oracles.fpr_at_tpr(outside, inside, tpr))


@pytest.mark.parametrize("case", FINITE)
def test_against_scikit_learn(case: str) -> None:
    inside, outside = arrays(case)
    score = np.concatenate([inside, outside])
    out = np.concatenate([np.zeros(len(inside)), np.ones(len(outside))])
    assert auroc(*SCORES[case]) == pytest.approx(sklearn.roc_auc_score(out, score))
    assert aupr_out(*SCORES[case]) == pytest.approx(sklearn.average_precision_score(out, score))
    assert aupr_in(*SCORES[case]) == pytest.approx(sklearn.average_precision_score(1 - out, -score))
    for positive, truth, sign in (("in", 1 - out, -1), ("out", out, 1)):
        fpr, tpr, _ = sklearn.roc_curve(truth, sign * score, drop_intermediate=False)
        assert fpr_at_tpr(*SCORES[case], positive=positive) == pytest.approx(fpr[tpr >= 0.95].min())


def test_ninety_five_percent_of_twenty_are_nineteen() -> None:
    """0.95 * 20 and 0.07 * 100 must not round up."""
    inside = torch.arange(20.0)
    assert fpr_at_tpr(inside, torch.tensor([18.5])) == 0
    assert fpr_at_tpr(inside, torch.tensor([18.0])) == 1
    assert fpr_at_tpr(torch.arange(100.0), torch.tensor([6.5]), tpr=0.07) == 0


@pytest.mark.parametrize("case", FINITE)
def test_ranks_alone_matter(case: str) -> None:
    inside, outside = (scores.double() for scores in SCORES[case])
    for metric in METRICS:
        assert metric(7 * inside - 3, 7 * outside - 3) == metric(inside, outside)
        assert metric(inside.flip(0), outside.flip(0)) == metric(inside, outside)
    assert auroc(-inside, -outside) == pytest.approx(1 - auroc(inside, outside))
