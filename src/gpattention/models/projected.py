"""The kinds of attention without projections of their own: the host projects queries, keys and values.

Each is the library's own kind without projections.  direct, cgp and scgp have another way to weigh values,
`normalize="softmax"` (eq. 21), with which attention starts as the host's.  Without its amplitudes b_j, rows
divided by their sums would be a softmax over q_i . k_j - 1/2 |k_j|^2: in a trained BERT the lengths of keys
differ so much that half of the output changes.

Inducing inputs start at tokens of an example.  In the many dimensions of a trained head the kernel of almost
any two points is near 0, so that attention is off if inducing inputs are far from the tokens.
"""

import math
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch import Generator, Tensor, nn

from gpattention.attention import (
    Attention,
    CGPAttention,
    DirectAttention,
    GaussianAttention,
    Heads,
    KernelAttention,
    SCGPAttention,
    SGPAAttention,
    SoftmaxGPAttention,
)
from gpattention.attention.scgp import LearnedInducing
from gpattention.gp import keep_rows, key_log_amplitude, query_log_amplitude, real_mean
from gpattention.numerics import compute_dtype, full_precision

CANDIDATES = 4096  # most tokens of an example to choose inducing inputs from


def shift_queries(q: Tensor, k: Tensor, mask: Tensor | None, query_mask: Tensor | None) -> Tensor:
    """q - qbar + kbar, whose distances to k are those of both sides about their own means.  [B, H, Q, D]"""
    dtype, q, k = q.dtype, q.to(compute_dtype(q.dtype)), k.to(compute_dtype(k.dtype))
    return (q + (real_mean(k, mask) - real_mean(q, query_mask))).to(dtype)


@full_precision
def softmax_log_amplitudes(
    q: Tensor,  # [B, H, Q, D] queries as the kernel sees them: q . k is the host's logit
    k: Tensor,  # [B, H, K, D]
    *,
    scale: Tensor,  # [H] t
    mask: Tensor | None,  # [B, 1, K] True = real
    query_mask: Tensor | None,  # [B, 1, Q]
    max_stddev: float,
) -> tuple[Tensor, Tensor]:
    """log a_i, capped at the largest standard deviation wanted, and log b_j of eq. 21.

    [B, H, Q] and [B, H, K]; both are 0 at padded tokens.
    """
    q, k = q.to(compute_dtype(q.dtype)), k.to(compute_dtype(k.dtype))
    q, k = keep_rows(q, query_mask), keep_rows(k, mask)
    q_bar, k_bar = real_mean(q, query_mask), real_mean(k, mask)  # [B, H, 1, D]
    log_t, most = scale.to(q.dtype).log()[:, None], math.log(max_stddev)
    log_a = (log_t + query_log_amplitude(q, k, q - q_bar, k_bar, mask=mask)).clamp_max(most)  # [B, H, Q]
    log_b = key_log_amplitude(k, k - k_bar, q_bar, k_bar)  # [B, H, K]
    if query_mask is not None:
        log_a = torch.where(query_mask, log_a, 0.0)
    if mask is not None:
        log_a, log_b = torch.where(mask.any(-1, keepdim=True), log_a, 0.0), torch.where(mask, log_b, 0.0)
    return log_a, log_b


@torch.no_grad()
def place_points_(points: Tensor, tokens: Tensor, mask: Tensor | None, generator: Generator) -> None:
    """Set points [H, m, D] to tokens [B, H, N, D] that are real by the mask [B, 1, N].

    The probability of each next one is its squared distance from those before (k-means++): points are spread
    out, and no two are at one place, where the Gram matrix would have no Cholesky factor.
    """
    tokens = tokens.transpose(1, 2).flatten(0, 1)  # [B N, H, D]
    if mask is not None:
        tokens = tokens[mask[:, 0].flatten()]
    if len(tokens) == 0:
        raise ValueError("expected an example with real tokens, got padding alone")
    order = torch.randperm(len(tokens), generator=generator)[:CANDIDATES].to(tokens.device)
    for head in range(points.shape[0]):
        points[head] = _far_apart(tokens[order, head].double(), points.shape[1], generator).to(points)


def _far_apart(x: Tensor, count: int, generator: Generator) -> Tensor:
    """[R, D] -> [m, D]"""
    chosen = [x[0]]
    nearest = (x - x[0]).square().sum(-1)  # [R]
    scale = x.std(0).clamp_min(1e-3) if len(x) > 1 else torch.ones_like(x[0])
    while len(chosen) < count:
        chances = nearest.cpu()  # the generator is the CPU's
        if float(chances.max()) < 1e-6:  # there are fewer tokens than points: stay near one of them
            noise = torch.randn(x.shape[1], generator=generator, dtype=x.dtype).to(x)
            point = chosen[len(chosen) % len(x) % len(chosen)] + 0.3 * scale * noise
        else:
            point = x[int(torch.multinomial(chances, 1, generator=generator))]
        chosen.append(point)
        nearest = torch.minimum(nearest, (x - point).square().sum(-1))
    return torch.stack(chosen)


