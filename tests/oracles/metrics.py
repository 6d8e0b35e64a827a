"""Metrics by their definitions: loops over items, bins, thresholds and pairs, in float64."""

from __future__ import annotations

from itertools import pairwise, permutations

import numpy as np

from .kernels import Array


def top(p: Array) -> int:
    """The most probable class, the first of equals."""
    best = 0
    for c in range(len(p)):
        if p[c] > p[best]:
            best = c
    return best


def accuracy(probs: Array, labels: Array) -> float:
    """Fraction right."""
    return sum(top(p) == y for p, y in zip(probs, labels, strict=True)) / len(probs)


def mcc(probs: Array, labels: Array) -> float:
    """Correlation of one-hot labels and one-hot predictions, covariances summed over the classes."""
    n, classes = probs.shape
    x, y = np.zeros((n, classes)), np.zeros((n, classes))
    for i in range(n):
        x[i, top(probs[i])] = 1
        y[i, labels[i]] = 1
    x, y = x - x.mean(0), y - y.mean(0)
    spread = np.sqrt(np.sum(x * x) * np.sum(y * y))
    return float(np.sum(x * y) / spread) if spread > 0 else 0.0


def nll(probs: Array, labels: Array, *, least: float) -> float:
    """Mean negative logarithm of the right class's probability, at least `least`."""
    return float(np.mean([-np.log(max(p[y], least)) for p, y in zip(probs, labels, strict=True)]))


def brier(probs: Array, labels: Array) -> float:
    """Mean over items of the sum over classes of squared errors."""
    total = 0.0
    for p, y in zip(probs, labels, strict=True):
        for c in range(len(p)):
            total += (p[c] - (c == y)) ** 2
    return float(total / len(probs))


def gaps(values: Array, occurred: Array, bins: int) -> list[tuple[int, float, float]]:
    """(items, mean value, frequency) of every bin that is not empty."""
    found = []
    for k in range(bins):
        low, high = k / bins, (k + 1) / bins
        inside = [i for i, v in enumerate(values) if low <= v < high or (k == bins - 1 and v >= high)]
        if inside:
            found.append((len(inside), float(np.mean(values[inside])), float(np.mean(occurred[inside]))))
    return found


def confidences(probs: Array, labels: Array) -> tuple[Array, Array]:
    """Top-1 probabilities and whether they are right.  [B], [B]"""
    tops = [top(p) for p in probs]
    value = np.array([p[c] for p, c in zip(probs, tops, strict=True)])
    return value, np.array([float(c == y) for c, y in zip(tops, labels, strict=True)])


def ece(probs: Array, labels: Array, bins: int) -> float:
    """Mean distance over bins, weighted by items."""
    return sum(n * abs(c - a) for n, c, a in gaps(*confidences(probs, labels), bins)) / len(probs)


def mce(probs: Array, labels: Array, bins: int) -> float:
    """Largest distance of a bin."""
    return max(abs(c - a) for _, c, a in gaps(*confidences(probs, labels), bins))


def classwise_ece(probs: Array, labels: Array, bins: int) -> float:
    """Mean over classes of the weighted distance."""
    errors = []
    for c in range(probs.shape[1]):
        found = gaps(probs[:, c], (labels == c).astype(float), bins)
        errors.append(sum(n * abs(m - f) for n, m, f in found) / len(probs))
    return float(np.mean(errors))


def adaptive_ece(probs: Array, labels: Array, bins: int) -> float:
    """Weighted distance in bins of equal numbers of items; equal confidences share their accuracy."""
    confidence, right = confidences(probs, labels)
    shared = np.array([np.mean(right[confidence == c]) for c in confidence])
    order = sorted(range(len(confidence)), key=lambda i: confidence[i])
    total = 0.0
    for k in range(bins):
        inside = [i for r, i in enumerate(order) if k * len(order) <= r * bins < (k + 1) * len(order)]
        if inside:
            total += len(inside) * abs(np.mean(confidence[inside]) - np.mean(shared[inside]))
    return float(total / len(confidence))


def aurc_over_all_orders(certainty: Array, wrong: Array) -> float:
    """Mean selective risk, averaged over every order of the items that is sorted by certainty."""
    areas = []
    for order in permutations(range(len(wrong))):
        if all(certainty[a] >= certainty[b] for a, b in pairwise(order)):
            mistakes = [wrong[i] for i in order]
            areas.append(np.mean([np.mean(mistakes[:k]) for k in range(1, len(order) + 1)]))
    return float(np.mean(areas))


def aurc(certainty: Array, wrong: Array) -> float:
    """Mean selective risk; each k takes whole groups of higher certainty and its share of its own group."""
    risks = []
    ordered = sorted(certainty, reverse=True)
    for k in range(1, len(ordered) + 1):
        above, level = certainty > ordered[k - 1], certainty == ordered[k - 1]
        expected = wrong[above].sum() + (k - above.sum()) * wrong[level].mean()
        risks.append(expected / k)
    return float(np.mean(risks))


def auroc(inside: Array, outside: Array) -> float:
    """Fraction of pairs in the right order, equal ones counting half."""
    return float(np.mean([1.0 if o > i else 0.5 if o == i else 0.0 for o in outside for i in inside]))


def average_precision(positive: Array, negative: Array) -> float:
    """Sum over falling thresholds of the recall gained times the precision."""
    area, before = 0.0, 0.0
    for t in sorted({*positive.tolist(), *negative.tolist()}, reverse=True):
        found, mistaken = int((positive >= t).sum()), int((negative >= t).sum())
        recall = found / len(positive)
        area += (recall - before) * found / (found + mistaken)
        before = recall
    return area


def fpr_at_tpr(positive: Array, negative: Array, tpr: float) -> float:
    """Smallest false-positive rate of thresholds that keep so many positives (larger = positive)."""
    rates = []
    for t in positive:
        if sum(p >= t for p in positive) >= tpr * len(positive) - 1e-9:
            rates.append(float(np.mean(negative >= t)))
    return min(rates)
