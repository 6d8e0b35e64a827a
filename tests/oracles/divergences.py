"""Divergences of the attention posteriors from their priors."""

from __future__ import annotations

import numpy as np

from .exact import cgp_posterior, direct_posterior
from .gaussians import kl
from .kernels import Array, rbf
from .sparse import scgp_posterior
from .tokens import Mask, amplitudes, real_tokens


def _posterior_to_prior(mean: Array, cov: Array, prior: Array, tau2: float) -> float:
    """KL(N(mean, cov + tau^2 I) || N(0, prior + tau^2 I)) summed over columns (eq. 23)."""
    white = tau2 * np.eye(len(mean))  # [nq, nq]
    return kl(mean, cov + white, np.zeros_like(mean), prior + white)


def cgp_kl(
    q: Array,
    k: Array,
    o: Array,
    v: Array,
    *,
    noise: float,
    observation_noise: float | None = None,
    scale_q: float = 1.0,
    scale_k: float = 1.0,
    mask: Mask | None = None,
    query_mask: Mask | None = None,
    log_amplitude: Array | None = None,
) -> float:
    """Divergence of the CGP posterior (eq. 4, 5) from its prior (eq. 23)."""
    tau2 = noise if observation_noise is None else observation_noise
    qi, ki = real_tokens(len(q), len(k), mask, query_mask)
    mean, cov = cgp_posterior(
        q[qi],
        k[ki],
        o[ki],
        v[ki],
        noise=noise,
        scale_q=scale_q,
        scale_k=scale_k,
        log_amplitude=None if log_amplitude is None else log_amplitude[qi],
    )
    D_a = scale_q * np.diag(amplitudes(log_amplitude, qi))  # [nq, nq]
    return _posterior_to_prior(mean, cov, D_a @ rbf(q[qi], q[qi]) @ D_a, tau2)


def direct_kl(
    q: Array,
    k: Array,
    v: Array,
    *,
    noise: float,
    observation_noise: float | None = None,
    scale_q: float = 1.0,
    scale_k: float = 1.0,
    mask: Mask | None = None,
    query_mask: Mask | None = None,
    log_amplitude: Array | None = None,
) -> float:
    """Divergence of the direct posterior (eq. 2) from its prior (eq. 23)."""
    tau2 = noise if observation_noise is None else observation_noise
    qi, ki = real_tokens(len(q), len(k), mask, query_mask)
    mean, cov = direct_posterior(
        q[qi],
        k[ki],
        v[ki],
        noise=noise,
        scale_q=scale_q,
        scale_k=scale_k,
        log_amplitude=None if log_amplitude is None else log_amplitude[qi],
    )
    D_a = scale_q * np.diag(amplitudes(log_amplitude, qi))  # [nq, nq]
    return _posterior_to_prior(mean, cov, D_a @ rbf(q[qi], q[qi]) @ D_a, tau2)


def scgp_kl(
    q: Array,
    k: Array,
    o: Array,
    v: Array,
    inducing_q: Array,
    inducing_k: Array | None = None,
    *,
    noise: float,
    values: str = "paper",
    delta: float = 1e-6,
    scale_q: float = 1.0,
    scale_k: float = 1.0,
    mask: Mask | None = None,
    query_mask: Mask | None = None,
    log_amplitude: Array | None = None,
) -> float:
    """Divergence of the sparse posterior (eq. 13, 14) from its DTC prior (eq. 24)."""
    qi, ki = real_tokens(len(q), len(k), mask, query_mask)
    mean, cov = scgp_posterior(
        q[qi],
        k[ki],
        o[ki],
        v[ki],
        inducing_q,
        inducing_k,
        noise=noise,
        scale_q=scale_q,
        scale_k=scale_k,
        log_amplitude=None if log_amplitude is None else log_amplitude[qi],
        values=values,
        delta=delta,
        include_noise=False,
    )
    K_mm = rbf(inducing_q, inducing_q) + delta * np.eye(len(inducing_q))  # [m, m]
    K_qm = scale_q * np.diag(amplitudes(log_amplitude, qi)) @ rbf(q[qi], inducing_q)  # [nq, m]
    return _posterior_to_prior(mean, cov, K_qm @ np.linalg.inv(K_mm) @ K_qm.T, noise)
