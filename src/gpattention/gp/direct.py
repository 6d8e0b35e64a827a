"""Direct GP attention: plain asymmetric kernel attention as the posterior mean of one GP (eq. 2).

K_q = s_q^2 kappa(q, q),  K_k = s_k^2 kappa(k, k),  K_qk = s_q s_k kappa(q, k)       (1)
M_k = K_k + sigma^2 I = L_k L_k^T,  observed: z_k = M_k V
mean = K_qk V,   cov = K_q - K_qk M_k^-1 K_kq                                        (2)
"""

import torch
from torch import Generator, Tensor
from torch.linalg import solve_triangular

from gpattention.gp.checks import check_choice
from gpattention.gp.errors import UndefinedCovarianceError
from gpattention.gp.fused.exact.direct import DirectMoments, fused_direct
from gpattention.gp.fused.switch import why_not_fused_on
from gpattention.gp.inputs import Scalar, Tokens, keep_columns, keep_rows, masked, prepare
from gpattention.gp.kernels import gram, log_kappa
from gpattention.gp.noise import NoiseSource
from gpattention.gp.posterior import COSTS, Cost, Posterior, prior_root
from gpattention.gp.precision import full_precision
from gpattention.gp.shapes import broadcast
from gpattention.gp.unit_process import UnitProcess, unit_variance


class UnitDirect(Posterior):
    """Posterior of unit-amplitude processes, to be scaled by exp(log_scale_i) per query.

    Softmax attention (section 10) and row normalisation (section 13) are this with other amplitudes.
    """

    _unit: Tensor | None = None  # u_i, once it was asked for

    @property
    def _process(self) -> UnitProcess:
        """What is scaled."""
        raise NotImplementedError

    @property
    def _log_scale(self) -> Tensor:
        """By how much.  [..., Q] or [..., 1]"""
        raise NotImplementedError

    def _unit_variance(self) -> Tensor:
        """u_i of eq. 22.  [..., Q]"""
        if self._unit is None:
            self._unit = unit_variance(self._process)
        return self._unit

    def _raw_variance(self) -> Tensor:
        return (2 * self._log_scale + self._unit_variance().log()).exp()

    def _prior_stddev(self) -> Tensor:
        return self._log_scale.exp()

    def _log_variance(self) -> Tensor:
        log_variance = 2 * self._log_scale + self._unit_variance().log()
        if self._query_mask is None:
            return log_variance
        return torch.where(self._query_mask, log_variance, -torch.inf)

    def _stddev(self) -> Tensor:
        stddev = (self._log_scale + 0.5 * self._unit_variance().log()).exp()
        return stddev if self._query_mask is None else torch.where(self._query_mask, stddev, 0.0)

    def _spread(self) -> tuple[Tensor, bool]:
        return self._stddev(), False  # whose square may overflow

    def _amplify(self, rows: Tensor) -> Tensor:
        return self._log_scale.exp()[..., None] * rows

    def _full_covariance(self) -> Tensor:
        self._refuse_if_causal()
        process = self._process
        _, R = process.whitened()
        return self._amplify(self._amplify(process.prior() - R.mT @ R).mT)

    def _joint_deviation(self, n: int, generator: Generator | NoiseSource | None) -> Tensor:
        """Matheron's rule: a prior draw at (k, q) minus what the observations explain of it."""
        self._refuse_if_causal()
        p = self._process
        L, R = p.whitened()
        A = solve_triangular(L.mT, R, upper=True).mT  # [..., Q, K]  kappa_qk (kappa_kk + noise I)^-1
        K = p.k.shape[-2]
        f = prior_draw(self, (p.k, p.q), (p.mask, p.query_mask), n, generator)  # [n, ..., K + Q, D]
        observed = f[..., :K, :] + p.noise.sqrt() * self._normal(n, K, generator)
        return self._amplify(f[..., K:, :] - A @ observed)

    def _refuse_if_causal(self) -> None:
        if self._process.causal:
            raise UndefinedCovarianceError(
                "causal attention defines a variance per row, no covariance between rows: "
                "use .variance, or .sample(joint=False)"
            )


