"""Equal-width bins of probabilities, as sums that add up over batches and processes.

K bins divide [0, 1] at k / K.  A bin holds its lower edge and not its upper one, but the last one holds 1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gpattention.checks import check_count
from gpattention.metrics.checks import read_items
from gpattention.metrics.classification import hits

BINS = 15  # of Guo et al. (2017) and most since; the paper has 10


@dataclass(frozen=True)
class BinSums:
    """What all calibration errors of G groups in K bins are made of."""

    counts: Tensor  # [G, K] items, int64
    predicted: Tensor  # [G, K] sum of their probabilities, float64
    occurred: Tensor  # [G, K] how many came true, int64


@dataclass(frozen=True)
class ReliabilityBins:
    """A reliability diagram of K bins; empty bins have NaN for confidence and accuracy."""

    edges: Tensor  # [K + 1] from 0 to 1
    counts: Tensor  # [K] items in each
    confidence: Tensor  # [K] their mean top-1 probability
    accuracy: Tensor  # [K] the fraction of them classified right


def reliability_bins(probs: Tensor, labels: Tensor, *, bins: int = BINS) -> ReliabilityBins:
    """Mean confidence and accuracy of the items in each equal-width bin of confidence, pooled.

    `probs` are [B, C] and `labels` [B].
    """
    bins = check_count("bins", bins)
    return ReliabilityBins(**reliability(top_sums(*read_items(probs, labels), bins)))


def edges(bins: int, device: torch.device | None = None) -> Tensor:
    """k / K rounded once, so that 0.3 is the float64 number 0.3.  [K + 1]"""
    return torch.arange(bins + 1, dtype=torch.float64, device=device) / bins


def bin_sums(values: Tensor, occurred: Tensor, bins: int, group: Tensor, groups: int) -> BinSums:
    """Sums over the entries [n] of `values` of each group and bin; `occurred` tells what came true."""
    values = values.double()
    inner = edges(bins, values.device)[1:-1]  # [K - 1]
    place = group * bins + torch.bucketize(values, inner, right=True)  # [n]
    size = groups * bins
    predicted = values.new_zeros(size).index_add_(0, place, values)
    return BinSums(
        torch.bincount(place, minlength=size).view(groups, bins),
        predicted.view(groups, bins),
        torch.bincount(place[occurred], minlength=size).view(groups, bins),
    )


def top_sums(probs: Tensor, labels: Tensor, bins: int, batch_size: int | None = None) -> BinSums:
    """Of the most probable classes; one group, or one for every `batch_size` items in a row."""
    batches = 1 if batch_size is None else -(-len(probs) // batch_size)
    group = torch.zeros_like(labels)  # [B]
    if batch_size is not None:
        group = torch.arange(len(probs), device=probs.device) // batch_size
    return bin_sums(probs.amax(-1), hits(probs, labels), bins, group, batches)


def class_sums(probs: Tensor, labels: Tensor, bins: int) -> BinSums:
    """Of every class's probability; a group for each class."""
    items, classes = probs.shape
    each = torch.arange(classes, device=probs.device)  # [C]
    occurred = labels[:, None] == each  # [B, C]
    return bin_sums(probs.flatten(), occurred.flatten(), bins, each.repeat(items), classes)


def expected_gap(sums: BinSums) -> Tensor:
    """Mean distance of what was predicted from what came true, bins weighted by their items.  [G]"""
    return (sums.predicted - sums.occurred).abs().sum(-1) / sums.counts.sum(-1)


def largest_gap(sums: BinSums) -> Tensor:
    """The largest distance in any bin that is not empty.  [G]"""
    return ((sums.predicted - sums.occurred).abs() / sums.counts.clamp(min=1)).amax(-1)


def reliability(sums: BinSums) -> dict[str, Tensor]:
    """The fields of `ReliabilityBins` from sums of one group."""
    counts = sums.counts[0]  # [K]
    return {
        "edges": edges(len(counts), counts.device),
        "counts": counts,
        "confidence": sums.predicted[0] / counts,
        "accuracy": sums.occurred[0].double() / counts,
    }
