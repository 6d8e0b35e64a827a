"""Correctness of predicted classes, and the distance of their probabilities from frequencies.

Proper scores (NLL, Brier) are smallest, on average, for the true probabilities.  Risk and coverage describe
the errors if only the most certain items are answered.  Items with equal scores share their mean, so that the
order of items does not matter.

Calibration errors use bins of equal width, whose sums add up over batches and processes.  K bins divide [0,
1] at k / K.  A bin contains its lower edge and not its upper one, but the last one contains 1.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gpattention.checks import check_count, check_labels, check_tensor

BINS = 15  # of Guo et al. (2017) and most since; the paper has 10


def read_items(probs: Tensor, labels: Tensor, *, least: int = 1) -> tuple[Tensor, Tensor]:
    """The probabilities [B, C] and the labels [B] as int64 on the same device, after checks."""
    check_probs(probs, least=least)
    check_labels(labels, *probs.shape)
    return probs.detach(), labels.to(probs.device, torch.int64)


def check_probs(probs: Tensor, *, least: int = 1) -> None:
    """Require probabilities [B, C] that add up to 1, for at least `least` items."""
    check_tensor("probs", probs)
    if probs.ndim != 2 or not probs.is_floating_point() or probs.shape[1] == 0:
        got = f"shape {tuple(probs.shape)} and {probs.dtype}"
        raise ValueError(f"expected probs to be floating-point [items, classes], got {got}")
    if len(probs) < least:
        raise ValueError(f"expected probs of at least {least} items, got {len(probs)}")
    tolerance = max(1e-3, torch.finfo(probs.dtype).eps)  # bfloat16 rounds more coarsely
    sums = probs.detach().sum(-1, dtype=torch.float64)  # [B]
    good = (probs >= 0).all(-1) & ((sums - 1).abs() < tolerance)  # NaN is not good
    if not bool(good.all()):
        worst = int((~good).nonzero()[0])
        shown = [round(p, 4) for p in probs[worst].tolist()[:8]]
        raise ValueError(f"expected probs >= 0 that add up to 1, got {shown} for item {worst}")


def read_scores(name: str, scores: Tensor, *, least: int = 1) -> Tensor:
    """Scores in float64 without NaN; infinite ones are allowed, as they can be ranked.  [B]"""
    check_tensor(name, scores)
    if scores.ndim != 1 or not scores.is_floating_point():
        got = f"shape {tuple(scores.shape)} and {scores.dtype}"
        raise ValueError(f"expected {name} to be floating-point [items], got {got}")
    if len(scores) < least:
        raise ValueError(f"expected {name} of at least {least} items, got {len(scores)}")
    lost = int(scores.isnan().sum())
    if lost:
        raise ValueError(f"expected {name} that can be ranked, got {lost} NaN of {len(scores)}")
    return scores.detach().double()


def share_among_equals(ordered: Tensor, values: Tensor) -> Tensor:
    """Values [B] replaced by their mean over items with equal scores, for sorted scores [B].

    A sum over the first k items is then its expectation over all orders of equal ones.
    """
    _, group, sizes = ordered.unique_consecutive(return_inverse=True, return_counts=True)  # [B], [K]
    sums = values.new_zeros(len(sizes)).index_add_(0, group, values)  # [K]
    return (sums / sizes)[group]


def accuracy(probs: Tensor, labels: Tensor) -> float:
    """The fraction of items whose most probable class is right; of equally probable ones the first counts.

    Args:
        probs: probabilities of the classes, [B, C].
        labels: right classes, [B].

    Returns:
        A number in [0, 1].

    Raises:
        ValueError: probabilities or labels are not valid.
    """
    return float(hits(*read_items(probs, labels)).double().mean())


def mcc(probs: Tensor, labels: Tensor) -> float:
    """Matthews' correlation coefficient of labels and most probable classes, for any number of classes.

    Gorodkin's R_K (2004).

    Args:
        probs: probabilities of the classes, [B, C].
        labels: right classes, [B].

    Returns:
        A number in [-1, 1]; 0 if all labels, or all predictions, are of one class.

    Raises:
        ValueError: probabilities or labels are not valid.
    """
    return mcc_from_confusion(confusion_matrix(*read_items(probs, labels)))


def hits(probs: Tensor, labels: Tensor) -> Tensor:
    """True where the most probable class is right.  [B]"""
    return probs.argmax(-1) == labels


def confusion_matrix(probs: Tensor, labels: Tensor) -> Tensor:
    """How many items of each class (rows) are taken for each (columns).  [C, C] of int64"""
    classes = probs.shape[1]
    pairs = labels * classes + probs.argmax(-1)  # [B]
    return torch.bincount(pairs, minlength=classes * classes).view(classes, classes)


def mcc_from_confusion(confusion: Tensor) -> float:
    """Gorodkin's R_K of counts [C, C], whose squares are whole numbers and stay exact."""
    real, predicted = confusion.sum(1), confusion.sum(0)  # [C], [C]
    # Python's whole numbers do not overflow where int64 would
    total, right = int(confusion.sum()), int(confusion.trace())
    together = right * total - int((real * predicted).sum())
    spread = (total**2 - int((real * real).sum())) * (total**2 - int((predicted * predicted).sum()))
    return together / math.sqrt(spread) if spread else 0.0


