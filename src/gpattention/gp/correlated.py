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

from dataclasses import dataclass
from typing import Any, Literal, assert_never, get_args

import torch
from torch import Tensor
from torch.linalg import solve_triangular

from gpattention.checks import check_choice, check_count
from gpattention.gp.direct import ExactPosterior, amplified_gram, log_query_scale, prior_draw
from gpattention.gp.inputs import (
    Scalar,
    expanded,
    keep_rows,
    key_noise,
    observation_variance,
    prepare,
    with_diagonal,
)
from gpattention.gp.kernels import cross_gram, gram
from gpattention.gp.posterior import (
    COSTS,
    LogDensity,
    Source,
    as_log_density,
    gaussian_log_density,
    log_det,
    prior_log_density,
    prior_root,
    quadratic_log_density,
)
from gpattention.numerics import (
    Cost,
    cholesky,
    full_precision,
    inverse,
    kept,
    once_differentiable,
    solve,
    wants_plain_operations,
)
from gpattention.ops import standard_normal
from gpattention.ops.exact import QUERY_COVARIANCE, Moments, fused_cgp


def _right_upper(X: Tensor, L: Tensor) -> Tensor:
    """X L^-T.  [..., N, K]"""
    return solve_triangular(L.mT, X, upper=True, left=False)


def _right_lower(X: Tensor, L: Tensor) -> Tensor:
    """X L^-1.  [..., N, K]"""
    return solve_triangular(L, X, upper=False, left=False)