class LatentProjection(nn.Linear):
    """From tokens to latent inputs: a copy of the host's projection from tokens to keys.

    Its results have the type in which the process is computed, also under autocast.
    """

    def __init__(self, keys: "KeyProjection", heads: int, scale: float) -> None:
        weight, bias = keys.weight, keys.bias
        made: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
        super().__init__(weight.shape[1], weight.shape[0], bias=bias is not None, **made)
        with torch.no_grad():
            self.weight.copy_(weight)
            if bias is not None:
                self.bias.copy_(bias)
        self.norm = deepcopy(keys.norm)
        self.heads, self.scale = heads, scale

    def forward(self, input: Tensor) -> Tensor:
        """[..., N, E] -> [..., N, H D]"""
        o = super().forward(input)
        if self.norm is not None:
            o = self.norm(o.unflatten(-1, (self.heads, -1))).flatten(-2)
        return o.to(compute_dtype(o.dtype)) * self.scale


def is_plain_linear(module: object) -> TypeGuard[nn.Linear]:
    """Whether a module is a linear map and nothing more: adapters subclass `nn.Linear` and add to it."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


@dataclass(frozen=True, eq=False)
class KeyProjection:
    """A host's projection from tokens to keys."""

    weight: Tensor  # [H D, E]
    bias: Tensor | None  # [H D]
    norm: nn.Module | None = None  # applied to every head afterwards


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectedHeads(Heads):
    """`Heads` with projected queries and keys, which the kernel takes as they are."""

    q: Tensor  # [B, H, Q, D]
    k: Tensor  # [B, H, K, D]

    @classmethod
    def scaled(cls, heads: Heads, q: Tensor, k: Tensor, shrink: float) -> "ProjectedHeads":
        """The host's queries and keys, scaled so that q . k is the host's logit (eq. 21)."""
        dtype = compute_dtype(q.dtype)
        tokens = (heads.queries, heads.keys, heads.v.to(dtype), heads.mask, heads.query_mask, None)
        return cls(*tokens, q=q.to(dtype) * shrink, k=k.to(dtype) * shrink)


class Projected(Attention):
    """Base of kinds without projections of their own, except for latent ones."""

    placing: Generator | None = None  # set while an example runs, at whose tokens inducing inputs are placed

    def __init__(self, embed_dim: int, num_heads: int, **options: Any) -> None:
        super().__init__(embed_dim, num_heads, **options)
        for name in ("query", "key", "value", "output", "dropout"):  # which the host has
            self._modules.pop(name, None)

    def start(self, keys: KeyProjection | None, scale: float) -> None:
        """Initialise what is learned from tokens by the host's key projection times `scale`."""

    def _from_keys(self, keys: KeyProjection | None, scale: float, part: str) -> LatentProjection:
        if keys is None:
            raise ValueError(f"{self.kind!r} attention starts its {part} from the host's keys")
        return LatentProjection(keys, self.num_heads, scale)


class _ProjectedGaussian(Projected, GaussianAttention):
    def __init__(self, embed_dim: int, num_heads: int, *, normalize: str = "softmax", **options: Any) -> None:
        if normalize not in ("softmax", "rows", "none"):
            raise ValueError(f"expected normalize to be 'softmax', 'rows' or 'none', got {normalize!r}")
        if normalize == "softmax" and self.causal_form and options.get("causal"):
            why = "as the amplitudes of eq. 21 average all keys; 'softmax-gp' has a causal form of softmax"
            raise ValueError(f"expected normalize='rows' or 'none' beside causal=True, {why}, got 'softmax'")
        # eq. 21 has the prior scale and the dual values of eq. 25
        self._from_softmax = normalize == "softmax"
        super().__init__(
            embed_dim, num_heads, normalize="rows" if normalize == "softmax" else normalize, **options
        )
        self.normalize = normalize  # type: ignore[assignment]

    def _projected(self, heads: Heads) -> tuple[Tensor, Tensor]:
        q, k = projections(heads)
        return (shift_queries(q, k, heads.mask, heads.query_mask) if self._from_softmax else q), k

    def _compared(self, heads: Heads) -> tuple[Tensor, Tensor, bool] | None:
        found = super()._compared(heads)
        return (*projections(heads), True) if self._from_softmax and found is not None else found

    def _amplitudes(
        self, q: Tensor, k: Tensor, heads: Heads, *, causal: bool
    ) -> tuple[Tensor, dict[str, Any]]:
        if not self._from_softmax:
            return super()._amplitudes(q, k, heads, causal=causal)
        t = self.prior_scale()  # [H]
        masks: dict[str, Any] = {"mask": heads.mask, "query_mask": heads.query_mask}
        log_a, log_b = softmax_log_amplitudes(
            *projections(heads), scale=t, max_stddev=self.max_stddev, **masks
        )
        values = heads.v * (log_b.exp() / t.to(log_b.dtype)[:, None])[..., None]  # [B, H, K, D]
        return values, {"noise": self.noise(), "log_amplitude": log_a, **masks}

    def start(self, keys: KeyProjection | None, scale: float) -> None:
        if hasattr(self, "latent"):
            self.add_module("latent", self._from_keys(keys, scale, "latent projection"))


