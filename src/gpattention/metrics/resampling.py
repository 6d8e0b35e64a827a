"""How much metrics would change with other items of the same kind: the bootstrap for many metrics together.

A replicate draws n of n items with replacement and is described by a row of counts, so that sums over items
are products with the matrix of counts.  `gpattention.metrics.bootstrap` is the slow reference for one metric.

Resampling increases the bias of metrics that are biased for few items, such as calibration errors.  Intervals
therefore have the spread of the replicates around the metric itself: value + (quantile - mean of replicates).
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

from gpattention.metrics.classification import (
    BINS,
    brier_per_item,
    edges,
    hits,
    nll_per_item,
    read_items,
    read_scores,
    share_among_equals,
)

LEVEL = 0.95
MOST, FEWEST = 400, 100  # replicates for few and for many items
CELLS = 4_000_000  # counts at once
NORMAL = 1.959963984540054  # standard deviations on each side that contain 95 %
Interval = tuple[float, float]


@lru_cache(maxsize=2)
def drawn_counts(*sizes: int, seed: int = 0, device: torch.device | str = "cpu") -> tuple[Tensor, ...]:
    """How often each replicate draws each item, separately for each set.  [R, n] for every size n

    Args:
        sizes: numbers of items.
        seed: of the draws.
        device: where the matrices are kept; the draws are the same everywhere.

    Returns:
        One matrix of float64 for each size.
    """
    replicates = max(FEWEST, min(MOST, CELLS // max(1, *sizes)))
    generator = torch.Generator().manual_seed(seed)
    found = tuple(torch.empty(replicates, size, dtype=torch.float64) for size in sizes)
    for number in range(replicates):
        for counts, size in zip(found, sizes, strict=True):
            counts[number] = torch.bincount(torch.randint(size, (size,), generator=generator), minlength=size)
    return tuple(counts.to(device) for counts in found)


def classification_replicates(probs: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Accuracy, MCC, NLL, Brier score, ECE and AURC of every replicate.

    Args:
        probs: [B, C].
        labels: [B].

    Returns:
        [R] by the metrics' names.

    Raises:
        ValueError: probabilities or labels are not valid.
    """
    probs, labels = read_items(probs, labels)
    items, classes = probs.shape
    (counts,) = drawn_counts(items, device=probs.device)  # [R, B]
    right, certainty = hits(probs, labels).double(), probs.amax(-1).double()  # [B]
    each = torch.stack([right, nll_per_item(probs, labels), brier_per_item(probs, labels)], 1)  # [B, 3]
    accuracy, nll, brier = (counts @ each / items).unbind(1)

    place = torch.bucketize(certainty, edges(BINS, probs.device)[1:-1], right=True)  # [B]
    gaps = counts.new_zeros(len(counts), BINS).index_add_(1, place, counts * (certainty - right))  # [R, K]

    ordered, order = certainty.sort(descending=True)
    wrong, sorted_counts = share_among_equals(ordered, 1 - right[order]), counts[:, order]
    risk = (sorted_counts * wrong).cumsum(1) / sorted_counts.cumsum(1).clamp_min(1)  # [R, B]

    pairs = labels * classes + probs.argmax(-1)  # [B]
    confusion = counts.new_zeros(len(counts), classes**2).index_add_(1, pairs, counts)
    return {
        "accuracy": accuracy, "nll": nll, "brier": brier, "ece": gaps.abs().sum(1) / items,
        "aurc": (sorted_counts * risk).sum(1) / items, "mcc": _mcc(confusion.unflatten(1, (classes, -1))),
    }  # fmt: skip


def _mcc(confusion: Tensor) -> Tensor:
    """Gorodkin's R_K of counts [R, C, C]."""
    real, predicted, total = confusion.sum(2), confusion.sum(1), confusion.sum((1, 2))
    together = confusion.diagonal(dim1=1, dim2=2).sum(1) * total - (real * predicted).sum(1)
    spread = (total**2 - (real**2).sum(1)) * (total**2 - (predicted**2).sum(1))
    return torch.where(spread > 0, together / spread.clamp_min(1).sqrt(), 0.0)


def auroc_replicates(scores_in: Tensor, scores_out: Tensor) -> Tensor:
    """The AUROC of every replicate, in which both sets are drawn separately.

    Args:
        scores_in: of in-distribution items, [n].
        scores_out: of out-of-distribution items, [m].

    Returns:
        [R]

    Raises:
        ValueError: there is no score, or one is NaN.
    """
    sets = read_scores("scores_in", scores_in), read_scores("scores_out", scores_out)
    levels, rank = torch.cat(sets).unique(return_inverse=True)
    ranks = rank.split([len(each) for each in sets])
    drawn = drawn_counts(*map(len, sets), device=levels.device)
    found = []
    for several in zip(*(each.split(max(1, CELLS // len(levels))) for each in drawn), strict=True):
        empty = several[0].new_zeros(len(several[0]), len(levels))
        inside, outside = (
            empty.index_add(1, own, counts) for own, counts in zip(ranks, several, strict=True)
        )
        found.append((outside * (inside.cumsum(1) - inside / 2)).sum(1))  # ties count half
    return torch.cat(found) / (len(sets[0]) * len(sets[1]))


def interval_about(value: float, replicates: Tensor, least: float = 0.0, most: float = math.inf) -> Interval:
    """The interval of 95 % with the spread of the replicates around the value.

    Args:
        value: for the original items.
        replicates: [R]
        least: the smallest possible value of the metric.
        most: the largest one.

    Returns:
        Its ends.
    """
    tail = torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2], dtype=torch.float64, device=replicates.device)
    low, high = (replicates.quantile(tail) - replicates.mean() + value).tolist()
    return max(low, least), min(high, most)


def share_interval(share: float, items: float) -> Interval:
    """Wilson's interval of 95 % for a share, which is right for few items too.

    Args:
        share: the observed share.
        items: number of items, at least one.

    Returns:
        Its ends, in [0, 1].
    """
    square = NORMAL**2 / items
    middle = (share + square / 2) / (1 + square)
    half = NORMAL / (1 + square) * math.sqrt(share * (1 - share) / items + square / items / 4)
    return max(0.0, middle - half), min(1.0, middle + half)