def nll(probs: Tensor, labels: Tensor) -> float:
    """Mean negative log-probability of the right class, in nats.

    Probabilities below the smallest positive normal number of their type, 0 among them, count as that
    number: a class held impossible costs 87.3 nats in float32 and in the half precisions, which are read as
    float32, and 708.4 in float64.

    Args:
        probs: probabilities of the classes, [B, C].
        labels: right classes, [B].

    Returns:
        A number >= 0.

    Raises:
        ValueError: probabilities or labels are not valid.
    """
    return float(nll_per_item(*read_items(probs, labels)).mean())


def brier(probs: Tensor, labels: Tensor) -> float:
    """Mean squared distance of the probabilities from the right class, summed over the classes.

    Brier's own definition (1950); for two classes it is twice the square of the error in one of them.

    Args:
        probs: probabilities of the classes, [B, C].
        labels: right classes, [B].

    Returns:
        A number in [0, 2].

    Raises:
        ValueError: probabilities or labels are not valid.
    """
    return float(brier_per_item(*read_items(probs, labels)).mean())


def nll_per_item(probs: Tensor, labels: Tensor) -> Tensor:
    """Negative log-probability of each item's class, in float64.  [B]"""
    kind = torch.promote_types(probs.dtype, torch.float32)
    right = probs.gather(1, labels[:, None])[:, 0]  # [B]
    return -right.double().clamp(min=torch.finfo(kind).tiny).log()


def brier_per_item(probs: Tensor, labels: Tensor) -> Tensor:
    """Squared distance of each item's probabilities from its class, in float64.  [B]"""
    # a copy, since it is changed in place and may be the caller's
    off = probs.to(torch.float64, copy=True)  # [B, C]
    off[torch.arange(len(off), device=off.device), labels] -= 1
    return off.square().sum(-1)


@dataclass(frozen=True)
class RiskCoverage:
    """Risk of answering the k surest of B items, for every k from 1 to B.

    Attributes:
        coverage: k / B, [B].
        risk: the fraction of wrong answers among them, [B].
    """

    coverage: Tensor
    risk: Tensor


def risk_coverage(probs: Tensor, labels: Tensor, *, certainty: Tensor | None = None) -> RiskCoverage:
    """The risk-coverage curve, surest items first.

    Where the k-th item has the certainty of others, the risk is its expectation over all their orders.

    Args:
        probs: probabilities of the classes, [B, C].
        labels: right classes, [B].
        certainty: larger for surer items, [B]; the top-1 probability if not given.

    Returns:
        Risks at every coverage.

    Raises:
        ValueError: probabilities or labels are not valid.
    """
    probs, labels = read_items(probs, labels)
    return curve(read_certainty(probs, certainty), ~hits(probs, labels))


