"""KL divergence of an attention posterior from its prior: a regulariser bounded below by 0.

    K = sum_a KL(N(nu_a, V + tau^2 I) || N(0, K_q + tau^2 I))
      = 1/2 [|L_q^-1 N|^2 + s (|L_q^-1 L_V|^2 - n + log det(K_q + tau^2 I) - log det(V + tau^2 I))]   (23)

and its sparse form (24) in O(N m^2).
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.linalg import solve_triangular

from gpattention.gp.cholesky import cholesky, solve
from gpattention.gp.correlated import CGPPosterior, cgp_posterior
from gpattention.gp.density import log_det
from gpattention.gp.direct import DirectPosterior, amplified_gram, direct_weights
from gpattention.gp.inputs import Scalar, observation_variance, prepare, with_diagonal
from gpattention.gp.kernels import gram
from gpattention.gp.moments import key_noise
from gpattention.gp.precision import full_precision
from gpattention.gp.sharding import counted_once
from gpattention.gp.sparse import SCGPPosterior, scgp_posterior
from gpattention.gp.sparse_evidence import query_quadratic
from gpattention.gp.sparse_kind import Values

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@full_precision
def cgp_kl(
    q: Tensor,  # [..., Q, C]
    k: Tensor,  # [..., K, C]
    o: Tensor,  # [..., K, C]
    v: Tensor,  # [..., K, D]
    *,
    noise: Scalar,
    observation_noise: Scalar | None = None,
    scale_q: Scalar = 1.0,
    scale_k: Scalar = 1.0,
    mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    log_amplitude: Tensor | None = None,
) -> Tensor:
    """KL of the CGP posterior from its prior (eq. 23), summed over tokens and channels.  [...]

    `observation_noise` is tau^2, sigma^2 when None.  Zero where attention is switched off.
    """
    posterior = cgp_posterior(
        q, k, o, v, noise=noise, scale_q=scale_q, scale_k=scale_k, mask=mask,
        query_mask=query_mask, log_amplitude=log_amplitude,
    )  # fmt: skip
    return cgp_kl_of(posterior, observation_noise)


@full_precision
def cgp_kl_of(posterior: CGPPosterior, observation_noise: Scalar | None = None) -> Tensor:
    """`cgp_kl` of a posterior that is there already.  [...]"""
    tau = observation_variance(observation_noise, posterior.given)
    fused = posterior.fused_cost("kl") if tau is posterior.given.noise else None
    if fused is not None:
        return fused
    t = posterior.t
    V = posterior.computed_covariance()  # [..., Q, Q]
    return _kl_to_prior(posterior.computed_mean, V, amplified_gram(t), tau, t.query_mask)


@full_precision
def direct_kl(
    q: Tensor,  # [..., Q, C]
    k: Tensor,  # [..., K, C]
    v: Tensor,  # [..., K, D]
    *,
    noise: Scalar,
    observation_noise: Scalar | None = None,
    scale_q: Scalar = 1.0,
    scale_k: Scalar = 1.0,
    mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    log_amplitude: Tensor | None = None,
) -> Tensor:
    """KL of the direct GP's posterior (eq. 2) from its prior (eq. 23).  [...]"""
    t = prepare(
        q, k, v, noise=noise, scale_q=scale_q, scale_k=scale_k, mask=mask,
        query_mask=query_mask, log_amplitude=log_amplitude, mask_tokens=False,
    )  # fmt: skip
    return direct_kl_of(DirectPosterior(t, with_cost="kl"), observation_noise)


