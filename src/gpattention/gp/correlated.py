"""Exact correlated-GP attention (CGP): queries and keys tied by one canonical GP (eq. 3-7).

    K_o = kappa(o, o),  K_qo = s_q kappa(q, o),  K_ok = s_k kappa(o, k),  K_k = s_k^2 kappa(k, k)   (1)
    M = K_o + sigma^2 I = L L^T,   M_k = K_k + sigma^2 I = L_k L_k^T,   W = L^-1 K_oq
    mean = W^T (L^-1 K_ok V)                                                                        (4)
    cov  = K_q - sigma^2 A A^T - F^T F,   A^T = L^-T W,   F = L_k^-1 K_ko A^T                       (6)

Everything about the queries is kept at unit amplitude and multiplied by s_q a_i at the end.
"""

import torch
from torch import Generator, Tensor
from torch.linalg import solve_triangular

from gpattention.gp.checks import check_choice
from gpattention.gp.cholesky import cholesky, solve
from gpattention.gp.direct import log_query_scale, prior_draw
from gpattention.gp.fused.exact.cgp import Moments, fused_cgp
from gpattention.gp.fused.switch import why_not_fused_on
from gpattention.gp.inputs import (
    Scalar,
    Tokens,
    keep_columns,
    keep_rows,
    masked,
    prepare,
    with_diagonal,
)
from gpattention.gp.kernels import cross_gram, gram
from gpattention.gp.moments import cgp_mean, cgp_moments, key_noise
from gpattention.gp.noise import NoiseSource
from gpattention.gp.posterior import COSTS, Cost, Posterior
from gpattention.gp.precision import full_precision


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

    Queries may be of another number than keys (cross-attention); `query_mask` defaults to `mask`
    when the numbers agree.  The variance is computed when it is asked for; `with_variance` announces
    that it will be, and computes it with the mean, which is cheaper.  So does `with_cost` for the
    regulariser "marginal" (eq. 10) or "kl" (eq. 23), where fused kernels run.
    """
    check_choice("with_cost", with_cost, COSTS)
    t = prepare(
        q, k, v, o=o, noise=noise, scale_q=scale_q, scale_k=scale_k, mask=mask,
        query_mask=query_mask, log_amplitude=log_amplitude, mask_tokens=False,
    )  # fmt: skip
    return CGPPosterior(t, with_variance=with_variance, with_cost=with_cost)


class CGPPosterior(Posterior):
    """Exact CGP posterior; keeps the matrices for the variance, draws, densities and KL."""

    def __init__(self, t: Tokens, *, with_variance: bool = False, with_cost: Cost = "none") -> None:
        self.given = t  # as they came; the kernels mask what they read
        self._masked: Tokens | None = None
        self._M: Tensor | None = None
        self._K_qo: Tensor | None = None
        self._K_ok: Tensor | None = None
        self._M_k: Tensor | None = None
        self._root: Tensor | None = None
        self._root_k: Tensor | None = None
        self._factors: tuple[Tensor, Tensor] | None = None
        self._unit: Tensor | None = None
        self._log_det_k: Tensor | None = None
        self._fused: Moments | None = None
        self._cost: Cost = "none"
        if self.why_not_fused() is None:
            self._cost = with_cost
            self._fused = fused_cgp(t, with_variance=with_variance, cost=self._cost)
            mean = self._fused.mean
        elif with_variance:
            mean = t.amplify(self._moments())
        else:
            mean = t.amplify(cgp_mean(self.M, self.K_qo, self.K_ok, self.t.v, t.noise))
        super().__init__(mean, None if self._fused else t.query_mask, t.dtype)  # eq. 4
        self._query_mask = t.query_mask

    @property
    def t(self) -> Tokens:
        """The checked inputs, masked."""
        if self._masked is None:
            self._masked = masked(self.given)
        return self._masked

    def why_not_fused(self) -> str | None:
        """None if mean, variance and regulariser come from fused kernels, else the reason."""
        t = self.given
        tokens, channels = max(t.q.shape[-2], t.k.shape[-2]), max(t.k.shape[-1], t.v.shape[-1])
        return why_not_fused_on(t.q.device, t.q.dtype, tokens=tokens, channels=channels)

    def fused(self) -> Moments | None:
        """The fused kernels' mean, variance and key density, where they apply."""
        if self._fused is not None and self._fused.variance is None:
            self._fused = fused_cgp(self.given, with_variance=True)
        return self._fused

    def fused_cost(self, cost: Cost) -> Tensor | None:
        """Minus eq. 10 or eq. 23 by the fused kernels, at hand if it was announced.  [...]

        None where plain operations run.
        """
        if self.why_not_fused() is not None:
            return None
        if self._fused is None or self._cost != cost:
            self._cost, self._fused = cost, fused_cgp(self.given, with_variance=True, cost=cost)
        return self._fused.cost

    @property
    def M(self) -> Tensor:
        """K_o + sigma^2 I.  [..., K, K]"""
        if self._M is None:
            self._M = with_diagonal(gram(self.t.latent), self.t.noise, self.t.mask)
        return self._M

    @property
    def K_qo(self) -> Tensor:
        """kappa(q, o) at unit query amplitude.  [..., Q, K]"""
        if self._K_qo is None:
            K_qo = keep_rows(cross_gram(self.t.q, self.t.latent), self.t.query_mask)
            self._K_qo = keep_columns(K_qo, self.t.mask)
        return self._K_qo

    @property
    def K_ok(self) -> Tensor:
        """s_k kappa(o, k).  [..., K, K]"""
        if self._K_ok is None:
            K_ok = keep_rows(cross_gram(self.t.latent, self.t.k), self.t.mask)
            self._K_ok = self.t.scale_k * keep_columns(K_ok, self.t.mask)
        return self._K_ok

    @full_precision
    def _moments(self) -> Tensor:
        """Mean, variance and log det M_k together, which is cheaper than one after the other."""
        mean, self._unit, self._log_det_k = cgp_moments(
            self.M, self.K_qo, self.K_ok, self.t.v, self.M_k, self.t.noise, key_noise(self.t)
        )
        return mean

    @property
    def M_k(self) -> Tensor:
        """K_k + sigma^2 I.  [..., K, K]"""
        if self._M_k is None:
            t = self.t
            self._M_k = with_diagonal(t.scale_k.square() * gram(t.k), t.noise, t.mask)
        return self._M_k

    @property
    def L(self) -> Tensor:
        """Cholesky factor of M.  [..., K, K]"""
        if self._root is None:
            self._root = cholesky(self.M, name="K_o + noise I", noise=self.t.noise)
        return self._root

    @property
    def L_k(self) -> Tensor:
        """Cholesky factor of M_k.  [..., K, K]"""
        if self._root_k is None:
            self._root_k = cholesky(self.M_k, name="K_k + noise I", noise=key_noise(self.t))
        return self._root_k

    @property
    def W(self) -> Tensor:
        """L^-1 K_oq at unit query amplitude.  [..., K, Q]"""
        return solve_triangular(self.L, self.K_qo.mT, upper=False)

    def log_det_k(self) -> Tensor:
        """log det M_k.  [...]"""
        if self._log_det_k is None:
            self._log_det_k = 2 * self.L_k.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return self._log_det_k

    def explained(self) -> tuple[Tensor, Tensor]:
        """A^T and F of eq. 6 at unit query amplitude, open to autograd.  [..., K, Q] each"""
        if self._factors is None:
            A_t = solve_triangular(self.L.mT, self.W, upper=True)
            self._factors = A_t, solve_triangular(self.L_k, self.K_ok.mT @ A_t, upper=False)
        return self._factors

    @full_precision
    def _unit_variance(self) -> Tensor:
        if self._unit is None:
            self._moments()
        noise = self.t.noise[..., 0]  # [..., 1]
        floor = noise / (self.t.real_keys()[..., None] + noise)
        return torch.clamp(self._unit_raw(), min=floor, max=torch.ones_like(noise))

    def _unit_raw(self) -> Tensor:
        if self._unit is None:
            raise RuntimeError("the variance has not been computed")
        return self._unit

    def _full_variance(self) -> Tensor:
        fused = self.fused()
        if fused is not None and fused.variance is not None:
            return fused.variance
        return super()._full_variance()

    def _raw_variance(self) -> Tensor:
        return (2 * log_query_scale(self.given)).exp() * self._unit_variance()

    def _prior_stddev(self) -> Tensor:
        return log_query_scale(self.given).exp()

    def unit_covariance(self) -> Tensor:
        """Eq. 6 at unit query amplitude, zero at padded queries.  [..., Q, Q]"""
        A_t, F = self.explained()
        kappa = keep_columns(keep_rows(gram(self.t.q), self.t.query_mask), self.t.query_mask)
        return kappa - self.t.noise * A_t.mT @ A_t - F.mT @ F

    def _full_covariance(self) -> Tensor:
        return self.t.amplify(self.t.amplify(self.unit_covariance()).mT)

    def _joint_deviation(self, n: int, generator: Generator | NoiseSource | None) -> Tensor:
        """Eq. 7 applied to random numbers: two prior draws, each corrected pathwise."""
        t, o = self.t, self.t.latent
        K, sigma = o.shape[-2], t.noise.sqrt()
        A_t, _ = self.explained()
        f = prior_draw(self, (o, t.q), (t.mask, t.query_mask), n, generator)  # [n, ..., K + Q, D]
        h = prior_draw(self, (t.k, o), (t.mask, t.mask), n, generator)  # [n, ..., K + K, D]
        h_k = t.scale_k * h[..., :K, :] + sigma * self._normal(n, K, generator)
        B_h = self.K_ok @ solve(keep_rows(h_k, t.mask), self.L_k)  # B h_k, eq. 3
        latent = h[..., K:, :] - B_h - f[..., :K, :] - sigma * self._normal(n, K, generator)
        return t.amplify(f[..., K:, :] + A_t.mT @ latent)
