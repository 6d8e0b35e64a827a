"""Sparse correlated-GP attention (eq. 15): linear in the number of tokens."""

import math
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor, nn

from gpattention.attention.base import Heads, Source, normalised, register_attention
from gpattention.attention.gaussian import GaussianAttention
from gpattention.attention.parameters import latent_points, recomputed, values_of
from gpattention.checks import check_choice, check_count
from gpattention.gp import (
    CGPPosterior,
    Posterior,
    SCGPPosterior,
    cgp_posterior,
    scgp_posterior,
    sparse_row_log_amplitude,
)
from gpattention.gp.sparse import (
    CONDITIONALS,
    FUSED_OBJECTIVES,
    VALUES,
    Conditional,
    UnitFeatures,
    Values,
)
from gpattention.numerics import Cost
from gpattention.ops import check_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

InducingKind = Literal["learned", "pooled"]
SHARED_REGULARIZERS = ("kl", "dtc", "dtc_bound", "none")  # functions of sums over tokens
# the exact model's own name for what each becomes with inducing inputs at all tokens
EXACT_COSTS: dict[str, Cost] = {"kl": "kl", "dtc": "marginal", "none": "none"}


class TokenShards:
    """A reference to the process group that shares the tokens, if any.

    A group belongs to a running job, so that copies of a module use the same one and a pickled module has
    none.
    """

    __slots__ = ("group",)

    def __init__(self, group: "ProcessGroup | None" = None) -> None:
        check_group(group)
        self.group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> "TokenShards":
        return self

    def __reduce__(self) -> tuple[type["TokenShards"], tuple[()]]:
        return TokenShards, ()


