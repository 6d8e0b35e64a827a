"""Correlated-GP attention, exact (eq. 4-6) and causal (eq. 17-18)."""

from typing import Any

from torch import Generator, Tensor

from gpattention.attention.base import Heads
from gpattention.attention.gaussian import GaussianAttention, causal_options
from gpattention.attention.registry import register_attention
from gpattention.attention.unused import refuse_unused
from gpattention.checks import check_count
from gpattention.gp import LogDensity, NoiseSource, Posterior, causal_cgp_posterior, cgp_posterior
from gpattention.gp.checks import check_choice, check_observation_noise
from gpattention.gp.correlated import CGPPosterior
from gpattention.gp.correlated_density import LATENT_PRIORS, LatentPrior, cgp_density_of
from gpattention.gp.divergence import cgp_kl_of
from gpattention.gp.posterior import Cost


@register_attention("cgp")
class CGPAttention(GaussianAttention):
    """Queries predicted from keys through latent inputs of the canonical process: CGPT's attention.

    Options beside those of `Attention`: those of `GaussianAttention`; `causal`; `latent_prior`
    ("noisy" or the paper's "latent"), `observation_noise` (None means sigma^2, 0.0 is the paper's) and
    `regularizer_samples` of its regularisers.  Those that the chosen one does not read are refused: only
    "monte_carlo" draws samples, "kl" knows no prior of the latent inputs, "none" (causal attention's) reads
    none of them.
    """

    causal_form = True
    projections = ("query", "key", "latent", "value")
    regularizers = ("kl", "marginal", "jensen", "monte_carlo", "joint", "none")
    default_regularizer = "kl"

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
        super().__init__(embed_dim, num_heads, **(causal_options(options) if causal else options))
        check_choice("latent_prior", latent_prior, LATENT_PRIORS)
        if observation_noise is not None:
            check_observation_noise(observation_noise)
        regularizer_samples = check_count("regularizer_samples", regularizer_samples)
        self.causal = causal
        self._refuse_unread(latent_prior, observation_noise, regularizer_samples)
        self.latent_prior: LatentPrior = latent_prior
        self.observation_noise, self.regularizer_samples = observation_noise, regularizer_samples
        self.latent = self._latent()

    def _refuse_unread(
        self, latent_prior: LatentPrior, observation_noise: float | None, regularizer_samples: int
    ) -> None:
        chosen = f"where regularizer is {self.regularizer!r}" + (
            " (causal attention's)" if self.causal else ""
        )
        if self.regularizer == "none":
            refuse_unused(CGPAttention, chosen, observation_noise=observation_noise)
        if self.regularizer in ("kl", "none"):
            refuse_unused(CGPAttention, chosen, latent_prior=latent_prior)
        if self.regularizer != "monte_carlo":
            refuse_unused(
                CGPAttention, "unless regularizer is 'monte_carlo'", regularizer_samples=regularizer_samples
            )

    def _posterior(self, heads: Heads, *, with_variance: bool = False) -> Posterior:
        q, k, o = *self._projected(heads), self._projection("latent", heads)
        v, options = self._amplitudes(q, k, heads, causal=self.causal)
        if self.causal:
            options |= {"mask": heads.one_mask("causal 'cgp'")}
            options.pop("query_mask")
            return causal_cgp_posterior(q, k, o, v, **options)
        return cgp_posterior(q, k, o, v, with_variance=with_variance, with_cost=self._announced(), **options)

    def _announced(self) -> Cost:
        """The regulariser that a training step will ask for, where fused kernels can give it."""
        if not self.training or self.observation_noise is not None:
            return "none"
        if self.regularizer == "kl":
            return "kl"
        return "marginal" if self.regularizer == "marginal" and self.latent_prior == "noisy" else "none"

    def _regularizer(
        self, heads: Heads, posterior: Posterior, generator: Generator | NoiseSource | None
    ) -> Tensor:
        exact = _exact(posterior)
        if self.regularizer == "kl":
            return cgp_kl_of(exact, self.observation_noise)
        fused = exact.fused_cost("marginal") if self._announced() == "marginal" else None
        if fused is not None:
            return fused
        density = cgp_density_of(
            exact, self.regularizer, self.latent_prior, self.observation_noise,  # type: ignore[arg-type]
            samples=self.regularizer_samples, generator=generator,
        )  # fmt: skip
        return self._density(density)

    def _log_density(self, heads: Heads, posterior: Posterior) -> LogDensity | None:
        return None if self.causal else cgp_density_of(_exact(posterior))


def _exact(posterior: Posterior) -> CGPPosterior:
    if not isinstance(posterior, CGPPosterior):
        raise TypeError(f"expected the exact model's posterior, got {type(posterior).__name__}")
    return posterior
