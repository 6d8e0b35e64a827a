"""Bad arguments are refused by name, and nothing but torch is needed."""

import subprocess
import sys

import pytest
import torch

from gpattention import metrics
from tests.metrics.problems import predictions

OF_ITEMS = (
    metrics.accuracy, metrics.mcc, metrics.nll, metrics.brier, metrics.ece, metrics.mce, metrics.adaptive_ece,
    metrics.classwise_ece, metrics.aurc, metrics.risk_coverage, metrics.reliability_bins,
)  # fmt: skip
OF_SCORES = (metrics.auroc, metrics.aupr_in, metrics.aupr_out, metrics.fpr_at_tpr)
PROBS, LABELS = predictions(4, 3)


@pytest.mark.parametrize("metric", OF_ITEMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("probs", "labels", "message"),
    [
        (PROBS[0], LABELS, r"probs to be floating-point \[items, classes\], got shape \(3,\)"),
        (LABELS[:, None], LABELS, "probs to be floating-point.*int64"),
        (PROBS[:, :0], LABELS, r"probs.*got shape \(4, 0\)"),
        (PROBS[:0], LABELS[:0], "probs of at least 1 items, got 0"),
        (2 * PROBS, LABELS, r"probs >= 0 that add up to 1, got \[.*\] for item 0"),
        (PROBS.log(), LABELS, "probs >= 0 that add up to 1"),
        (PROBS * torch.nan, LABELS, "probs >= 0 that add up to 1"),
        (PROBS, LABELS[:3], r"labels to be whole numbers of shape \[4\].*got shape \(3,\)"),
        (PROBS, LABELS.double(), "labels to be whole numbers.*float64"),
        (PROBS, LABELS > 0, "labels to be whole numbers.*bool"),
        (PROBS.numpy(), LABELS, "probs to be a tensor, got ndarray: torch.as_tensor"),
        (PROBS, LABELS.tolist(), "labels to be a tensor, got list: torch.as_tensor"),
        (PROBS, LABELS * 0 + 3, "labels from 0 to 2, got 3"),
        (PROBS, LABELS * 0 - 1, "labels from 0 to 2, got -1"),
    ],
)
def test_items(metric, probs: torch.Tensor, labels: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        metric(probs, labels)


@pytest.mark.parametrize(
    "metric",
    [metrics.ece, metrics.mce, metrics.adaptive_ece, metrics.classwise_ece, metrics.reliability_bins],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("bins", [0, -1, 1.5, True])
def test_bins(metric, bins: int) -> None:
    with pytest.raises(ValueError, match=f"bins to be a whole number >= 1, got {bins}"):
        metric(PROBS, LABELS, bins=bins)


@pytest.mark.parametrize("metric", [metrics.ece, metrics.mce])
def test_aggregations(metric) -> None:
    with pytest.raises(ValueError, match="aggregation to be one of pooled, batch_mean, got 'mean'"):
        metric(PROBS, LABELS, aggregation="mean")
    with pytest.raises(ValueError, match="batch_size to be a whole number >= 1, got 0"):
        metric(PROBS, LABELS, aggregation="batch_mean", batch_size=0)


def test_certainties() -> None:
    with pytest.raises(ValueError, match=r"certainty of shape \[4\], one per item, got \(3,\)"):
        metrics.aurc(PROBS, LABELS, certainty=torch.zeros(3))
    with pytest.raises(ValueError, match="certainty that can be ranked, got 1 NaN of 4"):
        metrics.aurc(PROBS, LABELS, certainty=torch.tensor([0, 1, torch.nan, 2]))


@pytest.mark.parametrize("metric", OF_SCORES, ids=lambda f: f.__name__)
def test_scores(metric) -> None:
    good = torch.zeros(3)
    with pytest.raises(ValueError, match="scores_in of at least 1 items, got 0"):
        metric(good[:0], good)
    with pytest.raises(ValueError, match="scores_out of at least 1 items, got 0"):
        metric(good, good[:0])
    with pytest.raises(ValueError, match="scores_out that can be ranked, got 3 NaN of 3"):
        metric(good, good * torch.nan)
    with pytest.raises(ValueError, match=r"scores_in to be floating-point \[items\].*int64"):
        metric(good.long(), good)
    with pytest.raises(ValueError, match=r"scores_in to be floating-point \[items\], got shape \(3, 1\)"):
        metric(good[:, None], good)


def test_rates() -> None:
    with pytest.raises(ValueError, match=r"tpr in \(0, 1\], got 0"):
        metrics.fpr_at_tpr(torch.zeros(3), torch.zeros(3), tpr=0)
    with pytest.raises(ValueError, match="positive to be one of in, out, got 'ood'"):
        metrics.fpr_at_tpr(torch.zeros(3), torch.zeros(3), positive="ood")


def test_public_names() -> None:
    assert sorted(metrics.__all__) == sorted({*metrics.__all__})
    for name in set(metrics.__all__) - {"METRICS"}:
        assert len(getattr(metrics, name).__doc__) > 20


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
