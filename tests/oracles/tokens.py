"""Deletion of padded tokens and scattering of results back with zeros."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .kernels import Array

Mask = NDArray[np.bool_]
Index = NDArray[np.intp]


def real_tokens(
    n_queries: int, n_keys: int, mask: Mask | None, query_mask: Mask | None
) -> tuple[Index, Index]:
    """Indices of the real queries and of the real keys (section 5)."""
    if mask is None:
        mask = np.ones(n_keys, dtype=bool)
    if query_mask is None:
        query_mask = mask if n_queries == n_keys else np.ones(n_queries, dtype=bool)
    return np.flatnonzero(query_mask), np.flatnonzero(mask)


def amplitudes(log_amplitude: Array | None, query_index: Index) -> Array:
    """Amplitudes a_i = exp(log_amplitude_i) of the real queries (section 13)."""
    if log_amplitude is None:
        return np.ones(len(query_index))
    return np.exp(log_amplitude[query_index])


def scatter_rows(rows: Array, index: Index, n: int) -> Array:
    """Place rows [r,...] at index in an array of zeros with n rows (section 5)."""
    out = np.zeros((n, *rows.shape[1:]))
    for row, i in zip(rows, index, strict=True):
        out[i] = row
    return out


def scatter_square(cov: Array, index: Index, n: int) -> Array:
    """Place cov [r,r] at index in an n by n matrix of zeros (section 5)."""
    out = np.zeros((n, n))
    out[np.ix_(index, index)] = cov
    return out