@full_precision
def direct_kl_of(posterior: DirectPosterior, observation_noise: Scalar | None = None) -> Tensor:
    """`direct_kl` of a posterior that is there already.  [...]"""
    tau = observation_variance(observation_noise, posterior.given)
    fused = posterior.fused_cost("kl") if tau is posterior.given.noise else None
    if fused is not None:
        return fused
    t = posterior.t
    M_k = with_diagonal(t.scale_k.square() * gram(t.k), t.noise, t.mask)  # [..., K, K]
    L_k = cholesky(M_k, name="K_k + noise I", noise=key_noise(t))
    R = solve_triangular(L_k, direct_weights(t).mT, upper=False)  # [..., K, Q]
    K_q = amplified_gram(t)  # [..., Q, Q]
    return _kl_to_prior(posterior.computed_mean, K_q - R.mT @ R, K_q, tau, t.query_mask)


@full_precision
def scgp_kl(
    q: Tensor,  # [..., Q, C]
    k: Tensor,  # [..., K, C]
    o: Tensor,  # [..., K, C]
    v: Tensor,  # [..., K, D]
    inducing_q: Tensor,  # [..., m, C]
    inducing_k: Tensor | None = None,  # [..., l, C]
    *,
    noise: Scalar,
    scale_q: Scalar = 1.0,
    scale_k: Scalar = 1.0,
    mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    log_amplitude: Tensor | None = None,
    values: Values = "paper",
    delta: float = 1e-6,
    group: "ProcessGroup | None" = None,
) -> Tensor:
    """KL of the sparse posterior from the DTC prior sigma^2 I + Phi_q Phi_q^T (eq. 24).  [...]

    With a `group` (see `scgp_posterior`) it is that of all tokens, the same on every process, and its
    gradient counts once in the sum of their losses.
    """
    p = scgp_posterior(
        q, k, o, v, inducing_q, inducing_k, noise=noise, scale_q=scale_q, scale_k=scale_k,
        mask=mask, query_mask=query_mask, log_amplitude=log_amplitude, values=values, delta=delta,
        group=group, objectives=["kl"],
    )  # fmt: skip
    return scgp_kl_of(p)


@full_precision
def scgp_kl_of(p: SCGPPosterior) -> Tensor:
    """`scgp_kl` of a posterior that is there already.  [...]"""
    fused = p.fused("kl")
    if fused is not None and fused.kl is not None:
        return counted_once(fused.kl, p.kind.group)
    p = p.plain()
    noise, D = p.t.noise, p.t.v.shape[-1]
    quadratic, L_0 = query_quadratic(p)  # [...], [..., m, m]
    G = p.density_sums().Phi_qq  # [..., m, m]
    R_c = p.covariance_root()  # [..., m, m]
    shrink = solve(G / noise, L_0)  # [..., m, m]  I - B_0^-1
    excess = R_c @ R_c.mT - torch.eye(G.shape[-1], dtype=G.dtype, device=G.device)
    inner = cholesky(
        with_diagonal(R_c.mT @ G @ R_c / noise, 1.0), name="I + R_c^T G R_c / noise", noise=noise
    )
    trace = (excess * shrink.mT).sum((-2, -1))
    return counted_once(0.5 * (quadratic + D * (trace + log_det(L_0) - log_det(inner))), p.kind.group)


def _kl_to_prior(
    mean: Tensor,  # [..., Q, D]
    V: Tensor,  # [..., Q, Q]
    K_q: Tensor,  # [..., Q, Q]
    tau: Tensor,  # [..., 1, 1]
    query_mask: Tensor | None,
) -> Tensor:
    """Eq. 23; both covariances are identity at padded queries, so n is the padded number.  [...]"""
    L_V = cholesky(with_diagonal(V, tau, query_mask), name="V + tau^2 I", noise=tau)
    L_q = cholesky(with_diagonal(K_q, tau, query_mask), name="K_q + tau^2 I", noise=tau)
    quadratic = solve_triangular(L_q, mean, upper=False).square().sum((-2, -1))
    trace = solve_triangular(L_q, L_V, upper=False).square().sum((-2, -1)) - mean.shape[-2]
    return 0.5 * (quadratic + mean.shape[-1] * (trace + log_det(L_q) - log_det(L_V)))
