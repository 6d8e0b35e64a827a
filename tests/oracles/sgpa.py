"""Posterior and divergence of sparse Gaussian-process attention (SGPA)."""

from __future__ import annotations

import numpy as np

from .gaussians import kl
from .kernels import Array, rbf
from .tokens import real_tokens, rows, square


def sgpa_posterior(
    q, v, inducing_k, inducing_v, scale_tril, *, kernel=rbf, jitter=1e-6, mask=None
) -> tuple[Array, Array]:
    """Mean [N,D] and per-dimension covariance [D,N,N] by integrating out u_a (eq. 19)."""
    n, s = v.shape
    qi, _ = real_tokens(n, n, mask, None)
    K_qq = kernel(q[qi], q[qi])  # [n, n]
    K_qb = kernel(q[qi], inducing_k)  # [n, m]
    K_b = kernel(inducing_k, inducing_k) + jitter * np.eye(len(inducing_k))  # [m, m]
    L_b = np.linalg.cholesky(K_b)  # [m, m], part of the definition: cov(u_a) = L_b S_a L_b^T
    J = K_qb @ np.linalg.inv(K_b)  # [n, m]
    residual = K_qq - K_qb @ np.linalg.inv(K_b) @ K_qb.T  # [n, n], cov(f | u)
    mean = residual @ v[qi] + K_qb @ inducing_v  # [n, D]
    cov = np.zeros((s, n, n))
    for dim in range(s):
        S_a = scale_tril[dim] @ scale_tril[dim].T  # [m, m]
        cov_u = L_b @ S_a @ L_b.T  # [m, m]
        cov[dim] = square(residual + J @ cov_u @ J.T, qi, n)
    return rows(mean, qi, n), cov


def sgpa_kl(q, v, inducing_k, inducing_v, scale_tril, *, kernel=rbf, jitter=1e-6, mask=None) -> float:
    """KL of one sequence and head, un-jittered K_bb in the inducing-value term (eq. 20)."""
    n, s = v.shape
    qi, _ = real_tokens(n, n, mask, None)
    K_qq = kernel(q[qi], q[qi])  # [n, n]
    K_qb = kernel(q[qi], inducing_k)  # [n, m]
    K_bb = kernel(inducing_k, inducing_k)  # [m, m]
    K_b = K_bb + jitter * np.eye(len(inducing_k))  # [m, m]
    L_b = np.linalg.cholesky(K_b)  # [m, m]
    residual = K_qq - K_qb @ np.linalg.inv(K_b) @ K_qb.T  # [n, n]
    zero = np.zeros((len(inducing_k), 1))  # [m, 1]
    total = 0.0
    for dim in range(s):
        cov_u = L_b @ scale_tril[dim] @ scale_tril[dim].T @ L_b.T  # [m, m]
        total += kl(zero, cov_u, zero, K_b)
        total += float(0.5 * inducing_v[:, dim] @ K_bb @ inducing_v[:, dim])
        total += float(0.5 * v[qi, dim] @ residual @ v[qi, dim])
    return float(total)
