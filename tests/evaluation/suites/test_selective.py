"""Suite `selective`: thresholds of validation items, judged on test items."""

import numpy as np
import pytest
import torch

from gpattention.evaluation.predicted import Predicted
from gpattention.evaluation.suites import selective_findings
from tests.evaluation.suites.cases import mean_probs, predicted

VALIDATION, TEST = predicted(150, seed=3), predicted(120, seed=30)


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, float | None], float]:
    records = selective_findings("model", VALIDATION, TEST).records
    return {(record.metric, record.detail.get("alpha")): record.value for record in records}


def answered(threshold: float) -> tuple[float, float]:
    """Coverage and risk on the test items of answering from this confidence on."""
    probs, labels = mean_probs(TEST), TEST.known_labels.numpy()
    kept = probs.max(-1) >= threshold - 1e-12
    return kept.mean(), (probs.argmax(-1) != labels)[kept].mean()


def risks() -> tuple[np.ndarray, np.ndarray]:
    """Confidences of the validation items, falling, and the risk of answering up to each."""
    probs, labels = mean_probs(VALIDATION), VALIDATION.known_labels.numpy()
    order = np.argsort(-probs.max(-1))
    wrong = (probs.argmax(-1) != labels)[order]
    return probs.max(-1)[order], wrong.cumsum() / np.arange(1, len(wrong) + 1)


@pytest.mark.parametrize(("name", "wanted"), [("05", 0.05), ("10", 0.1)])
def test_at_a_risk(found: dict, name: str, wanted: float) -> None:
    confidence, risk = risks()
    if (risk <= wanted).any():
        coverage, expected = answered(confidence[np.nonzero(risk <= wanted)[0][-1]])
        assert found[f"coverage_at_risk_{name}", None] == pytest.approx(coverage)
        assert found[f"risk_at_risk_{name}", None] == pytest.approx(expected)
    else:
        assert found[f"coverage_at_risk_{name}", None] == 0


@pytest.mark.parametrize(("name", "wanted"), [("80", 120), ("90", 135)])
def test_at_a_coverage(found: dict, name: str, wanted: int) -> None:
    confidence, _ = risks()
    coverage, risk = answered(confidence[wanted - 1])
    assert found[f"coverage_at_coverage_{name}", None] == pytest.approx(coverage)
    assert found[f"risk_at_coverage_{name}", None] == pytest.approx(risk)


@pytest.mark.parametrize("alpha", [0.05, 0.1])
def test_conformal_sets(found: dict, alpha: float) -> None:
    fitted, labels = mean_probs(VALIDATION), VALIDATION.known_labels.numpy()
    scores = np.sort(1 - fitted[np.arange(150), labels])
    threshold = scores[int(np.ceil(151 * (1 - alpha))) - 1]
    sets = 1 - mean_probs(TEST) <= threshold + 1e-12
    right = sets[np.arange(120), TEST.known_labels.numpy()]
    assert found["conformal_coverage", alpha] == pytest.approx(right.mean())
    assert found["conformal_size", alpha] == pytest.approx(sets.sum(-1).mean())


def test_curve() -> None:
    many = predicted(700, seed=5)
    made = selective_findings("mean", VALIDATION, many)
    curve = made.curves["risk_coverage"]["mean"]
    assert len(curve["risk"]) == len(curve["coverage"]) == 200
    assert curve["coverage"][-1] == 1
    wrong = float((many.prediction.label != many.known_labels).double().mean())
    assert curve["risk"][-1] == pytest.approx(wrong)
    assert curve["coverage"] == sorted(curve["coverage"])


def test_a_model_that_is_always_wrong_answers_nothing() -> None:
    logits = torch.randn(1, 40, 2, generator=torch.Generator().manual_seed(0))
    bad = Predicted.from_logits(logits, 1 - logits[0].argmax(-1))
    values = {r.metric: r.value for r in selective_findings("model", bad, bad).records}
    assert values["coverage_at_risk_10"] == 0
    assert "risk_at_risk_10" not in values
    assert values["risk_at_coverage_80"] == 1


def test_nobody_answered() -> None:
    """A threshold above every test item's confidence has a coverage of 0 and no risk."""
    sure = Predicted.from_logits(10 * torch.eye(2).repeat(20, 1)[None], torch.arange(40) % 2)
    unsure = Predicted.from_logits(torch.eye(2).repeat(5, 1)[None], torch.arange(10) % 2)
    values = {r.metric: r.value for r in selective_findings("model", sure, unsure).records}
    assert values["coverage_at_risk_05"] == 0
    assert "risk_at_risk_05" not in values


def test_too_few_items_for_a_conformal_set() -> None:
    few = predicted(12, seed=4)
    made = selective_findings("model", few, TEST)
    assert {r.detail["alpha"] for r in made.records if r.metric == "conformal_size"} == {0.1}
    assert made.notes[0].startswith("no conformal sets of model for alpha=0.05: expected at least 19")
