"""Correlated-GP attention, exact (eq. 4-6) and causal (eq. 17-18)."""

from typing import Any

from torch import Tensor

from gpattention.attention.base import Heads, Source, register_attention
from gpattention.attention.gaussian import GaussianAttention, causal_options
from gpattention.attention.parameters import refuse_unused
from gpattention.checks import check_choice, check_count
from gpattention.gp import LogDensity, Posterior, causal_cgp_posterior, cgp_posterior
from gpattention.gp.correlated import LATENT_PRIORS, LatentPrior
from gpattention.gp.inputs import check_observation_noise
from gpattention.numerics import Cost


@register_attention("cgp")
class CGPAttention(GaussianAttention):
    """Queries predicted from keys through latent inputs of the canonical process: the attention of CGPT.

    Options that the chosen regulariser does not use are refused: only "monte_carlo" draws samples, "kl" has
    no prior of the latent inputs, and "none" (for causal attention) uses none of them.

    Args:
        embed_dim: width E of the tokens and of the output.
        num_heads: number H of heads; E must be a multiple.
        causal: whether token i sees only tokens up to i.
        latent_prior: "noisy" or the paper's "latent".
        observation_noise: None means sigma^2, 0.0 is the paper's.
        regularizer_samples: draws of "monte_carlo".
        **options: those of `GaussianAttention` and `Attention`.

    Raises:
        ValueError: an option is unknown, or has no effect in the mode that is chosen.
    """

    causal_form = True
    projections = ("query", "key", "latent", "value")
    regularizers = ("kl", "marginal", "jensen", "monte_carlo", "joint", "none")

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        causal: bool = False,
        latent_prior: LatentPrior = "noisy",
        observation_noise: float | None = None,
        regularizer_samples: int = 1,
        **options: Any,
    ) -> None:
        super().__init__(embed_dim, num_heads, **causal_options(options, causal=causal))
        check_choice("latent_prior", latent_prior, LATENT_PRIORS)
        if observation_noise is not None:
            check_observation_noise(observation_noise)
        self.causal = causal
        self.latent_prior: LatentPrior = latent_prior
        self.observation_noise = observation_noise
        self.regularizer_samples = check_count("regularizer_samples", regularizer_samples)
        chosen = f"where regularizer is {self.regularizer!r}" + (" (causal attention's)" if causal else "")
        if self.regularizer == "none":
            refuse_unused(CGPAttention, chosen, observation_noise=observation_noise)
        if self.regularizer in ("kl", "none"):
            refuse_unused(CGPAttention, chosen, latent_prior=latent_prior)
        if self.regularizer != "monte_carlo":
            samples = {"regularizer_samples": self.regularizer_samples}
            refuse_unused(CGPAttention, "unless regularizer is 'monte_carlo'", **samples)
        self.latent = self._latent()

    def _posterior(self, heads: Heads, *, with_variance: bool = False) -> Posterior:
        q, k, o = *self._projected(heads), self._projection("latent", heads)
        v, options = self._amplitudes(q, k, heads, causal=self.causal)
        if self.causal:
            options |= {"mask": heads.one_mask("causal 'cgp'")}
            options.pop("query_mask")
            return causal_cgp_posterior(q, k, o, v, **options)
        options |= {"with_variance": with_variance, "with_cost": self._announced()}
        return cgp_posterior(q, k, o, v, with_draw=heads.one_draw, **options)

    def _announced(self) -> Cost:
        papers = self.regularizer == "marginal" and self.latent_prior != "noisy"
        return "none" if papers or self.observation_noise is not None else super()._announced()

    def _regularizer(self, heads: Heads, posterior: Posterior, generator: Source) -> Tensor:
        if self._announced() != "none":
            return super()._regularizer(heads, posterior, generator)
        if self.regularizer == "kl":
            return posterior.kl(self.observation_noise)
        return -posterior.log_density(
            self.regularizer, latent_prior=self.latent_prior, observation_noise=self.observation_noise,
            samples=self.regularizer_samples, generator=generator,
        ).total  # fmt: skip

    def _log_density(self, heads: Heads, posterior: Posterior) -> LogDensity | None:
        return None if self.causal else super()._log_density(heads, posterior)
