"""Posteriors of direct and correlated Gaussian-process attention."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .gaussians import joint_posterior
from .kernels import Array, rbf
from .tokens import causal, of_real_tokens, rows, square


@of_real_tokens(2, rows, square)
def direct_posterior(q, k, v, *, noise, scale_q=1.0, scale_k=1.0, a) -> tuple[Array, Array]:
    """Mean [Nq,D] and covariance [Nq,Nq] of the direct GP (eq. 2)."""
    return joint_posterior(q, k, v, scale_q * a, scale_k * np.ones(len(k)), noise * np.eye(len(k)))


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


@of_real_tokens(3, rows, square)
def cgp_posterior(q, k, o, v, *, noise, scale_q=1.0, scale_k=1.0, a) -> tuple[Array, Array]:
    """Mean [Nq,D] and covariance [Nq,Nq] of CGP attention (eq. 3, 4, 5)."""
    g = cgp_matrices(q, k, o, noise, scale_q, scale_k, a)
    Z = g.M_k @ v  # [n, D]
    mean = g.A @ (g.B @ Z)  # [nq, D]
    return mean, g.S_q + g.A @ g.C @ g.A.T  # [nq, nq]


causal_direct_posterior, causal_cgp_posterior = causal(direct_posterior), causal(cgp_posterior)
