"""Exact correlated-GP attention (CGP): queries and keys tied by one canonical GP (eq. 3-7).

    K_o = kappa(o, o),  K_qo = s_q kappa(q, o),  K_ok = s_k kappa(o, k),  K_k = s_k^2 kappa(k, k)   (1)
    M = K_o + sigma^2 I = L L^T,   M_k = K_k + sigma^2 I = L_k L_k^T,   W = L^-1 K_oq
    mean = W^T (L^-1 K_ok V)                                                                        (4)
    cov  = K_q - sigma^2 A A^T - F^T F,   A^T = L^-T W,   F = L_k^-1 K_ko A^T                       (6)

Everything about the queries is kept at unit amplitude and multiplied by s_q a_i at the end.

Mean, variance and log det M_k are one autograd function with its gradient written out.  With A = K_qo M^-1,
G = A K_ok,  F^T = G L_k^-T  (eq. 4, 6 at unit query amplitude)
    mean = G V,   u_i = 1 - sigma^2 |A_i|^2 - |F_i|^2,   ld = log det M_k
and incoming gradients g (mean), w (u), c (ld), with X = G M_k^-1:
    dV = G^T g,   dA = (g V^T - 2 diag(w) X) K_ko - 2 sigma^2 diag(w) A,   Z = dA M^-1
    dK_ok = A^T (g V^T - 2 diag(w) X),   dM_k = X^T diag(w) X + c M_k^-1
    dK_qo = Z,   dM = -A^T Z,   dsigma^2 = -sum_i w_i |A_i|^2
so that nothing is differentiated through a Cholesky factor: autograd's own way makes twenty triangular
solves of it.  Solves are from the right, on rows: in row-major memory twice as fast as from the left.

Log density of the exact model's own outputs: the CGP regulariser (eq. 9-12).

Query term at the mean N (eq. 4), key term at Z = M_k V, observation noise tau^2:
S = K_q + tau^2 I - W^T W,   A = W^T L^-1,   Pi = M ("noisy") or K_o ("latent")
marginal:  log N(N; 0, K_q + tau^2 I - [latent] sigma^2 A A^T)                              (10)
jensen:    -1/2 [|L_S^-1 N|^2 + s (T + log det S + n log 2 pi)],
           T = |L_S^-1 W^T|^2 - [latent] sigma^2 |L_S^-1 A|^2                               (9)
joint:     both together under conditional independence given z_o                           (12)
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, Unpack, assert_never, get_args

import torch
from torch import Generator, Tensor
from torch.linalg import solve_triangular

from gpattention.checks import check_count
from gpattention.gp.density import (
    LogDensity,
    as_log_density,
    gaussian_log_density,
    kl_to_prior,
    log_det,
    prior_log_density,
    quadratic_log_density,
)
from gpattention.gp.direct import ExactPosterior, amplified_gram, log_query_scale, prior_draw
from gpattention.gp.inputs import (
    Given,
    Scalar,
    check_choice,
    expanded,
    keep_columns,
    keep_rows,
    key_noise,
    observation_variance,
    prepare,
    refuse_others,
    with_diagonal,
)
from gpattention.gp.kernels import cross_gram, gram
from gpattention.gp.posterior import COSTS, prior_root
from gpattention.numerics import (
    Cost,
    Tokens,
    cholesky,
    full_precision,
    inverse,
    kept,
    once_differentiable,
    solve,
    wants_plain_operations,
)
from gpattention.ops import NoiseSource, standard_normal
from gpattention.ops.exact import QUERY_COVARIANCE, Moments, fused_cgp, fused_prior_density


def cgp_mean(M: Tensor, K_qo: Tensor, K_ok: Tensor, v: Tensor, noise: Tensor) -> Tensor:
    """K_qo M^-1 K_ok V (eq. 4).  [..., Q, D]"""
    if wants_plain_operations():
        return _plain(M, K_qo, K_ok, v, noise)[0]
    mean: Tensor = _Mean.apply(*expanded(M, K_qo, K_ok, v), noise)  # type: ignore[no-untyped-call]
    return mean


def cgp_moments(
    M: Tensor,  # [..., K, K] K_o + sigma^2 I
    K_qo: Tensor,  # [..., Q, K] at unit query amplitude
    K_ok: Tensor,  # [..., K, K]
    v: Tensor,  # [..., K, D]
    M_k: Tensor,  # [..., K, K] K_k + sigma^2 I
    noise: Tensor,  # [..., 1, 1]
    key_noise: Tensor,  # [..., 1, 1] sigma^2 / s_k^2, for the message only
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean [..., Q, D], unit variance u [..., Q] before clamping, and log det M_k [...]."""
    if wants_plain_operations():
        mean, A = _plain(M, K_qo, K_ok, v, noise)
        L_k = cholesky(M_k, name="K_k + noise I", noise=key_noise)
        F_t = _right_upper(A @ K_ok, L_k)  # [..., Q, K]
        u = 1 - noise[..., 0] * A.square().sum(-1) - F_t.square().sum(-1)
        return mean, u, log_det(L_k)
    M, K_qo, K_ok, v, M_k = expanded(M, K_qo, K_ok, v, M_k)
    noise = noise.expand(*M.shape[:-2], 1, 1)
    moments: tuple[Tensor, Tensor, Tensor] = _Moments.apply(  # type: ignore[no-untyped-call]
        M, K_qo, K_ok, v, M_k, noise, key_noise
    )
    return moments


