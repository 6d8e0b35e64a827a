"""Log density of the exact model's own outputs: the CGP regulariser (eq. 9-12).

Query term at the mean N (eq. 4), key term at Z = M_k V, observation noise tau^2:
S = K_q + tau^2 I - W^T W,   A = W^T L^-1,   Pi = M ("noisy") or K_o ("latent")
marginal:  log N(N; 0, K_q + tau^2 I - [latent] sigma^2 A A^T)                              (10)
jensen:    -1/2 [|L_S^-1 N|^2 + s (T + log det S + n log 2 pi)],
           T = |L_S^-1 W^T|^2 - [latent] sigma^2 |L_S^-1 A|^2                               (9)
joint:     both together under conditional independence given z_o                           (12)
"""

import math
from dataclasses import dataclass
from typing import Literal, assert_never, get_args

from torch import Generator, Tensor
from torch.linalg import solve_triangular

from gpattention.checks import check_count
from gpattention.gp.checks import check_choice
from gpattention.gp.cholesky import cholesky
from gpattention.gp.correlated import CGPPosterior, cgp_posterior
from gpattention.gp.density import (
    LogDensity,
    as_log_density,
    gaussian_log_density,
    prior_log_density,
    quadratic_log_density,
)
from gpattention.gp.direct import amplified_gram
from gpattention.gp.fused.exact.cgp import QUERY_COVARIANCE
from gpattention.gp.fused.exact.density import fused_prior_density
from gpattention.gp.inputs import (
    Scalar,
    Tokens,
    keep_rows,
    observation_variance,
    with_diagonal,
)
from gpattention.gp.kernels import gram
from gpattention.gp.noise import NoiseSource, standard_normal
from gpattention.gp.posterior import prior_root
from gpattention.gp.precision import full_precision

CGPObjective = Literal["marginal", "jensen", "monte_carlo", "joint"]
LatentPrior = Literal["noisy", "latent"]
CGP_OBJECTIVES: tuple[CGPObjective, ...] = get_args(CGPObjective)
LATENT_PRIORS: tuple[LatentPrior, ...] = get_args(LatentPrior)


@full_precision
def cgp_log_density(
    q: Tensor,  # [..., Q, C]
    k: Tensor,  # [..., K, C]
    o: Tensor,  # [..., K, C]
    v: Tensor,  # [..., K, D]
    *,
    noise: Scalar,
    objective: CGPObjective = "marginal",
    latent_prior: LatentPrior = "noisy",
    observation_noise: Scalar | None = None,
    scale_q: Scalar = 1.0,
    scale_k: Scalar = 1.0,
    mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    log_amplitude: Tensor | None = None,
    samples: int = 1,
    generator: Generator | NoiseSource | None = None,
) -> LogDensity:
    """log p of the CGP's own mean and observed keys (section 2); negate it for a regulariser.

    - "marginal" (eq. 10): the exact log density, the default;
    - "jensen" (eq. 9): the paper's lower bound in closed form;
    - "monte_carlo": the paper's estimate of that bound from `samples` draws of z_o;
    - "joint" (eq. 12): queries and keys together, conditionally independent given z_o.

    `observation_noise` is tau^2: None means sigma^2, the stated noise model; 0.0 is the paper's and
    fails wherever two queries coincide.  `latent_prior="latent"` is the paper's z_o ~ N(0, K_o).
    """
    posterior = cgp_posterior(
        q, k, o, v, noise=noise, scale_q=scale_q, scale_k=scale_k, mask=mask,
        query_mask=query_mask, log_amplitude=log_amplitude,
    )  # fmt: skip
    return cgp_density_of(
        posterior, objective, latent_prior, observation_noise, samples=samples, generator=generator
    )