class LearnedInducing(nn.Module):
    """Inducing inputs as parameters in the space of latent inputs; the same for every sequence."""

    def __init__(self, num_heads: int, count: int, embed_dim: int, **made_with: Any) -> None:
        super().__init__()
        points = latent_points(num_heads, count, embed_dim // num_heads)
        self.points = nn.Parameter(points.to(**made_with))  # [H, m, D]

    def forward(self, tokens: Tensor, latent: Tensor, mask: Tensor | None) -> Tensor:
        """[H, m, D]"""
        return self.points


class PooledInducing(nn.Module):
    """m averages of the latent inputs of each sequence, by attention of learned probes.

    They exist for any length, ignore padding and do not depend on the order of tokens.  Since averages are
    close together, and equal inputs have a singular Gram matrix, learned points are added as offsets.
    """

    def __init__(self, num_heads: int, count: int, embed_dim: int, **made_with: Any) -> None:
        super().__init__()
        self.num_heads, self.count = num_heads, count
        self.probe = nn.Linear(embed_dim, num_heads * count, bias=False, **made_with)
        nn.init.normal_(self.probe.weight, std=1 / math.sqrt(embed_dim))
        points = latent_points(num_heads, count, embed_dim // num_heads)
        self.offsets = nn.Parameter(points.to(**made_with))  # [H, m, D]

    def forward(self, tokens: Tensor, latent: Tensor, mask: Tensor | None) -> Tensor:
        """From tokens [B, N, E] and latent inputs [B, H, N, D]: [B, H, m, D]"""
        scores = self.probe(tokens).unflatten(-1, (self.num_heads, self.count)).movedim(1, -1)  # [B, H, m, N]
        if mask is not None:
            real = mask[:, :, None, :]  # [B, 1, 1, N]
            scores = torch.where(real, scores, -torch.inf)
            scores = torch.where(real.any(-1, keepdim=True), scores, 0.0)
            latent = torch.where(mask[..., None], latent, 0.0)
        return scores.softmax(-1) @ latent + self.offsets.to(latent.dtype)


Inducing = LearnedInducing | PooledInducing
INDUCING: dict[str, type[Inducing]] = {"learned": LearnedInducing, "pooled": PooledInducing}


@register_attention("scgp")
class SCGPAttention(GaussianAttention):
    """CGP attention through inducing inputs: the attention of SCGPT.

    The processes of a group may share the tokens: see `shard_tokens`.

    Args:
        embed_dim: width E of the tokens and of the output.
        num_heads: number H of heads; E must be a multiple.
        inducing: "learned" per head or "pooled" from the tokens.
        num_inducing: their numbers (m, l) for the two stages, or one number for one common set.
        values: "paper" observes z_k = V; "dual" approximates the mean of the exact model and is the default
            with `normalize="rows"`, whose row sums are those of the exact kernel.
        include_noise: whether variance and draws include sigma^2 as printed in eq. 15, the default without
            row normalisation.  With the small amplitudes of normalised rows it would hide the information in
            the keys.
        conditional: "deterministic" as printed, whose variance falls to sigma^2 far from all inducing inputs,
            or "independent", whose variance rises to that of the prior; regularisers are those of the first.
        exact_when_shorter: whether sequences with at most as many tokens as inducing inputs, including
            padding, use the exact model with the same projections, noise and amplitudes (eq. 4-6), which is
            cheaper there and does not use inducing inputs.  Needs values "dual" and no `include_noise`, which
            are the defaults then, and the regulariser "kl", "dtc" or "none".
        **options: those of `GaussianAttention` and `Attention`.

    Raises:
        ValueError: an option is unknown, or has no effect in the mode that is chosen.
    """

    projections = ("query", "key", "latent", "value")
    regularizers = ("kl", "dtc", "dtc_bound", "marginal", "jensen", "double_jensen", "printed", "none")
    has_inducing = True
    shards = True
    meaning = (*GaussianAttention.meaning, "exact_when_shorter")

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        inducing: InducingKind = "learned",
        num_inducing: int | tuple[int, int] = 32,
        values: Values | None = None,
        include_noise: bool | None = None,
        conditional: Conditional = "deterministic",
        exact_when_shorter: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(embed_dim, num_heads, **options)
        if values is not None:
            check_choice("values", values, VALUES)
        if exact_when_shorter:
            self._check_exact(values, include_noise)
        self.exact_when_shorter = exact_when_shorter
        dual = self.normalize == "rows" or exact_when_shorter
        self.values: Values = values or ("dual" if dual else "paper")
        check_choice("conditional", conditional, CONDITIONALS)
        self.conditional: Conditional = conditional
        self.include_noise = not dual if include_noise is None else include_noise
        self.latent = self._latent()
        counts = tuple(num_inducing) if isinstance(num_inducing, tuple | list) else (num_inducing,)
        if len(counts) not in (1, 2):
            raise ValueError(f"expected num_inducing to be one number or a pair, got {num_inducing!r}")
        check_choice("inducing", inducing, tuple(INDUCING))
        counts = tuple(check_count("num_inducing", count) for count in counts)
        self._fewest = min(counts)
        sets = [INDUCING[inducing](num_heads, count, embed_dim, **self._made_with) for count in counts]
        self.inducing_q = sets[0]
        self.inducing_k = sets[1] if len(sets) == 2 else None
        self._shards = TokenShards()

    def _check_exact(self, values: Values | None, include_noise: bool | None) -> None:
        """Refuse options with which short and long sequences would have different models."""
        where = "with exact_when_shorter=True"
        if values == "paper":
            why = "since the exact model observes z_k = M_k V, which 'dual' approximates"
            raise ValueError(f"expected values to be 'dual' {where}, {why}, got 'paper'")
        if include_noise:
            why = "since the exact model's variance is without noise"
            raise ValueError(f"expected include_noise to be False {where}, {why}, got True")
        if self.regularizer not in EXACT_COSTS:
            expected = f"expected regularizer to be one of {', '.join(EXACT_COSTS)} {where}"
            raise ValueError(f"{expected}, got {self.regularizer!r}, which the exact model has not")

    def shard_tokens(self, group: "ProcessGroup | None") -> Self:
        """Make later calls take this process's share of the tokens of every sequence (section 12).

        Every process of the group must make the same calls, with the same number of sequences and the
        same parameters; the numbers of tokens may differ.  Outputs, variances and draws (from a
        `ShardNoise`) are those of the process's own tokens; the regulariser is that of all tokens and the
        same on every process.  The loss of the run is the sum of the losses of the processes, in which the
        regulariser counts once; after the backward pass `ops.sum_gradients` adds up the gradients of
        parameters.  There is one all-reduce forward and one backward for any length, and with
        `normalize="rows"` a second, smaller one each.  The group is not part of the module's state and is
        neither saved nor pickled.  `None` ends the sharing.
        """
        shards, where = TokenShards(group), "where tokens are spread over a group"
        if group is not None and not isinstance(self.inducing_q, LearnedInducing):
            why = "which averages over all tokens"
            raise ValueError(f"expected inducing to be 'learned' {where}, got 'pooled', {why}")
        if group is not None and self.regularizer not in SHARED_REGULARIZERS:
            expected = f"expected regularizer to be one of {', '.join(SHARED_REGULARIZERS)} {where}"
            raise ValueError(f"{expected}, got {self.regularizer!r}, which holds pairs of tokens")
        if group is not None and self.exact_when_shorter:
            why = "since no process knows the others' lengths"
            raise ValueError(f"expected exact_when_shorter to be False {where}, {why}, got True")
        self._shards = shards
        return self

    def _compared(self, heads: Heads) -> tuple[Tensor, Tensor, bool] | None:
        return None  # it computes nothing for all pairs of tokens

    def _sparse(self, heads: Heads) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """q, k, o, v, both inducing sets, and the keyword arguments."""
        q, k = self._projected(heads)
        o = self._projection("latent", heads)
        m = self.inducing_q(heads.keys, o, heads.mask)
        points = m if self.inducing_k is None else self.inducing_k(heads.keys, o, heads.mask)
        group, features = self._shards.group, None
        if group is None and points is m:
            features = UnitFeatures.of(q, k, o, m, heads.mask, heads.query_mask)
        shared: dict[str, Any] = {"group": group, "features": features}
        if self.normalize == "rows":  # with the Nystrom estimate of row sums, which needs no N x N matrix
            noise, t = values_of(self.noise, self.prior_scale)  # [H]
            log_amplitude = sparse_row_log_amplitude(q, k, points, **shared, **self._row_options(heads, t))
            v, options = self._normalised(heads, noise, t, log_amplitude)
        else:
            v, options = self._amplitudes(q, k, heads, causal=False)
        sets = (m,) if self.inducing_k is None else (m, points)
        return (q, k, o, v, *sets), {**options, "values": self.values, **shared}

    def _is_short(self, heads: Heads) -> bool:
        """Whether the exact model is used; depends only on shapes, which graphs can contain."""
        if not self.exact_when_shorter:
            return False
        return max(heads.queries.shape[1], heads.keys.shape[1]) <= self._fewest

    def _exact(self, heads: Heads, *, with_variance: bool) -> Posterior:
        """The posterior of CGP attention with the same parameters."""
        q, k, o = *self._projected(heads), self._projection("latent", heads)
        v, options = self._amplitudes(q, k, heads, causal=False)
        options |= {"with_variance": with_variance, "with_cost": self._announced()}
        return cgp_posterior(q, k, o, v, with_draw=heads.one_draw, **options)

    def _announced(self) -> Cost:
        return EXACT_COSTS.get(self.regularizer, "none") if self.training else "none"

    def _posterior(self, heads: Heads, *, with_variance: bool = False) -> Posterior:
        if self._is_short(heads):
            return self._exact(heads, with_variance=with_variance)
        tensors, options = self._sparse(heads)
        announced = [name for name in FUSED_OBJECTIVES if name == self.regularizer]
        with recomputed(heads.ready):
            return scgp_posterior(
                *tensors, include_noise=self.include_noise, conditional=self.conditional,
                objectives=announced, with_draw=heads.one_draw, **options,
            )  # fmt: skip

    def _regularizer(self, heads: Heads, posterior: Posterior, generator: Source) -> Tensor:
        if self.regularizer != "dtc" or not isinstance(posterior, CGPPosterior):
            return super()._regularizer(heads, posterior, generator)
        fused = posterior.fused_cost("marginal") if self.training else None
        return -posterior.log_density("marginal").total if fused is None else fused

    def _scalar_regularizer(self, heads: Heads, posterior: Posterior | None, generator: Source) -> Tensor:
        if self._shards.group is None or self.regularizer == "none" or posterior is None:
            return super()._scalar_regularizer(heads, posterior, generator)
        assert isinstance(posterior, SCGPPosterior)
        total = self._regularizer(heads, posterior, generator)  # [B, H] of all tokens
        tokens = posterior.real_counts()[0][:, 0].sum()
        # the processes count as one, so that there is nothing to average over them
        return normalised(total, tokens, head_dim=self.head_dim, training=False)

    def _weights(self, heads: Heads) -> Tensor:
        if self._shards.group is not None:
            raise ValueError("weights hold every pair of tokens, which no process of a group has")
        return super()._weights(heads)