def aurc(probs: Tensor, labels: Tensor, *, certainty: Tensor | None = None) -> float:
    """Area under the risk-coverage curve as a step function (Geifman et al. 2019).

    The mean of the risks at the coverages 1 / B, 2 / B, ..., 1, without interpolation: 0 if nothing is
    wrong, 1 if everything is.  Ties as in `risk_coverage`.

    Args:
        probs: probabilities of the classes, [B, C].
        labels: right classes, [B].
        certainty: larger for surer items, [B]; the top-1 probability if not given.

    Returns:
        A number in [0, 1].

    Raises:
        ValueError: probabilities or labels are not valid.
    """
    return float(risk_coverage(probs, labels, certainty=certainty).risk.mean())


def read_certainty(probs: Tensor, certainty: Tensor | None) -> Tensor:
    """What the items are ranked by, in float64.  [B]"""
    if certainty is None:
        return probs.amax(-1).double()
    if certainty.shape != probs.shape[:1]:
        got = tuple(certainty.shape)
        raise ValueError(f"expected certainty of shape [{len(probs)}], one per item, got {got}")
    return read_scores("certainty", certainty, least=0).to(probs.device)


def curve(certainty: Tensor, wrong: Tensor) -> RiskCoverage:
    """From certainties [B] of answers that are `wrong` or not [B]."""
    ordered, order = certainty.sort(descending=True)  # [B]
    errors = share_among_equals(ordered, wrong[order].double()).cumsum(0)  # [B] expected among the first k
    answered = torch.arange(1, len(ordered) + 1, device=ordered.device)  # [B]
    return RiskCoverage(answered.double() / len(ordered), errors / answered)


# Calibration


@dataclass(frozen=True)
class BinSums:
    """What all calibration errors of G groups in K bins are made of."""

    counts: Tensor  # [G, K] items, int64
    predicted: Tensor  # [G, K] sum of their probabilities, float64
    occurred: Tensor  # [G, K] how many came true, int64


@dataclass(frozen=True)
class ReliabilityBins:
    """A reliability diagram of K bins; empty bins have NaN for confidence and accuracy.

    Attributes:
        edges: from 0 to 1, [K + 1].
        counts: items in each bin, [K].
        confidence: their mean top-1 probability, [K].
        accuracy: the fraction of them classified right, [K].
    """

    edges: Tensor
    counts: Tensor
    confidence: Tensor
    accuracy: Tensor


def reliability_bins(probs: Tensor, labels: Tensor, *, bins: int = BINS) -> ReliabilityBins:
    """Mean confidence and accuracy of the items in each equal-width bin of confidence, pooled.

    Args:
        probs: probabilities of the classes, [B, C].
        labels: right classes, [B].
        bins: how many.

    Returns:
        The diagram.

    Raises:
        ValueError: probabilities or labels are not valid, or `bins` is not a positive number.
    """
    bins = check_count("bins", bins)
    return reliability(top_sums(*read_items(probs, labels), bins))


def edges(bins: int, device: torch.device | None = None) -> Tensor:
    """k / K rounded once, so that 0.3 is the float64 number 0.3.  [K + 1]"""
    return torch.arange(bins + 1, dtype=torch.float64, device=device) / bins


def bin_sums(values: Tensor, occurred: Tensor, bins: int, group: Tensor, groups: int) -> BinSums:
    """Sums over the entries [n] of `values` of each group and bin; `occurred` tells what came true."""
    values = values.double()
    # without the ends, so that 0 and 1 fall into the first and the last bin
    inner = edges(bins, values.device)[1:-1]  # [K - 1]
    place = group * bins + torch.bucketize(values, inner, right=True)  # [n]
    predicted = values.new_zeros(groups * bins).index_add_(0, place, values)
    counts = (torch.bincount(x, minlength=groups * bins) for x in (place, place[occurred]))
    here, true = (count.view(groups, bins) for count in counts)
    return BinSums(here, predicted.view(groups, bins), true)