@full_precision
def cgp_density_of(
    posterior: CGPPosterior,
    objective: CGPObjective = "marginal",
    latent_prior: LatentPrior = "noisy",
    observation_noise: Scalar | None = None,
    *,
    samples: int = 1,
    generator: Generator | NoiseSource | None = None,
) -> LogDensity:
    """`cgp_log_density` of a posterior that is there already."""
    check_choice("objective", objective, CGP_OBJECTIVES)
    check_choice("latent_prior", latent_prior, LATENT_PRIORS)
    samples = check_count("samples", samples)
    t = posterior.given
    tau = observation_variance(observation_noise, t)
    latent = latent_prior == "latent"
    if objective == "marginal" and not latent:  # the GP prior, in which the latent inputs play no part
        return as_log_density(t, _prior_queries(posterior, tau), _prior_keys(posterior, tau))
    query, key = _query_side(posterior, tau), _key_side(posterior, tau)
    if objective == "marginal":
        return as_log_density(t, _marginal(query, latent), _marginal(key, latent))
    if objective == "jensen":
        return as_log_density(t, _jensen(query, latent), _jensen(key, latent))
    if objective == "monte_carlo":
        root = posterior.L if not latent else prior_root(gram(posterior.t.latent.double())).to(t.v.dtype)
        sides = [_monte_carlo(side, root, samples, generator) for side in (query, key)]
        return as_log_density(t, *sides)
    if objective == "joint":
        return as_log_density(t, *_joint(query, key, latent))
    assert_never(objective)


def _prior_queries(posterior: CGPPosterior, tau: Tensor) -> Tensor:
    """log N(N; 0, K_q + tau^2 I) (eq. 10 with the noisy prior).  [...]"""
    t, name = posterior.given, QUERY_COVARIANCE
    if posterior.why_not_fused() is None:
        return fused_prior_density(
            t.q, posterior.computed_mean, scale=t.scale_q, log_amplitude=t.log_amplitude, noise=tau,
            mask=t.query_mask, name=name,
        )  # fmt: skip
    C = with_diagonal(amplified_gram(posterior.t), tau, t.query_mask)  # [..., Q, Q]
    return prior_log_density(posterior.computed_mean, C, t.real_queries(), name=name, noise=tau)


def _prior_keys(posterior: CGPPosterior, tau: Tensor) -> Tensor:
    """log N(Z; 0, K_k + tau^2 I); with tau^2 = sigma^2, Z^T M_k^-1 Z is V^T M_k V.  [...]"""
    fused = posterior.fused() if tau is posterior.given.noise else None
    if fused is not None and fused.key is not None:
        return fused.key
    t = posterior.t
    if tau is t.noise:
        quadratic = (t.v * (posterior.M_k @ t.v)).sum((-2, -1))
        constant = posterior.log_det_k() + t.real_keys() * math.log(2 * math.pi)
        return -0.5 * (quadratic + t.v.shape[-1] * constant)
    K_k = t.scale_k.square() * gram(t.k)  # [..., K, K]
    C = with_diagonal(K_k, tau, t.mask)
    return prior_log_density(
        observed_keys(t, K_k), C, t.real_keys(), name="marginal covariance of the keys", noise=tau
    )


@dataclass(frozen=True, slots=True)
class _Side:
    """Queries or keys seen from the latent inputs: z ~ N(A z_o, S), observed at X."""

    K: Tensor  # [..., N, N] prior covariance with tau^2, identity at padded tokens
    W: Tensor  # [..., K, N] L^-1 K_o.
    A_t: Tensor  # [..., K, N] L^-T W
    X: Tensor  # [..., N, D]
    real: Tensor  # [...]
    noise: Tensor  # [..., 1, 1]
    tau: Tensor  # [..., 1, 1]
    name: str

    def root(self, cov: Tensor, what: str) -> Tensor:
        return cholesky(cov, name=f"{what} of the {self.name}", noise=self.tau)


def _query_side(posterior: CGPPosterior, tau: Tensor) -> _Side:
    t = posterior.t
    W = t.amplify(posterior.W.mT).mT
    return _Side(
        K=with_diagonal(amplified_gram(t), tau, t.query_mask),
        W=W,
        A_t=solve_triangular(posterior.L.mT, W, upper=True),
        X=posterior.computed_mean,
        real=t.real_queries(),
        noise=t.noise,
        tau=tau,
        name="queries",
    )


