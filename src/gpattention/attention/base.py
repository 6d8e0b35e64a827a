"""The one call all kinds of attention share: projections, masks, draws, and what `need` names."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor, nn

from gpattention.attention.initialisation import preserve_
from gpattention.attention.output import AttentionOutput, Draw, check_request
from gpattention.attention.projections import projected_together
from gpattention.attention.regularizer import normalised, real_tokens
from gpattention.attention.tokens import attends_to_itself, call_tokens
from gpattention.checks import check_count, plain
from gpattention.gp import LogDensity, NoiseSource, Posterior
from gpattention.gp.checks import check_choice


@dataclass(frozen=True, slots=True)
class Heads:
    """What one call attends with, split into heads; masks are True at real tokens."""

    queries: Tensor  # [B, Q, E] the inputs themselves
    keys: Tensor  # [B, K, E]
    v: Tensor  # [B, H, K, D]
    mask: Tensor | None  # [B, 1, K]
    query_mask: Tensor | None  # [B, 1, Q]
    inducing: Tensor | None  # [H, m, E], sgpa's
    ready: Mapping[str, Tensor] = field(default_factory=dict)  # projections made together, [B, N, E] each

    def one_mask(self, kind: str) -> Tensor | None:
        """The mask of queries and keys together, for models that know no other.  [B, 1, N]"""
        if self.query_mask is not self.mask:
            raise ValueError(
                f"{kind} attention has one mask for queries and keys: "
                "expected a key_padding_mask alone and no other key, got masks that may differ"
            )
        return self.mask


class Attention(nn.Module):
    """Base of all kinds.  A subclass projects what it needs and answers `_mean` or `_posterior`.

    Args:
        embed_dim: width E of the tokens and of the output.
        num_heads: number H of heads; E must be a multiple.
        bias: whether projections have biases.
        dropout: probability of dropping an output entry, after the output projection.
        regularizer: which regulariser `need=("regularizer",)` computes, one of the kind's `regularizers`.
        batch_first: inputs are [B, N, E] (the default) or [N, B, E].
        device: where parameters live.
        dtype: their type.
    """

    kind: ClassVar[str] = ""
    draws: ClassVar[bool] = False  # whether it has a posterior
    regularizers: ClassVar[tuple[str, ...]] = ("none",)
    default_regularizer: ClassVar[str] = "none"
    normalizes: ClassVar[bool] = False  # whether it takes normalize="rows"
    causal_form: ClassVar[bool] = False  # whether it takes causal=True
    causal: bool = False  # whether token i sees tokens up to i alone
    crosses: ClassVar[bool] = True  # whether keys may differ from queries
    projections: ClassVar[tuple[str, ...]] = ("value",)  # its linear maps of the tokens

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        bias: bool = True,
        dropout: float = 0.0,
        regularizer: str | None = None,
        batch_first: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        embed_dim, num_heads = check_count("embed_dim", embed_dim), check_count("num_heads", num_heads)
        dropout = plain(dropout)
        if embed_dim % num_heads:
            raise ValueError(
                f"expected embed_dim to be a positive multiple of num_heads, got {embed_dim} and {num_heads}"
            )
        if not 0 <= dropout < 1:
            raise ValueError(f"expected dropout in [0, 1), got {dropout}")
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.batch_first = batch_first
        self.regularizer = self._checked_regularizer(regularizer)
        self._made_with: dict[str, Any] = {"device": device, "dtype": dtype}
        self._bias = bias
        self.value = self._linear()
        self.output = self._linear()
        self.dropout = nn.Dropout(dropout)
        preserve_(self.value)
        preserve_(self.output)

    def forward(
        self,
        query: Tensor,  # [B, Q, E]
        key: Tensor | None = None,  # [B, K, E]; None, or the query itself, is self-attention
        value: Tensor | None = None,  # [B, K, E]; None is the key
        *,
        key_padding_mask: Tensor | None = None,  # [B, K] True = ignore
        query_padding_mask: Tensor | None = None,  # [B, Q] True = ignore
        draw: Draw = "none",
        samples: int = 1,
        generator: Generator | NoiseSource | None = None,
        need: tuple[str, ...] = ("output",),
        inducing: Tensor | None = None,  # [H, m, E], sgpa only
        finish: bool = True,
    ) -> AttentionOutput:
        """Attend, and return the output with whatever `need` names.

        Masks mean what they mean in `nn.MultiheadAttention`: True = ignore, whatever is written there.  In
        self-attention, `attention(x)` or `attention(x, x, x)`, the key mask is the query mask too.  Causal
        attention takes as many queries as keys.  `draw` replaces the mean by draws from the
        posterior, token by token ("independent") or correlated ("joint"); one sample has the shape of the
        mean, more come stacked in front.  Unbatched [N, E] inputs give unbatched results, but for the
        posterior, which has a batch of one.  `finish=False` leaves the output projection and its dropout to
        the caller, who may have them done together with what follows: the output is what they are given.
        """
        check_request(self.kind, self.draws, draw, samples, need)
        heads, unbatched = self._heads(query, key, value, key_padding_mask, query_padding_mask, inducing)
        wanted = draw != "none" or "variance" in need
        posterior = self._posterior(heads, with_variance=wanted) if self.draws else None
        if posterior is None:
            mean = self._mean(heads)  # [B, H, Q, D]
        elif draw == "none":
            mean = posterior.mean
        else:
            mean = posterior.sample(samples, generator=generator, joint=draw == "joint")
            mean = mean if samples > 1 else mean.squeeze(0)  # whose gradient is a view too
        output = mean.transpose(-3, -2).flatten(-2)  # [..., B, Q, E]
        output = self.dropout(self.output(output)) if finish else output
        variance = posterior.variance if posterior is not None and "variance" in need else None
        weights = self._weights(heads) if "weights" in need else None
        if unbatched:
            output = output.squeeze(-3)
            variance = None if variance is None else variance[0]
            weights = None if weights is None else weights[0]
        elif not self.batch_first:
            output = output.transpose(-3, -2)
        return AttentionOutput(
            output=output,
            variance=variance,
            regularizer=self._scalar_regularizer(heads, posterior, generator)
            if "regularizer" in need
            else None,
            weights=weights,
            posterior=posterior if "posterior" in need else None,
            inducing=heads.inducing,
        )

    def _heads(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_padding: Tensor | None,
        query_padding: Tensor | None,
        inducing: Tensor | None,
    ) -> tuple[Heads, bool]:
        if not self.crosses and not attends_to_itself(query, key):
            raise ValueError(f"{self.kind!r} attention is self-attention: its keys are its queries")
        told = call_tokens(
            query, key, value, key_padding, query_padding,
            embed_dim=self.embed_dim, batch_first=self.batch_first, causal=self.causal,
        )  # fmt: skip
        ready = self._together(told.key) if told.one_set and told.values_are_keys else {}
        values = ready["value"] if "value" in ready else self.value(told.value)
        heads = Heads(
            queries=told.query,
            keys=told.key,
            v=self._split(values),
            mask=told.mask,
            query_mask=told.query_mask,
            inducing=self._inducing_inputs(inducing),
            ready=ready,
        )
        return heads, told.unbatched

    def _together(self, tokens: Tensor) -> dict[str, Tensor]:
        """All projections of the tokens in one product, where that can be done; else none.  [B, N, E]"""
        names = [name for name in self.projections if getattr(self, name) is not None]
        made = projected_together(tokens, [getattr(self, name) for name in names])
        return {} if made is None else dict(zip(names, made, strict=True))

    def _projection(self, name: str, heads: Heads) -> Tensor:
        """Queries, keys or latent inputs by the projection of that name.  [B, H, N, D]"""
        if name in heads.ready:
            return self._split(heads.ready[name])
        return self._split(getattr(self, name)(heads.queries if name == "query" else heads.keys))

    def _scalar_regularizer(
        self, heads: Heads, posterior: Posterior | None, generator: Generator | NoiseSource | None
    ) -> Tensor:
        if self.regularizer == "none" or posterior is None:
            return heads.v.new_zeros(())
        total = self._regularizer(heads, posterior, generator)
        total = total.expand(heads.queries.shape[0], self.num_heads)  # [B, H]
        padding = None if heads.query_mask is None else ~heads.query_mask[:, 0]
        tokens = real_tokens(padding, heads.queries)
        return normalised(total, tokens, head_dim=self.head_dim, training=self.training)

    def _weights(self, heads: Heads) -> Tensor:
        """The mean is linear in the values: attend to the identity.  [B, H, Q, K]"""
        eye = torch.eye(heads.v.shape[-2], dtype=heads.v.dtype, device=heads.v.device)
        unit = replace(heads, v=eye.expand(*heads.v.shape[:-1], -1))
        return self._posterior(unit).mean if self.draws else self._mean(unit)

    def _inducing_inputs(self, inducing: Tensor | None) -> Tensor | None:
        if inducing is not None:
            raise ValueError(f"{self.kind!r} attention takes no inducing inputs from outside")
        return None

    def _mean(self, heads: Heads) -> Tensor:
        """The heads' outputs, for kinds without a posterior.  [B, H, Q, D]"""
        return self._posterior(heads).mean

    def _posterior(self, heads: Heads, *, with_variance: bool = False) -> Posterior:
        """The posterior; `with_variance` announces that its variance will be asked for."""
        raise NotImplementedError

    def _regularizer(
        self, heads: Heads, posterior: Posterior, generator: Generator | NoiseSource | None
    ) -> Tensor:
        """Negative log density or KL of the posterior, per sequence and head.  [B, H]"""
        raise NotImplementedError

    def _kernel_inputs(self, heads: Heads) -> tuple[Tensor, Tensor]:
        """Queries and keys between which kappa of eq. 1 is this kind's kernel.  [B, H, N, D]"""
        raise NotImplementedError

    def _log_density(self, heads: Heads, posterior: Posterior) -> LogDensity | None:
        """The density whose noise floor tells a collapse, where the kind has one."""
        return None

    def _checked_regularizer(self, name: str | None) -> str:
        name = self.default_regularizer if name is None else name
        check_choice(f"regularizer of {self.kind!r} attention", name, self.regularizers)
        return name

    def _linear(self) -> nn.Linear:
        return nn.Linear(self.embed_dim, self.embed_dim, bias=self._bias, **self._made_with)

    def _split(self, x: Tensor) -> Tensor:
        """[B, N, E] -> [B, H, N, D]"""
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(-3, -2)

    def extra_repr(self) -> str:
        """Kind and regulariser in the module's print-out."""
        return f"kind={self.kind!r}, regularizer={self.regularizer!r}"
