"""Log density of kernel attention's own outputs under the direct GP (eq. 12, GP)."""

from typing import Literal, get_args

from torch import Tensor
from torch.linalg import solve_triangular

from gpattention.gp.checks import check_choice
from gpattention.gp.cholesky import cholesky
from gpattention.gp.density import (
    LogDensity,
    as_log_density,
    gaussian_log_density,
    quadratic_log_density,
)
from gpattention.gp.direct import DirectPosterior, amplified_gram, direct_weights
from gpattention.gp.fused.exact.density import fused_prior_density
from gpattention.gp.fused.exact.direct import PRIOR_COVARIANCE, fused_direct
from gpattention.gp.inputs import Scalar, observation_variance, prepare, with_diagonal
from gpattention.gp.kernels import gram
from gpattention.gp.moments import key_noise
from gpattention.gp.precision import full_precision

DirectObjective = Literal["marginal", "joint"]
DIRECT_OBJECTIVES: tuple[DirectObjective, ...] = get_args(DirectObjective)


@full_precision
def direct_log_density(
    q: Tensor,  # [..., Q, C]
    k: Tensor,  # [..., K, C]
    v: Tensor,  # [..., K, D]
    *,
    noise: Scalar,
    objective: DirectObjective = "marginal",
    observation_noise: Scalar | None = None,
    scale_q: Scalar = 1.0,
    scale_k: Scalar = 1.0,
    mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    log_amplitude: Tensor | None = None,
) -> LogDensity:
    """log p of the direct GP's mean K_qk V and observed keys M_k V under the prior (eq. 12, GP).

    "marginal" takes each on its own, "joint" both together.  `observation_noise` is tau^2 of the
    queries; the keys are observed with sigma^2, as eq. 2 has it.
    """
    t = prepare(
        q, k, v, noise=noise, scale_q=scale_q, scale_k=scale_k, mask=mask,
        query_mask=query_mask, log_amplitude=log_amplitude, mask_tokens=False,
    )  # fmt: skip
    return direct_density_of(DirectPosterior(t, with_variance=True), objective, observation_noise)


@full_precision
def direct_density_of(
    posterior: DirectPosterior,
    objective: DirectObjective = "marginal",
    observation_noise: Scalar | None = None,
) -> LogDensity:
    """`direct_log_density` of a posterior that is there already."""
    check_choice("objective", objective, DIRECT_OBJECTIVES)
    tau = observation_variance(observation_noise, posterior.given)
    if objective == "marginal" and posterior.why_not_fused() is None:
        return _fused_marginal(posterior, tau)
    t = posterior.t
    K_q = amplified_gram(t)  # [..., Q, Q]
    K_k = t.scale_k.square() * gram(t.k)  # [..., K, K]
    L_key = cholesky(with_diagonal(K_k, t.noise, t.mask), name="K_k + noise I", noise=key_noise(t))
    white = L_key.mT @ t.v  # [..., K, D]  L_k^-1 Z for Z = M_k V
    key = quadratic_log_density(white.square().sum((-2, -1)), L_key, t.real_keys(), t.v)
    cov, X = with_diagonal(K_q, tau, t.query_mask), posterior.computed_mean
    if objective == "joint":
        R = solve_triangular(L_key, direct_weights(t).mT, upper=False)  # [..., K, Q]
        cov = cov - R.mT @ R
        X = X - R.mT @ white
    L_query = cholesky(cov, name=PRIOR_COVARIANCE, noise=tau)
    return as_log_density(t, gaussian_log_density(X, L_query, t.real_queries()), key)


def _fused_marginal(posterior: DirectPosterior, tau: Tensor) -> LogDensity:
    t, fused = posterior.given, posterior.fused()
    if fused is None or fused.key is None:
        fused = fused_direct(t, with_variance=True)
    query = fused_prior_density(
        t.q, fused.mean, scale=t.scale_q, log_amplitude=t.log_amplitude, noise=tau,
        mask=t.query_mask, name=PRIOR_COVARIANCE,
    )  # fmt: skip
    assert fused.key is not None  # it comes with the variance
    return as_log_density(t, query, fused.key)
