"""What every attention posterior offers: mean, variance, covariance, draws, and the densities beside them.

Only the mean is computed at construction.  Variance and covariance are computed when they are asked
for, from the factors the mean already needed.  Densities and divergences are of Gaussians under masks, the
blocks the regularisers are made of.  A posterior's KL divergence from its prior is bounded below by 0:

    K = sum_a KL(N(nu_a, V + tau^2 I) || N(0, K_q + tau^2 I))
      = 1/2 [|L_q^-1 N|^2 + s (|L_q^-1 L_V|^2 - n + log det(K_q + tau^2 I) - log det(V + tau^2 I))]   (23)
"""

import math
from dataclasses import dataclass
from typing import Any, TypeAlias, get_args

import torch
from torch import Generator, Tensor
from torch.linalg import solve_triangular

from gpattention.gp.inputs import Scalar, check_positive, expanded, keep_real, keep_rows, with_diagonal
from gpattention.numerics import (
    Cost,
    Tokens,
    UndefinedCovarianceError,
    checks_are_deferred,
    cholesky,
    compute_dtype,
    full_precision,
    inverse,
    kept,
    once_differentiable,
    solve,
    wants_plain_operations,
)
from gpattention.ops import ItemNoise, NoiseSource, standard_normal, why_not_fused
from gpattention.ops.draws import draws_fit, fused_draw, fused_item_draw

Source: TypeAlias = Generator | NoiseSource | None  # of random numbers; None is torch's own


@dataclass(frozen=True, slots=True)
class LogDensity:
    """log p(z_q) and log p(z_k), not negated, per sequence and head, summed over value channels.

    For the objective "joint", `query` is log p(z_q | z_k), so that `total` is the joint density.

    Attributes:
        query: log density of the queries' outputs.  [...]
        key: log density of the observed keys.  [...]
        real_queries: number of real queries.  [...]
        real_keys: number of real keys.  [...]
        channels: number of value channels.
    """

    query: Tensor  # [...]
    key: Tensor  # [...]
    real_queries: Tensor  # [...]
    real_keys: Tensor  # [...]
    channels: int

    @property
    def total(self) -> Tensor:
        """Sum of both terms.  [...]"""
        return self.query + self.key

    def per_token(self) -> "LogDensity":
        """Each term divided by its real tokens and by the value channels (0 for empty ones).

        Returns:
            The same with counts of 1.
        """
        query, key = (
            total / (real.clamp_min(1) * self.channels)
            for total, real in ((self.query, self.real_queries), (self.key, self.real_keys))
        )
        return LogDensity(query, key, torch.ones_like(self.real_queries), torch.ones_like(self.real_keys), 1)


def as_log_density(t: Tokens, query: Tensor, key: Tensor) -> LogDensity:
    """Both terms with the counts `per_token` divides by."""
    query, key = torch.broadcast_tensors(query, key)  # keys shared by a batch count in each sequence
    return LogDensity(query, key, t.real_queries(), t.real_keys(), t.v.shape[-1])


def gaussian_log_density(X: Tensor, L: Tensor, real: Tensor) -> Tensor:
    """sum over channels of log N(x; 0, L L^T), to which padding adds nothing.  [...]

    X [..., N, D] is zero at padded tokens and the Cholesky factor L [..., N, N] the identity; `real` [...]
    counts the other tokens.
    """
    quadratic = solve_triangular(L, X, upper=False).square().sum((-2, -1))
    return quadratic_log_density(quadratic, log_det(L), real, X)


def prior_log_density(X: Tensor, C: Tensor, real: Tensor, *, name: str, noise: Tensor) -> Tensor:
    """The same from the covariance C = L L^T itself, with its gradient written out.  [...]"""
    X, C = expanded(X, C)
    if wants_plain_operations():
        return gaussian_log_density(X, cholesky(C, name=name, noise=noise), real)
    cost: Tensor = _GaussianCost.apply(X, C, name, noise)  # type: ignore[no-untyped-call]
    return -0.5 * (cost + X.shape[-1] * real * math.log(2 * math.pi))