class ProjectedDirect(_ProjectedGaussian, DirectAttention):
    """`direct` for a host."""


class ProjectedCGP(_ProjectedGaussian, CGPAttention):
    """`cgp` for a host."""


class ProjectedSCGP(_ProjectedGaussian, SCGPAttention):
    """`scgp` for a host; its inducing inputs start where the latent projection puts random tokens."""

    def start(self, keys: KeyProjection | None, scale: float) -> None:
        """Latent projection from the keys', inducing inputs from the latent projection."""
        super().start(keys, scale)
        for inducing in (self.inducing_q, self.inducing_k):
            if isinstance(inducing, LearnedInducing):
                spread_points_(inducing.points, self.latent)
            elif inducing is not None:
                spread_points_(inducing.offsets, self.latent, about_zero=True)

    def _is_short(self, heads: Heads) -> bool:
        return self.placing is None and super()._is_short(heads)

    def _sparse(self, heads: Heads) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        if self.placing is not None:
            o = self._split(self.latent(heads.keys))  # [B, H, N, D]
            for inducing in (self.inducing_q, self.inducing_k):
                if isinstance(inducing, LearnedInducing):
                    place_points_(inducing.points, o, heads.mask, self.placing)
        return super()._sparse(heads)


class ProjectedKernel(Projected, KernelAttention):
    """`kernel` for a host."""

    def __init__(self, embed_dim: int, num_heads: int, **options: Any) -> None:
        super().__init__(embed_dim, num_heads, **options)
        self.query, self.key = nn.Identity(), nn.Identity()  # type: ignore[assignment]

    def start(self, keys: KeyProjection | None, scale: float) -> None:
        """Start with a length scale of 1: exp(q . k) in rows divided by their sums is the host's softmax."""
        if self.kernel == "exp_dot":
            self.lengthscale.set(1.0)

    def _scaled(self, heads: Heads) -> tuple[Tensor, Tensor]:
        q, k = projections(heads)
        queries, keys = (x.transpose(-3, -2).flatten(-2) for x in (q, k))  # [B, N, H D]
        return super()._scaled(replace(heads, queries=queries, keys=keys))


class ProjectedSoftmaxGP(Projected, SoftmaxGPAttention):
    """`softmax-gp` for a host: its mean is the host's."""

    def _projected(self, heads: Heads) -> tuple[Tensor, Tensor]:
        q, k = projections(heads)
        grow = q.shape[-1] ** 0.25  # eq. 21 divides by it
        return q * grow, k * grow


class ProjectedSGPA(Projected, SGPAAttention):
    """`sgpa` for a host: queries are also keys, and inducing keys are among them."""

    def __init__(self, embed_dim: int, num_heads: int, **options: Any) -> None:
        super().__init__(embed_dim, num_heads, **options)
        points = torch.zeros(num_heads, self.inducing.shape[1], self.head_dim, **self._made_with)
        self.inducing = nn.Parameter(points)  # [H, m, D]

    def start(self, keys: KeyProjection | None, scale: float) -> None:
        """Inducing keys where the host's keys put random tokens."""
        spread_points_(self.inducing, self._from_keys(keys, scale, "inducing keys"))

    def _arguments(self, heads: Heads) -> tuple[Tensor, ...]:
        q, _ = projections(heads)
        if self.placing is not None:
            place_points_(self.inducing, q, heads.mask, self.placing)
        return q, heads.v, self.inducing, self.inducing_values, self.scale_tril()


KINDS: dict[str, type[Projected]] = {
    "cgp": ProjectedCGP, "direct": ProjectedDirect, "kernel": ProjectedKernel, "scgp": ProjectedSCGP,
    "sgpa": ProjectedSGPA, "softmax-gp": ProjectedSoftmaxGP,
}  # fmt: skip


def projections(heads: Heads) -> tuple[Tensor, Tensor]:
    """Queries and keys of a host.  [B, H, N, D] each"""
    assert isinstance(heads, ProjectedHeads)
    return heads.q, heads.k


@torch.no_grad()
def spread_points_(points: Tensor, projection: nn.Module, *, about_zero: bool = False) -> None:
    """Set points [H, m, D] to projections of random normalised tokens, drawn on the CPU for all devices."""
    heads, count, _ = points.shape
    width = next(projection.parameters()).shape[1]
    tokens = torch.randn(count, width).to(points)  # [m, E]
    placed = projection(tokens).unflatten(-1, (heads, -1)).transpose(0, 1)  # [H, m, D]
    points.copy_(placed - placed.mean(1, keepdim=True) if about_zero else placed)
