"""Kernel Gram matrices by double loops."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Kernel = Callable[[Array, Array], Array]


def rbf(x: Array, y: Array) -> Array:
    """Canonical kernel exp(-1/2 ||x_i - y_j||^2) (section 0)."""
    K = np.zeros((len(x), len(y)))  # [n, p]
    for i in range(len(x)):
        for j in range(len(y)):
            K[i, j] = np.exp(-0.5 * np.sum((x[i] - y[j]) ** 2))
    return K


def ard_rbf(x: Array, y: Array, lengthscale: Array | float, variance: float) -> Array:
    """ARD kernel variance * exp(-1/2 sum (x-y)^2 / lengthscale^2) (section 7)."""
    K = np.zeros((len(x), len(y)))  # [n, p]
    for i in range(len(x)):
        for j in range(len(y)):
            K[i, j] = variance * np.exp(-0.5 * np.sum((x[i] - y[j]) ** 2 / lengthscale**2))
    return K


def exp_dot(x: Array, y: Array, lengthscale: Array | float, variance: float) -> Array:
    """Exponential kernel variance * exp(sum x*y / lengthscale^2) (section 7)."""
    K = np.zeros((len(x), len(y)))  # [n, p]
    for i in range(len(x)):
        for j in range(len(y)):
            K[i, j] = variance * np.exp(np.sum(x[i] * y[j] / lengthscale**2))
    return K