class _GaussianCost(torch.autograd.Function):
    """sum over channels of x^T C^-1 x + log det C; with Y = C^-1 X:  dX = 2 Y,  dC = D C^-1 - Y Y^T."""

    @staticmethod
    def forward(ctx: Any, X: Tensor, C: Tensor, name: str, noise: Tensor) -> Tensor:
        L = cholesky(C, name=name, noise=noise)
        white = solve_triangular(L.mT, X.mT, upper=True, left=False)  # [..., D, N]
        ctx.save_for_backward(L, white)
        return white.square().sum((-2, -1)) + X.shape[-1] * log_det(L)

    @staticmethod
    @once_differentiable
    @full_precision
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        L, white = ctx.saved_tensors
        g = grads[0][..., None, None]
        Y = solve_triangular(L, white, upper=False, left=False)  # [..., D, N]
        dX = dC = None
        if ctx.needs_input_grad[0]:
            dX = 2 * g * Y.mT
        if ctx.needs_input_grad[1]:
            dC = g * (Y.shape[-2] * inverse(L) - Y.mT @ Y)
        return dX, dC, None, None


def quadratic_log_density(quadratic: Tensor, log_det: Tensor, real: Tensor, X: Tensor) -> Tensor:
    """The same with quadratic form, summed over channels, and log determinant already known.  [...]"""
    return -0.5 * (quadratic + X.shape[-1] * (log_det + real * math.log(2 * math.pi)))


def log_det(L: Tensor) -> Tensor:
    """log det L L^T.  [...]"""
    return 2 * L.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def lowrank_log_density(X: Tensor, F: Tensor, noise: Tensor, real: Tensor) -> Tensor:
    """sum over channels of log N(x; 0, noise I + F F^T) in O(N m^2).  [...]

    X [..., N, D] and F [..., N, m] are zero at padded tokens; noise [..., 1, 1].  The quadratic form is the
    minimum of a ridge regression, |x - F w|^2 / noise + |w|^2, a sum of squares; the usual
    |x|^2 - |L_B^-1 F^T x|^2 / noise loses every digit when x lies in F's span.
    """
    L_B = lowrank_root(F.mT @ F, noise, "F^T F")  # [..., m, m]
    w = solve(F.mT @ X / noise, L_B)  # [..., m, D]  the minimum itself, so that both terms are squares
    scalar = noise[..., 0, 0]
    quadratic = (X - F @ w).square().sum((-2, -1)) / scalar + w.square().sum((-2, -1))
    return -0.5 * (quadratic + X.shape[-1] * (log_det(L_B) + real * (2 * math.pi * scalar).log()))


def lowrank_root(FF: Tensor, noise: Tensor, name: str) -> Tensor:
    """chol(I + F^T F / noise) for F^T F, which errors call `name`.  [..., m, m]"""
    return cholesky(with_diagonal(FF / noise, 1.0), name=f"I + {name} / noise", noise=noise)


def kl_to_prior(mean: Tensor, V: Tensor, K_q: Tensor, tau: Tensor, query_mask: Tensor | None) -> Tensor:
    """Eq. 23 of a mean [..., Q, D] and covariances V and K_q [..., Q, Q], with tau^2 [..., 1, 1].  [...]

    Both covariances are the identity at padded queries, so that n counts these too.
    """
    L_V = cholesky(with_diagonal(V, tau, query_mask), name="V + tau^2 I", noise=tau)
    L_q = cholesky(with_diagonal(K_q, tau, query_mask), name="K_q + tau^2 I", noise=tau)
    quadratic = solve_triangular(L_q, mean, upper=False).square().sum((-2, -1))
    trace = solve_triangular(L_q, L_V, upper=False).square().sum((-2, -1)) - mean.shape[-2]
    return 0.5 * (quadratic + mean.shape[-1] * (trace + log_det(L_q) - log_det(L_V)))


