"""Posterior of sparse correlated Gaussian-process attention by composing its stages."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .kernels import Array, rbf
from .tokens import of_real_tokens, rows, square


class DtcStage(NamedTuple):
    """Stage z_u | z_s ~ N(E z_s, D), z_t | z_u ~ N(J z_u, sigma^2 I) (section 4)."""

    J: Array  # [t, m]
    E: Array  # [m, s]
    D: Array  # [m, m]


def dtc_stage(K_tu: Array, K_su: Array, K_uu: Array, noise: float) -> DtcStage:
    """Condition z_u ~ N(0, K_uu) on z_s ~ N(K_su K_uu^-1 z_u, sigma^2 I) (section 4)."""
    J_s = K_su @ np.linalg.inv(K_uu)  # [s, m]
    cov_s = J_s @ K_uu @ J_s.T + noise * np.eye(len(K_su))  # [s, s]
    cross = K_uu @ J_s.T  # [m, s]
    E = cross @ np.linalg.inv(cov_s)  # [m, s]
    D = K_uu - E @ cross.T  # [m, m]
    return DtcStage(K_tu @ np.linalg.inv(K_uu), E, D)


class SparseGrams(NamedTuple):
    """Gram matrices of section 3, K_mm and K_ll including delta I."""

    K_o: Array  # [N, N]
    K_mm: Array  # [m, m]
    K_ll: Array  # [l, l]
    K_qm: Array  # [Nq, m]
    K_om: Array  # [N, m]
    K_ol: Array  # [N, l]
    K_kl: Array  # [N, l]


def sparse_grams(q, k, o, inducing_q, inducing_k, scale_q, scale_k, a, delta) -> SparseGrams:
    """All Gram matrices of section 3 for real tokens and query amplitudes a [Nq]."""
    m = inducing_q
    ell = inducing_q if inducing_k is None else inducing_k
    return SparseGrams(
        K_o=rbf(o, o),
        K_mm=rbf(m, m) + delta * np.eye(len(m)),
        K_ll=rbf(ell, ell) + delta * np.eye(len(ell)),
        K_qm=scale_q * np.diag(a) @ rbf(q, m),
        K_om=rbf(o, m),
        K_ol=rbf(o, ell),
        K_kl=scale_k * rbf(k, ell),
    )


def observed_values(g: SparseGrams, v: Array, noise: float, values: str) -> Array:
    """Observed z_k [N,D]: V ('paper', section 3) or (Q_k + sigma^2 I) V ('dual')."""
    if values == "paper":
        return v
    if values == "dual":
        Q_k = g.K_kl @ np.linalg.inv(g.K_ll) @ g.K_kl.T  # [N, N]
        return (Q_k + noise * np.eye(len(v))) @ v
    raise ValueError(f"unknown values {values!r}")


@of_real_tokens(3, rows, square)
def scgp_posterior(
    q, k, o, v, inducing_q, inducing_k=None, *, noise, scale_q=1.0, scale_k=1.0, values="paper", delta=1e-6,
    include_noise=True, conditional="deterministic", a,
) -> tuple[Array, Array]:  # fmt: skip
    """Mean [Nq,D] and covariance [Nq,Nq] of sparse CGP attention (eq. 13, 14).

    A query keeps its own variance given the inducing values where the conditional is "independent".
    """
    g = sparse_grams(q, k, o, inducing_q, inducing_k, scale_q, scale_k, a, delta)
    z_k = observed_values(g, v, noise, values)  # [n, D]

    from_k = dtc_stage(g.K_ol, g.K_kl, g.K_ll, noise)
    mean_l, cov_l = from_k.E @ z_k, from_k.D  # [l, D], [l, l]
    mean_o = from_k.J @ mean_l  # [n, D]
    cov_o = from_k.J @ cov_l @ from_k.J.T + noise * np.eye(len(k))  # [n, n]

    from_o = dtc_stage(g.K_qm, g.K_om, g.K_mm, noise)
    mean_m = from_o.E @ mean_o  # [m, D]
    cov_m = from_o.D + from_o.E @ cov_o @ from_o.E.T  # [m, m]
    mean = from_o.J @ mean_m  # [nq, D]
    cov = from_o.J @ cov_m @ from_o.J.T  # [nq, nq]
    if include_noise:
        cov = cov + noise * np.eye(len(q))
    if conditional == "independent":
        prior = (scale_q * a) ** 2  # kappa(q, q) = 1
        known = np.einsum("im,mn,in->i", g.K_qm, np.linalg.inv(g.K_mm), g.K_qm)
        cov = cov + np.diag(prior - known)
    return mean, cov
