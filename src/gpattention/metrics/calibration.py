"""Calibration errors: how far probabilities are from the frequencies of what they predict."""

import torch
from torch import Tensor

from gpattention.checks import check_count
from gpattention.metrics.binning import (
    BINS,
    BinSums,
    class_sums,
    expected_gap,
    largest_gap,
    top_sums,
)
from gpattention.metrics.checks import check_choice, read_items
from gpattention.metrics.classification import hits
from gpattention.metrics.ties import share_among_equals

AGGREGATIONS = ("pooled", "batch_mean")


def ece(
    probs: Tensor,  # [B, C]
    labels: Tensor,  # [B]
    *,
    bins: int = BINS,
    aggregation: str = "pooled",
    batch_size: int | None = None,
) -> float:
    """Expected calibration error of the top-1 confidence in equal-width bins.

    sum_k n_k / B |accuracy_k - confidence_k|.  `aggregation="batch_mean"` averages the errors of every
    `batch_size` items in a row, the last and perhaps shorter batch like any other.  It is here only to
    compare with papers that do so (1000 for CIFAR-C, 32 for CoLA): few items per bin make it large
    for perfect predictions too, and it changes with the order of the items.
    """
    return float(expected_gap(_sums(probs, labels, bins, aggregation, batch_size)).mean())


def mce(
    probs: Tensor,  # [B, C]
    labels: Tensor,  # [B]
    *,
    bins: int = BINS,
    aggregation: str = "pooled",
    batch_size: int | None = None,
) -> float:
    """Maximum calibration error: the largest |accuracy_k - confidence_k| of bins that are not empty.

    A bin counts however few its items are.  `aggregation` as for `ece`.
    """
    return float(largest_gap(_sums(probs, labels, bins, aggregation, batch_size)).mean())


def classwise_ece(probs: Tensor, labels: Tensor, *, bins: int = BINS) -> float:
    """Mean over the classes of the calibration error of each class's probability (Kull et al. 2019).

    Every probability counts, not the largest alone: for each class, all items are binned by its
    probability and compared with how often it occurs.  `probs` are [B, C] and `labels` [B].
    """
    bins = check_count("bins", bins)
    return float(expected_gap(class_sums(*read_items(probs, labels), bins)).mean())


def adaptive_ece(probs: Tensor, labels: Tensor, *, bins: int = BINS) -> float:
    """Expected calibration error of the top-1 confidence in bins of equal numbers of items.

    Of the items sorted by confidence, number r of B (from 0) goes to bin floor(r K / B); items of equal
    confidence share their accuracy, so that it does not matter which of them go to which bin.  `probs` are
    [B, C] and `labels` [B].
    """
    bins = check_count("bins", bins)
    probs, labels = read_items(probs, labels)
    return adaptive_gap(probs.amax(-1), hits(probs, labels), bins)


def adaptive_gap(confidence: Tensor, right: Tensor, bins: int) -> float:
    """`adaptive_ece` of confidences [B] that are `right` or not [B]."""
    ordered, order = confidence.double().sort()  # [B]
    excess = ordered - share_among_equals(ordered, right[order].double())  # [B]
    place = torch.arange(len(ordered), device=ordered.device) * bins // len(ordered)  # [B]
    return float(ordered.new_zeros(bins).index_add_(0, place, excess).abs().sum()) / len(ordered)


def _sums(probs: Tensor, labels: Tensor, bins: int, aggregation: str, batch_size: int | None) -> BinSums:
    bins = check_count("bins", bins)
    check_choice("aggregation", aggregation, AGGREGATIONS)
    if (batch_size is not None) != (aggregation == "batch_mean"):
        raise ValueError(
            f"expected batch_size with aggregation='batch_mean' and only with it, "
            f"got batch_size={batch_size} with aggregation={aggregation!r}"
        )
    if batch_size is not None:
        batch_size = check_count("batch_size", batch_size)
    return top_sums(*read_items(probs, labels), bins, batch_size)
