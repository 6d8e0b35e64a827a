"""The registry of metrics, the bootstrap, and bad arguments, which every metric refuses by name."""

import subprocess
import sys

import pytest
import torch

from gpattention import metrics
from gpattention.metrics import accuracy, aurc, auroc, bootstrap, fpr_at_tpr
from tests.metrics.problems import SCORES, predictions, seeded
from tests.refusals import refusals

OF_ITEMS = (
    metrics.accuracy, metrics.mcc, metrics.nll, metrics.brier, metrics.ece, metrics.mce, metrics.adaptive_ece,
    metrics.classwise_ece, metrics.aurc, metrics.risk_coverage, metrics.reliability_bins,
)  # fmt: skip

OF_SCORES = (metrics.auroc, metrics.aupr_in, metrics.aupr_out, metrics.fpr_at_tpr)
PROBS, LABELS = predictions(4, 3)
BINNED = (metrics.ece, metrics.mce, metrics.adaptive_ece, metrics.classwise_ece, metrics.reliability_bins)
GOOD, WHOLE = torch.zeros(3), "labels to be whole numbers"
BAD_ITEMS = (
    (PROBS[0], LABELS, r"probs to be floating-point \[items, classes\]", r"\(3,\)"),
    (LABELS[:, None], LABELS, "probs to be floating-point", "int64"),
    (PROBS[:, :0], LABELS, "probs", r"\(4, 0\)"),
    (PROBS[:0], LABELS[:0], "probs of at least 1 items", "0"),
    (2 * PROBS, LABELS, "probs >= 0 that add up to 1", r"\[.*\] for item 0"),
    (PROBS.log(), LABELS, "probs >= 0 that add up to 1", ""),
    (PROBS * torch.nan, LABELS, "probs >= 0 that add up to 1", ""),
    (PROBS, LABELS[:3], rf"{WHOLE} of shape \[4\]", r"\(3,\)"),
    (PROBS, LABELS.double(), WHOLE, "float64"),
    (PROBS, LABELS > 0, WHOLE, "bool"),
    (PROBS.numpy(), LABELS, "probs to be a tensor", "ndarray: convert it by torch.as_tensor"),
    (PROBS, LABELS.tolist(), "labels to be a tensor", "list: convert it by torch.as_tensor"),
    (PROBS, LABELS * 0 + 3, "labels from 0 to 2", "3"),
    (PROBS, LABELS * 0 - 1, "labels from 0 to 2", "-1"),
)
BAD_SCORES = (
    (GOOD[:0], GOOD, "scores_in of at least 1 items", "0"),
    (GOOD, GOOD[:0], "scores_out of at least 1 items", "0"),
    (GOOD, GOOD * torch.nan, "scores_out that can be ranked", "3 NaN of 3"),
    (GOOD.long(), GOOD, r"scores_in to be floating-point \[items\]", "int64"),
    (GOOD[:, None], GOOD, r"scores_in to be floating-point \[items\]", r"\(3, 1\)"),
)
test_refusals = refusals([
    *(
        (lambda f=metric, a=a, b=b: f(a, b), field, value)
        for group, rows in ((OF_ITEMS, BAD_ITEMS), (OF_SCORES, BAD_SCORES))
        for metric in group
        for a, b, field, value in rows
    ),
    *(
        (lambda f=metric, n=bins: f(PROBS, LABELS, bins=n), "bins to be a whole number >= 1", str(bins))
        for metric in BINNED
        for bins in (0, -1, 1.5, True)
    ),
    *(
        (lambda f=metric: f(PROBS, LABELS, batch_size=0), "batch_size to be a whole number >= 1", "0")
        for metric in (metrics.ece, metrics.mce)
    ),
    (lambda: aurc(PROBS, LABELS, certainty=torch.zeros(3)), r"certainty of shape \[4\]", r"\(3,\)"),
    (lambda: aurc(PROBS, LABELS, certainty=torch.tensor([0, 1, torch.nan, 2])), "certainty", "1 NaN of 4"),
    (lambda: fpr_at_tpr(GOOD, GOOD, tpr=0), r"tpr in \(0, 1\]", "0"),
    (lambda: fpr_at_tpr(GOOD, GOOD, positive="ood"), "positive to be one of in, out", "ood"),
    (lambda: bootstrap(accuracy, PROBS, LABELS, replicates=1), "replicates.*>= 2", "1"),
    (lambda: bootstrap(accuracy, PROBS, LABELS, level=1.0), r"level in \(0, 1\)", "1.0"),
    (lambda: bootstrap(auroc, *SCORES["overlapping"]), "all alike", r"\[180, 120\]"),
    (lambda: bootstrap(auroc, GOOD, GOOD[:0], paired=False), "at least one item", r"\[3, 0\]"),
    (lambda: bootstrap(auroc), "sizes", r"\[\]"),
])  # fmt: skip


