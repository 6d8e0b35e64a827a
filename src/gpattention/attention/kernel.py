"""Kernel attention: the mean the GP kinds start from, without a posterior."""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gpattention.attention.base import Attention, Heads
from gpattention.attention.initialisation import spread_
from gpattention.attention.parameters import Positive
from gpattention.attention.registry import register_attention
from gpattention.gp import exp_dot, rbf
from gpattention.gp.fused.attention.streamed import fused_kernel_attention
from gpattention.gp.fused.switch import SHOWN_TOKENS, why_not_fused_on
from gpattention.gp.inputs import keep_rows
from gpattention.gp.precision import compute_dtype, full_precision

KernelName = Literal["rbf", "ard_rbf", "exp_dot"]
KERNELS: tuple[KernelName, ...] = ("rbf", "ard_rbf", "exp_dot")
Normalize = Literal["none", "rows"]


def check_normalize(normalize: str) -> Normalize:
    """One of the two ways to weigh values."""
    if normalize == "none" or normalize == "rows":
        return normalize  # type: ignore[return-value]
    raise ValueError(f"expected normalize to be 'none' or 'rows', got {normalize!r}")


def kernel_parameters(
    kernel: KernelName, num_heads: int, head_dim: int, **made_with: Any
) -> tuple[Positive, Positive]:
    """Length scales [H, D] and variances [H] of ard_rbf and exp_dot.

    exp(q . k) has no mean at all when the tokens spread as rbf wants them (SPREAD = 1): longer scales
    and a small variance keep its rows in proportion.
    """
    lengthscale, variance = (1.0, 1.0) if kernel == "ard_rbf" else (1.6, 0.1)
    return (
        Positive((num_heads, head_dim), lengthscale, **made_with),
        Positive((num_heads,), variance, **made_with),
    )