def _key_side(posterior: CGPPosterior, tau: Tensor) -> _Side:
    t = posterior.t
    K_k = t.scale_k.square() * gram(t.k)  # [..., K, K]
    W = solve_triangular(posterior.L, posterior.K_ok, upper=False)  # [..., K, K]
    return _Side(
        K=with_diagonal(K_k, tau, t.mask),
        W=W,
        A_t=solve_triangular(posterior.L.mT, W, upper=True),
        X=observed_keys(t, K_k),
        real=t.real_keys(),
        noise=t.noise,
        tau=tau,
        name="keys",
    )


def _marginal_covariance(side: _Side, latent: bool) -> Tensor:
    """Eq. 10.  [..., N, N]"""
    return side.K - side.noise * side.A_t.mT @ side.A_t if latent else side.K


def _marginal(side: _Side, latent: bool) -> Tensor:
    covariance = _marginal_covariance(side, latent)
    name = f"marginal covariance of the {side.name}"
    return prior_log_density(side.X, covariance, side.real, name=name, noise=side.tau)


def _conditional_root(side: _Side) -> Tensor:
    """chol(S), S = K + tau^2 I - W^T W.  [..., N, N]"""
    return side.root(side.K - side.W.mT @ side.W, "conditional covariance")


def _jensen(side: _Side, latent: bool) -> Tensor:
    """Eq. 9.  [...]"""
    L_S = _conditional_root(side)
    quadratic = solve_triangular(L_S, side.X, upper=False).square().sum((-2, -1))
    spread = side.X.shape[-1] * _expected_spread(side, L_S, latent)
    return quadratic_log_density(quadratic + spread, L_S, side.real, side.X)


def _expected_spread(side: _Side, L_S: Tensor, latent: bool) -> Tensor:
    """T = tr(S^-1 A Pi A^T) of eq. 9, as sums of squares.  [...]"""
    trace = solve_triangular(L_S, side.W.mT, upper=False).square().sum((-2, -1))
    if not latent:
        return trace
    A = solve_triangular(L_S, side.A_t.mT, upper=False)  # [..., N, K]
    return trace - side.noise[..., 0, 0] * A.square().sum((-2, -1))


def _monte_carlo(
    side: _Side, root: Tensor, samples: int, generator: Generator | NoiseSource | None
) -> Tensor:
    """Mean over draws z_o ~ N(0, Pi), one per value channel, of log N(x; A z_o, S).  [...]"""
    L_S = _conditional_root(side)
    shape = (samples, *side.X.shape[:-2], root.shape[-1], side.X.shape[-1])
    noise = standard_normal(shape, root.dtype, root.device, generator)
    residual = side.X - side.A_t.mT @ (root @ noise)  # [R, ..., N, D]
    quadratic = solve_triangular(L_S, residual, upper=False).square().sum((-2, -1)).mean(0)
    return quadratic_log_density(quadratic, L_S, side.real, side.X)


def _joint(query: _Side, key: _Side, latent: bool) -> tuple[Tensor, Tensor]:
    """log p(z_q | z_k) and log p(z_k) under the conditional-independence model (eq. 12)."""
    L_key = key.root(_marginal_covariance(key, latent), "marginal covariance")
    cross = key.W.mT @ query.W  # [..., K, Q]  A_k Pi A^T for Pi = M
    if latent:
        cross = cross - query.noise * key.A_t.mT @ query.A_t
    R = solve_triangular(L_key, cross, upper=False)  # [..., K, Q]
    Z = solve_triangular(L_key, key.X, upper=False)  # [..., K, D]
    cov = _marginal_covariance(query, latent) - R.mT @ R
    L_query = query.root(cov, "covariance given the keys")
    return (
        gaussian_log_density(query.X - R.mT @ Z, L_query, query.real),
        gaussian_log_density(key.X, L_key, key.real),
    )


def observed_keys(t: Tokens, K_k: Tensor) -> Tensor:
    """Z = M_k V, zero at padded keys.  [..., K, D]"""
    return keep_rows(K_k @ t.v + t.noise * t.v, t.mask)
