"""Log densities of the attention outputs and observations under their priors."""

from __future__ import annotations

import numpy as np

from .exact import CgpMatrices, cgp_matrices, direct_posterior
from .gaussians import log_density
from .kernels import Array, rbf
from .sparse import dtc_stage, observed_values, scgp_posterior, sparse_grams
from .tokens import of_real_tokens


def _expected_log_density(X: Array, A: Array, prior: Array, S: Array) -> float:
    """E over z ~ N(0, prior), one draw per column, of log N(x; A z, S) (eq. 9)."""
    penalty = 0.5 * float(np.trace(np.linalg.inv(S) @ A @ prior @ A.T))
    return float(log_density(X, S) - X.shape[1] * penalty)


def _joint_terms(nu: Array, Z: Array, joint: Array, S_zz: Array) -> tuple[float, float]:
    """Terms (log p(z_q, z_k) - log p(z_k), log p(z_k)) of eq. 12."""
    key = log_density(Z, S_zz)
    return log_density(np.concatenate([nu, Z]), joint) - key, key


def _cgp_setup(
    g: CgpMatrices, v: Array, noise: float, latent_prior: str, tau2: float | None
) -> tuple[Array, Array, Array, Array, Array]:
    """Mean nu, observation Z, latent covariance Pi and S_q, S_k with tau^2 I (section 2)."""
    if latent_prior not in ("noisy", "latent"):
        raise ValueError(f"unknown latent_prior {latent_prior!r}")
    tau2 = noise if tau2 is None else tau2
    Z = g.M_k @ v  # [N, D]
    nu = g.A @ (g.B @ Z)  # [Nq, D]
    Pi = g.M if latent_prior == "noisy" else g.K_o  # [N, N]
    return nu, Z, Pi, g.S_q + tau2 * np.eye(len(nu)), g.S_k + tau2 * np.eye(len(Z))


@of_real_tokens(3)
def cgp_log_density(
    q, k, o, v, *, noise, objective, latent_prior="noisy", observation_noise=None, scale_q=1.0, scale_k=1.0, a
) -> tuple[float, float]:
    """Query and key log density: 'marginal' (eq. 10), 'jensen' (eq. 9), 'joint' (eq. 12 CI)."""
    g = cgp_matrices(q, k, o, noise, scale_q, scale_k, a)
    nu, Z, Pi, S_q, S_k = _cgp_setup(g, v, noise, latent_prior, observation_noise)
    if objective == "jensen":
        query = _expected_log_density(nu, g.A, Pi, S_q)
        return query, _expected_log_density(Z, g.A_k, Pi, S_k)
    cov_q = S_q + g.A @ Pi @ g.A.T  # [nq, nq]
    cov_k = S_k + g.A_k @ Pi @ g.A_k.T  # [n, n]
    if objective == "marginal":
        return log_density(nu, cov_q), log_density(Z, cov_k)
    if objective == "joint":
        cross = g.A @ Pi @ g.A_k.T  # [nq, n]
        return _joint_terms(nu, Z, np.block([[cov_q, cross], [cross.T, cov_k]]), cov_k)
    raise ValueError(f"unknown objective {objective!r}")


@of_real_tokens(3)
def cgp_monte_carlo(
    q, k, o, v, *, noise, samples, rng, latent_prior="noisy", observation_noise=None, scale_q=1.0,
    scale_k=1.0, a,
) -> tuple[Array, Array]:  # fmt: skip
    """Per-draw query and key values [samples] whose mean estimates eq. 9 (section 2 (i))."""
    g = cgp_matrices(q, k, o, noise, scale_q, scale_k, a)
    nu, Z, Pi, S_q, S_k = _cgp_setup(g, v, noise, latent_prior, observation_noise)
    eigenvalues, U = np.linalg.eigh(Pi)
    root = U @ np.diag(np.sqrt(np.maximum(eigenvalues, 0.0)))  # [n, n]
    query, key = np.zeros(samples), np.zeros(samples)
    for r in range(samples):
        z_o = root @ rng.standard_normal((len(k), v.shape[1]))  # [n, D]
        query[r] = log_density(nu - g.A @ z_o, S_q)
        key[r] = log_density(Z - g.A_k @ z_o, S_k)
    return query, key


