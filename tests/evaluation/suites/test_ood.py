"""Suite `ood`: scores and metrics against NumPy and scikit-learn."""

import numpy as np
import pytest
import torch
from scipy.stats import entropy as scipy_entropy
from sklearn.metrics import roc_auc_score

from gpattention.evaluation.ood_scores import SCORES, OodScores
from gpattention.evaluation.predicted import Predicted
from gpattention.evaluation.suites import ood_findings
from gpattention.evaluation.suites.ood import histogram, roc
from tests.evaluation.suites.cases import draws, mean_probs, predicted, some_labels
from tests.oracles import metrics as oracles

VALIDATION, TEST, OUTSIDE = predicted(80, seed=1), predicted(50, seed=20), predicted(40, seed=40)


def kl(p: np.ndarray, q: np.ndarray) -> float:
    return float(sum(a * np.log(a / b) for a, b in zip(p, q, strict=True) if a > 0))


def by_hand() -> dict[str, np.ndarray]:
    """Every score of OUTSIDE."""
    fitted, probs = mean_probs(VALIDATION), mean_probs(OUTSIDE)
    guesses, labels = fitted.argmax(-1), VALIDATION.known_labels.numpy()
    by_guess = [fitted[guesses == k].mean(0) for k in range(4) if (guesses == k).any()]
    by_label = [fitted[labels == k].mean(0) for k in range(4)]
    logits = OUTSIDE.prediction.logits.numpy()  # [S, B, C]
    each = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    variance, known = OUTSIDE.layer_variance.numpy(), VALIDATION.layer_variance.double().numpy()
    return {
        "kl_matching": np.array([min(kl(p, d) for d in by_guess) for p in probs]),
        "kl_matching_predicted": np.array([kl(p, by_label[p.argmax()]) for p in probs]),
        "max_softmax": 1 - probs.max(-1),
        "entropy": scipy_entropy(probs, axis=-1),
        "energy": -np.log(np.exp(logits.mean(0)).sum(-1)),
        "mutual_information": scipy_entropy(probs, axis=-1) - scipy_entropy(each, axis=-1).mean(0),
        "gp_variance": ((variance - known.mean(0)) / known.std(0)).mean(-1),
    }


def test_every_score_by_hand() -> None:
    found, expected = OodScores.fit(VALIDATION)(OUTSIDE), by_hand()
    assert set(found) == set(SCORES)
    for name in SCORES:
        assert found[name].numpy() == pytest.approx(expected[name], abs=1e-6), name


def test_the_two_variants_of_kl_matching_differ() -> None:
    found = OodScores.fit(VALIDATION)(OUTSIDE)
    assert not torch.allclose(found["kl_matching"], found["kl_matching_predicted"])


def test_an_item_at_a_template_scores_zero() -> None:
    probs = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6]])
    same = Predicted.from_logits(probs.log()[None], torch.arange(3))
    found = OodScores.fit(same)(same)
    assert found["kl_matching"].numpy() == pytest.approx(np.zeros(3), abs=1e-7)
    assert found["kl_matching_predicted"].numpy() == pytest.approx(np.zeros(3), abs=1e-7)


def test_classes_without_validation_items() -> None:
    """No template: the article's variant passes over them, the other holds them infinitely far."""
    logits = 4 * torch.eye(3)[None]  # each item is sure of its class
    validation = Predicted.from_logits(logits[:, :2], torch.tensor([0, 1]))
    found = OodScores.fit(validation)(Predicted.from_logits(logits))
    assert found["kl_matching"].isfinite().all()
    assert found["kl_matching"].argmax() == 2
    assert found["kl_matching_predicted"].isinf().tolist() == [False, False, True]


def test_certain_predictions_have_finite_scores() -> None:
    logits = torch.tensor([[[2000.0, 0.0], [0.0, 2000.0]]])
    sure = Predicted.from_logits(logits, torch.tensor([0, 1]))
    for name, score in OodScores.fit(sure)(Predicted.from_logits(logits.flip(1))).items():
        assert score.isfinite().all(), name


def test_scores_that_cannot_be_had() -> None:
    """One draw has no mutual information; a model without posteriors no variance."""
    one = predicted(samples=1, layers=None)
    assert set(OodScores.fit(one)(one)) == set(SCORES) - {"mutual_information", "gp_variance"}
    assert "gp_variance" not in OodScores.fit(VALIDATION)(one)


