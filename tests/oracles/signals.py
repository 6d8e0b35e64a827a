"""Oracles of the profiles of signals, token by token, of one head without padding."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def entropy(q: Array, k: Array, *, dot: bool, causal: bool = False) -> Array:
    """Of kappa(q_i, k_j) / sum_j kappa(q_i, k_j).  [Q]"""
    found = []
    for i, query in enumerate(q):
        keys = k[: i + 1] if causal else k
        z = np.array([query @ key if dot else -0.5 * ((query - key) ** 2).sum() for key in keys])
        w = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
        found.append(-sum(p * np.log(p) for p in w if p > 0))
    return np.array(found)


def unit_log_variance(x: Array, y: Array, noise: float) -> Array:
    """log(1 - kappa(x_i, y) (kappa(y, y) + noise I)^-1 kappa(y, x_i)) of eq. 22.  [Q]"""

    def kappa(a: Array, b: Array) -> Array:
        return np.exp(-0.5 * ((a[:, None] - b[None]) ** 2).sum(-1))

    inverse = np.linalg.inv(kappa(y, y) + noise * np.eye(len(y)))
    return np.log([1 - row @ inverse @ row for row in kappa(x, y)])