@register_attention("kernel")
class KernelAttention(Attention):
    """kappa(q, k) V, or its rows divided by their sums (eq. 25's mean).

    Options beside those of `Attention`: `kernel` ("rbf", "ard_rbf" with a length scale per head and
    dimension and a variance per head, "exp_dot" likewise), `symmetric` (queries and keys share their
    projection), `normalize` ("rows" or "none"), `causal`.
    """

    normalizes = True
    causal_form = True
    projections = ("query", "key", "value")

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        kernel: KernelName = "rbf",
        symmetric: bool = False,
        normalize: Normalize = "rows",
        causal: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(embed_dim, num_heads, **options)
        if kernel not in KERNELS:
            raise ValueError(f"expected kernel to be one of {', '.join(KERNELS)}, got {kernel!r}")
        self.kernel: KernelName = kernel
        self.symmetric, self.causal = symmetric, causal
        self.normalize = check_normalize(normalize)
        self.query = self._linear()
        self.key = None if symmetric else self._linear()
        for linear in (self.query, self.key):
            if linear is not None:
                spread_(linear, num_heads)
        if kernel != "rbf":
            self.lengthscale, self.variance = kernel_parameters(
                kernel, num_heads, self.head_dim, **self._made_with
            )

    def _scaled(self, heads: Heads) -> tuple[Tensor, Tensor]:
        """Queries and keys divided by the length scales.  [B, H, N, D]"""
        q = self._projection("query", heads)
        k = self._projection("key", heads) if self.key is not None else self._split(self.query(heads.keys))
        q, k = q.to(compute_dtype(q.dtype)), k.to(compute_dtype(k.dtype))
        if self.kernel != "rbf":
            scale = self.lengthscale()[:, None]  # [H, 1, D]
            q, k = q / scale, k / scale
        return q, k

    def _projected(self, heads: Heads) -> tuple[Tensor, Tensor]:
        """The same masked and about one origin.  [B, H, N, D]"""
        q, k = self._scaled(heads)
        k = keep_rows(k, heads.mask)
        if self.kernel != "exp_dot":  # distances do not see a translation, but rounding does
            centre = k.detach().mean(-2, keepdim=True)
            q, k = q - centre, keep_rows(k - centre, heads.mask)
        return keep_rows(q, heads.query_mask), k

    def _kernel_inputs(self, heads: Heads) -> tuple[Tensor, Tensor]:
        return self._projected(heads)

    def _mean(self, heads: Heads) -> Tensor:
        if self._why_not_fused(heads.v) is None:
            return self._streamed(heads, *self._scaled(heads))
        return self._attended(heads, *self._projected(heads))

    def _why_not_fused(self, v: Tensor) -> str | None:
        """None if a fused kernel attends, else the reason."""
        if self.kernel == "exp_dot":
            return "exp_dot has no fused kernel"
        dtype, channels = compute_dtype(v.dtype), max(self.head_dim, v.shape[-1])
        # any length fits; "auto" stays with those at which the kernel was measured to be the faster way
        shown = v.shape[-2] <= SHOWN_TOKENS
        return why_not_fused_on(v.device, dtype, channels=channels, measured=shown)

    def _streamed(self, heads: Heads, q: Tensor, k: Tensor) -> Tensor:
        """The mean by the kernel that streams the keys and sees to origin and masks.  [B, H, Q, D]"""
        v = heads.v.to(q.dtype)
        if self.kernel != "rbf" and self.normalize == "none":
            v = self.variance()[:, None, None] * v
        mean = fused_kernel_attention(
            q, k, v, normalised=self.normalize == "rows", causal=self.causal,
            mask=heads.mask, query_mask=heads.query_mask,
        )  # fmt: skip
        return mean.to(heads.v.dtype)

    @full_precision
    def _attended(self, heads: Heads, q: Tensor, k: Tensor) -> Tensor:
        v = keep_rows(heads.v.to(q.dtype), heads.mask)  # [B, H, K, D]
        visible = self._visible(heads, q.shape[-2], k.shape[-2])  # [B, 1, Q, K]
        if self.normalize == "none":
            return (self._gram(q, k, visible) @ v).to(heads.v.dtype)
        bias = self._row_bias(k, visible)  # [B, H, Q, K]
        mean = scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
        return torch.where(visible.any(-1, keepdim=True), mean, 0.0).to(heads.v.dtype)

    def _weights(self, heads: Heads) -> Tensor:
        return self._all_weights(heads, *self._projected(heads))

    @full_precision
    def _all_weights(self, heads: Heads, q: Tensor, k: Tensor) -> Tensor:
        visible = self._visible(heads, q.shape[-2], k.shape[-2])
        if self.normalize == "none":
            return self._gram(q, k, visible).to(heads.v.dtype)
        weights = (q @ k.mT + self._row_bias(k, visible)).softmax(-1)
        return torch.where(visible, weights, 0.0).to(heads.v.dtype)

    def _gram(self, q: Tensor, k: Tensor, visible: Tensor) -> Tensor:
        """variance * kappa, zero between tokens that do not see each other.  [B, H, Q, K]"""
        K = rbf(q, k) if self.kernel != "exp_dot" else exp_dot(q, k)
        K = K if self.kernel == "rbf" else self.variance()[:, None, None] * K
        return torch.where(visible, K, 0.0)

    def _row_bias(self, k: Tensor, visible: Tensor) -> Tensor:
        """What q . k lacks: -1/2 |q - k|^2 = q . k - 1/2 |k|^2 - 1/2 |q|^2, whose last term cancels.

        [B, H, Q, K]
        """
        bias = 0.0 if self.kernel == "exp_dot" else -0.5 * k.square().sum(-1)[..., None, :]
        bias = torch.where(visible, bias, -torch.inf)
        # a row with nothing to attend to attends anywhere, then to nothing
        bias = torch.where(visible.any(-1, keepdim=True), bias, 0.0).to(k.dtype)
        return bias.expand(*k.shape[:2], -1, -1)

    def _visible(self, heads: Heads, queries: int, keys: int) -> Tensor:
        """Pairs of real tokens.  [B or 1, 1, Q, K]"""
        visible = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=heads.v.device)
        if self.causal:
            visible = visible.tril()
        if heads.mask is not None:
            visible = visible & heads.mask[:, :, None, :]
        if heads.query_mask is not None:
            visible = visible & heads.query_mask[..., None]
        return visible
