"""Posteriors of direct, softmax and correlated Gaussian-process attention."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .gaussians import joint_posterior
from .kernels import Array, rbf
from .softmax import (
    causal_softmax_posterior,
    softmax_posterior,
    sparse_softmax_variance,
)
from .tokens import Mask, amplitudes, real_tokens, scatter_rows, scatter_square

__all__ = [
    "CgpMatrices",
    "causal_cgp_posterior",
    "causal_direct_posterior",
    "causal_softmax_posterior",
    "cgp_matrices",
    "cgp_posterior",
    "direct_posterior",
    "softmax_posterior",
    "sparse_softmax_variance",
]


def direct_posterior(
    q: Array,
    k: Array,
    v: Array,
    *,
    noise: float,
    scale_q: float = 1.0,
    scale_k: float = 1.0,
    mask: Mask | None = None,
    query_mask: Mask | None = None,
    log_amplitude: Array | None = None,
) -> tuple[Array, Array]:
    """Mean [Nq,D] and covariance [Nq,Nq] of the direct GP (eq. 2)."""
    n_q = len(q)
    qi, ki = real_tokens(n_q, len(k), mask, query_mask)
    a = scale_q * amplitudes(log_amplitude, qi)  # [nq]
    b = scale_k * np.ones(len(ki))  # [n]
    mean, cov = joint_posterior(q[qi], k[ki], v[ki], a, b, noise * np.eye(len(ki)))
    return scatter_rows(mean, qi, n_q), scatter_square(cov, qi, n_q)


def causal_direct_posterior(
    q: Array,
    k: Array,
    v: Array,
    *,
    noise: float,
    scale_q: float = 1.0,
    scale_k: float = 1.0,
    mask: Mask | None = None,
    query_mask: Mask | None = None,
    log_amplitude: Array | None = None,
) -> tuple[Array, Array]:
    """Mean [N,D] and variance [N], row i being eq. 2 on the real tokens j <= i (section 6)."""
    qi, ki = real_tokens(len(q), len(k), mask, query_mask)
    mean, var = np.zeros((len(q), v.shape[1])), np.zeros(len(q))
    for i in qi:
        past = ki[ki <= i]
        row = slice(i, i + 1)
        mean_i, cov_i = direct_posterior(
            q[row],
            k[past],
            v[past],
            noise=noise,
            scale_q=scale_q,
            scale_k=scale_k,
            log_amplitude=None if log_amplitude is None else log_amplitude[row],
        )
        mean[i], var[i] = mean_i[0], cov_i[0, 0]
    return mean, var


class CgpMatrices(NamedTuple):
    """Gram matrices of eq. 1 and stage conditionals of eq. 3 (and section 2 for the keys)."""

    K_q: Array  # [Nq, Nq]
    K_k: Array  # [N, N]
    K_o: Array  # [N, N]
    M: Array  # [N, N]
    M_k: Array  # [N, N]
    A: Array  # [Nq, N]
    S_q: Array  # [Nq, Nq]
    B: Array  # [N, N]
    C: Array  # [N, N]
    A_k: Array  # [N, N]
    S_k: Array  # [N, N]


def cgp_matrices(
    q: Array, k: Array, o: Array, noise: float, scale_q: float, scale_k: float, a: Array
) -> CgpMatrices:
    """All matrices of eq. 1 and 3 for real tokens and query amplitudes a [Nq] (section 13)."""
    D_a = np.diag(a)  # [Nq, Nq]
    K_q = scale_q**2 * D_a @ rbf(q, q) @ D_a  # [Nq, Nq]
    K_k = scale_k**2 * rbf(k, k)  # [N, N]
    K_o = rbf(o, o)  # [N, N]
    K_qo = scale_q * D_a @ rbf(q, o)  # [Nq, N]
    K_ok = scale_k * rbf(o, k)  # [N, N]
    M = K_o + noise * np.eye(len(o))  # [N, N]
    M_k = K_k + noise * np.eye(len(k))  # [N, N]
    A = K_qo @ np.linalg.inv(M)  # [Nq, N]
    S_q = K_q - K_qo @ np.linalg.inv(M) @ K_qo.T  # [Nq, Nq]
    B = K_ok @ np.linalg.inv(M_k)  # [N, N]
    C = K_o - K_ok @ np.linalg.inv(M_k) @ K_ok.T  # [N, N]
    A_k = K_ok.T @ np.linalg.inv(M)  # [N, N]
    S_k = K_k - K_ok.T @ np.linalg.inv(M) @ K_ok  # [N, N]
    return CgpMatrices(K_q, K_k, K_o, M, M_k, A, S_q, B, C, A_k, S_k)


def cgp_posterior(
    q: Array,
    k: Array,
    o: Array,
    v: Array,
    *,
    noise: float,
    scale_q: float = 1.0,
    scale_k: float = 1.0,
    mask: Mask | None = None,
    query_mask: Mask | None = None,
    log_amplitude: Array | None = None,
) -> tuple[Array, Array]:
    """Mean [Nq,D] and covariance [Nq,Nq] of CGP attention (eq. 3, 4, 5)."""
    n_q = len(q)
    qi, ki = real_tokens(n_q, len(k), mask, query_mask)
    a = amplitudes(log_amplitude, qi)  # [nq]
    g = cgp_matrices(q[qi], k[ki], o[ki], noise, scale_q, scale_k, a)
    Z = g.M_k @ v[ki]  # [n, D]
    mean = g.A @ (g.B @ Z)  # [nq, D]
    cov = g.S_q + g.A @ g.C @ g.A.T  # [nq, nq]
    return scatter_rows(mean, qi, n_q), scatter_square(cov, qi, n_q)


def causal_cgp_posterior(
    q: Array,
    k: Array,
    o: Array,
    v: Array,
    *,
    noise: float,
    scale_q: float = 1.0,
    scale_k: float = 1.0,
    mask: Mask | None = None,
    query_mask: Mask | None = None,
    log_amplitude: Array | None = None,
) -> tuple[Array, Array]:
    """Mean [N,D] and variance [N], row i being eq. 4, 5 on the real tokens j <= i (section 6)."""
    qi, ki = real_tokens(len(q), len(k), mask, query_mask)
    mean, var = np.zeros((len(q), v.shape[1])), np.zeros(len(q))
    for i in qi:
        past = ki[ki <= i]
        row = slice(i, i + 1)
        mean_i, cov_i = cgp_posterior(
            q[row],
            k[past],
            o[past],
            v[past],
            noise=noise,
            scale_q=scale_q,
            scale_k=scale_k,
            log_amplitude=None if log_amplitude is None else log_amplitude[row],
        )
        mean[i], var[i] = mean_i[0], cov_i[0, 0]
    return mean, var
