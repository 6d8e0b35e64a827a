"""Row-normalising query amplitudes."""

from __future__ import annotations

import numpy as np

from .kernels import Array, rbf
from .tokens import real_tokens


def row_log_amplitude(q, k, *, scale=1.0, mask=None, query_mask=None, causal=False) -> Array:
    """Log a_i [Nq] of eq. 25; 0 for padded queries and for queries with no real key."""
    qi, ki = real_tokens(len(q), len(k), mask, query_mask)
    out = np.zeros(len(q))
    for i in qi:
        keys = [j for j in ki if j <= i] if causal else list(ki)
        if keys:
            exponents = [-0.5 * np.sum((q[i] - k[j]) ** 2) for j in keys]
            out[i] = np.log(scale) - np.logaddexp.reduce(exponents)
    return out


def sparse_row_log_amplitude(
    q, k, inducing, *, scale=1.0, mask=None, query_mask=None, delta=1e-6, floor=1e-3
) -> Array:
    """Log a_i [Nq] with the Nystrom estimate of the row sum, at least floor (section 13)."""
    qi, ki = real_tokens(len(q), len(k), mask, query_mask)
    K_ll_inv = np.linalg.inv(rbf(inducing, inducing) + delta * np.eye(len(inducing)))  # [m, m]
    key_sum = np.zeros(len(inducing))  # [m]
    for j in ki:
        key_sum = key_sum + rbf(inducing, k[j : j + 1])[:, 0]
    out = np.zeros(len(q))
    for i in qi:
        row_sum = rbf(q[i : i + 1], inducing)[0] @ K_ll_inv @ key_sum
        out[i] = np.log(scale) - np.log(max(floor, row_sum))
    return out
