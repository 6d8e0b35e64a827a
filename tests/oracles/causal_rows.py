"""The variance of causal softmax attention, one row after the other, by explicit inverses (section 10)."""

from __future__ import annotations

import numpy as np

from .kernels import Array, rbf


def conditioned_on(visible: Array, max_keys: int) -> list[int]:
    """Keys that a row conditions on: every s-th of the earlier ones, and its own, the last it sees."""
    seen = [j for j in range(len(visible)) if visible[j]]
    earlier, own = seen[:-1], seen[-1:]
    stride = 1
    while len(earlier) > max_keys * stride:
        stride *= 2
    return [key for number, key in enumerate(earlier) if number % stride == 0] + own


def unit_variances(q: Array, k: Array, visible: Array, *, noise: float, max_keys: int) -> tuple[Array, Array]:
    """u_i of queries [Q, C] over keys [K, C] and the noisy variance of every row's own key.  [Q], [Q]"""
    unit, of_keys = np.zeros(len(q)), np.ones(len(q))
    for i in range(len(q)):
        chosen = conditioned_on(visible[i], max_keys)
        if not chosen:
            continue
        keys, own = k[chosen], k[chosen[-1:]]
        K_qk = rbf(q[i : i + 1], keys)  # [1, n]
        inverse = np.linalg.inv(rbf(keys, keys) + noise * np.eye(len(keys)))  # [n, n]
        unit[i] = 1 - (K_qk @ inverse @ K_qk.T)[0, 0]
        before = keys[:-1]
        inverse = np.linalg.inv(rbf(before, before) + noise * np.eye(len(before)))  # [n - 1, n - 1]
        K_own = rbf(own, before)  # [1, n - 1]
        of_keys[i] = 1 + noise - (K_own @ inverse @ K_own.T)[0, 0]
    return unit, of_keys
