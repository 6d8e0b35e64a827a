"""Suite `ood`: scores and metrics against NumPy and scikit-learn."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import entropy as scipy_entropy
from sklearn.metrics import roc_auc_score

from gpattention.evaluation import PARTS, Strangeness
from gpattention.evaluation.ood_scores import SCORES, OodScores
from gpattention.evaluation.predictions import Predicted
from gpattention.evaluation.suites import ood_findings
from gpattention.evaluation.suites.ood import ecdf, histogram, roc
from gpattention.models import Signals
from gpattention.strangeness.strangeness import PROFILES
from tests.evaluation.cases import draws, mean_probs, predicted, seeded, softmax, some_labels
from tests.oracles import metrics as oracles
from tests.oracles import strangeness as oracle_detectors

HEAD = (torch.randn(4, 5, generator=seeded(7)), torch.randn(4, generator=seeded(8)))
SITES = ("attention head 0", "attention head 1", "attention head 2")


def with_signals(items: int, seed: int) -> Predicted:
    found, g = predicted(items, seed=seed), seeded(seed + 9)
    features = torch.randn(items, 5, generator=g) + HEAD[0][found.known_labels]
    profiles = [torch.randn(items, 3, generator=g) for _ in range(2)]
    logits = features @ HEAD[0].mT + HEAD[1]
    return replace(found, signals=Signals(logits, features, *profiles, torch.full((items,), 9), SITES))


VALIDATION, TEST, OUTSIDE = with_signals(80, 1), with_signals(50, 20), with_signals(40, 40)


def kl(p: np.ndarray, q: np.ndarray) -> float:
    return float(sum(a * np.log(a / b) for a, b in zip(p, q, strict=True) if a > 0))


def test_every_score_by_hand() -> None:
    fitted, probs = mean_probs(VALIDATION), mean_probs(OUTSIDE)
    guesses, labels = fitted.argmax(-1), VALIDATION.known_labels.numpy()
    by_guess = [fitted[guesses == k].mean(0) for k in range(4) if (guesses == k).any()]
    by_label = [fitted[labels == k].mean(0) for k in range(4)]
    logits = OUTSIDE.prediction.logits.numpy()  # [S, B, C]
    variance, known = OUTSIDE.layer_variance.numpy(), VALIDATION.layer_variance.double().numpy()
    entropy = scipy_entropy(probs, axis=-1)
    expected = {
        "kl_matching": np.array([min(kl(p, d) for d in by_guess) for p in probs]),
        "kl_matching_predicted": np.array([kl(p, by_label[p.argmax()]) for p in probs]),
        "max_softmax": 1 - probs.max(-1),
        "entropy": entropy,
        "energy": -np.log(np.exp(logits.mean(0)).sum(-1)),
        "mutual_information": entropy - scipy_entropy(softmax(logits), axis=-1).mean(0),
        "gp_variance": ((variance - known.mean(0)) / known.std(0)).mean(-1),
        "gen": oracle_detectors.generalised_entropy(probs, 0.1, 100),
        **_by_signals(labels),
    }
    found = OodScores.fit(VALIDATION, HEAD)(OUTSIDE)
    assert list(found) == list(expected)
    assert set(found) == set(SCORES)
    for name in SCORES:
        assert found[name].numpy() == pytest.approx(expected[name], rel=1e-5, abs=1e-5), name
    untaught = OodScores.fit(None)(OUTSIDE)  # without validation items there are no templates
    assert list(untaught) == ["max_softmax", "entropy", "energy", "mutual_information", "gen"]
    assert all(score.equal(found[name]) for name, score in untaught.items())


def _by_signals(labels: np.ndarray) -> dict[str, np.ndarray]:
    """What is fitted to the signals of all validation items, by hand; but for their combination."""
    inside, outside = (
        {
            name: getattr(x.signals, name).double().numpy()
            for name in ("features", "variance", "attention_entropy")
        }
        for x in (VALIDATION, OUTSIDE)
    )
    usual, x = inside["features"], outside["features"]
    pair, normed = (x, usual, labels), (oracle_detectors.unit(x), oracle_detectors.unit(usual), labels)
    profiles = {
        name: 0.5 * np.log1p(oracle_detectors.profile_distance(outside[field], inside[field]))
        for name, field in PROFILES.items()
    }
    weight, bias = (each.double().numpy() for each in HEAD)
    combined = Strangeness.fit(VALIDATION.signals, VALIDATION.labels).score(OUTSIDE.signals).numpy()
    return {
        "mahalanobis": 0.5 * np.log1p(oracle_detectors.mahalanobis(*pair)),
        "mahalanobis_normed": 0.5 * np.log1p(oracle_detectors.mahalanobis(*normed)),
        "relative_mahalanobis": oracle_detectors.relative_mahalanobis(*pair),
        "relative_mahalanobis_normed": oracle_detectors.relative_mahalanobis(*normed),
        "knn": oracle_detectors.knn(x, usual, 10),
        "vim": oracle_detectors.vim(x, usual, weight, bias),
        **profiles,
        "strangeness": combined,
    }


def test_classes_without_validation_items() -> None:
    """No template: the article's variant passes over them, the other holds them infinitely far."""
    logits = 4 * torch.eye(3)[None]  # each item is sure of its class
    validation = Predicted.from_logits(logits[:, :2], torch.tensor([0, 1]))
    found = OodScores.fit(validation)(Predicted.from_logits(logits))
    for name in ("kl_matching", "kl_matching_predicted"):  # an item at a template scores 0
        assert found[name][:2].numpy() == pytest.approx(np.zeros(2), abs=1e-7)
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
    of_signals = {name for name in SCORES if name in PARTS and PARTS[name].reads != "logits"} | {
        "strangeness"
    }
    assert set(OodScores.fit(one)(one)) == set(SCORES) - {"mutual_information", "gp_variance"} - of_signals
    assert set(OodScores.fit(VALIDATION)(OUTSIDE)) == set(SCORES) - {"vim"}  # of an unknown head
    few = replace(VALIDATION, prediction=VALIDATION.prediction[:9], signals=VALIDATION.signals[:9])
    few = replace(few, labels=VALIDATION.labels[:9], layer_variance=VALIDATION.layer_variance[:9])
    assert set(OodScores.fit(few)(OUTSIDE)) == set(SCORES) - {"vim", "strangeness"}
    assert "gp_variance" not in OodScores.fit(VALIDATION)(one)
    logits = draws(20)
    flat = Predicted.from_logits(logits, some_labels(logits), torch.full((20, 2), 0.3))
    assert OodScores.fit(flat)(flat)["gp_variance"].abs().max() < 1e-7  # a constant ranks nothing


