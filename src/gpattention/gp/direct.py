"""Direct GP attention: plain asymmetric kernel attention as the posterior mean of one GP (eq. 2).

    K_q = s_q^2 kappa(q, q),  K_k = s_k^2 kappa(k, k),  K_qk = s_q s_k kappa(q, k)       (1)
    M_k = K_k + sigma^2 I = L_k L_k^T,  observed: z_k = M_k V
    mean = K_qk V,   cov = K_q - K_qk M_k^-1 K_kq                                        (2)

Behind it, and behind softmax attention, is a process of unit amplitude and what its keys leave open of it:

    L = chol(kappa(k, k) + noise I),   R = L^-1 kappa(k, q)
    u_i = 1 - |R_i|^2                                                                    (2), (22)
"""

from collections.abc import Sequence
from typing import ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.linalg import solve_triangular

from gpattention.checks import check_choice
from gpattention.gp.closed import ClosedMoments, closed_explained, closed_moments
from gpattention.gp.inputs import (
    Scalar,
    keep_pairs,
    keep_real,
    key_noise,
    masked,
    observation_variance,
    prepare,
    with_diagonal,
)
from gpattention.gp.kernels import cross_gram, gram, log_kappa
from gpattention.gp.posterior import (
    COSTS,
    LogDensity,
    Posterior,
    Source,
    as_log_density,
    gaussian_log_density,
    kl_to_prior,
    log_det,
    prior_root,
    quadratic_log_density,
    undefined_covariance,
)
from gpattention.numerics import Cost, Tokens, broadcast, cholesky, full_precision, kept
from gpattention.ops import why_not_fused_on
from gpattention.ops.exact import PRIOR_COVARIANCE, Moments, fused_direct, fused_prior_density


class UnitProcess(NamedTuple):
    """A process of unit amplitude: where it is seen, and where it was observed (eq. 22).

    Attributes:
        q: where it is seen.  [..., Q, C]
        k: where it was observed.  [..., K, C]
        noise: of the observations, sigma^2 / s_k^2.  [..., 1, 1]
        mask: which observations are real.  [..., K]
        query_mask: which queries are real.  [..., Q]
        causal: whether query i sees the keys up to i alone.
    """

    q: Tensor  # [..., Q, C]
    k: Tensor  # [..., K, C]
    noise: Tensor  # [..., 1, 1]  sigma^2 / s_k^2
    mask: Tensor | None = None  # [..., K] True = real
    query_mask: Tensor | None = None  # [..., Q]
    causal: bool = False

    def prior(self) -> Tensor:
        """kappa(q, q), zero at padded queries.  [..., Q, Q]"""
        return gram(self.q, self.query_mask)

    def whitened(self) -> tuple[Tensor, Tensor]:
        """L and R.  [..., K, K], [..., K, Q]"""
        M = with_diagonal(gram(self.k), self.noise, self.mask)  # [..., K, K]
        L = cholesky(M, name="K_k + noise I", noise=self.noise)
        K_kq = cross_gram(self.k, self.q, self.mask, self.query_mask)  # [..., K, Q]
        # R^T = K_qk L^-T: LAPACK solves from that side in less than half the time
        return L, solve_triangular(L.mT, K_kq.mT, upper=True, left=False).mT


@full_precision
def unit_variance(process: UnitProcess) -> Tensor:
    """u_i of eq. 22, within its proven bounds.

    Args:
        process: where it is seen, and where it was observed.

    Returns:
        [..., Q].

    Raises:
        NotPositiveDefiniteError: the keys' covariance has no factor.
    """
    p = process
    explained = None if p.causal else closed_explained(p.q, p.k, p.noise, p.mask, p.query_mask)
    if explained is None:
        _, R = p.whitened()
        R = R.triu() if p.causal else R  # prefixes of a forward substitution are causal
        explained = R.square().sum(-2)
    return within_bounds(1 - explained, p)