def top_sums(probs: Tensor, labels: Tensor, bins: int, batch_size: int | None = None) -> BinSums:
    """Of the most probable classes; one group, or one for every `batch_size` items in a row."""
    batch_size = batch_size or max(len(probs), 1)
    group = torch.arange(len(probs), device=probs.device) // batch_size  # [B]
    batches = max(-(-len(probs) // batch_size), 1)  # one without items too: its sums are 0
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


def reliability(sums: BinSums) -> ReliabilityBins:
    """The diagram of sums of one group."""
    counts, predicted, occurred = sums.counts[0], sums.predicted[0], sums.occurred[0].double()  # [K]
    return ReliabilityBins(edges(len(counts), counts.device), counts, predicted / counts, occurred / counts)


def ece(probs: Tensor, labels: Tensor, *, bins: int = BINS, batch_size: int | None = None) -> float:
    """Expected calibration error of the top-1 confidence in equal-width bins.

    sum_k n_k / B |accuracy_k - confidence_k|.  With a `batch_size` it is the mean of the errors of so many
    items in a row, the last and perhaps shorter batch like any other.  That is here only to
    compare with papers that do so (1000 for CIFAR-C, 32 for CoLA): few items per bin make it large
    for perfect predictions too, and it changes with the order of the items.

    Args:
        probs: probabilities of the classes, [B, C].
        labels: right classes, [B].
        bins: how many.
        batch_size: items of a batch; all items are one if not given.

    Returns:
        A number in [0, 1].

    Raises:
        ValueError: probabilities or labels are not valid, or `bins` is not a positive number.
    """
    return float(expected_gap(_sums(probs, labels, bins, batch_size)).mean())


def mce(probs: Tensor, labels: Tensor, *, bins: int = BINS, batch_size: int | None = None) -> float:
    """Maximum calibration error: the largest |accuracy_k - confidence_k| of bins that are not empty.

    A bin counts however few its items are.  `batch_size` as for `ece`.

    Args:
        probs: probabilities of the classes, [B, C].
        labels: right classes, [B].
        bins: how many.
        batch_size: items of a batch; all items are one if not given.

    Returns:
        A number in [0, 1].

    Raises:
        ValueError: probabilities or labels are not valid, or `bins` is not a positive number.
    """
    return float(largest_gap(_sums(probs, labels, bins, batch_size)).mean())


def classwise_ece(probs: Tensor, labels: Tensor, *, bins: int = BINS) -> float:
    """Mean over the classes of the calibration error of each class's probability (Kull et al. 2019).

    Every probability counts, not the largest alone: for each class, all items are binned by its
    probability and compared with how often it occurs.

    Args:
        probs: probabilities of the classes, [B, C].
        labels: right classes, [B].
        bins: how many.

    Returns:
        A number in [0, 1].

    Raises:
        ValueError: probabilities or labels are not valid, or `bins` is not a positive number.
    """
    bins = check_count("bins", bins)
    return float(expected_gap(class_sums(*read_items(probs, labels), bins)).mean())


def adaptive_ece(probs: Tensor, labels: Tensor, *, bins: int = BINS) -> float:
    """Expected calibration error of the top-1 confidence in bins of equal numbers of items.

    Of the items sorted by confidence, number r of B (from 0) goes to bin floor(r K / B); items of equal
    confidence share their accuracy, so that it does not matter which of them go to which bin.

    Args:
        probs: probabilities of the classes, [B, C].
        labels: right classes, [B].
        bins: how many.

    Returns:
        A number in [0, 1].

    Raises:
        ValueError: probabilities or labels are not valid, or `bins` is not a positive number.
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


def _sums(probs: Tensor, labels: Tensor, bins: int, batch_size: int | None) -> BinSums:
    bins = check_count("bins", bins)
    batch_size = None if batch_size is None else check_count("batch_size", batch_size)
    return top_sums(*read_items(probs, labels), bins, batch_size)