def _plain(M: Tensor, K_qo: Tensor, K_ok: Tensor, v: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Mean [..., Q, D] and A [..., Q, K] by operations autograd and compilers know."""
    L = cholesky(M, name="K_o + noise I", noise=noise)
    W = _right_upper(K_qo, L)  # [..., Q, K]
    return W @ _right_upper((K_ok @ v).mT, L).mT, _right_lower(W, L)


def _right_upper(X: Tensor, L: Tensor) -> Tensor:
    """X L^-T.  [..., N, K]"""
    return solve_triangular(L.mT, X, upper=True, left=False)


def _right_lower(X: Tensor, L: Tensor) -> Tensor:
    """X L^-1.  [..., N, K]"""
    return solve_triangular(L, X, upper=False, left=False)


class _Mean(torch.autograd.Function):
    """The mean alone: g V^T has rank D, so nothing N x N x N but the two solves of Z."""

    @staticmethod
    def forward(ctx: Any, M: Tensor, K_qo: Tensor, K_ok: Tensor, v: Tensor, noise: Tensor) -> Tensor:
        L = cholesky(M, name="K_o + noise I", noise=noise)
        W = _right_upper(K_qo, L)  # [..., Q, K]
        P = K_ok @ v  # [..., K, D]
        ctx.save_for_backward(L, W, K_ok, v, P)
        return W @ _right_upper(P.mT, L).mT

    @staticmethod
    @once_differentiable
    @full_precision
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        L, W, K_ok, v, P = ctx.saved_tensors
        (g,) = grads  # [..., Q, D]
        A = _right_lower(W, L)  # [..., Q, K]
        back = A.mT @ g  # [..., K, D]
        Z = _right_lower(_right_upper(g @ P.mT, L), L)  # [..., Q, K]
        return -A.mT @ Z, Z, back @ v.mT, K_ok.mT @ back, None


class _Moments(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        M: Tensor,
        K_qo: Tensor,
        K_ok: Tensor,
        v: Tensor,
        M_k: Tensor,
        noise: Tensor,
        key_noise: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        L = cholesky(M, name="K_o + noise I", noise=noise)
        L_k = cholesky(M_k, name="K_k + noise I", noise=key_noise)
        W = _right_upper(K_qo, L)  # [..., Q, K]
        P = K_ok @ v  # [..., K, D]
        mean = W @ _right_upper(P.mT, L).mT  # [..., Q, D]
        A = _right_lower(W, L)  # [..., Q, K]
        F_t = _right_upper(A @ K_ok, L_k)  # [..., Q, K]
        squares = A.square().sum(-1)  # [..., Q]
        u = 1 - noise[..., 0] * squares - F_t.square().sum(-1)
        ctx.save_for_backward(L, L_k, A, F_t, K_ok, v, P, squares, noise)
        return mean, u, log_det(L_k)

    @staticmethod
    @once_differentiable
    @full_precision
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        L, L_k, A, F_t, K_ok, v, P, squares, noise = ctx.saved_tensors
        g, w, c = grads  # [..., Q, D], [..., Q], [...]
        X = _right_lower(F_t, L_k)  # [..., Q, K]  G M_k^-1
        wX = w[..., None] * X  # [..., Q, K]
        back = A.mT @ g  # [..., K, D]
        dA = g @ P.mT - 2 * (wX @ K_ok.mT) - (2 * noise * w[..., None]) * A  # [..., Q, K]
        Z = _right_lower(_right_upper(dA, L), L)  # [..., Q, K]
        dK_ok = back @ v.mT - 2 * (A.mT @ wX)  # [..., K, K]
        dM_k = X.mT @ wX  # [..., K, K]
        if ctx.needs_input_grad[4]:
            dM_k = dM_k + c[..., None, None] * inverse(L_k)
        dnoise = -(w * squares).sum(-1)[..., None, None]  # [..., 1, 1]
        return -A.mT @ Z, Z, dK_ok, K_ok.mT @ back, dM_k, dnoise, None


@full_precision
def cgp_posterior(
    q: Tensor,  # [..., Q, C]
    k: Tensor,  # [..., K, C]
    o: Tensor,  # [..., K, C]
    v: Tensor,  # [..., K, D]
    *,
    noise: Scalar,
    scale_q: Scalar = 1.0,
    scale_k: Scalar = 1.0,
    mask: Tensor | None = None,  # [..., K] True = real
    query_mask: Tensor | None = None,  # [..., Q]
    log_amplitude: Tensor | None = None,  # [..., Q]
    with_variance: bool = False,
    with_cost: Cost = "none",
) -> "CGPPosterior":
    """p(z_q | z_k = M_k V) through the latent inputs o (eq. 4-6).

    Args:
        q: queries, which may be of another number than keys (cross-attention).
        k: keys.
        o: latent inputs, one per key.
        v: values.
        noise: sigma^2, one number or one per leading axis.
        scale_q: amplitude s_q of the queries.
        scale_k: amplitude s_k of the keys.
        mask: which keys are real.
        query_mask: which queries are real; `mask` when None and the numbers agree.
        log_amplitude: multiplies the query process per token.
        with_variance: announces that the variance will be asked for, and computes it with the mean, which is
            cheaper than when it is asked for.
        with_cost: announces the regulariser "marginal" (eq. 10) or "kl" (eq. 23) to fused kernels, likewise.

    Returns:
        The posterior of every query.

    Raises:
        ValueError: an argument does not fit the others, or is out of its range.
        NumericalError: tokens are not finite or too far apart, or a covariance has no factor.
    """
    check_choice("with_cost", with_cost, COSTS)
    t = prepare(
        q, k, v, o=o, noise=noise, scale_q=scale_q, scale_k=scale_k, mask=mask,
        query_mask=query_mask, log_amplitude=log_amplitude, mask_tokens=False,
    )  # fmt: skip
    return CGPPosterior(t, with_variance=with_variance, with_cost=with_cost)


class CGPPosterior(ExactPosterior):
    """Exact CGP posterior; keeps the matrices for the variance, draws, densities and KL.

    Args:
        t: checked inputs.
        with_variance: whether the variance will be asked for.
        with_cost: the regulariser that will be asked for.
    """

    def _run_fused(self, with_variance: bool, cost: Cost) -> Moments:
        return fused_cgp(self.given, with_variance=with_variance, cost=cost)

    def _plain_mean(self, with_variance: bool) -> Tensor:
        t = self.t
        if with_variance:
            return t.amplify(self._moments[0])
        return t.amplify(cgp_mean(self.M, self.K_qo, self.K_ok, t.v, t.noise))  # eq. 4

    @kept
    def M(self) -> Tensor:
        """K_o + sigma^2 I.  [..., K, K]"""
        return with_diagonal(gram(self.t.latent), self.t.noise, self.t.mask)

    @kept
    def K_qo(self) -> Tensor:
        """kappa(q, o) at unit query amplitude.  [..., Q, K]"""
        return keep_columns(keep_rows(cross_gram(self.t.q, self.t.latent), self.t.query_mask), self.t.mask)

    @kept
    def K_ok(self) -> Tensor:
        """s_k kappa(o, k).  [..., K, K]"""
        K_ok = keep_rows(cross_gram(self.t.latent, self.t.k), self.t.mask)
        return self.t.scale_k * keep_columns(K_ok, self.t.mask)

    @kept
    def M_k(self) -> Tensor:
        """K_k + sigma^2 I.  [..., K, K]"""
        t = self.t
        return with_diagonal(t.scale_k.square() * gram(t.k), t.noise, t.mask)

    @kept
    def L(self) -> Tensor:
        """Cholesky factor of M.  [..., K, K]"""
        return cholesky(self.M, name="K_o + noise I", noise=self.t.noise)

    @kept
    def L_k(self) -> Tensor:
        """Cholesky factor of M_k.  [..., K, K]"""
        return cholesky(self.M_k, name="K_k + noise I", noise=key_noise(self.t))

    @property
    def W(self) -> Tensor:
        """L^-1 K_oq at unit query amplitude.  [..., K, Q]"""
        return solve_triangular(self.L, self.K_qo.mT, upper=False)

    @kept
    @full_precision
    def _moments(self) -> tuple[Tensor, Tensor, Tensor]:
        """Mean, variance and log det M_k together, which is cheaper than one after the other."""
        t = self.t
        return cgp_moments(self.M, self.K_qo, self.K_ok, t.v, self.M_k, t.noise, key_noise(t))

    def log_det_k(self) -> Tensor:
        """log det M_k.  [...]"""
        together = getattr(self, "_kept__moments", None)  # it comes with a variance that was asked for
        return log_det(self.L_k) if together is None else together[2]

    @kept
    def explained(self) -> tuple[Tensor, Tensor]:
        """A^T and F of eq. 6 at unit query amplitude, open to autograd.  [..., K, Q] each"""
        A_t = solve_triangular(self.L.mT, self.W, upper=True)
        return A_t, solve_triangular(self.L_k, self.K_ok.mT @ A_t, upper=False)

    @full_precision
    def _raw_variance(self) -> Tensor:
        noise = self.t.noise[..., 0]  # [..., 1]
        floor = noise / (self.t.real_keys()[..., None] + noise)
        unit = torch.clamp(self._moments[1], min=floor, max=torch.ones_like(noise))
        return (2 * log_query_scale(self.given)).exp() * unit

    def _prior_stddev(self) -> Tensor:
        return log_query_scale(self.given).exp()

    def unit_covariance(self) -> Tensor:
        """Eq. 6 at unit query amplitude, zero at padded queries.  [..., Q, Q]"""
        A_t, F = self.explained
        kappa = keep_columns(keep_rows(gram(self.t.q), self.t.query_mask), self.t.query_mask)
        return kappa - self.t.noise * A_t.mT @ A_t - F.mT @ F

    def _full_covariance(self) -> Tensor:
        return self.t.amplify(self.t.amplify(self.unit_covariance()).mT)

    def _joint_deviation(self, n: int, generator: Generator | NoiseSource | None) -> Tensor:
        """Eq. 7 applied to random numbers: two prior draws, each corrected pathwise."""
        t, o = self.t, self.t.latent
        K, sigma = o.shape[-2], t.noise.sqrt()
        A_t, _ = self.explained
        f = prior_draw(self, (o, t.q), (t.mask, t.query_mask), n, generator)  # [n, ..., K + Q, D]
        h = prior_draw(self, (t.k, o), (t.mask, t.mask), n, generator)  # [n, ..., K + K, D]
        h_k = t.scale_k * h[..., :K, :] + sigma * self._normal(n, K, generator)
        B_h = self.K_ok @ solve(keep_rows(h_k, t.mask), self.L_k)  # B h_k, eq. 3
        latent = h[..., K:, :] - B_h - f[..., :K, :] - sigma * self._normal(n, K, generator)
        return t.amplify(f[..., K:, :] + A_t.mT @ latent)


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
    objective: CGPObjective = "marginal",
    latent_prior: LatentPrior = "noisy",
    observation_noise: Scalar | None = None,
    samples: int = 1,
    generator: Generator | NoiseSource | None = None,
    **given: Unpack[Given],
) -> LogDensity:
    """log p of the CGP's own mean and observed keys (section 2); negate it for a regulariser.

    - "marginal" (eq. 10): the exact log density, the default;
    - "jensen" (eq. 9): the paper's lower bound in closed form;
    - "monte_carlo": the paper's estimate of that bound from `samples` draws of z_o;
    - "joint" (eq. 12): queries and keys together, conditionally independent given z_o.

    Args:
        q: queries.
        k: keys.
        o: latent inputs, one per key.
        v: values.
        objective: one of the above.
        latent_prior: of z_o: "noisy", N(0, K_o + sigma^2 I), or "latent", the paper's N(0, K_o).
        observation_noise: tau^2: None means sigma^2, the stated noise model; 0.0 is the paper's and fails
            wherever two queries coincide.
        samples: draws of "monte_carlo".
        generator: of its random numbers.
        **given: noise, scales, masks and amplitudes, as in `cgp_posterior`.

    Returns:
        Both terms.

    Raises:
        ValueError: an argument does not fit the others, or is out of its range.
        NumericalError: tokens are not finite or too far apart, or a covariance has no factor.
    """
    refuse_others("cgp_log_density", given, Given)
    p = cgp_posterior(q, k, o, v, **given)
    return cgp_density_of(p, objective, latent_prior, observation_noise, samples=samples, generator=generator)


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
    """`cgp_log_density` of a posterior that is there already (section 2).

    Args:
        posterior: what `cgp_posterior` gave.
        objective: as in `cgp_log_density`.
        latent_prior: likewise.
        observation_noise: likewise.
        samples: likewise.
        generator: likewise.

    Returns:
        Both terms.

    Raises:
        ValueError: an argument is out of its range.
        NotPositiveDefiniteError: a covariance has no factor.
    """
    check_choice("objective", objective, CGP_OBJECTIVES)
    check_choice("latent_prior", latent_prior, LATENT_PRIORS)
    samples = check_count("samples", samples)
    t = posterior.given
    tau = observation_variance(observation_noise, t)
    latent = latent_prior == "latent"
    if objective == "marginal" and not latent:  # the GP prior, in which the latent inputs play no part
        return as_log_density(t, _prior_queries(posterior, tau), _prior_keys(posterior, tau))
    query, key = _sides(posterior, tau)
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


def _sides(posterior: CGPPosterior, tau: Tensor) -> tuple[_Side, _Side]:
    """Queries and keys."""
    t = posterior.t
    K_k = t.scale_k.square() * gram(t.k)  # [..., K, K]
    W_q = t.amplify(posterior.W.mT).mT  # [..., K, Q]
    W_k = solve_triangular(posterior.L, posterior.K_ok, upper=False)  # [..., K, K]
    A_q, A_k = (solve_triangular(posterior.L.mT, W, upper=True) for W in (W_q, W_k))
    K_q = with_diagonal(amplified_gram(t), tau, t.query_mask)
    query = _Side(K_q, W_q, A_q, posterior.computed_mean, t.real_queries(), t.noise, tau, "queries")
    K = with_diagonal(K_k, tau, t.mask)
    return query, _Side(K, W_k, A_k, observed_keys(t, K_k), t.real_keys(), t.noise, tau, "keys")


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


@full_precision
def cgp_kl(
    q: Tensor,  # [..., Q, C]
    k: Tensor,  # [..., K, C]
    o: Tensor,  # [..., K, C]
    v: Tensor,  # [..., K, D]
    *,
    observation_noise: Scalar | None = None,
    **given: Unpack[Given],
) -> Tensor:
    """KL of the CGP posterior from its prior (eq. 23), summed over tokens and channels.

    Args:
        q: queries.
        k: keys.
        o: latent inputs, one per key.
        v: values.
        observation_noise: tau^2, sigma^2 when None.
        **given: noise, scales, masks and amplitudes, as in `cgp_posterior`.

    Returns:
        At least 0, and 0 where attention is switched off.  [...]

    Raises:
        ValueError: an argument does not fit the others, or is out of its range.
        NumericalError: tokens are not finite or too far apart, or a covariance has no factor.
    """
    refuse_others("cgp_kl", given, Given)
    return cgp_kl_of(cgp_posterior(q, k, o, v, **given), observation_noise)


@full_precision
def cgp_kl_of(posterior: CGPPosterior, observation_noise: Scalar | None = None) -> Tensor:
    """`cgp_kl` of a posterior that is there already (eq. 23).

    Args:
        posterior: what `cgp_posterior` gave.
        observation_noise: tau^2, sigma^2 when None.

    Returns:
        At least 0.  [...]

    Raises:
        ValueError: the noise is negative.
        NotPositiveDefiniteError: a covariance has no factor.
    """
    tau = observation_variance(observation_noise, posterior.given)
    fused = posterior.fused_cost("kl") if tau is posterior.given.noise else None
    if fused is not None:
        return fused
    t = posterior.t
    V = posterior.computed_covariance()  # [..., Q, Q]
    return kl_to_prior(posterior.computed_mean, V, amplified_gram(t), tau, t.query_mask)
