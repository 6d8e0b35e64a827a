"""The kinds of attention with projections left to their host: they read queries, keys and values as they are.

Each is the library's own kind with its projections taken out and, for direct, cgp and scgp, one way more to
weigh values: `normalize="softmax"` (eq. 21), under which attention starts as the host's.
"""

from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from gpattention.adopt.convert_amplitude import shift_queries, softmax_log_amplitudes
from gpattention.adopt.convert_inducing import Placing
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
from gpattention.attention.inducing import LearnedInducing
from gpattention.gp.precision import compute_dtype


class LatentProjection(nn.Linear):
    """Tokens to latent inputs: the host's way from tokens to keys, with weights of its own.

    Its results have the type the process is computed in, also under autocast.
    """

    def __init__(self, keys: "KeyProjection", heads: int, scale: float) -> None:
        weight, bias = keys.linear.weight, keys.linear.bias
        super().__init__(
            keys.linear.in_features, keys.linear.out_features, bias=bias is not None,
            device=weight.device, dtype=weight.dtype,
        )  # fmt: skip
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
    """Whether its weight tells all it does: adapters subclass `nn.Linear` and add to it."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


@dataclass(frozen=True, eq=False)
class KeyProjection:
    """How a host comes from tokens to keys."""

    linear: nn.Linear
    norm: nn.Module | None = None  # of every head, afterwards


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectedHeads(Heads):
    """`Heads` whose queries and keys are projected already; the kernel sees q and k as they are."""

    q: Tensor  # [B, H, Q, D]
    k: Tensor  # [B, H, K, D]


class Projected(Attention):
    """Base: no projection of its own but the latent one."""

    placing: Placing | None = None  # while an example runs: inducing inputs go where its tokens are

    def drop_projections(self) -> None:
        """Leave queries, keys, values and outputs to the host."""
        for name in ("query", "key", "value", "output", "dropout"):
            if hasattr(self, name):
                delattr(self, name)

    def start(self, keys: KeyProjection | None, scale: float) -> None:
        """Take the host's key projection, times `scale`, as the start of what is learned from tokens."""


class _ProjectedGaussian(Projected, GaussianAttention):
    def __init__(self, embed_dim: int, num_heads: int, *, normalize: str = "softmax", **options: Any) -> None:
        if normalize not in ("softmax", "rows", "none"):
            raise ValueError(f"expected normalize to be 'softmax', 'rows' or 'none', got {normalize!r}")
        # eq. 21 has the prior scale of eq. 25, and its values are the dual ones
        known = {"softmax": "rows"}.get(normalize, normalize)
        super().__init__(embed_dim, num_heads, normalize=known, **options)  # type: ignore[arg-type]
        self.normalize = normalize  # type: ignore[assignment]
        self.drop_projections()

    def _projected(self, heads: Heads) -> tuple[Tensor, Tensor]:
        q, k = projections(heads)
        if self._from_softmax:
            q = shift_queries(q, k, heads.mask, heads.query_mask)
        return q, k

    def _amplitudes(
        self, q: Tensor, k: Tensor, heads: Heads, *, causal: bool
    ) -> tuple[Tensor, dict[str, Any]]:
        if not self._from_softmax:
            return super()._amplitudes(q, k, heads, causal=causal)
        t = self.prior_scale()  # [H]
        log_a, log_b = softmax_log_amplitudes(
            *projections(heads), scale=t, mask=heads.mask, query_mask=heads.query_mask,
            max_stddev=self.max_stddev,
        )  # fmt: skip
        values = heads.v * (log_b.exp() / t.to(log_b.dtype)[:, None])[..., None]  # [B, H, K, D]
        shared = {"noise": self.noise(), "mask": heads.mask, "query_mask": heads.query_mask}
        return values, {**shared, "log_amplitude": log_a}

    @property
    def _from_softmax(self) -> bool:
        return str(self.normalize) == "softmax"

    def start(self, keys: KeyProjection | None, scale: float) -> None:
        latent = getattr(self, "latent", None)
        if latent is None:
            return
        if keys is None:
            raise ValueError(f"{self.kind!r} attention starts its latent projection from the host's keys")
        self.add_module("latent", LatentProjection(keys, self.num_heads, scale))


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
            if inducing is None:
                continue
            points = inducing.points if isinstance(inducing, LearnedInducing) else inducing.offsets
            offsets = not isinstance(inducing, LearnedInducing)
            spread_points_(points, self.latent, about_zero=offsets)

    def _sparse(self, heads: Heads) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        if self.placing is not None:
            o = self._split(self.latent(heads.keys))  # [B, H, N, D]
            for inducing in (self.inducing_q, self.inducing_k):
                if isinstance(inducing, LearnedInducing):
                    self.placing.place_(inducing.points, o, heads.mask)
        return super()._sparse(heads)