def within_bounds(u: Tensor, process: UnitProcess) -> Tensor:
    """u_i between noise / (n + noise), for n keys seen, and 1.  [..., Q]"""
    noise = process.noise[..., 0]  # [..., 1]
    seen = real_key_counts(process.mask, process.k, process.causal)  # [..., 1] or [..., Q]
    return u.clamp(min=noise / (seen + noise), max=torch.ones_like(noise))


def real_key_counts(mask: Tensor | None, k: Tensor, causal: bool) -> Tensor:
    """How many real keys each query sees, as [..., 1] or, causally, [..., Q]."""
    K = k.shape[-2]
    if causal:
        if mask is None:
            return torch.arange(1, K + 1, dtype=k.dtype, device=k.device)
        return mask.cumsum(-1).to(k.dtype)
    if mask is None:
        return k.new_full((1,), K)
    return mask.sum(-1, keepdim=True).to(k.dtype)


class UnitDirect(Posterior):
    """Posterior of unit-amplitude processes, to be scaled by exp(log_scale_i) per query.

    Softmax attention (section 10) and row normalisation (section 13) are this with other amplitudes.
    """

    @property
    def _process(self) -> UnitProcess:
        """What is scaled."""
        raise NotImplementedError

    @property
    def _log_scale(self) -> Tensor:
        """Log amplitude per query.  [..., Q] or [..., 1]"""
        raise NotImplementedError

    @kept
    def _unit_variance(self) -> Tensor:
        """u_i of eq. 22.  [..., Q]"""
        return self._find_unit_variance()

    def _find_unit_variance(self) -> Tensor:
        return unit_variance(self._process)

    def _raw_variance(self) -> Tensor:
        return (2 * self._log_scale + self._unit_variance.log()).exp()

    def _prior_stddev(self) -> Tensor:
        return self._log_scale.exp()

    def _log_variance(self) -> Tensor:
        log_variance = 2 * self._log_scale + self._unit_variance.log()
        if self._query_mask is None:
            return log_variance
        return torch.where(self._query_mask, log_variance, -torch.inf)

    def _stddev(self) -> Tensor:
        return keep_real((self._log_scale + 0.5 * self._unit_variance.log()).exp(), self._query_mask)

    def _spread(self) -> tuple[Tensor, bool]:
        return self._stddev(), False  # whose square may overflow

    def _amplify(self, rows: Tensor) -> Tensor:
        return self._log_scale.exp()[..., None] * rows

    def _full_covariance(self) -> Tensor:
        process = self._process
        if process.causal:
            raise undefined_covariance()
        _, R = process.whitened()
        return self._amplify(self._amplify(process.prior() - R.mT @ R).mT)

    def _joint_deviation(self, n: int, generator: Source) -> Tensor:
        """Matheron's rule: a prior draw at (k, q) minus what the observations explain of it."""
        p = self._process
        if p.causal:
            raise undefined_covariance()
        L, R = p.whitened()
        A = solve_triangular(L.mT, R, upper=True).mT  # [..., Q, K]  kappa_qk (kappa_kk + noise I)^-1
        K = p.k.shape[-2]
        f = prior_draw(self, (p.k, p.q), (p.mask, p.query_mask), n, generator)  # [n, ..., K + Q, D]
        observed = f[..., :K, :] + p.noise.sqrt() * self._normal(n, K, generator)
        return self._amplify(f[..., K:, :] - A @ observed)