@of_real_tokens(2)
def direct_log_density(
    q, k, v, *, noise, objective, observation_noise=None, scale_q=1.0, scale_k=1.0, a
) -> tuple[float, float]:
    """Query and key log density of the direct GP: 'marginal' or 'joint' (eq. 12 GP)."""
    tau2 = noise if observation_noise is None else observation_noise
    D_a = scale_q * np.diag(a)  # [nq, nq]
    K_q = D_a @ rbf(q, q) @ D_a  # [nq, nq]
    K_k = scale_k**2 * rbf(k, k)  # [n, n]
    K_qk = scale_k * D_a @ rbf(q, k)  # [nq, n]
    nu, _ = direct_posterior.__wrapped__(q, k, v, noise=noise, scale_q=scale_q, scale_k=scale_k, a=a)
    cov_q = K_q + tau2 * np.eye(len(q))  # [nq, nq]
    cov_k = K_k + noise * np.eye(len(k))  # [n, n]
    Z = cov_k @ v  # [n, D]
    if objective == "marginal":
        return log_density(nu, cov_q), log_density(Z, cov_k)
    if objective == "joint":
        return _joint_terms(nu, Z, np.block([[cov_q, K_qk], [K_qk.T, cov_k]]), cov_k)
    raise ValueError(f"unknown objective {objective!r}")


def _scgp_term(
    X: Array, K_tu: Array, K_ou: Array, K_uu: Array, K_o: Array, noise: float, objective: str
) -> float:
    """One term of section 4 for targets X [t,D] through the inducing set u of z_t | z_o."""
    t, s = X.shape
    if objective == "printed":
        P = np.linalg.inv(K_uu + np.eye(len(K_uu)) / noise)  # [m, m]
        total = 0.0
        for a in range(s):
            spread = np.trace(K_ou @ P @ K_tu.T @ K_tu @ P @ K_ou.T @ K_o) / noise**2
            square = X[:, a] @ X[:, a] + spread + np.trace(K_tu @ P @ K_tu.T)
            total += -square / (2 * noise) - t * np.log(2 * np.pi) - 1 / (2 * np.sqrt(noise))
        return float(total)
    Pi = K_o  # [N, N]
    if objective in ("dtc", "dtc_bound"):  # the prior of z_o that DTC implies
        Pi = K_ou @ np.linalg.inv(K_uu) @ K_ou.T + noise * np.eye(len(K_o))
    J, E, D = dtc_stage(K_tu, K_ou, K_uu, noise)
    white = noise * np.eye(t)  # [t, t]
    if objective in ("dtc", "marginal"):
        return log_density(X, white + J @ (D + E @ Pi @ E.T) @ J.T)
    if objective == "jensen":
        return _expected_log_density(X, J @ E, Pi, white + J @ D @ J.T)
    if objective in ("dtc_bound", "double_jensen"):
        return _expected_log_density(X, J, D + E @ Pi @ E.T, white)
    raise ValueError(f"unknown objective {objective!r}")


@of_real_tokens(3)
def scgp_log_density(
    q, k, o, v, inducing_q, inducing_k=None, *, noise, objective, values="paper", delta=1e-6,
    scale_q=1.0, scale_k=1.0, a,
) -> tuple[float, float]:  # fmt: skip
    """Query and key log density of sparse CGP for one objective of section 4 (eq. 16)."""
    g = sparse_grams(q, k, o, inducing_q, inducing_k, scale_q, scale_k, a, delta)
    nu, _ = scgp_posterior.__wrapped__(
        q, k, o, v, inducing_q, inducing_k, noise=noise, scale_q=scale_q, scale_k=scale_k, values=values,
        delta=delta, a=a,
    )  # fmt: skip
    z_k = observed_values(g, v, noise, values)  # [n, D]
    query = _scgp_term(nu, g.K_qm, g.K_om, g.K_mm, g.K_o, noise, objective)
    return query, _scgp_term(z_k, g.K_kl, g.K_ol, g.K_ll, g.K_o, noise, objective)
