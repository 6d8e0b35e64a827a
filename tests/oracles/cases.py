"""Small random problems shared by the checks of the oracles."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from .kernels import Array

N, C, D, M_U = 6, 3, 2, 4
NOISE, S_Q, S_K = 0.2, 1.3, 0.7
AMP: dict[str, Any] = {"scale_q": S_Q, "scale_k": S_K}
close = partial(np.testing.assert_allclose, rtol=1e-8, atol=1e-9)


def draw(seed: int = 0, n: int = N) -> tuple[Array, Array, Array, Array]:
    """Random q, k, o [n,C] and v [n,D]."""
    rng = np.random.default_rng(seed)
    q, k, o = rng.standard_normal((3, n, C))
    return q, k, o, rng.standard_normal((n, D))


def draw_inducing(seed: int = 1) -> tuple[Array, Array]:
    """Two random sets of inducing inputs, m [M_U,C] and l [M_U+1,C]."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((M_U, C)), rng.standard_normal((M_U + 1, C))


def min_eig(cov: Array) -> float:
    """Smallest eigenvalue of a symmetric matrix."""
    return float(np.linalg.eigvalsh(cov).min())