class ExactPosterior(Posterior):
    """A posterior whose moments and costs come from fused kernels, or from closed forms on a CPU.

    Args:
        t: checked inputs as they came; the kernels mask what they read.
        with_variance: whether the variance will be asked for.
        with_cost: the regulariser that will be asked for, "marginal" (eq. 10) or "kl" (eq. 23).
        with_draw: whether one draw will be asked for.
    """

    query_covariance: ClassVar[str]  # what errors call K_q + tau^2 I
    _may_close = True  # whether the closed forms know this process

    def __init__(
        self, t: Tokens, *, with_variance: bool = False, with_cost: Cost = "none", with_draw: bool = False
    ) -> None:
        self.given, self._cost = t, with_cost
        self._fused: Moments | None = None
        self._closed: ClosedMoments | None = None
        if self.why_not_fused() is None:
            self._fused = self._run_fused(with_variance, with_cost, draw=with_draw)
            super().__init__(self._fused.mean, None, t.dtype)
            self._announced_draw = self._fused.draw
            self._query_mask = t.query_mask
            return
        if (with_variance or with_cost != "none") and self._may_close:
            amplitude = log_query_scale(t).exp()
            self._closed = closed_moments(t, amplitude, cost=with_cost, name=self.query_covariance)
        mean = self._plain_mean(with_variance) if self._closed is None else self._closed.mean
        super().__init__(mean, t.query_mask, t.dtype)

    def _run_fused(self, with_variance: bool, cost: Cost, *, draw: bool = False) -> Moments:
        raise NotImplementedError

    def _plain_mean(self, with_variance: bool) -> Tensor:
        raise NotImplementedError

    @kept
    def t(self) -> Tokens:
        """The checked inputs, masked."""
        return masked(self.given)

    @kept
    def M_k(self) -> Tensor:
        """K_k + sigma^2 I.  [..., K, K]"""
        t = self.t
        return with_diagonal(t.scale_k.square() * gram(t.k), t.noise, t.mask)

    @kept
    def L_k(self) -> Tensor:
        """Cholesky factor of M_k.  [..., K, K]"""
        return cholesky(self.M_k, name="K_k + noise I", noise=key_noise(self.t))

    def why_not_fused(self) -> str | None:
        """None if moments, marginal density and KL come from fused kernels, else the reason."""
        t = self.given
        tokens, channels = max(t.q.shape[-2], t.k.shape[-2]), max(t.k.shape[-1], t.v.shape[-1])
        return why_not_fused_on(t.q.device, t.q.dtype, tokens=tokens, channels=channels)

    def fused(self) -> Moments | None:
        """The fused kernels' moments and key density, where they apply."""
        if self._fused is not None and self._fused.variance is None:
            self._fused = self._run_fused(True, "none")
        return self._fused

    def fused_cost(self, cost: Cost) -> Tensor | None:
        """The regulariser by the fused kernels, at hand if it was announced.

        Args:
            cost: "marginal", minus eq. 10 or 12 (GP), or "kl", eq. 23, both with tau^2 = sigma^2.

        Returns:
            [...], or None where plain operations run, or where it was not announced to the closed forms.
        """
        if self.why_not_fused() is not None:
            return self._closed.cost if self._closed is not None and self._cost == cost else None
        if self._fused is None or self._cost != cost:
            self._cost, self._fused = cost, self._run_fused(True, cost)
        return self._fused.cost

    def _full_variance(self) -> Tensor:
        fused = self.fused()
        return super()._full_variance() if fused is None or fused.variance is None else fused.variance

    @full_precision
    def kl(self, observation_noise: Scalar | None = None) -> Tensor:
        """KL of the posterior from its prior (eq. 23), summed over tokens and channels.

        Args:
            observation_noise: tau^2, sigma^2 when None.

        Returns:
            At least 0, and 0 where attention is switched off.  [...]

        Raises:
            ValueError: the noise is negative.
            NotPositiveDefiniteError: a covariance has no factor.
        """
        tau = observation_variance(observation_noise, self.given)
        fused = self.fused_cost("kl") if tau is self.given.noise else None
        if fused is not None:
            return fused
        t = self.t
        return kl_to_prior(self._mean, self._full_covariance(), amplified_gram(t), tau, t.query_mask)

    def _query_density(self, tau: Tensor) -> Tensor | None:
        """log N(N; 0, K_q + tau^2 I) by the fused kernels (eq. 10 with the noisy prior).  [...]"""
        if self.why_not_fused() is not None:
            return None
        t = self.given
        return fused_prior_density(
            t.q, self._mean, scale=t.scale_q, log_amplitude=t.log_amplitude, noise=tau,
            mask=t.query_mask, name=self.query_covariance,
        )  # fmt: skip

    def _key_density(self) -> Tensor:
        """log N(M_k V; 0, M_k).  [...]"""
        fused = self.fused()
        if fused is not None and fused.key is not None:
            return fused.key
        if self._closed is not None:
            return self._closed.key
        t = self.t
        quadratic = (t.v * (self.M_k @ t.v)).sum((-2, -1))  # Z^T M_k^-1 Z, as Z = M_k V
        return quadratic_log_density(quadratic, self._log_det_k(), t.real_keys(), t.v)

    def _log_det_k(self) -> Tensor:
        """log det M_k.  [...]"""
        return log_det(self.L_k)