def test_a_constant_variance_tells_nothing() -> None:
    logits = draws(20)
    flat = Predicted.from_logits(logits, some_labels(logits), torch.full((20, 2), 0.3))
    assert OodScores.fit(flat)(flat)["gp_variance"].abs().max() < 1e-7


def test_energy_ranks_alike_at_every_temperature_of_one_draw() -> None:
    one = predicted(samples=1)
    cold = OodScores.fit(one)(one)["energy"]
    scaled = one.prediction.logits[0].mul(1 / 2.5).logsumexp(-1) * -2.5
    hot = OodScores.fit(one.tempered(2.5))(one.tempered(2.5))["energy"]
    assert (2.5 * hot).numpy() == pytest.approx(scaled.numpy())
    assert hot.shape == cold.shape


def test_records_against_oracles() -> None:
    found = ood_findings("model", VALIDATION, TEST, {"ood/far": OUTSIDE})
    fitted = OodScores.fit(VALIDATION)
    values = {(record.detail["score"], record.metric): record.value for record in found.records}
    assert len(values) == len(found.records) == 5 * len(SCORES)
    for score in SCORES:
        inside, outside = fitted(TEST)[score].numpy(), fitted(OUTSIDE)[score].numpy()
        expected = {
            "auroc": roc_auc_score([0] * 50 + [1] * 40, np.concatenate([inside, outside])),
            "aupr_in": oracles.average_precision(-inside, -outside),
            "aupr_out": oracles.average_precision(outside, inside),
            "fpr95": oracles.fpr_at_tpr(-inside, -outside, 0.95),
            "fpr95_out": oracles.fpr_at_tpr(outside, inside, 0.95),
        }
        assert {metric: values[score, metric] for metric in expected} == pytest.approx(expected), score
    assert {record.set for record in found.records} == {"ood/far"}
    assert found.curves == {}


def test_larger_is_further_out() -> None:
    """Items of which the draws know less than of the test items."""
    unsure = Predicted.from_logits(0.1 * draws(60, seed=9))
    found = ood_findings("model", VALIDATION, TEST, {"ood/unsure": unsure})
    values = {r.detail["score"]: r.value for r in found.records if r.metric == "auroc"}
    assert all(values[score] > 0.8 for score in ("max_softmax", "entropy", "energy"))


def test_curves() -> None:
    found = ood_findings("model", VALIDATION, TEST, {"ood/far": OUTSIDE}, curves=True)
    areas = {r.detail["score"]: r.value for r in found.records if r.metric == "auroc"}
    assert set(found.curves["scores"]["ood/far"]) == set(SCORES)
    for score, curve in found.curves["roc"]["ood/far"].items():
        fpr, tpr = np.array(curve["fpr"]), np.array(curve["tpr"])
        assert (fpr[0], tpr[0], fpr[-1], tpr[-1]) == (0, 0, 1, 1)
        assert np.trapezoid(tpr, fpr) == pytest.approx(areas[score])
    for counts in found.curves["scores"]["ood/far"].values():
        assert len(counts["edges"]) == 31
        assert sum(counts["in"]) == pytest.approx(1)
        assert sum(counts["out"]) == pytest.approx(1)


def test_curves_stay_short_and_finite() -> None:
    g = torch.Generator().manual_seed(0)
    inside, outside = torch.randn(3000, generator=g), 1 + torch.randn(2000, generator=g)
    outside[:3] = torch.inf
    curve, counts = roc(inside, outside), histogram(inside, outside)
    assert len(curve["fpr"]) == len(curve["tpr"]) == 200
    assert counts["out"][-1] >= 3 / 2000
    assert None not in counts["edges"]
    flat = histogram(torch.ones(4), torch.ones(3))
    assert max(flat["in"]) == max(flat["out"]) == 1
    assert None not in histogram(torch.full((2,), torch.inf), torch.full((2,), torch.inf))["edges"]


def test_without_validation_items_there_are_no_templates() -> None:
    whole, found = OodScores.fit(VALIDATION)(OUTSIDE), OodScores.fit(None)(OUTSIDE)
    assert list(found) == ["max_softmax", "entropy", "energy", "mutual_information"]
    for name, score in found.items():
        assert score.equal(whole[name])
