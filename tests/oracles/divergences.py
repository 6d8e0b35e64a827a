"""Divergences of the attention posteriors from their priors."""

from __future__ import annotations

import numpy as np

from .exact import cgp_posterior, direct_posterior
from .gaussians import kl
from .kernels import Array, rbf
from .sparse import scgp_posterior
from .tokens import of_real_tokens


def _posterior_to_prior(mean: Array, cov: Array, prior: Array, tau2: float) -> float:
    """KL(N(mean, cov + tau^2 I) || N(0, prior + tau^2 I)) summed over columns (eq. 23)."""
    white = tau2 * np.eye(len(mean))  # [nq, nq]
    return kl(mean, cov + white, np.zeros_like(mean), prior + white)


def _exact_kl(posterior, q, keys, noise, observation_noise, scale_q, scale_k, a) -> float:
    tau2 = noise if observation_noise is None else observation_noise
    mean, cov = posterior.__wrapped__(q, *keys, noise=noise, scale_q=scale_q, scale_k=scale_k, a=a)
    D_a = scale_q * np.diag(a)  # [nq, nq]
    return _posterior_to_prior(mean, cov, D_a @ rbf(q, q) @ D_a, tau2)


@of_real_tokens(3)
def cgp_kl(q, k, o, v, *, noise, observation_noise=None, scale_q=1.0, scale_k=1.0, a) -> float:
    """Divergence of the CGP posterior (eq. 4, 5) from its prior (eq. 23)."""
    return _exact_kl(cgp_posterior, q, (k, o, v), noise, observation_noise, scale_q, scale_k, a)


@of_real_tokens(2)
def direct_kl(q, k, v, *, noise, observation_noise=None, scale_q=1.0, scale_k=1.0, a) -> float:
    """Divergence of the direct posterior (eq. 2) from its prior (eq. 23)."""
    return _exact_kl(direct_posterior, q, (k, v), noise, observation_noise, scale_q, scale_k, a)


@of_real_tokens(3)
def scgp_kl(
    q, k, o, v, inducing_q, inducing_k=None, *, noise, values="paper", delta=1e-6, scale_q=1.0, scale_k=1.0, a
) -> float:
    """Divergence of the sparse posterior (eq. 13, 14) from its DTC prior (eq. 24)."""
    mean, cov = scgp_posterior.__wrapped__(
        q, k, o, v, inducing_q, inducing_k, noise=noise, scale_q=scale_q, scale_k=scale_k, values=values,
        delta=delta, include_noise=False, a=a,
    )  # fmt: skip
    K_mm = rbf(inducing_q, inducing_q) + delta * np.eye(len(inducing_q))  # [m, m]
    K_qm = scale_q * np.diag(a) @ rbf(q, inducing_q)  # [nq, m]
    return _posterior_to_prior(mean, cov, K_qm @ np.linalg.inv(K_mm) @ K_qm.T, noise)