DirectObjective = Literal["marginal", "joint"]
DIRECT_OBJECTIVES: tuple[DirectObjective, ...] = get_args(DirectObjective)


class DirectPosterior(ExactPosterior, UnitDirect):
    """The posterior of eq. 2.

    Args:
        t: checked inputs.
        causal: whether row i sees the keys up to i alone.
        with_variance: whether the variance will be asked for.
        with_cost: the regulariser that will be asked for.
    """

    query_covariance = PRIOR_COVARIANCE

    def __init__(
        self, t: Tokens, *, causal: bool = False, with_variance: bool = False, with_cost: Cost = "none",
        with_draw: bool = False,
    ) -> None:  # fmt: skip
        self._causal = causal
        self._may_close = not causal
        super().__init__(t, with_variance=with_variance, with_cost=with_cost, with_draw=with_draw)

    def _run_fused(self, with_variance: bool, cost: Cost, *, draw: bool = False) -> Moments:
        return fused_direct(self.given, with_variance=with_variance, cost=cost, draw=draw)

    def _plain_mean(self, with_variance: bool) -> Tensor:
        return direct_weights(self.t, causal=self._causal) @ self.t.v  # eq. 2

    @property
    def _process(self) -> UnitProcess:
        t = self.t
        return UnitProcess(t.q, t.k, t.noise / t.scale_k.square(), t.mask, t.query_mask, self._causal)

    @property
    def _log_scale(self) -> Tensor:
        return log_query_scale(self.given)

    def why_not_fused(self) -> str | None:
        """None if moments, marginal density and KL come from fused kernels, else the reason."""
        return "causal attention has no kernel" if self._causal else super().why_not_fused()

    def _find_unit_variance(self) -> Tensor:
        fused = self.fused()
        if fused is not None and fused.unit is not None:
            return fused.unit
        if self._closed is not None:
            return within_bounds(self._closed.unit, self._process)
        return super()._find_unit_variance()

    def _stddev(self) -> Tensor:
        fused = self.fused()
        return super()._stddev() if fused is None or fused.stddev is None else fused.stddev

    @full_precision
    def log_density(
        self, objective: DirectObjective = "marginal", *, observation_noise: Scalar | None = None
    ) -> LogDensity:
        """log p of the direct GP's mean K_qk V and observed keys M_k V under the prior (eq. 12, GP).

        Args:
            objective: "marginal" takes each on its own, "joint" both together.
            observation_noise: tau^2 of the queries, sigma^2 when None.

        Returns:
            Both terms; negate their sum for a regulariser.

        Raises:
            ValueError: the objective is unknown, or the noise is negative.
            NotPositiveDefiniteError: a covariance has no factor.
        """
        check_choice("objective", objective, DIRECT_OBJECTIVES)
        tau = observation_variance(observation_noise, self.given)
        query = self._query_density(tau) if objective == "marginal" else None
        if query is None:
            t = self.t
            cov, X = with_diagonal(amplified_gram(t), tau, t.query_mask), self._mean
            if objective == "joint":
                R = solve_triangular(self.L_k, direct_weights(t).mT, upper=False)  # [..., K, Q]
                cov = cov - R.mT @ R
                X = X - R.mT @ (self.L_k.mT @ t.v)  # L_k^T V = L_k^-1 Z for Z = M_k V
            L = cholesky(cov, name=self.query_covariance, noise=tau)
            query = gaussian_log_density(X, L, t.real_queries())
        return as_log_density(self.given, query, self._key_density())