def noise_floor(
    noise: Scalar,
    *,
    observation_noise: Scalar | None = None,
    scale: Scalar | None = None,
    tokens: int | Tensor | None = None,
) -> Tensor:
    """The least a negative log density can reach, per term, token and value channel (section 11).

    1/2 log(2 pi tau^2), reached when means, amplitudes and values have collapsed to nothing; with
    `scale` and `tokens` given, the floor at that fixed amplitude, all tokens merged.  The plain floor holds
    for every objective of `Posterior.log_density` but "printed"; the one at fixed amplitude for "marginal"
    and "jensen" with the noisy latent prior.  The keys of the direct model always have sigma^2: their floor
    takes no `observation_noise`.  A run whose regulariser sits here has collapsed, whatever its ECE says.

    Args:
        noise: sigma^2.
        observation_noise: tau^2, sigma^2 when None; 0.0 (the paper's) has no floor and gives -inf.
        scale: s_q or s_k.
        tokens: how many there are.

    Returns:
        The floor, in the type and shape of the noise.

    Raises:
        ValueError: one of `scale` and `tokens` without the other, or a noise that is negative.
    """
    if (scale is None) != (tokens is None):
        raise ValueError("scale and tokens belong together: give both or neither")
    name, value = ("noise", noise) if observation_noise is None else ("observation_noise", observation_noise)
    tau = torch.as_tensor(value)
    tau = tau.to(compute_dtype(tau.dtype)) if tau.is_floating_point() else tau.double()
    if not checks_are_deferred(tau) and not bool((tau >= 0).all()):
        raise ValueError(f"expected {name} >= 0, got {float(tau.detach().min())}")
    floor = 0.5 * (2 * math.pi * tau).log()
    if scale is None or tokens is None:
        return floor
    n = torch.as_tensor(tokens, dtype=tau.dtype, device=tau.device)
    check_positive("tokens", n)
    merged = torch.log1p(n * torch.as_tensor(scale, dtype=tau.dtype, device=tau.device) ** 2 / tau)
    return floor + merged / (2 * n)


COSTS: tuple[Cost, ...] = get_args(Cost)

# Added to the diagonal of *prior* Gram matrices when joint draws factor them, in float64.
PRIOR_DELTA = 1e-10


