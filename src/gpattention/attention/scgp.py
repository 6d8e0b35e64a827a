"""Sparse correlated-GP attention (eq. 15): linear in the number of tokens."""

from typing import TYPE_CHECKING, Any, Self

from torch import Generator, Tensor

from gpattention.attention.base import Heads
from gpattention.attention.gaussian import GaussianAttention
from gpattention.attention.inducing import InducingKind, LearnedInducing, build_inducing
from gpattention.attention.recomputation import recomputed
from gpattention.attention.registry import register_attention
from gpattention.attention.regularizer import normalised
from gpattention.attention.sharding import TokenShards
from gpattention.gp import LogDensity, NoiseSource, Posterior, scgp_posterior, sparse_row_log_amplitude
from gpattention.gp.checks import check_choice
from gpattention.gp.divergence import scgp_kl_of
from gpattention.gp.sparse import FUSED_OBJECTIVES, SCGPPosterior
from gpattention.gp.sparse_density import scgp_density_of
from gpattention.gp.sparse_kind import CONDITIONALS, VALUES, Conditional, Values

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SHARED_REGULARIZERS = ("kl", "dtc", "dtc_bound", "none")  # functions of sums over tokens


@register_attention("scgp")
class SCGPAttention(GaussianAttention):
    """CGP attention through inducing inputs: SCGPT's attention.

    Options beside those of `Attention`: those of `GaussianAttention`; `inducing` ("learned" per head or
    "pooled" from the tokens); `num_inducing`, their numbers (m, l) for the two stages, or one number for
    one common set; `values`: "paper" observes z_k = V, "dual" approximates the exact model's mean and is
    the default with `normalize="rows"`, whose row sums are those of the exact kernel; `include_noise`:
    whether variance and draws hold sigma^2 as eq. 15 prints it, the default without row normalisation
    (beside the small amplitudes of normalised rows it would drown what the keys say); `conditional`:
    "deterministic" as printed, where the variance falls to sigma^2 far from all inducing inputs, or
    "independent", where it rises to the prior's (the regularisers stay those of the first).

    Tokens may be spread over the processes of a group: see `shard_tokens`.
    """

    projections = ("query", "key", "latent", "value")
    regularizers = ("kl", "dtc", "dtc_bound", "marginal", "jensen", "double_jensen", "printed", "none")
    default_regularizer = "kl"

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
        **options: Any,
    ) -> None:
        super().__init__(embed_dim, num_heads, **options)
        if values is not None:
            check_choice("values", values, VALUES)
        self.values: Values = values or ("dual" if self.normalize == "rows" else "paper")
        check_choice("conditional", conditional, CONDITIONALS)
        self.conditional: Conditional = conditional
        self.include_noise = self.normalize == "none" if include_noise is None else include_noise
        self.latent = self._latent()
        counts = tuple(num_inducing) if isinstance(num_inducing, tuple | list) else (num_inducing,)
        if len(counts) not in (1, 2):
            raise ValueError(f"expected num_inducing to be one number or a pair, got {num_inducing!r}")
        first = build_inducing(inducing, num_heads, counts[0], embed_dim, **self._made_with)
        self.inducing_q = first
        self.inducing_k = None
        if len(counts) == 2:
            self.inducing_k = build_inducing(inducing, num_heads, counts[1], embed_dim, **self._made_with)
        self._shards = TokenShards()

    def shard_tokens(self, group: "ProcessGroup | None") -> Self:
        """From now on each call holds this process's shard of the tokens of every sequence (section 12).

        Every process of the group must make the same calls, with the same number of sequences and the
        same parameters; the numbers of tokens may differ.  Outputs, variances and draws (from a
        `ShardNoise`) are those of the process's own tokens; the regulariser is that of all tokens, the
        same everywhere.  The loss of the run is the sum of the processes' losses, in which the regulariser
        counts once; after the backward pass `gp.sharding.sum_gradients` adds up the gradients of parameters.
        One all-reduce forward and one backward, whatever the length; with `normalize="rows"` a second,
        smaller one each.  The group is no part of the module's state: it is neither saved nor pickled.
        `None` ends it.
        """
        shards = TokenShards(group)
        if group is not None:
            self._check_shardable()
        self._shards = shards
        return self

    def _check_shardable(self) -> None:
        if not isinstance(self.inducing_q, LearnedInducing):
            raise ValueError(
                "expected inducing to be 'learned' where tokens are spread over a group, got 'pooled', "
                "which averages over all tokens"
            )
        if self.regularizer not in SHARED_REGULARIZERS:
            raise ValueError(
                f"expected regularizer to be one of {', '.join(SHARED_REGULARIZERS)} where tokens are spread "
                f"over a group, got {self.regularizer!r}, which holds pairs of tokens"
            )

    def _sparse(self, heads: Heads) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """q, k, o, v, both inducing sets, and the keyword arguments."""
        q, k = self._projected(heads)
        o = self._projection("latent", heads)
        m = self.inducing_q(heads.keys, o, heads.mask)
        points = m if self.inducing_k is None else self.inducing_k(heads.keys, o, heads.mask)
        group = self._shards.group
        if self.normalize == "rows":  # by the Nystrom estimate of the row sums: nothing N x N is made
            t = self.prior_scale()  # [H]
            log_amplitude = sparse_row_log_amplitude(q, k, points, group=group, **self._row_options(heads, t))
            v, options = self._normalised(heads, t, log_amplitude)
        else:
            v, options = self._amplitudes(q, k, heads, causal=False)
        sets = (m,) if self.inducing_k is None else (m, points)
        return (q, k, o, v, *sets), {**options, "values": self.values, "group": group}

    def _posterior(self, heads: Heads, *, with_variance: bool = False) -> Posterior:
        tensors, options = self._sparse(heads)
        announced = [name for name in FUSED_OBJECTIVES if name == self.regularizer]
        with recomputed(heads.ready):
            return scgp_posterior(
                *tensors, include_noise=self.include_noise, conditional=self.conditional,
                objectives=announced, **options,
            )  # fmt: skip

    def _regularizer(
        self, heads: Heads, posterior: Posterior, generator: Generator | NoiseSource | None
    ) -> Tensor:
        sparse = _sparse_posterior(posterior)
        if self.regularizer == "kl":
            return scgp_kl_of(sparse)
        return self._density(scgp_density_of(sparse, self.regularizer))  # type: ignore[arg-type]

    def _scalar_regularizer(
        self, heads: Heads, posterior: Posterior | None, generator: Generator | NoiseSource | None
    ) -> Tensor:
        if self._shards.group is None or self.regularizer == "none" or posterior is None:
            return super()._scalar_regularizer(heads, posterior, generator)
        total = self._regularizer(heads, posterior, generator)  # [B, H] of all tokens
        tokens = _sparse_posterior(posterior).real_counts()[0][:, 0].sum()
        # the processes count as one: there is nothing to average over them, in training or not
        return normalised(total, tokens, head_dim=self.head_dim, training=False)

    def _weights(self, heads: Heads) -> Tensor:
        if self._shards.group is not None:
            raise ValueError(
                "weights hold every pair of tokens: not to be had where a group shares the tokens"
            )
        return super()._weights(heads)

    def _log_density(self, heads: Heads, posterior: Posterior) -> LogDensity:
        return scgp_density_of(_sparse_posterior(posterior))


def _sparse_posterior(posterior: Posterior) -> SCGPPosterior:
    if not isinstance(posterior, SCGPPosterior):
        raise TypeError(f"expected the sparse model's posterior, got {type(posterior).__name__}")
    return posterior
