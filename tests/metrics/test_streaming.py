"""Streaming metrics give what their functions give, however the items are split."""

import copy
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
import torchmetrics
from torch import Tensor
from torch.testing import assert_close

from gpattention import metrics
from gpattention.metrics import ReliabilityBins, streaming
from tests.metrics.problems import CASES, SCORES, coarse, predictions

OF_ITEMS: dict[str, tuple[Callable, Callable]] = {
    "accuracy": (lambda classes: streaming.Accuracy(), metrics.accuracy),
    "mcc": (streaming.MCC, metrics.mcc),
    "nll": (lambda classes: streaming.NLL(), metrics.nll),
    "brier": (lambda classes: streaming.Brier(), metrics.brier),
    "ece": (lambda classes: streaming.ECE(), metrics.ece),
    "mce": (lambda classes: streaming.MCE(), metrics.mce),
    "ece10": (lambda classes: streaming.ECE(bins=10), lambda p, y: metrics.ece(p, y, bins=10)),
    "classwise": (streaming.ClasswiseECE, metrics.classwise_ece),
    "adaptive": (lambda classes: streaming.AdaptiveECE(), metrics.adaptive_ece),
    "aurc": (lambda classes: streaming.AURC(), metrics.aurc),
}
OF_SCORES: dict[str, tuple[Callable, Callable]] = {
    "auroc": (streaming.AUROC, metrics.auroc),
    "aupr_in": (streaming.AUPRIn, metrics.aupr_in),
    "aupr_out": (streaming.AUPROut, metrics.aupr_out),
    "fpr": (streaming.FPRAtTPR, metrics.fpr_at_tpr),
    "fpr80": (
        lambda: streaming.FPRAtTPR(tpr=0.8, positive="out"),
        lambda i, o: metrics.fpr_at_tpr(i, o, tpr=0.8, positive="out"),
    ),
}
CLOSE = {"rel": 1e-13, "abs": 1e-15}


def labelled(case: str) -> tuple[Tensor, Tensor]:
    """Scores [n + m], mixed, and which are outside."""
    inside, outside = SCORES[case]
    scores = torch.cat([inside, outside])
    marks = torch.arange(len(scores)) >= len(inside)
    order = torch.randperm(len(scores), generator=torch.Generator().manual_seed(0))
    return scores[order], marks[order]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", OF_ITEMS)
def test_splits_of_items_do_not_matter(name: str, case: str) -> None:
    (build, function), (probs, labels) = OF_ITEMS[name], CASES[case]
    expected = function(probs, labels)
    for size in (1, 13, 1000):
        metric = build(probs.shape[1])
        for p, y in zip(probs.split(size), labels.split(size), strict=True):
            metric.update(p, y)
        value = metric.compute()
        assert (value.shape, value.dtype) == ((), torch.float64)
        assert float(value) == pytest.approx(expected, **CLOSE)


@pytest.mark.parametrize("case", SCORES)
@pytest.mark.parametrize("name", OF_SCORES)
def test_splits_of_scores_do_not_matter(name: str, case: str) -> None:
    (build, function), (scores, marks) = OF_SCORES[name], labelled(case)
    for size in (1, 13, 1000):
        metric = build()
        for s, m in zip(scores.split(size), marks.split(size), strict=True):
            metric.update(s, m)
        assert float(metric.compute()) == function(*SCORES[case])


def test_reliability_bins() -> None:
    probs, labels = coarse(100, 3)
    metric = streaming.Reliability(bins=10)
    for p, y in zip(probs.split(7), labels.split(7), strict=True):
        metric.update(p, y)
    found, expected = (
        ReliabilityBins(**metric.compute()),
        metrics.reliability_bins(probs, labels, bins=10),
    )
    assert_close(vars(found), vars(expected), rtol=1e-13, atol=0, equal_nan=True)


def test_another_certainty() -> None:
    probs, labels = predictions(50, 3)
    certainty = -torch.special.entr(probs).sum(-1)
    metric = streaming.AURC()
    for part in torch.arange(50).split(8):
        metric.update(probs[part], labels[part], certainty[part])
    assert float(metric.compute()) == metrics.aurc(probs, labels, certainty=certainty)


