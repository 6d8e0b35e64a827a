"""Textbook densities, divergences and conditionals of dense Gaussians."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .kernels import Array, rbf


def log_density(X: Array, cov: Array) -> float:
    """Sum over the columns x of X [n,s] of log N(x; 0, cov)."""
    n, s = X.shape
    precision = np.linalg.inv(cov)  # [n, n]
    log_det = np.linalg.slogdet(cov)[1]
    total = 0.0
    for a in range(s):
        quadratic = X[:, a] @ precision @ X[:, a]
        total += -0.5 * (quadratic + log_det + n * np.log(2.0 * np.pi))
    return float(total)


def kl(mean0: Array, cov0: Array, mean1: Array, cov1: Array) -> float:
    """Sum over columns of KL(N(mean0_a, cov0) || N(mean1_a, cov1)), shared covariances."""
    n, s = mean0.shape
    precision1 = np.linalg.inv(cov1)  # [n, n]
    log_det0 = np.linalg.slogdet(cov0)[1]
    log_det1 = np.linalg.slogdet(cov1)[1]
    total = 0.0
    for a in range(s):
        shift = mean1[:, a] - mean0[:, a]  # [n]
        quadratic = shift @ precision1 @ shift
        total += 0.5 * (np.trace(precision1 @ cov0) + quadratic - n + log_det1 - log_det0)
    return float(total)


def condition(
    cov: Array,
    targets: NDArray[np.intp],
    observed: NDArray[np.intp],
    y: Array,
    obs_cov: Array | None = None,
) -> tuple[Array, Array]:
    """Mean [t,s] and covariance [t,t] of N(0, cov)[targets] given noisy y [p,s] at observed."""
    K_tt = cov[np.ix_(targets, targets)]  # [t, t]
    K_to = cov[np.ix_(targets, observed)]  # [t, p]
    K_oo = cov[np.ix_(observed, observed)]  # [p, p]
    if obs_cov is not None:
        K_oo = K_oo + obs_cov
    gain = K_to @ np.linalg.inv(K_oo)  # [t, p]
    return gain @ y, K_tt - gain @ K_to.T


def joint_posterior(q: Array, k: Array, v: Array, a: Array, b: Array, obs_cov: Array) -> tuple[Array, Array]:
    """Condition a_i z_o(q_i) on b_j z_o(k_j) observed as M_k V with noise obs_cov (eq. 2)."""
    n_q, n = len(q), len(k)
    inputs = np.concatenate([q, k])  # [Nq+N, C]
    scale = np.concatenate([a, b])  # [Nq+N]
    prior = np.diag(scale) @ rbf(inputs, inputs) @ np.diag(scale)  # [Nq+N, Nq+N]
    queries, keys = np.arange(n_q), np.arange(n_q, n_q + n)
    M_k = prior[np.ix_(keys, keys)] + obs_cov  # [N, N]
    return condition(prior, queries, keys, M_k @ v, obs_cov)