class ProjectedKernel(Projected, KernelAttention):
    """`kernel` for a host."""

    def __init__(self, embed_dim: int, num_heads: int, **options: Any) -> None:
        super().__init__(embed_dim, num_heads, **options)
        self.drop_projections()
        self.query, self.key = nn.Identity(), nn.Identity()  # type: ignore[assignment]

    def start(self, keys: KeyProjection | None, scale: float) -> None:
        """exp(q . k) with rows divided by their sums is the host's softmax: no length scale at first."""
        if self.kernel == "exp_dot":
            self.lengthscale.set(1.0)

    def _scaled(self, heads: Heads) -> tuple[Tensor, Tensor]:
        q, k = projections(heads)
        return super()._scaled(replace(heads, queries=_join(q), keys=_join(k)))


class ProjectedSoftmaxGP(Projected, SoftmaxGPAttention):
    """`softmax-gp` for a host: its mean is the host's."""

    def __init__(self, embed_dim: int, num_heads: int, **options: Any) -> None:
        super().__init__(embed_dim, num_heads, **options)
        self.drop_projections()

    def _projected(self, heads: Heads) -> tuple[Tensor, Tensor]:
        q, k = projections(heads)
        grow = q.shape[-1] ** 0.25  # eq. 21 divides by it
        return q * grow, k * grow


class ProjectedSGPA(Projected, SGPAAttention):
    """`sgpa` for a host: its queries are its keys too; inducing keys live where the queries do."""

    def __init__(self, embed_dim: int, num_heads: int, **options: Any) -> None:
        super().__init__(embed_dim, num_heads, **options)
        self.drop_projections()
        points = torch.zeros(num_heads, self.inducing.shape[1], self.head_dim, **self._made_with)
        self.inducing = nn.Parameter(points)  # [H, m, D]

    def start(self, keys: KeyProjection | None, scale: float) -> None:
        """Inducing keys where the host's keys put random tokens."""
        if keys is None:
            raise ValueError(f"{self.kind!r} attention starts its inducing keys from the host's keys")
        spread_points_(self.inducing, LatentProjection(keys, self.num_heads, scale))

    def _arguments(self, heads: Heads) -> tuple[Tensor, ...]:
        q, _ = projections(heads)
        if self.placing is not None:
            self.placing.place_(self.inducing, q, heads.mask)
        return q, heads.v, self.inducing, self.inducing_values, self.scale_tril()

    def _kernel_inputs(self, heads: Heads) -> tuple[Tensor, Tensor]:
        return projections(heads)[0], projections(heads)[0]


KINDS: dict[str, type[Projected]] = {
    "cgp": ProjectedCGP,
    "direct": ProjectedDirect,
    "kernel": ProjectedKernel,
    "scgp": ProjectedSCGP,
    "sgpa": ProjectedSGPA,
    "softmax-gp": ProjectedSoftmaxGP,
}


def projections(heads: Heads) -> tuple[Tensor, Tensor]:
    """Queries and keys of a host.  [B, H, N, D] each"""
    if not isinstance(heads, ProjectedHeads):
        raise TypeError(f"expected the projections of a host, got {type(heads).__name__}")
    return heads.q, heads.k


@torch.no_grad()
def spread_points_(points: Tensor, projection: nn.Module, *, about_zero: bool = False) -> None:
    """Points [H, m, D] where a projection puts LayerNorm'ed tokens; drawn on the CPU, the same everywhere."""
    heads, count, _ = points.shape
    width = next(projection.parameters()).shape[1]
    tokens = torch.randn(count, width).to(points)  # [m, E]
    placed = projection(tokens).unflatten(-1, (heads, -1)).transpose(0, 1)  # [H, m, D]
    points.copy_(placed - placed.mean(1, keepdim=True) if about_zero else placed)


def _join(x: Tensor) -> Tensor:
    """[B, H, N, D] -> [B, N, H D]"""
    return x.transpose(-3, -2).flatten(-2)