class Posterior:
    """A Gaussian over the attention output of every query.

    The covariance is shared by the D value channels, except for SGPA, which has one per channel.
    Padded queries have mean, variance and draws of exactly 0.

    Args:
        mean: [..., Q, D] in the computing type.
        query_mask: [..., Q], True = real token; None where all are.
        dtype: of what is handed out.
    """

    _announced_draw: Tensor | None = None  # that was made with the mean

    def __init__(self, mean: Tensor, query_mask: Tensor | None, dtype: torch.dtype) -> None:
        self._mean = keep_rows(mean, query_mask)  # [..., Q, D] in the computing type
        self._query_mask = query_mask  # [..., Q]
        self._dtype = dtype

    @property
    def mean(self) -> Tensor:
        """The attention output.  [..., Q, D]"""
        return self._mean.to(self._dtype)

    @property
    def variance(self) -> Tensor:
        """Predictive variance of every query token.  [..., Q]; SGPA: [..., Q, D]"""
        return self._variance.to(self._dtype)

    @property
    def log_variance(self) -> Tensor:
        """Its logarithm, which does not overflow; -inf at padded queries."""
        return self._log_variance().to(self._dtype)

    @property
    def stddev(self) -> Tensor:
        """Predictive standard deviation, with finite gradients where it is 0."""
        return self._stddev().to(self._dtype)

    @property
    def prior_stddev(self) -> Tensor:
        """Standard deviation before anything was observed, 0 at padded queries.  [..., Q]

        Where the posterior's is no smaller, the keys had nothing to say about a query.
        """
        prior = self._prior_stddev().expand(self._mean.shape[:-1])
        return keep_real(prior, self._query_mask).to(self._dtype)

    @full_precision
    def covariance(self) -> Tensor:
        """Dense covariance between query tokens.  [..., Q, Q]; SGPA: [..., D, Q, Q]

        Returns:
            It, in the inputs' type.

        Raises:
            UndefinedCovarianceError: the attention is causal.
        """
        return self._full_covariance().to(self._dtype)

    def log_density(self, *args: Any, **options: Any) -> LogDensity:
        """log p of the outputs and of what was observed, in models that define it (section 2).

        Args:
            *args: the objective.
            **options: as the model's own posterior documents them.

        Returns:
            Both terms.

        Raises:
            NotImplementedError: the model has none.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no log density")

    def kl(self, *args: Any, **options: Any) -> Tensor:
        """The divergence from the prior, in models that define it (section 11).

        Args:
            *args: as the model's own posterior documents them.
            **options: likewise.

        Returns:
            [...].

        Raises:
            NotImplementedError: the model has none.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no divergence from its prior")

    @full_precision
    def sample(self, n: int = 1, *, generator: Source = None, joint: bool = False) -> Tensor:
        """Reparameterised draws, independent between value channels.

        Args:
            n: how many.
            generator: of the random numbers; None is torch's own.
            joint: False draws every token on its own from its variance, as SGPA does; True draws from the
                full covariance, by a factor that is a square and so cannot be indefinite.

        Returns:
            [n, ..., Q, D].

        Raises:
            ValueError: n is below 1, or the generator does not fit the batch.
            UndefinedCovarianceError: `joint` draws of causal attention.
        """
        if n < 1:
            raise ValueError(f"expected n >= 1 draws, got {n}")
        if self._announced_draw is not None and n == 1 and not joint and generator is None:
            draw, self._announced_draw = self._announced_draw, None  # another one has other numbers
            return draw.to(self._dtype)
        if joint:
            deviation = self._joint_deviation(n, generator)
        else:
            if why_not_fused(self._mean) is None and draws_fit(torch.Size((n, *self._mean.shape))):
                return self._fused_draws(n, generator).to(self._dtype)
            noise = self._normal(n, self._mean.shape[-2], generator)
            stddev = self._stddev()
            stddev = stddev if stddev.ndim == self._mean.ndim else stddev[..., None]
            deviation = stddev * noise
        return (self._mean + keep_rows(deviation, self._query_mask)).to(self._dtype)

    def _fused_draws(self, n: int, generator: Source) -> Tensor:
        spread, squared = self._spread()
        if type(generator) is ItemNoise and spread.ndim < self._mean.ndim > 2:
            keys, stream = generator.next_draws(self._mean.shape[0], self._mean.device)
            return fused_item_draw(self._mean, spread, keys, stream=stream, draws=n, squared=squared)
        noise = self._normal(n, self._mean.shape[-2], generator)
        return fused_draw(self._mean, spread, noise, squared=squared)

    @kept
    def _variance(self) -> Tensor:
        """The variance, 0 at padded queries, in the computing type."""
        return self._full_variance()

    def _full_variance(self) -> Tensor:
        variance = self._raw_variance()
        if variance.ndim == self._mean.ndim:  # one per channel
            return keep_rows(variance, self._query_mask)
        return keep_real(variance, self._query_mask)

    def _log_variance(self) -> Tensor:
        real = self._real_like(self._variance)
        return torch.where(real, torch.where(real, self._variance, 1.0).log(), -torch.inf)

    def _stddev(self) -> Tensor:
        # sqrt has an infinite slope at 0, so padded tokens pass through 1
        real = self._real_like(self._variance)
        return torch.where(real, torch.where(real, self._variance, 1.0).sqrt(), 0.0)

    def _spread(self) -> tuple[Tensor, bool]:
        """What independent draws scale with: the variance (True) or the standard deviation (False)."""
        return self._variance, True

    def _real_like(self, variance: Tensor) -> Tensor:
        positive = variance > 0
        if self._query_mask is None:
            return positive
        channels = variance.ndim == self._mean.ndim
        return positive & (self._query_mask[..., None] if channels else self._query_mask)

    def _normal(self, n: int, rows: int, generator: Source) -> Tensor:
        """Standard normal numbers.  [n, ..., rows, D]"""
        shape = (n, *self._mean.shape[:-2], rows, self._mean.shape[-1])
        return standard_normal(shape, self._mean.dtype, self._mean.device, generator)

    def _raw_variance(self) -> Tensor:
        raise NotImplementedError

    def _prior_stddev(self) -> Tensor:
        raise NotImplementedError

    def _full_covariance(self) -> Tensor:
        raise NotImplementedError

    def _joint_deviation(self, n: int, generator: Source) -> Tensor:
        raise NotImplementedError


def undefined_covariance() -> UndefinedCovarianceError:
    """What is raised where attention is causal."""
    return UndefinedCovarianceError(
        "causal attention defines a variance per row, no covariance between rows: "
        "use .variance, or .sample(joint=False)"
    )


def prior_root(K: Tensor, mask: Tensor | None = None) -> Tensor:
    """Factor of a float64 prior Gram matrix that may be singular, with a fixed tiny delta.

    Tokens may coincide, so a prior Gram has no float32 factor in general: the caller evaluates the
    kernel in float64, where a delta of 1e-10 gives one, and 1e-5 of a standard deviation is far below
    what a draw can show.  The rows of real tokens are the same wherever and however many padded ones,
    where `mask` is False, stand between or behind them.  [..., N, N]
    """
    return cholesky(with_diagonal(K, PRIOR_DELTA, mask), name="prior Gram", noise=PRIOR_DELTA)
