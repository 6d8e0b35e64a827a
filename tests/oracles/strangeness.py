"""Detectors of strange items and p-values, item by item with explicit inverses."""

from __future__ import annotations

import numpy as np

from .kernels import Array


def ledoit_wolf(x: Array) -> tuple[Array, float]:
    """Shrunk covariance of centred items [n, E], from the definition of its three norms."""
    n, width = x.shape
    S = sum(np.outer(row, row) for row in x) / n
    target = np.trace(S) / width * np.eye(width)
    apart = ((S - target) ** 2).sum()
    error = sum(((np.outer(row, row) - S) ** 2).sum() for row in x) / n**2
    shrinkage = min(error, apart) / apart
    return (1 - shrinkage) * S + shrinkage * target, shrinkage


def class_distances(x: Array, usual: Array, classes: Array) -> Array:
    """Squared Mahalanobis distance of every item to every class.  [B, K]"""
    means = {k: usual[classes == k].mean(0) for k in np.unique(classes)}
    covariance, _ = ledoit_wolf(np.stack([row - means[k] for row, k in zip(usual, classes, strict=True)]))
    inverse = np.linalg.inv(covariance)
    return np.array([[(row - mean) @ inverse @ (row - mean) for mean in means.values()] for row in x])


def mahalanobis(x: Array, usual: Array, classes: Array) -> Array:
    return class_distances(x, usual, classes).min(-1)


def relative_mahalanobis(x: Array, usual: Array, classes: Array) -> Array:
    one = class_distances(x, usual, np.zeros(len(usual)))[:, 0]
    return mahalanobis(x, usual, classes) - one


def unit(x: Array) -> Array:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def knn(x: Array, bank: Array, neighbour: int) -> Array:
    far = [sorted(np.linalg.norm(row - other) for other in unit(bank)) for row in unit(x)]
    return np.array([row[neighbour - 1] for row in far])


def vim(x: Array, usual: Array, weight: Array, bias: Array) -> Array:
    """The null space from a singular value decomposition."""
    origin = -np.linalg.pinv(weight) @ bias
    _, _, directions = np.linalg.svd(usual - origin, full_matrices=True)
    null = directions[usual.shape[1] // 2 :].T

    def residual(items: Array) -> Array:
        return np.linalg.norm((items - origin) @ null, axis=-1)

    alpha = (usual @ weight.T + bias).max(-1).mean() / residual(usual).mean()
    return alpha * residual(x) - np.log(np.exp(x @ weight.T + bias).sum(-1))


def generalised_entropy(probs: Array, power: float, classes: int) -> Array:
    return np.array([sum((p * (1 - p)) ** power for p in sorted(row)[-classes:]) for row in probs])


def profile_distance(x: Array, usual: Array) -> Array:
    """Squared Mahalanobis distance of profiles whose columns are in their own standard deviations.  [B]"""
    centre, spread = usual.mean(0), usual.std(0)
    seen = (usual - centre) / spread
    return class_distances((x - centre) / spread, seen, np.zeros(len(usual)))[:, 0]


def p_values(scores: Array, calibration: Array) -> Array:
    return np.array([(1 + sum(c >= s for c in calibration)) / (len(calibration) + 1) for s in scores])


def nll(draws: Array, labels: Array, temperature: Array) -> float:
    """Mean over items of -log of the label's probability, averaged over draws [S, B, C] at T [B]."""
    total = 0.0
    for i, label in enumerate(labels):
        powers = np.exp(draws[:, i] / temperature[i])
        total -= np.log((powers[:, label] / powers.sum(-1)).mean())
    return total / len(labels)
