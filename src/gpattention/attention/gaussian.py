"""Base of direct, cgp and scgp: noise and amplitudes per head, normalised rows, and the warm start.

A warm start moves length scales and variance of an ard_rbf source exactly into the projections and amplitudes
of these kinds, whose kernel has none:

    variance * exp(-1/2 |(W_q x - W_k y) / l|^2) = s_q s_k kappa(W_q x / l, W_k y / l),
    s_q = s_k = variance^1/2
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gpattention.attention.base import Attention, Heads, Source
from gpattention.attention.kernel import NORMALIZE, Normalize
from gpattention.attention.parameters import NOISE_FLOOR, refuse_unused, spread_, values_of
from gpattention.checks import check_choice
from gpattention.gp import ExactPosterior, LogDensity, Posterior, row_log_amplitude
from gpattention.numerics import Cost


class GaussianAttention(Attention):
    """Queries and keys as evaluations of one Gaussian process.

    `normalize="rows"` gives the query process the amplitude t / sum_j kappa(q_i, k_j) (eq. 25): the
    mean is a weighted average of the values and the standard deviation grows where a query has no near
    key.  The prior scale t is per head; the values are divided by it, so that it changes the standard
    deviation alone.  `normalize="none"` is the paper's: amplitudes scale_q and scale_k per head.

    `prior_scale`, `learn_prior_scale` and `max_stddev` are options of normalised rows, `scale` and
    `learn_scale` of `normalize="none"`; in the other mode they are refused.

    Args:
        embed_dim: width E of the tokens and of the output.
        num_heads: number H of heads; E must be a multiple.
        normalize: "rows" or "none".
        noise: initial sigma^2.
        learn_noise: whether it is trained.
        scale: initial scale_q and scale_k.
        learn_scale: whether they are trained.
        prior_scale: initial t.
        learn_prior_scale: whether it is trained.
        max_stddev: a cap on the amplitude.
        **options: those of `Attention`.

    Raises:
        ValueError: an option is unknown, or has no effect in the mode that is chosen.
    """

    draws: ClassVar[bool] = True
    normalizes: ClassVar[bool] = True
    projections: ClassVar[tuple[str, ...]] = ("query", "key", "value")
    converts_from: ClassVar[tuple[str, ...]] = ("softmax", "kernel")
    default_regularizer: ClassVar[str] = "kl"

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        normalize: Normalize = "rows",
        noise: float = 0.01,
        learn_noise: bool = True,
        scale: float = 1.0,
        learn_scale: bool = True,
        prior_scale: float = 0.2,
        learn_prior_scale: bool = True,
        max_stddev: float = 2.0,
        **options: Any,
    ) -> None:
        super().__init__(embed_dim, num_heads, **options)
        check_choice("normalize", normalize, NORMALIZE)
        self.normalize: Normalize = normalize
        by_rows = {
            "prior_scale": prior_scale, "learn_prior_scale": learn_prior_scale, "max_stddev": max_stddev,
        }  # fmt: skip
        if normalize == "none":
            refuse_unused(GaussianAttention, "where normalize is 'none'", **by_rows)
        else:
            given = {"scale": scale, "learn_scale": learn_scale}
            refuse_unused(GaussianAttention, "unless normalize is 'none'", **given)
        self.query, self.key = self._linear(), self._linear()
        for linear in (self.query, self.key):
            spread_(linear, num_heads)
        if not max_stddev > 0:
            raise ValueError(f"expected max_stddev > 0, got {max_stddev}")
        self.max_stddev = max_stddev
        self.noise = self._per_head("noise", noise, learn_noise, floor=NOISE_FLOOR)
        if normalize == "rows":
            self.prior_scale = self._per_head("prior_scale", prior_scale, learn_prior_scale)
        else:
            self.scale_q = self._per_head("scale", scale, learn_scale)
            self.scale_k = self._per_head("scale", scale, learn_scale)

    @classmethod
    def kernel_options(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Kernel attention of the same rows that sees as far."""
        return {"normalize": options.get("normalize", "rows"), "causal": options.get("causal", False)}

    def _from_kernel(self, source: Any, latent_from: str) -> dict[str, Tensor]:
        if source.kernel == "exp_dot":
            raise ValueError("an exp_dot kernel is no rbf kernel and cannot start one")
        self._check_like(source, "normalize", "causal")
        parts = {"query": source.folded("query"), "key": source.folded("key")}
        if "latent" in self.projections and latent_from != "none":
            parts["latent"] = parts[latent_from]
        plan = {f"{part}.{name}": x for part, state in parts.items() for name, x in state.items()}
        if self.normalize == "none":
            root = torch.ones(self.num_heads, dtype=torch.float64)  # [H]
            if source.kernel == "ard_rbf":
                root = source.variance().double().sqrt()
            plan |= {"scale_q.raw": self.scale_q.raw_of(root), "scale_k.raw": self.scale_k.raw_of(root)}
        return plan

    def _compared(self, heads: Heads) -> tuple[Tensor, Tensor, bool] | None:
        return *self._projected(heads), False

    def _amplitudes(
        self, q: Tensor, k: Tensor, heads: Heads, *, causal: bool
    ) -> tuple[Tensor, dict[str, Any]]:
        """Values [B, H, K, D] and the keyword arguments that all functions of the process take."""
        if self.normalize == "none":
            noise, scale_q, scale_k = values_of(self.noise, self.scale_q, self.scale_k)
            return heads.v, {**self._common(heads, noise), "scale_q": scale_q, "scale_k": scale_k}
        noise, t = values_of(self.noise, self.prior_scale)  # [H]
        log_amplitude = row_log_amplitude(q, k, causal=causal, **self._row_options(heads, t))
        return self._normalised(heads, noise, t, log_amplitude)

    def _normalised(
        self, heads: Heads, noise: Tensor, t: Tensor, log_amplitude: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        """The same for log a_i [B, H, Q] with the prior scale t [H], by which values are divided."""
        # the gradient of a product takes fewer passes over the values than that of a ratio
        values = (heads.v * t.reciprocal()[:, None, None]).to(heads.v.dtype)
        return values, {**self._common(heads, noise), "log_amplitude": log_amplitude}

    def _common(self, heads: Heads, noise: Tensor) -> dict[str, Any]:
        return {"noise": noise, "mask": heads.mask, "query_mask": heads.query_mask}

    def _row_options(self, heads: Heads, t: Tensor) -> dict[str, Any]:
        """Options of row normalisation; a_i is at most the largest standard deviation."""
        masks = {"mask": heads.mask, "query_mask": heads.query_mask}
        return {"scale": t, "max_log_amplitude": math.log(self.max_stddev), **masks}

    def _announced(self) -> Cost:
        """The regulariser that a training step will need, if fused kernels can compute it."""
        if not self.training:
            return "none"
        return "kl" if self.regularizer == "kl" else "marginal" if self.regularizer == "marginal" else "none"

    def _regularizer(self, heads: Heads, posterior: Posterior, generator: Source) -> Tensor:
        if self.regularizer == "kl":
            return posterior.kl()
        if isinstance(posterior, ExactPosterior) and self._announced() == "marginal":
            fused = posterior.fused_cost("marginal")
            if fused is not None:
                return fused
        return -posterior.log_density(self.regularizer).total

    def _log_density(self, heads: Heads, posterior: Posterior) -> LogDensity | None:
        return posterior.log_density()

    def _latent(self) -> nn.Linear:
        """A projection to latent inputs that starts like that of keys, so that cgp starts like direct."""
        linear = self._linear()
        linear.load_state_dict(self.key.state_dict())
        return linear


def causal_options(options: dict[str, Any], *, causal: bool) -> dict[str, Any]:
    """The options; those of causal attention, which has no density of all tokens, have no regulariser."""
    if not causal:
        return options
    given = options.get("regularizer")
    if given not in (None, "none"):
        why = "causal attention defines no density of all tokens"
        raise ValueError(f"{why}: expected regularizer 'none', got {given!r}")
    return {**options, "regularizer": "none"}