def test_records_against_oracles() -> None:
    found = ood_findings("model", VALIDATION, TEST, {"ood/far": OUTSIDE}, head=HEAD)
    fitted = OodScores.fit(VALIDATION, HEAD)
    assert any("gp_variance is for comparison alone" in note for note in found.notes)
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


def test_curves() -> None:
    found = ood_findings("model", VALIDATION, TEST, {"ood/far": OUTSIDE}, head=HEAD, curves=True)
    areas = {r.detail["score"]: r.value for r in found.records if r.metric == "auroc"}
    assert set(found.curves["scores"]["ood/far"]) == set(SCORES)
    for score, curve in found.curves["roc"]["ood/far"].items():
        fpr, tpr = np.array(curve["fpr"]), np.array(curve["tpr"])
        assert (fpr[0], tpr[0], fpr[-1], tpr[-1]) == (0, 0, 1, 1)
        assert np.trapezoid(tpr, fpr) == pytest.approx(areas[score])
        counts = found.curves["scores"]["ood/far"][score]
        assert len(counts["edges"]) == 31
        assert sum(counts["in"]) == pytest.approx(1)
        assert sum(counts["out"]) == pytest.approx(1)


def test_p_values_of_strangeness() -> None:
    found = ood_findings("model", VALIDATION, TEST, {"ood/far": OUTSIDE}, curves=True)
    fitted = Strangeness.fit(VALIDATION.signals, VALIDATION.labels)
    for name, items in {"test": TEST, "ood/far": OUTSIDE}.items():
        p, curve = fitted.p_value(items.signals).numpy(), found.curves["p_values"][name]
        assert curve["p"] == pytest.approx(np.sort(p))
        assert curve["share"] == pytest.approx(np.arange(1, len(p) + 1) / len(p))
    alarms = 100 * float(fitted.flag(TEST.signals, 0.05).double().mean())
    (note,) = (note for note in found.notes if "false alarms" in note)  # 32 calibration items show no .01
    assert note.endswith(f"32 calibration items: {alarms:.1f} % at a rate of 0.05")
    bare = [replace(x, signals=None) for x in (VALIDATION, TEST, OUTSIDE)]
    without = ood_findings("model", *bare[:2], {"ood/far": bare[2]}, curves=True)
    assert "p_values" not in without.curves
    assert not any("false alarms" in note for note in without.notes)


def test_thinned_p_values_keep_the_shares_that_are_flagged() -> None:
    p = (torch.arange(1, 1502).double() / 1001).clamp(max=1)
    curve = ecdf(p)
    assert len(curve["p"]) <= 202
    for rate in (0.01, 0.05):
        shares = [share for at, share in zip(curve["p"], curve["share"], strict=True) if at <= rate]
        assert shares[-1] == float((p <= rate).double().mean())


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