def prior_draw(
    posterior: Posterior, inputs: Sequence[Tensor], masks: Sequence[Tensor | None], n: int, generator: Source
) -> Tensor:
    """A draw of the canonical GP at several token sets together, each with its mask.  [n, ..., sum N, D]

    Each set has numbers of its own, so that padding behind one moves those of no other.
    """
    real = [
        x.new_ones(x.shape[-2], dtype=torch.bool) if mask is None else mask
        for x, mask in zip(inputs, masks, strict=True)
    ]
    lead = broadcast(*(x.shape[:-2] for x in inputs), *(mask.shape[:-1] for mask in real))
    together = torch.cat([x.expand(*lead, *x.shape[-2:]) for x in inputs], -2)
    mask = torch.cat([mask.expand(*lead, mask.shape[-1]) for mask in real], -1)  # [..., sum N]
    root = prior_root(gram(together.double()), mask)  # [..., sum N, sum N]
    noise = [posterior._normal(n, x.shape[-2], generator) for x in inputs]
    return root.to(together.dtype) @ torch.cat(noise, -2)


@full_precision
def direct_posterior(
    q: Tensor,  # [..., Q, C]
    k: Tensor,  # [..., K, C]
    v: Tensor,  # [..., K, D]
    *,
    noise: Scalar,
    scale_q: Scalar = 1.0,
    scale_k: Scalar = 1.0,
    mask: Tensor | None = None,  # [..., K] True = real
    query_mask: Tensor | None = None,  # [..., Q]
    log_amplitude: Tensor | None = None,  # [..., Q]
    causal: bool = False,
    with_variance: bool = False,
    with_cost: Cost = "none",
    with_draw: bool = False,
) -> DirectPosterior:
    """Kernel attention K_qk V with its exact GP covariance (eq. 2); the mean needs no solve.

    Args:
        q: queries.
        k: keys.
        v: values.
        noise: sigma^2 of the observed keys, one number or one per leading axis.
        scale_q: amplitude s_q of the queries.
        scale_k: amplitude s_k of the keys.
        mask: which keys are real.
        query_mask: which queries are real; `mask` when None and queries and keys are equally many
            (self-attention): pass it for cross-attention.
        log_amplitude: multiplies the query process per token: with `row_log_amplitude` the mean is
            row-normalised (eq. 25).
        causal: row i sees keys up to i only; then only per-row variances are defined.
        with_variance: announces that the variance will be asked for: fused kernels compute it with the mean.
        with_cost: announces the regulariser "marginal" or "kl" likewise.
        with_draw: announces one independent draw with torch's own numbers, which fused kernels then make.

    Returns:
        The posterior of every query.

    Raises:
        ValueError: an argument does not fit the others, or is out of its range.
        NumericalError: tokens are not finite or too far apart, or a covariance has no factor.
    """
    check_choice("with_cost", with_cost, COSTS)
    t = prepare(
        q, k, v, noise=noise, scale_q=scale_q, scale_k=scale_k, mask=mask,
        query_mask=query_mask, log_amplitude=log_amplitude, causal=causal, mask_tokens=False,
    )  # fmt: skip
    return DirectPosterior(
        t, causal=causal, with_variance=with_variance, with_cost=with_cost, with_draw=with_draw
    )


def log_query_scale(t: Tokens) -> Tensor:
    """log(s_q a_i).  [..., Q] or [..., 1]"""
    log_scale = t.scale_q[..., 0].log()
    return log_scale if t.log_amplitude is None else log_scale + t.log_amplitude


def direct_weights(t: Tokens, *, causal: bool = False) -> Tensor:
    """K_qk of eq. 1 with amplitudes inside the exponent, where they cannot overflow.  [..., Q, K]"""
    exponent = log_query_scale(t)[..., None] + log_kappa(t.q, t.k)
    weights = keep_pairs(t.scale_k * exponent.exp(), t.query_mask, t.mask)
    return weights.tril() if causal else weights


def amplified_gram(t: Tokens) -> Tensor:
    """K_q = D_a s_q^2 kappa(q, q) D_a, zero at padded queries.  [..., Q, Q]"""
    return t.amplify(t.amplify(gram(t.q, t.query_mask)).mT)
