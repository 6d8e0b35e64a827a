"""Kernel Gram matrices by double loops."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Kernel = Callable[[Array, Array], Array]


def rbf(x: Array, y: Array) -> Array:
    """Canonical kernel exp(-1/2 ||x_i - y_j||^2) (section 0)."""
    return _gram(x, y, lambda a, b: -0.5 * np.sum((a - b) ** 2))


def ard_rbf(x: Array, y: Array, lengthscale: Array | float, variance: float) -> Array:
    """ARD kernel variance * exp(-1/2 sum (x-y)^2 / lengthscale^2) (section 7)."""
    return variance * _gram(x, y, lambda a, b: -0.5 * np.sum((a - b) ** 2 / lengthscale**2))


def exp_dot(x: Array, y: Array, lengthscale: Array | float, variance: float) -> Array:
    """Exponential kernel variance * exp(sum x*y / lengthscale^2) (section 7)."""
    return variance * _gram(x, y, lambda a, b: np.sum(a * b / lengthscale**2))


def _gram(x: Array, y: Array, exponent: Callable[[Array, Array], float]) -> Array:
    K = np.zeros((len(x), len(y)))  # [n, p]
    for i, j in np.ndindex(K.shape):
        K[i, j] = np.exp(exponent(x[i], y[j]))
    return K
