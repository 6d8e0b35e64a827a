"""Padding as if it were not there: deleted before a calculation, zeros in its place after it (section 5)."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .kernels import Array

Mask = NDArray[np.bool_]
Index = NDArray[np.intp]


def real_tokens(
    n_queries: int, n_keys: int, mask: Mask | None, query_mask: Mask | None
) -> tuple[Index, Index]:
    """Indices of the real queries and of the real keys."""
    if mask is None:
        mask = np.ones(n_keys, dtype=bool)
    if query_mask is None:
        query_mask = mask if n_queries == n_keys else np.ones(n_queries, dtype=bool)
    return np.flatnonzero(query_mask), np.flatnonzero(mask)


def rows(found: Array, index: Index, n: int) -> Array:
    """Rows [r,...] at index in an array of zeros with n rows."""
    out = np.zeros((n, *found.shape[1:]))
    for row, i in zip(found, index, strict=True):
        out[i] = row
    return out


def square(cov: Array, index: Index, n: int) -> Array:
    """cov [r,r] at index in an n by n matrix of zeros."""
    out = np.zeros((n, n))
    out[np.ix_(index, index)] = cov
    return out


def of_real_tokens(keys: int, *places: Callable[..., Array]) -> Callable[[Callable[..., Any]], Any]:
    """Decorator of a function of real tokens alone: queries, `keys` arrays of keys, and the rest.

    It gets the amplitudes a_i = exp(log_amplitude_i) of the real queries (section 13); `places` put what it
    returns back among the padding, or leave a number as it is.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        @wraps(function)
        def inner(q, *args, mask=None, query_mask=None, log_amplitude=None, **options):
            qi, ki = real_tokens(len(q), len(args[0]), mask, query_mask)
            a = np.ones(len(qi)) if log_amplitude is None else np.exp(log_amplitude[qi])  # [nq]
            real = [x[ki] for x in args[:keys]]
            found = function(q[qi], *real, *args[keys:], a=a, **options)
            if not places:
                return found
            found = found if isinstance(found, tuple) else (found,)
            whole = tuple(place(x, qi, len(q)) for place, x in zip(places, found, strict=True))
            return whole if len(whole) > 1 else whole[0]

        return inner

    return decorate


def causal(full: Callable[..., tuple[Array, Array]]) -> Callable[..., tuple[Array, Array]]:
    """Mean [N,D] and variance [N], row i being a posterior on the real tokens j <= i (section 6)."""

    def posterior(q, *keys, mask=None, log_amplitude=None, **options):
        real = np.ones(len(q), dtype=bool) if mask is None else mask
        mean, var = np.zeros((len(q), keys[-1].shape[1])), np.zeros(len(q))
        for i in np.flatnonzero(real):
            past = np.flatnonzero(real[: i + 1])
            row = {} if log_amplitude is None else {"log_amplitude": log_amplitude[i : i + 1]}
            mean_i, cov_i = full(q[i : i + 1], *(x[past] for x in keys), **row, **options)
            mean[i], var[i] = mean_i[0], cov_i[0, 0]
        return mean, var

    return posterior
