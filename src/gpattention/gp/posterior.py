"""What every attention posterior offers: mean, variance, covariance, draws.

Only the mean is computed at construction.  Variance and covariance are computed when they are asked
for, from the factors the mean already needed.
"""

from typing import Any, get_args

import torch
from torch import Generator, Tensor

from gpattention.gp.density import LogDensity
from gpattention.gp.inputs import keep_real, keep_rows, with_diagonal
from gpattention.numerics import Cost, UndefinedCovarianceError, cholesky, full_precision, kept
from gpattention.ops import ItemNoise, NoiseSource, standard_normal, why_not_fused
from gpattention.ops.draws import draws_fit, fused_draw, fused_item_draw

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
    def sample(
        self, n: int = 1, *, generator: Generator | NoiseSource | None = None, joint: bool = False
    ) -> Tensor:
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

    def _fused_draws(self, n: int, generator: Generator | NoiseSource | None) -> Tensor:
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

    def _normal(self, n: int, rows: int, generator: Generator | NoiseSource | None) -> Tensor:
        """Standard normal numbers.  [n, ..., rows, D]"""
        shape = (n, *self._mean.shape[:-2], rows, self._mean.shape[-1])
        return standard_normal(shape, self._mean.dtype, self._mean.device, generator)

    def _raw_variance(self) -> Tensor:
        raise NotImplementedError

    def _prior_stddev(self) -> Tensor:
        raise NotImplementedError

    def _full_covariance(self) -> Tensor:
        raise NotImplementedError

    def _joint_deviation(self, n: int, generator: Generator | NoiseSource | None) -> Tensor:
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
