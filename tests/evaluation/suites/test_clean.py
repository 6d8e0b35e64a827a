"""Suite `clean`: every number against loops over items; temperature without a second pass."""

import math

import numpy as np
import pytest
import torch

from gpattention.evaluation.predicted import Predicted
from gpattention.evaluation.suites import Findings, clean_findings
from tests.evaluation.suites.cases import draws, mean_probs, predicted, softmax, some_labels
from tests.oracles import metrics as oracles


def by_metric(found: Findings, name: str) -> dict[str, float]:
    return {record.metric: record.value for record in found.records if record.set == name}


@pytest.mark.parametrize("samples", [1, 5])
def test_every_metric_against_loops(samples: int) -> None:
    one = predicted(70, samples=samples)
    found = by_metric(clean_findings("model", {"test": one}, batch=25), "test")
    probs, labels = mean_probs(one), one.known_labels.numpy()
    confidence, right = oracles.confidences(probs, labels)
    parts = [slice(start, start + 25) for start in range(0, 70, 25)]
    expected = {
        "accuracy": oracles.accuracy(probs, labels),
        "mcc": oracles.mcc(probs, labels),
        "nll": oracles.nll(probs, labels, least=0.0),
        "brier": oracles.brier(probs, labels),
        "ece": oracles.ece(probs, labels, 15),
        "mce": oracles.mce(probs, labels, 15),
        "adaptive_ece": oracles.adaptive_ece(probs, labels, 15),
        "classwise_ece": oracles.classwise_ece(probs, labels, 15),
        "aurc": oracles.aurc(confidence, 1 - right),
        "batch_ece": np.mean([oracles.ece(probs[part], labels[part], 10) for part in parts]),
        "batch_mce": np.mean([oracles.mce(probs[part], labels[part], 10) for part in parts]),
    }
    assert found == pytest.approx(expected, abs=1e-9)


def test_a_certain_mistake_costs_what_its_logits_say() -> None:
    """In float32 the probability of e^-200 is 0, and its logarithm would be cut off."""
    logits = torch.tensor([[[200.0, 0.0], [1.0, 0.0]]])
    one = Predicted.from_logits(logits, torch.tensor([1, 0]))
    found = by_metric(clean_findings("model", {"test": one}, batch=10), "test")
    assert found["nll"] == pytest.approx((200 + math.log1p(math.exp(-1))) / 2)


def test_only_sets_with_labels_are_judged() -> None:
    unlabelled = Predicted.from_logits(draws())
    sets = {"validation": predicted(), "test": predicted(seed=8), "ood/far": unlabelled}
    found = clean_findings("mean", sets, batch=20)
    assert {record.set for record in found.records} == {"validation", "test"}
    assert {record.predictor for record in found.records} == {"mean"}
    assert set(found.curves["reliability"]) == {"mean"}
    assert clean_findings("mean", {"ood/far": unlabelled}, batch=20) == Findings()


def test_reliability_adds_up_to_the_calibration_error() -> None:
    one = predicted(90)
    found = clean_findings("model", {"test": one}, batch=30)
    bins = found.curves["reliability"]["model"]
    assert len(bins["edges"]) == 16
    assert sum(bins["count"]) == 90
    assert [c is None for c in bins["confidence"]] == [n == 0 for n in bins["count"]]
    gaps = [
        n * abs(c - a)
        for n, c, a in zip(bins["count"], bins["confidence"], bins["accuracy"], strict=True)
        if n
    ]
    assert sum(gaps) / 90 == pytest.approx(by_metric(found, "test")["ece"])


@pytest.mark.parametrize("temperature", [0.5, 3.0])
def test_temperature_divides_every_draw(temperature: float) -> None:
    logits = draws()
    labels = some_labels(logits)
    hot = Predicted.from_logits(logits, labels).tempered(temperature)
    expected = softmax(logits.double().numpy() / temperature).mean(0)
    assert hot.prediction.probs.numpy() == pytest.approx(expected)
    found = clean_findings("model+temperature", {"test": hot}, batch=20)
    assert {record.detail["temperature"] for record in found.records} == {temperature}
    again = hot.tempered(2 * temperature)  # counts from the logits as they were
    assert again.prediction.probs.numpy() == pytest.approx(
        softmax(logits.double().numpy() / (2 * temperature)).mean(0)
    )


def test_findings_merge() -> None:
    first = Findings(curves={"a": {"x": {"p": 1}}, "b": [1]}, notes=("one", "two"))
    second = Findings(curves={"a": {"x": {"q": 2}, "y": 3}, "b": [2]}, notes=("two", "three"))
    both = Findings.merge([first, second])
    assert both.curves == {"a": {"x": {"p": 1, "q": 2}, "y": 3}, "b": [2]}
    assert both.notes == ("one", "two", "three")
    assert first.curves == {"a": {"x": {"p": 1}}, "b": [1]}  # as it was


def test_labels_are_asked_for() -> None:
    with pytest.raises(ValueError, match="items with labels"):
        Predicted.from_logits(draws()).known_labels  # noqa: B018
    with pytest.raises(ValueError, match="labels from 0 to 3, got 4"):
        Predicted.from_logits(draws(items=1), torch.tensor([4]))