@pytest.mark.parametrize("name", OF_ITEMS)
class TestAsTorchmetrics:
    def test_forward_tells_the_batch_and_keeps_the_whole(self, name: str) -> None:
        (build, function), (probs, labels) = OF_ITEMS[name], CASES["ten"]
        metric = build(10)
        for p, y in zip(probs.split(100), labels.split(100), strict=True):
            assert float(metric(p, y)) == pytest.approx(function(p, y), **CLOSE)
        assert float(metric.compute()) == pytest.approx(function(probs, labels), **CLOSE)

    def test_reset_forgets(self, name: str) -> None:
        (build, function), (probs, labels) = OF_ITEMS[name], CASES["three"]
        metric = build(3)
        metric.update(*predictions(20, 3, seed=77))
        metric.reset()
        metric.update(probs, labels)
        assert float(metric.compute()) == pytest.approx(function(probs, labels), **CLOSE)

    def test_half_precision_models_do_not_round_the_states(self, name: str) -> None:
        (build, function), (probs, labels) = OF_ITEMS[name], CASES["three"]
        metric = build(3).half().float().to("cpu")
        metric.update(probs, labels)
        assert float(metric.compute()) == pytest.approx(function(probs, labels), **CLOSE)

    def test_copies_and_pickles(self, name: str) -> None:
        (build, function), (probs, labels) = OF_ITEMS[name], CASES["three"]
        metric = build(3)
        metric.update(probs[:50], labels[:50])
        for again in (copy.deepcopy(metric), pickle.loads(pickle.dumps(metric))):
            again.update(probs[50:], labels[50:])
            assert float(again.compute()) == pytest.approx(function(probs, labels), **CLOSE)

    def test_empty_batches_add_nothing(self, name: str) -> None:
        (build, function), (probs, labels) = OF_ITEMS[name], CASES["three"]
        metric = build(3)
        for part in (slice(0, 0), slice(0, 60), slice(60, 60), slice(60, 101)):
            metric.update(probs[part], labels[part])
        assert float(metric.compute()) == pytest.approx(function(probs, labels), **CLOSE)

    def test_nothing_at_all_is_refused(self, name: str) -> None:
        metric = OF_ITEMS[name][0](3)
        metric.update(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))
        with pytest.raises(ValueError, match=r"at least one item before compute\(\), got 0"):
            metric.compute()

    def test_bad_batches_are_refused(self, name: str) -> None:
        metric = OF_ITEMS[name][0](3)
        with pytest.raises(ValueError, match="labels from 0 to 2, got 3"):
            metric.update(torch.eye(3), torch.tensor([0, 1, 3]))


def test_nothing_at_all_without_update() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torchmetrics warns first
        with pytest.raises(ValueError, match="at least one item"):
            streaming.AURC().compute()


def test_a_collection_shares_the_states() -> None:
    probs, labels = CASES["ten"]
    names = ("accuracy", "nll", "ece", "mce", "aurc")
    group = torchmetrics.MetricCollection({name: OF_ITEMS[name][0](10) for name in names})
    for p, y in zip(probs.split(64), labels.split(64), strict=True):
        group.update(p, y)
    assert ["ece", "mce"] in group.compute_groups.values()
    for name, value in group.compute().items():
        assert float(value) == pytest.approx(OF_ITEMS[name][1](probs, labels), **CLOSE)


def test_sums_stay_small_and_exact() -> None:
    """Sum states do not grow, and a float32 sum of so many would be off in the fourth digit."""
    metric = streaming.NLL()
    probs = torch.tensor([[0.9, 0.1]]).expand(100_000, 2)
    for _ in range(30):
        metric.update(probs, torch.zeros(100_000, dtype=torch.int64))
    expected = -float(torch.tensor(0.9).double().log())
    assert float(metric.compute()) == pytest.approx(expected, rel=1e-12)
    assert all(getattr(metric, name).numel() == 1 for name in metric._defaults)


@pytest.mark.parametrize("case", ["ten", "three", "binary"])
def test_torchmetrics_own_accuracy_agrees(case: str) -> None:
    probs, labels = CASES[case]
    own = torchmetrics.classification.MulticlassAccuracy(probs.shape[1], average="micro")
    assert float(own(probs, labels)) == pytest.approx(metrics.accuracy(probs, labels), rel=1e-6)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: streaming.ECE(bins=0), "bins to be a whole number >= 1, got 0"),
        (lambda: streaming.AdaptiveECE(bins=0), "bins to be a whole number >= 1, got 0"),
        (lambda: streaming.MCC(0), "classes to be a whole number >= 1, got 0"),
        (lambda: streaming.ClasswiseECE(0), "classes to be a whole number >= 1, got 0"),
        (lambda: streaming.FPRAtTPR(tpr=2), r"tpr in \(0, 1\], got 2"),
        (lambda: streaming.FPRAtTPR(positive="id"), "positive to be one of in, out, got 'id'"),
    ],
)
def test_refused_settings(build: Callable, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_refused_batches() -> None:
    for metric in (streaming.MCC(4), streaming.ClasswiseECE(4)):
        with pytest.raises(ValueError, match="probs of 4 classes, got 3"):
            metric.update(*predictions(5, 3))
    with pytest.raises(ValueError, match=r"outside to be bool of shape \[3\].*int64"):
        streaming.AUROC().update(torch.zeros(3), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="scores that can be ranked, got 1 NaN of 1"):
        streaming.AUROC().update(torch.tensor([torch.nan]), torch.tensor([True]))
    metric = streaming.AUROC()
    metric.update(torch.zeros(3), torch.zeros(3, dtype=torch.bool))
    with pytest.raises(ValueError, match="scores_out of at least 1 items, got 0"):
        metric.compute()