class _Moments(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        M, K_qo, K_ok, v, M_k, noise, key_noise = given
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
        # the key factor's solve is shared: X serves dA, dK_ok and dM_k
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
    with_draw: bool = False,
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
        with_draw: announces one independent draw with torch's own numbers, which fused kernels then make.

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
    return CGPPosterior(t, with_variance=with_variance, with_cost=with_cost, with_draw=with_draw)


CGPObjective = Literal["marginal", "jensen", "monte_carlo", "joint"]
LatentPrior = Literal["noisy", "latent"]
CGP_OBJECTIVES: tuple[CGPObjective, ...] = get_args(CGPObjective)
LATENT_PRIORS: tuple[LatentPrior, ...] = get_args(LatentPrior)


class CGPPosterior(ExactPosterior):
    """Exact CGP posterior; keeps the matrices for the variance, draws, densities and KL.

    Args:
        t: checked inputs.
        with_variance: whether the variance will be asked for.
        with_cost: the regulariser that will be asked for.
        with_draw: whether one draw will be asked for.
    """

    query_covariance = QUERY_COVARIANCE

    def _run_fused(self, with_variance: bool, cost: Cost, *, draw: bool = False) -> Moments:
        return fused_cgp(self.given, with_variance=with_variance, cost=cost, draw=draw)

    def _plain_mean(self, with_variance: bool) -> Tensor:
        t = self.t
        if with_variance:
            return t.amplify(self._moments[0])
        # L and W stay for a covariance, density or KL that is asked for later
        # as `_Moments` has it, so that a mean has the same bits beside a variance
        Y_t = _right_upper((self.K_ok @ t.v).mT, self.L)  # [..., D, K]
        return t.amplify(self.W @ Y_t.mT)  # eq. 4

    @kept
    def M(self) -> Tensor:
        """K_o + sigma^2 I.  [..., K, K]"""
        return with_diagonal(gram(self.t.latent), self.t.noise, self.t.mask)

    @kept
    def K_qo(self) -> Tensor:
        """kappa(q, o) at unit query amplitude.  [..., Q, K]"""
        return cross_gram(self.t.q, self.t.latent, self.t.query_mask, self.t.mask)

    @kept
    def K_ok(self) -> Tensor:
        """s_k kappa(o, k).  [..., K, K]"""
        return self.t.scale_k * cross_gram(self.t.latent, self.t.k, self.t.mask, self.t.mask)

    @kept
    def L(self) -> Tensor:
        """Cholesky factor of M.  [..., K, K]"""
        return cholesky(self.M, name="K_o + noise I", noise=self.t.noise)

    @kept
    def W(self) -> Tensor:
        """K_qo L^-T at unit query amplitude, the transpose of eq. 4's.  [..., Q, K]"""
        return _right_upper(self.K_qo, self.L)

    @kept
    @full_precision
    def _moments(self) -> tuple[Tensor, Tensor, Tensor]:
        """Mean [..., Q, D], unit variance u [..., Q] before clamping, and log det M_k [...].

        Together, which is cheaper than one after the other.
        """
        t = self.t
        if wants_plain_operations():  # which see through no gradient of our own
            A, F_t = self.explained
            u = 1 - t.noise[..., 0] * A.square().sum(-1) - F_t.square().sum(-1)
            Y_t = _right_upper((self.K_ok @ t.v).mT, self.L)  # [..., D, K]
            return self.W @ Y_t.mT, u, log_det(self.L_k)
        M, K_qo, K_ok, v, M_k = expanded(self.M, self.K_qo, self.K_ok, t.v, self.M_k)
        noise = t.noise.expand(*M.shape[:-2], 1, 1)
        moments: tuple[Tensor, Tensor, Tensor] = _Moments.apply(  # type: ignore[no-untyped-call]
            M, K_qo, K_ok, v, M_k, noise, key_noise(t)
        )
        return moments

    def _log_det_k(self) -> Tensor:
        together = getattr(self, "_kept__moments", None)  # it comes with a variance that was asked for
        return super()._log_det_k() if together is None else together[2]

    @kept
    def explained(self) -> tuple[Tensor, Tensor]:
        """A and F^T of eq. 6 at unit query amplitude, open to autograd.  [..., Q, K] each"""
        A = _right_lower(self.W, self.L)
        return A, _right_upper(A @ self.K_ok, self.L_k)

    @full_precision
    def _raw_variance(self) -> Tensor:
        noise = self.t.noise[..., 0]  # [..., 1]
        floor = noise / (self.t.real_keys()[..., None] + noise)
        raw = self._moments[1] if self._closed is None else self._closed.unit
        unit = torch.clamp(raw, min=floor, max=torch.ones_like(noise))
        return (2 * log_query_scale(self.given)).exp() * unit

    def _prior_stddev(self) -> Tensor:
        return log_query_scale(self.given).exp()

    def _full_covariance(self) -> Tensor:
        """Eq. 6, zero at padded queries.  [..., Q, Q]"""
        t = self.t
        A, F_t = self.explained
        unit = gram(t.q, t.query_mask) - t.noise * A @ A.mT - F_t @ F_t.mT
        return t.amplify(t.amplify(unit).mT)

    def _joint_deviation(self, n: int, generator: Source) -> Tensor:
        """Eq. 7 applied to random numbers: two prior draws, each corrected pathwise."""
        t, o = self.t, self.t.latent
        K, sigma = o.shape[-2], t.noise.sqrt()
        A, _ = self.explained
        f = prior_draw(self, (o, t.q), (t.mask, t.query_mask), n, generator)  # [n, ..., K + Q, D]
        h = prior_draw(self, (t.k, o), (t.mask, t.mask), n, generator)  # [n, ..., K + K, D]
        h_k = t.scale_k * h[..., :K, :] + sigma * self._normal(n, K, generator)
        B_h = self.K_ok @ solve(keep_rows(h_k, t.mask), self.L_k)  # B h_k, eq. 3
        latent = h[..., K:, :] - B_h - f[..., :K, :] - sigma * self._normal(n, K, generator)
        return t.amplify(f[..., K:, :] + A @ latent)

    @full_precision
    def log_density(
        self,
        objective: CGPObjective = "marginal",
        *,
        latent_prior: LatentPrior = "noisy",
        observation_noise: Scalar | None = None,
        samples: int = 1,
        generator: Source = None,
    ) -> LogDensity:
        """log p of the CGP's own mean and observed keys (section 2); negate it for a regulariser.

        - "marginal" (eq. 10): the exact log density, the default;
        - "jensen" (eq. 9): the paper's lower bound in closed form;
        - "monte_carlo": the paper's estimate of that bound from `samples` draws of z_o;
        - "joint" (eq. 12): queries and keys together, conditionally independent given z_o.

        Args:
            objective: one of the above.
            latent_prior: of z_o: "noisy", N(0, K_o + sigma^2 I), or "latent", the paper's N(0, K_o).
            observation_noise: tau^2: None means sigma^2, the stated noise model; 0.0 is the paper's and
                fails wherever two queries coincide.
            samples: draws of "monte_carlo".
            generator: of its random numbers.

        Returns:
            Both terms.

        Raises:
            ValueError: an argument is out of its range.
            NotPositiveDefiniteError: a covariance has no factor.
        """
        check_choice("objective", objective, CGP_OBJECTIVES)
        check_choice("latent_prior", latent_prior, LATENT_PRIORS)
        samples = check_count("samples", samples)
        t, latent = self.given, latent_prior == "latent"
        tau = observation_variance(observation_noise, t)
        if objective == "marginal" and not latent:  # the GP prior, in which the latent inputs play no part
            fused = self._query_density(tau)
            query = self._queries(tau, latent).marginal() if fused is None else fused
            # Z^T (K_k + tau^2 I)^-1 Z needs no solve where tau^2 is the noise of Z = M_k V
            key = self._key_density() if tau is t.noise else self._keys(tau, latent).marginal()
            return as_log_density(t, query, key)
        queries, keys = self._queries(tau, latent), self._keys(tau, latent)
        if objective == "joint":
            return as_log_density(t, *_joint(queries, keys))
        if objective == "marginal":
            return as_log_density(t, queries.marginal(), keys.marginal())
        if objective == "jensen":
            return as_log_density(t, queries.jensen(), keys.jensen())
        if objective == "monte_carlo":
            root = prior_root(gram(self.t.latent.double())).to(self.t.v.dtype) if latent else self.L
            drawn = (side.monte_carlo(root, samples, generator) for side in (queries, keys))
            return as_log_density(t, *drawn)
        assert_never(objective)

    def _queries(self, tau: Tensor, latent: bool) -> "_Side":
        t = self.t
        K = with_diagonal(amplified_gram(t), tau, t.query_mask)
        return _Side(self, "queries", K, self._mean, t.real_queries(), tau, latent)

    def _keys(self, tau: Tensor, latent: bool) -> "_Side":
        t = self.t
        K_k = t.scale_k.square() * gram(t.k)  # [..., K, K]
        Z = keep_rows(K_k @ t.v + t.noise * t.v, t.mask)  # [..., K, D]  M_k V
        return _Side(self, "keys", with_diagonal(K_k, tau, t.mask), Z, t.real_keys(), tau, latent)


@dataclass(eq=False)
class _Side:
    """Queries or keys seen from the latent inputs: z ~ N(A z_o, S), observed at X."""

    p: CGPPosterior
    name: Literal["queries", "keys"]
    K: Tensor  # [..., N, N] prior covariance with tau^2, identity at padded tokens
    X: Tensor  # [..., N, D]
    real: Tensor  # [...]
    tau: Tensor  # [..., 1, 1]
    latent: bool  # whether Pi of section 2 is K_o instead of M

    @kept
    def W(self) -> Tensor:
        """K_.o L^-T.  [..., N, K]"""
        p = self.p
        return p.t.amplify(p.W) if self.name == "queries" else _right_upper(p.K_ok.mT, p.L)

    @kept
    def A(self) -> Tensor:
        """K_.o M^-1.  [..., N, K]"""
        return _right_lower(self.W, self.p.L)

    def root(self, covariance: Tensor, what: str) -> Tensor:
        """Its Cholesky factor.  [..., N, N]"""
        return cholesky(covariance, name=f"{what} of the {self.name}", noise=self.tau)

    def conditional_root(self) -> Tensor:
        """chol(S), S = K + tau^2 I - W W^T.  [..., N, N]"""
        return self.root(self.K - self.W @ self.W.mT, "conditional covariance")

    def marginal_covariance(self) -> Tensor:
        """Eq. 10.  [..., N, N]"""
        return self.K - self.p.t.noise * self.A @ self.A.mT if self.latent else self.K

    def marginal(self) -> Tensor:
        """Eq. 10.  [...]"""
        name = f"marginal covariance of the {self.name}"
        return prior_log_density(self.X, self.marginal_covariance(), self.real, name=name, noise=self.tau)

    def jensen(self) -> Tensor:
        """Eq. 9.  [...]"""
        L_S = self.conditional_root()
        quadratic = solve_triangular(L_S, self.X, upper=False).square().sum((-2, -1))
        spread = self.X.shape[-1] * self.expected_spread(L_S)
        return quadratic_log_density(quadratic + spread, log_det(L_S), self.real, self.X)

    def expected_spread(self, L_S: Tensor) -> Tensor:
        """T = tr(S^-1 A Pi A^T) of eq. 9, as sums of squares.  [...]"""
        trace = solve_triangular(L_S, self.W, upper=False).square().sum((-2, -1))
        if not self.latent:
            return trace
        A = solve_triangular(L_S, self.A, upper=False)  # [..., N, K]
        return trace - self.p.t.noise[..., 0, 0] * A.square().sum((-2, -1))

    def monte_carlo(self, root: Tensor, samples: int, generator: Source) -> Tensor:
        """Mean over draws z_o ~ N(0, Pi), one per value channel, of log N(x; A z_o, S).  [...]"""
        L_S = self.conditional_root()
        shape = (samples, *self.X.shape[:-2], root.shape[-1], self.X.shape[-1])
        noise = standard_normal(shape, root.dtype, root.device, generator)
        residual = self.X - self.A @ (root @ noise)  # [R, ..., N, D]
        quadratic = solve_triangular(L_S, residual, upper=False).square().sum((-2, -1)).mean(0)
        return quadratic_log_density(quadratic, log_det(L_S), self.real, self.X)


def _joint(query: _Side, key: _Side) -> tuple[Tensor, Tensor]:
    """log p(z_q | z_k) and log p(z_k) under the conditional-independence model (eq. 12)."""
    L_key = key.root(key.marginal_covariance(), "marginal covariance")
    cross = key.W @ query.W.mT  # [..., K, Q]  A_k Pi A^T for Pi = M
    if query.latent:
        cross = cross - query.p.t.noise * key.A @ query.A.mT
    R = solve_triangular(L_key, cross, upper=False)  # [..., K, Q]
    Z = solve_triangular(L_key, key.X, upper=False)  # [..., K, D]
    L_query = query.root(query.marginal_covariance() - R.mT @ R, "covariance given the keys")
    return (
        gaussian_log_density(query.X - R.mT @ Z, L_query, query.real),
        gaussian_log_density(key.X, L_key, key.real),
    )
