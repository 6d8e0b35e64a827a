"""Softmax attention as a Gaussian-process posterior."""

from __future__ import annotations

from typing import Any

import numpy as np

from .gaussians import joint_posterior
from .kernels import Array, rbf
from .tokens import causal, of_real_tokens, rows, square


def _softmax_amplitudes(
    q: Array, k: Array, prior_scale: float, center_q: Array | None, center_k: Array | None
) -> tuple[Array, Array, Array, Array]:
    """Centred q~, k~ and the amplitudes a, b of eq. 21 whose product with kappa is softmax."""
    q_t, k_t = q * q.shape[1] ** -0.25, k * k.shape[1] ** -0.25  # [Nq, C], [N, C]
    q_bar = q_t.mean(axis=0) if center_q is None else center_q  # [C]
    k_bar = k_t.mean(axis=0) if center_k is None else center_k  # [C]
    q_c, k_c = q_t - q_bar, k_t - k_bar  # [Nq, C], [N, C]
    # q_c.k_c = q_t.k_t - q_t.k_bar - q_bar.k_t + q_bar.k_bar, so a_i must carry exp(q_t.k_bar)
    # and b_j must carry exp(q_bar.k_t - q_bar.k_bar).
    a, b = np.zeros(len(q)), np.zeros(len(k))
    for i in range(len(q)):
        lse = np.logaddexp.reduce(k_t @ q_t[i])
        a[i] = prior_scale * np.exp(0.5 * q_c[i] @ q_c[i] + q_t[i] @ k_bar - lse)
    for j in range(len(k)):
        b[j] = np.exp(0.5 * k_c[j] @ k_c[j] + q_bar @ k_t[j] - q_bar @ k_bar) / prior_scale
    scores = q_t @ k_t.T  # [Nq, N]
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))  # [Nq, N]
    weights = weights / weights.sum(axis=1, keepdims=True)
    product = np.diag(a) @ rbf(q_c, k_c) @ np.diag(b)  # [Nq, N]
    assert np.allclose(product, weights, rtol=1e-9, atol=1e-12), "a_i b_j kappa is not softmax"
    return q_c, k_c, a, b


@of_real_tokens(2, rows, square)
def softmax_posterior(
    q, k, v, *, noise, prior_scale=1.0, center_q=None, center_k=None, a
) -> tuple[Array, Array]:
    """Mean [Nq,D] and covariance [Nq,Nq] of softmax attention as a GP (eq. 21, 22)."""
    if len(q) == 0 or len(k) == 0:  # rows with no real key have mean = var = 0
        return np.zeros((len(q), v.shape[1])), np.zeros((len(q), len(q)))
    q_c, k_c, a, b = _softmax_amplitudes(q, k, prior_scale, center_q, center_k)
    assert b.max() < 1e7 * b.min(), "the joint covariance, of b^2, has no digits left"
    return joint_posterior(q_c, k_c, v, a, b, np.diag(noise * b**2))


def causal_softmax_posterior(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Array]:
    """Mean [N,D] and variance [N], row i being eq. 22 on the real tokens j <= i (section 10)."""
    origin = np.zeros(q.shape[1])  # [C]
    return causal(softmax_posterior)(q, k, v, **{"center_q": origin, "center_k": origin, **options})


@of_real_tokens(1, rows)
def sparse_softmax_variance(q, k, inducing, *, noise, prior_scale=1.0, delta=1e-6, a) -> Array:
    """Variance [Nq] of softmax attention with inducing inputs (section 10, sparse form)."""
    if len(q) == 0 or len(k) == 0:
        return np.zeros(len(q))
    q_c, k_c, a, _ = _softmax_amplitudes(q, k, prior_scale, None, None)
    K_ll = rbf(inducing, inducing) + delta * np.eye(len(inducing))  # [m, m]
    K_lk = rbf(inducing, k_c)  # [m, n]
    prior_inv = np.linalg.inv(K_ll)  # [m, m]
    posterior_inv = np.linalg.inv(K_ll + K_lk @ K_lk.T / noise)  # [m, m]
    var = np.zeros(len(q))
    for i in range(len(q)):
        k_li = rbf(inducing, q_c[i : i + 1])[:, 0]  # [m]
        u = 1.0 - k_li @ prior_inv @ k_li + k_li @ posterior_inv @ k_li
        var[i] = a[i] ** 2 * min(1.0, max(noise / (len(k) + noise), u))
    return var
