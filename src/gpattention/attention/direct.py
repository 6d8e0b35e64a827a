"""Kernel attention with its exact posterior (eq. 2)."""

from typing import Any

from gpattention.attention.base import Heads, register_attention
from gpattention.attention.gaussian import GaussianAttention, causal_options
from gpattention.gp import LogDensity, Posterior, direct_posterior


@register_attention("direct")
class DirectAttention(GaussianAttention):
    """The mean is kernel attention itself; the variance is the direct GP's.

    Args:
        embed_dim: width E of the tokens and of the output.
        num_heads: number H of heads; E must be a multiple.
        causal: whether token i sees only tokens up to i.
        **options: those of `GaussianAttention` and `Attention`.

    Raises:
        ValueError: an option is unknown, or has no effect in the mode that is chosen.
    """

    causal_form = True
    exportable = True
    regularizers = ("kl", "marginal", "joint", "none")

    def __init__(self, embed_dim: int, num_heads: int, *, causal: bool = False, **options: Any) -> None:
        super().__init__(embed_dim, num_heads, **causal_options(options, causal=causal))
        self.causal = causal

    def _posterior(self, heads: Heads, *, with_variance: bool = False) -> Posterior:
        q, k = self._projected(heads)
        v, options = self._amplitudes(q, k, heads, causal=self.causal)
        return direct_posterior(
            q, k, v, causal=self.causal, with_variance=with_variance, with_cost=self._announced(),
            with_draw=heads.one_draw, **options,
        )  # fmt: skip

    def _log_density(self, heads: Heads, posterior: Posterior) -> LogDensity:
        if self.causal:  # of rows that see all keys: the others share no one density
            q, k = self._projected(heads)
            v, options = self._amplitudes(q, k, heads, causal=False)
            posterior = direct_posterior(q, k, v, **options)
        return posterior.log_density()