class DirectPosterior(UnitDirect):
    """The posterior of eq. 2; its moments come from fused kernels where these run."""

    def __init__(
        self, t: Tokens, *, causal: bool = False, with_variance: bool = False, with_cost: Cost = "none"
    ) -> None:
        self.given = t  # as they came; the kernels mask what they read
        self._masked: Tokens | None = None
        self._causal, self._cost = causal, with_cost
        self._fused: DirectMoments | None = None
        if self.why_not_fused() is None:
            self._fused = fused_direct(t, with_variance=with_variance, cost=with_cost)
            mean = self._fused.mean
        else:
            mean = direct_weights(self.t, causal=causal) @ self.t.v
        super().__init__(mean, None if self._fused else t.query_mask, t.dtype)  # eq. 2
        self._query_mask = t.query_mask

    @property
    def t(self) -> Tokens:
        """The checked inputs, masked."""
        if self._masked is None:
            self._masked = masked(self.given)
        return self._masked

    @property
    def _process(self) -> UnitProcess:
        t = self.t
        return UnitProcess(t.q, t.k, t.noise / t.scale_k.square(), t.mask, t.query_mask, self._causal)

    @property
    def _log_scale(self) -> Tensor:
        return log_query_scale(self.given)

    def why_not_fused(self) -> str | None:
        """None if moments, marginal density and KL come from fused kernels, else the reason."""
        if self._causal:
            return "causal attention has no kernel"
        t = self.given
        tokens, channels = max(t.q.shape[-2], t.k.shape[-2]), max(t.k.shape[-1], t.v.shape[-1])
        return why_not_fused_on(t.q.device, t.q.dtype, tokens=tokens, channels=channels)

    def fused(self) -> DirectMoments | None:
        """The fused kernels' moments and key density, where they apply."""
        if self._fused is not None and self._fused.variance is None:
            self._fused = fused_direct(self.given, with_variance=True)
        return self._fused

    def fused_cost(self, cost: Cost) -> Tensor | None:
        """Minus eq. 12 (GP) or eq. 23 by the fused kernels, at hand if it was announced.  [...]

        None where plain operations run.
        """
        if self.why_not_fused() is not None:
            return None
        if self._fused is None or self._cost != cost:
            self._cost, self._fused = cost, fused_direct(self.given, with_variance=True, cost=cost)
        return self._fused.cost

    def _unit_variance(self) -> Tensor:
        fused = self.fused()
        return super()._unit_variance() if fused is None or fused.unit is None else fused.unit

    def _full_variance(self) -> Tensor:
        fused = self.fused()
        return super()._full_variance() if fused is None or fused.variance is None else fused.variance

    def _stddev(self) -> Tensor:
        fused = self.fused()
        return super()._stddev() if fused is None or fused.stddev is None else fused.stddev


def prior_draw(
    posterior: Posterior,
    inputs: tuple[Tensor, ...],
    masks: tuple[Tensor | None, ...],
    n: int,
    generator: Generator | NoiseSource | None,
) -> Tensor:
    """A draw of the canonical GP at several token sets together, each with its mask.  [n, ..., sum N, D]

    Each set has numbers of its own, so that padding behind one moves those of no other.
    """
    lead = broadcast(*(x.shape[:-2] for x in inputs), *(m.shape[:-1] for m in masks if m is not None))
    together = torch.cat([x.expand(*lead, *x.shape[-2:]) for x in inputs], -2)
    root = prior_root(gram(together.double()), _together(inputs, masks, lead))  # [..., sum N, sum N]
    noise = [posterior._normal(n, x.shape[-2], generator) for x in inputs]
    return root.to(together.dtype) @ torch.cat(noise, -2)


def _together(
    inputs: tuple[Tensor, ...], masks: tuple[Tensor | None, ...], lead: torch.Size
) -> Tensor | None:
    """One mask over several token sets.  [..., sum N]"""
    if all(mask is None for mask in masks):
        return None
    real = [
        x.new_ones(x.shape[-2], dtype=torch.bool) if mask is None else mask
        for x, mask in zip(inputs, masks, strict=True)
    ]
    return torch.cat([mask.expand(*lead, mask.shape[-1]) for mask in real], -1)


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
) -> DirectPosterior:
    """Kernel attention K_qk V with its exact GP covariance (eq. 2); the mean needs no solve.

    `noise` is sigma^2 of the observed keys.  `query_mask` defaults to `mask` when queries and keys
    are equally many (self-attention); pass it for cross-attention.  `log_amplitude` multiplies the
    query process per token: with `row_log_amplitude` the mean is row-normalised (eq. 25).
    `causal=True` lets row i see keys up to i only; then only per-row variances are defined.
    `with_variance` and `with_cost` (the regulariser "marginal" or "kl") announce what will be asked for:
    fused kernels compute it with the mean.
    """
    check_choice("with_cost", with_cost, COSTS)
    t = prepare(
        q, k, v, noise=noise, scale_q=scale_q, scale_k=scale_k, mask=mask,
        query_mask=query_mask, log_amplitude=log_amplitude, causal=causal, mask_tokens=False,
    )  # fmt: skip
    return DirectPosterior(t, causal=causal, with_variance=with_variance, with_cost=with_cost)


def log_query_scale(t: Tokens) -> Tensor:
    """log(s_q a_i).  [..., Q] or [..., 1]"""
    log_scale = t.scale_q[..., 0].log()
    return log_scale if t.log_amplitude is None else log_scale + t.log_amplitude


def direct_weights(t: Tokens, *, causal: bool = False) -> Tensor:
    """K_qk of eq. 1 with amplitudes inside the exponent, where they cannot overflow.  [..., Q, K]"""
    exponent = log_query_scale(t)[..., None] + log_kappa(t.q, t.k)
    weights = t.scale_k * exponent.exp()
    weights = keep_columns(keep_rows(weights, t.query_mask), t.mask)
    return weights.tril() if causal else weights


def amplified_gram(t: Tokens) -> Tensor:
    """K_q = D_a s_q^2 kappa(q, q) D_a, zero at padded queries.  [..., Q, Q]"""
    kappa = keep_columns(keep_rows(gram(t.q), t.query_mask), t.query_mask)
    return t.amplify(t.amplify(kappa).mT)
