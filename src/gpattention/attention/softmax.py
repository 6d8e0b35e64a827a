"""Softmax attention, plain and with the Gaussian-process variance of eq. 21-22."""

from typing import Any

import torch
from torch import Tensor

from gpattention.attention.base import Attention, Heads, MeanProcess, register_attention
from gpattention.attention.parameters import NOISE_FLOOR, spread_
from gpattention.gp import Posterior, keep_rows, real_mean, softmax_attention, softmax_posterior
from gpattention.ops import MOST_CHANNELS, MOST_TOKENS, why_not_fused_on
from gpattention.ops.attention import fused_softmax_attention


class _Softmax(Attention):
    """Queries and keys of dot-product attention."""

    causal_form = True
    projections = ("query", "key", "value")
    exportable = True

    def __init__(self, embed_dim: int, num_heads: int, *, causal: bool = False, **options: Any) -> None:
        super().__init__(embed_dim, num_heads, **options)
        self.causal = causal
        self.query, self.key = self._linear(), self._linear()
        for linear in (self.query, self.key):
            # q d^-1/4 are the inputs of the kernel behind softmax (eq. 21)
            spread_(linear, num_heads, scale=self.head_dim**0.25)

    def _scaled(self, heads: Heads) -> tuple[Tensor, Tensor]:
        """q d^-1/4 and k d^-1/4, whose products are the logits.  [B, H, N, D]"""
        q, k = self._projected(heads)
        return q * self.head_dim**-0.25, k * self.head_dim**-0.25

    def _compared(self, heads: Heads) -> tuple[Tensor, Tensor, bool]:
        return *self._scaled(heads), True

    def _kernel_inputs(self, heads: Heads) -> tuple[Tensor, Tensor]:
        """The same, each about its own mean (eq. 21)."""
        masks, scaled = (heads.query_mask, heads.mask), self._scaled(heads)
        q, k = (keep_rows(x - real_mean(x, mask), mask) for x, mask in zip(scaled, masks, strict=True))
        return q, k


@register_attention("softmax")
class SoftmaxAttention(_Softmax):
    """softmax(Q K^T / sqrt d) V by `scaled_dot_product_attention`; no variance.

    Args:
        embed_dim: width E of the tokens and of the output.
        num_heads: number H of heads; E must be a multiple.
        causal: whether token i sees only tokens up to i.
        **options: those of `Attention`.
    """

    attachable = True

    def _mean(self, heads: Heads) -> Tensor:
        q, k = self._projected(heads)
        attend = fused_softmax_attention if _streams(q, k, heads.v) else softmax_attention
        return attend(q, k, heads.v, causal=self.causal, mask=heads.mask, query_mask=heads.query_mask)

    def _mean_process(self, heads: Heads) -> MeanProcess:
        return MeanProcess(*self._scaled(heads), "softmax")


def _streams(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the fused kernel is used: for short sequences in float32, where it can run.

    It is never necessary, so that "on" is not an error where it cannot run, and "auto" does not use it, since
    SDPA was measured to be faster (a training step of the paper's CIFAR-10 model in 1.73 ms on an H200
    against 1.91).
    """
    tokens, channels = max(q.shape[-2], k.shape[-2]), max(q.shape[-1], v.shape[-1])
    fits = tokens <= MOST_TOKENS and channels <= MOST_CHANNELS and q.dtype == v.dtype == torch.float32
    return fits and why_not_fused_on(q.device, q.dtype, measured=False) is None


@register_attention("softmax-gp")
class SoftmaxGPAttention(_Softmax):
    """The same mean, exactly, plus the variance of the Gaussian process behind it (eq. 21-22).

    Args:
        embed_dim: width E of the tokens and of the output.
        num_heads: number H of heads; E must be a multiple.
        noise: initial sigma^2.
        learn_noise: whether it is trained.
        prior_scale: initial t per head, to which the standard deviation is proportional.
        learn_prior_scale: whether it is trained.
        **options: `causal`, and those of `Attention`.
    """

    draws = True
    converts_from = ("softmax",)

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        noise: float = 0.01,
        learn_noise: bool = True,
        prior_scale: float = 0.2,
        learn_prior_scale: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(embed_dim, num_heads, **options)
        self.noise = self._per_head("noise", noise, learn_noise, floor=NOISE_FLOOR)
        self.prior_scale = self._per_head("prior_scale", prior_scale, learn_prior_scale)

    def _posterior(self, heads: Heads, *, with_variance: bool = False) -> Posterior:
        q, k = self._projected(heads)
        return softmax_posterior(
            q, k, heads.v, noise=self.noise(), prior_scale=self.prior_scale(),
            mask=heads.mask, query_mask=heads.query_mask, causal=self.causal,
        )  # fmt: skip
