"""Kernel attention with its exact posterior (eq. 2)."""

from typing import Any

from torch import Generator, Tensor

from gpattention.attention.base import Heads
from gpattention.attention.gaussian import GaussianAttention, causal_options
from gpattention.attention.registry import register_attention
from gpattention.gp import LogDensity, NoiseSource, Posterior, direct_log_density, direct_posterior
from gpattention.gp.direct import DirectPosterior
from gpattention.gp.direct_density import direct_density_of
from gpattention.gp.divergence import direct_kl_of
from gpattention.gp.posterior import Cost


@register_attention("direct")
class DirectAttention(GaussianAttention):
    """The mean is kernel attention itself; the variance is the direct GP's.

    Options beside those of `Attention`: `normalize`, `noise`, `learn_noise`, `scale`, `learn_scale`,
    `prior_scale`, `learn_prior_scale`, `max_stddev` (see `GaussianAttention`), `causal`.
    """

    causal_form = True
    regularizers = ("kl", "marginal", "joint", "none")
    default_regularizer = "kl"

    def __init__(self, embed_dim: int, num_heads: int, *, causal: bool = False, **options: Any) -> None:
        super().__init__(embed_dim, num_heads, **(causal_options(options) if causal else options))
        self.causal = causal

    def _posterior(self, heads: Heads, *, with_variance: bool = False) -> Posterior:
        q, k = self._projected(heads)
        v, options = self._amplitudes(q, k, heads, causal=self.causal)
        return direct_posterior(
            q, k, v, causal=self.causal, with_variance=with_variance, with_cost=self._announced(), **options
        )

    def _announced(self) -> Cost:
        """The regulariser that a training step will ask for, where fused kernels can give it."""
        if not self.training or self.causal:
            return "none"
        return "kl" if self.regularizer == "kl" else "marginal" if self.regularizer == "marginal" else "none"

    def _regularizer(
        self, heads: Heads, posterior: Posterior, generator: Generator | NoiseSource | None
    ) -> Tensor:
        direct = _direct(posterior)
        if self.regularizer == "kl":
            return direct_kl_of(direct)
        fused = direct.fused_cost("marginal") if self._announced() == "marginal" else None
        if fused is not None:
            return fused
        return self._density(direct_density_of(direct, self.regularizer))  # type: ignore[arg-type]

    def _log_density(self, heads: Heads, posterior: Posterior) -> LogDensity:
        if not self.causal:
            return direct_density_of(_direct(posterior))
        q, k = self._projected(heads)
        v, options = self._amplitudes(q, k, heads, causal=False)
        return direct_log_density(q, k, v, **options)


def _direct(posterior: Posterior) -> DirectPosterior:
    if not isinstance(posterior, DirectPosterior):
        raise TypeError(f"expected the direct model's posterior, got {type(posterior).__name__}")
    return posterior