@pytest.mark.parametrize("metric", metrics.METRICS.values(), ids=lambda metric: metric.name)
def test_every_metric_of_the_list_is_what_it_says(metric: metrics.Metric) -> None:
    probs, labels = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]]), torch.tensor([0, 1, 1])
    inside, outside = torch.tensor([0.1, 0.4, 0.2]), torch.tensor([0.3, 0.9])
    arguments = {"labels": (probs, labels), "batches": (probs, labels), "scores": (inside, outside)}
    assert (metric.function is None) == (metric.kind == "other")
    if metric.function is not None:
        batched = {"batch_size": 2} if metric.kind == "batches" else {}
        assert 0 <= metric.function(*arguments[metric.kind], **batched) <= 2
    if metric.larger is not None:
        assert metric.better(2.0, 1.0) is metric.larger
        assert metric.best([2.0, 1.0]) == (2.0 if metric.larger else 1.0)
        assert metric.heading.endswith("↑" if metric.larger else "↓")
    assert metrics.metric_of(metric.name) is metric


WITHOUT = """
import sys
sys.modules["torchmetrics"] = None
import torch
from gpattention.metrics import *
probs, labels = torch.tensor([[0.75, 0.25], [0.5, 0.5]]), torch.tensor([0, 1])
values = [f(probs, labels) for f in (accuracy, mcc, nll, brier, ece, mce, adaptive_ece, classwise_ece, aurc)]
scores = [f(probs[0], probs[1]) for f in (auroc, aupr_in, aupr_out, fpr_at_tpr)]
assert all(isinstance(value, float) for value in values + scores)
reliability_bins(probs, labels)
try:
    import gpattention.metrics.streaming
except ImportError as error:
    print(error, error.name)
"""


def test_only_streaming_needs_torchmetrics() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "needs torchmetrics: pip install 'gpattention[train]' torchmetrics" in done.stdout


def test_of_a_mean_is_its_standard_error() -> None:
    values = torch.randn(400, dtype=torch.float64, generator=seeded(0))
    found = bootstrap(lambda v: float(v.mean()), values, replicates=2000)
    expected = float(values.std() / len(values) ** 0.5)
    assert found.value == float(values.mean())
    assert found.standard_error == pytest.approx(expected, rel=0.06)
    assert found.high - found.low == pytest.approx(2 * 1.96 * expected, rel=0.08)
    assert found.low < found.value < found.high


def test_items_stay_together() -> None:
    """Accuracy of probabilities with other items' labels would be lower."""
    probs, labels = predictions(200, 5, sharp=6)
    found = bootstrap(accuracy, probs, labels, replicates=200)
    rate = accuracy(probs, labels)
    assert found.value == rate
    assert found.standard_error == pytest.approx((rate * (1 - rate) / 200) ** 0.5, rel=0.2)
    assert found.low <= rate <= found.high


def test_groups_of_different_size() -> None:
    inside, outside = SCORES["overlapping"]
    found = bootstrap(auroc, inside, outside, replicates=100, paired=False)
    assert 0.01 < found.standard_error < 0.05
    assert found == bootstrap(auroc, inside, outside, replicates=100, paired=False)
    assert found != bootstrap(auroc, inside, outside, replicates=100, paired=False, seed=1)
