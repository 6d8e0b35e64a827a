"""Moments through layers with every Jacobian written out, one token at a time (NumPy, float64)."""

from math import erf, exp, pi, sqrt

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def through(J: Array, v: Array) -> Array:
    """Diagonal of J diag(v) J^T."""
    return np.diag(J @ np.diag(v) @ J.T)


def layer_norm(m: Array, v: Array, g: Array, b: Array, eps: float) -> tuple[Array, Array]:
    """One token [E]: its Jacobian by rows of e_j -> d LayerNorm / d x_j."""
    E, s = len(m), sqrt(m.var() + eps)
    x = (m - m.mean()) / s
    J = np.diag(g) @ (np.eye(E) - np.ones((E, E)) / E - np.outer(x, x) / E) / s
    return g * x + b, through(J, v)


def gelu(m: Array, v: Array) -> tuple[Array, Array]:
    """Phi(x) x and its derivative Phi(x) + x phi(x)."""
    below = np.array([0.5 * (1 + erf(x / sqrt(2))) for x in m])
    density = np.array([exp(-x * x / 2) / sqrt(2 * pi) for x in m])
    return m * below, through(np.diag(below + m * density), v)


def relu(m: Array, v: Array) -> tuple[Array, Array]:
    """The positive part."""
    return np.maximum(m, 0), through(np.diag((m > 0).astype(float)), v)


def attention(P: Array, own: Array, m: Array, v: Array) -> tuple[Array, Array]:
    """One head: weights P [Q, K], the process's variance [Q], values [K, D] with variances, as one vector."""
    D = m.shape[1]
    J = np.kron(P, np.eye(D))  # of values flattened [K D]
    variance = through(J, v.reshape(-1)).reshape(len(P), D)
    return P @ m, own[:, None] + variance
