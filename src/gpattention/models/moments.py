"""One pass instead of draws: means and diagonal variances, from layer to layer, to a Gaussian of the logits.

Every entry of the tokens has a mean m and a variance v; covariances between entries are left out.

    linear            m' = W m + b                       v' = W^2 v                                      (M1)
    LayerNorm         J = diag(g) (I - 1 1^T / E - x x^T / E) / s,  x = (m - mean m) / s                 (M2)
                      v' = diag(J diag(v) J^T), the local linearisation at m
    ReLU, GELU        m' = f(m)                          v' = f'(m)^2 v, likewise                        (M3)
    attention         m' = P m_V                         v' = V[z | m] + P^2 v_V                         (M4)
    residual          m' = m + m_f                       v' = v + v_f                                    (M5)
    pooling and head  m' = h(m)                          C = H diag(v) H^T, H the Jacobian of h at m     (M6)

Attention weights P are held at their mean: V[z | m] is the variance of the Gaussian process at the means of
queries, keys and latent inputs, and the second term what the variance of the values brings along.  (M1) and
(M6) are exact for entries that are independent; what the residual stream adds is not, as both terms come from
the same tokens, and the noise of one token reaches many others: `docs/attach.md` has what that costs.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm, linear

from gpattention.models.predict import (
    Inputs,
    Progress,
    count_items,
    device_of,
    evaluating,
    model_device,
    run_rows,
    take,
)
from gpattention.models.prediction import Prediction
from gpattention.numerics import checked_once
from gpattention.ops import why_not_fused_on
from gpattention.ops.layers import MOST_COLUMNS, fused_norm_moments

if TYPE_CHECKING:
    from gpattention.models.transformer import Block, Transformer

Method: TypeAlias = Literal["draws", "moments"]
METHODS: tuple[Method, ...] = ("draws", "moments")
GRADIENTS = 16  # classes whose gradients are held at once


@dataclass(frozen=True)
class LogitGaussian:
    """Gaussians over the logits of B items.

    Attributes:
        mean: [B, C]
        root: [B, C, R], covariance = root root^T
    """

    mean: Tensor
    root: Tensor

    @property
    def covariance(self) -> Tensor:
        """Between the logits of an item.  [B, C, C]"""
        return self.root @ self.root.mT

    @property
    def variance(self) -> Tensor:
        """Of every logit.  [B, C]"""
        return self.root.square().sum(-1)

    def sample(self, normal: Tensor) -> Tensor:
        """Draws from standard normal numbers [S, B, R].  [S, B, C]"""
        return self.mean + torch.einsum("bcr,sbr->sbc", self.root, normal)

    def mean_field(self) -> Tensor:
        """Logits of the approximate mean prediction, in closed form.  [B, C]

        E softmax is approximated by 1 / sum_i exp(-(m_k - m_i) / sqrt(1 + pi/8 var(f_k - f_i))), made to
        add up to 1 (Lu et al. 2020).  With two classes it is MacKay's probit approximation.  Only
        differences enter, since adding a number to all logits changes no prediction.
        """
        cov, var = self.covariance, self.variance  # [B, C, C], [B, C]
        spread = (var[:, :, None] + var[:, None] - 2 * cov).clamp(min=0)  # [B, C, C] var(f_k - f_i)
        ahead = (self.mean[:, :, None] - self.mean[:, None]) / (1 + math.pi / 8 * spread).sqrt()  # [B, C, C]
        return (-(-ahead).logsumexp(-1)).log_softmax(-1)


@dataclass(frozen=True)
class Moments:
    """Mean and variance of every entry; no variance is 0."""

    mean: Tensor  # [..., E]
    variance: Tensor | None = None  # [..., E]

    def __add__(self, other: "Moments") -> "Moments":
        """Eq. M5."""
        return Moments(self.mean + other.mean, summed(self.variance, other.variance))


def summed(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Of variances that may be none."""
    if first is None or second is None:
        return second if first is None else first
    return first + second


def linear_moments(x: Moments, weight: Tensor, bias: Tensor | None) -> Moments:
    """Eq. M1.

    Args:
        x: [..., E]
        weight: [F, E]
        bias: [F]

    Returns:
        [..., F]
    """
    return Moments(linear(x.mean, weight, bias), linear_variance(x.variance, weight))


def linear_variance(v: Tensor | None, weight: Tensor) -> Tensor | None:
    """The variance of eq. M1 alone."""
    return None if v is None else linear(v, weight.square())


def layer_norm_moments(x: Moments, weight: Tensor | None, bias: Tensor | None, eps: float) -> Moments:
    """Eq. M2 over the last axis.

    Args:
        x: [..., E]
        weight: [E]
        bias: [E]
        eps: of the LayerNorm.

    Returns:
        [..., E]
    """
    shape, width = x.mean.shape[-1:], x.mean.shape[-1]
    if (v := x.variance) is None:
        return Moments(layer_norm(x.mean, shape, weight, bias, eps))
    fits = width <= MOST_COLUMNS and not torch.is_grad_enabled()  # the kernel has no gradient
    fits = fits and why_not_fused_on(v.device, v.dtype) is None
    if fits and weight is not None and bias is not None:
        return Moments(*fused_norm_moments(x.mean, v, weight, bias, eps))
    # which has looked at centre and 1 / s, [..., 1] each, on its way
    mean, centre, precision = torch.native_layer_norm(x.mean, shape, weight, bias, eps)
    u = (x.mean - centre).mul_(precision)  # [..., E]
    uv = u * v
    uuv = u * uv
    # sum_j (d_ij - (1 + u_i u_j) / E)^2 v_j, its square multiplied out
    total, first, second = (y.sum(-1, keepdim=True) for y in (v, uv, uuv))  # [..., 1]
    rest = torch.mul(u, second, out=uv).add_(2 * first).mul_(u).add_(total)
    variance = uuv.mul_(-2 / width).add_(v, alpha=1 - 2 / width).add_(rest, alpha=width**-2).clamp_(min=0)
    scale = precision if weight is None else precision * weight
    return Moments(mean, variance.mul_(scale).mul_(scale))


def activation_moments(x: Moments, name: str) -> Moments:
    """Eq. M3 of "relu" or "gelu"."""
    m, v = x.mean, x.variance
    if name == "relu":
        return Moments(m.relu(), None if v is None else torch.where(m > 0, v, 0.0))
    # twice the product with f'(m) that a backward pass makes: few passes over the widest thing there is
    slope = torch.ops.aten.gelu_backward
    return Moments(gelu(m), None if v is None else slope(slope(v, m), m))


def attention_variance(
    own: Tensor | None,  # [B, H, Q] or [B, H, Q, D] of the process at the means
    weights: Callable[[], Tensor],  # [B, H, Q, K] made where they are needed
    values: Tensor | None,  # [B, H, K, D] variance of the values
) -> Tensor | None:
    """Eq. M4.  [B, H, Q, D], or [B, H, Q, 1] where it is the same for all channels"""
    own = own[..., None] if own is not None and own.ndim == 3 else own
    return summed(own, None if values is None else weights().square() @ values)


def tail_gaussian(mean: Tensor, variance: Tensor | None, logits: Callable[[Tensor], Tensor]) -> LogitGaussian:
    """Eq. M6.

    Args:
        mean: [B, ...] of what pooling and head read.
        variance: of its entries.
        logits: pooling and head, which keep items apart.

    Returns:
        The logits' Gaussian.
    """
    with torch.inference_mode(False), torch.enable_grad():
        leaf = mean.detach().clone().requires_grad_()
        return gaussian_of(logits(leaf), leaf, variance)


def gaussian_of(found: Tensor, leaf: Tensor, variance: Tensor | None, axis: int = 0) -> LogitGaussian:
    """Logits [B, C] with the graph that leads to a leaf whose axis of items is `axis`."""
    classes, parts = found.shape[-1], []
    if variance is None:
        return LogitGaussian(found.detach(), found.new_zeros(*found.shape, 1).detach())
    std = variance.detach().sqrt().movedim(axis, 0).flatten(1)  # [B, R]
    for some in torch.eye(classes, dtype=found.dtype, device=found.device).split(GRADIENTS):
        given = some[:, None].expand(-1, len(found), -1)  # [c, B, C]
        (slope,) = torch.autograd.grad(found, leaf, given, is_grads_batched=True, retain_graph=True)
        parts.append(slope.movedim(axis + 1, 1).flatten(2) * std)  # [c, B, R]
    return LogitGaussian(found.detach(), torch.cat(parts).transpose(0, 1))


def predict_moments(
    model: nn.Module,
    gaussian: Callable[[Inputs], LogitGaussian],
    inputs: Inputs,
    *,
    batch_size: int | None = None,
    first_item: int = 0,
    variances: bool = False,
    progress: Progress | None = None,
) -> Prediction:
    """The mean-field prediction of all items, with the variances of their logits.

    Args:
        model: what predicts.
        gaussian: a batch on its device to the Gaussian of its logits.
        inputs: of any number of items.
        batch_size: items that run at once.
        first_item: changes nothing, as nothing is drawn.
        variances: of layers; refused.
        progress: called with how many items are done, and how many there are.

    Returns:
        One sample, which is no draw.

    Raises:
        ValueError: for wrong numbers, and where variances of layers are asked for.
    """
    if variances:
        raise ValueError("expected variances=False with method='moments', which keeps those of the logits")
    device, home, count = model_device(model, inputs), device_of(inputs), count_items(inputs)

    def run(most: int) -> Prediction:
        parts = []
        for start in range(0, count, most):
            part = partial(gaussian, take(inputs, slice(start, start + most), device))
            found = checked_once(part, device, lambda found: (found.mean, found.root))
            exact = torch.promote_types(found.mean.dtype, torch.float32)
            found = LogitGaussian(found.mean.to(exact), found.root.to(exact))
            prediction = Prediction.from_logits(found.mean_field()[None], drawn=False)
            parts.append(replace(prediction, logit_variance=found.variance).to(home))
            if progress is not None:
                progress(min(start + most, count), count)
        return Prediction.cat(parts)

    with evaluating(model):
        return run_rows(run, batch_size, device)


# Our transformers


def transformer_moments(model: "Transformer", inputs: Any) -> LogitGaussian:
    """The logits' Gaussian of one of our transformers, in evaluation mode.

    Args:
        model: any kinds of attention.
        inputs: a batch.

    Returns:
        Of [B, C] logits.

    Raises:
        ValueError: for models whose blocks are not our own.
    """
    blocks = model._blocks()
    for number, block in enumerate(blocks):
        check_block(number, block)
    tokens, padding = model.embed(inputs)
    x, before = Moments(tokens), None
    for block in blocks:
        x = block_moments(block, x, padding, before)
        before = block
    x = _normed(model.norm, x)
    return tail_gaussian(x.mean, x.variance, lambda tokens: model.head(model.pool(tokens, padding)))


def check_block(number: int, block: "Block") -> None:
    """Refuse blocks that do something else."""
    from gpattention.models.transformer import Block, FeedForward

    if type(block) is not Block or type(block.feed_forward) is not FeedForward:
        got = f"a {type(block).__name__} as block {number}"
        raise ValueError(f"method='moments' knows blocks of our own transformers, got {got}: draw instead")
    if not hasattr(block.attention, "value"):
        raise ValueError(
            f"method='moments' knows attention with a linear map to values, got {block.attention.kind!r} "
            f"attention in block {number}: draw instead"
        )


def block_moments(block: "Block", x: Moments, padding: Tensor | None, before: "Block | None") -> Moments:
    """Tokens [B, N, E] after a block, as `Block.forward` has them."""
    attention, part = block.attention, block.feed_forward
    normed = _normed(block.norm, x)
    options: dict[str, Any] = {}
    inducing = attention.inducing_tokens()  # [H, m, E]
    if inducing is not None and before is not None:
        options["inducing"] = block.norm(inducing + before.feed_forward(inducing))
    need = ("output", *(("posterior",) if attention.draws else ()))
    need += () if normed.variance is None else ("weights",)
    found = attention(normed.mean, key_padding_mask=padding, need=need, finish=False, **options)
    values = None
    if normed.variance is not None:
        flat = linear(normed.variance, attention.value.weight.square())
        values = attention._split(flat)  # [B, H, N, D]
        if padding is not None:
            values = torch.where(padding[:, None, :, None], 0.0, values)
    own = None if found.posterior is None else found.posterior.variance
    variance = attention_variance(own, lambda: found.weights, values)
    if variance is not None:
        heads = variance.expand(*variance.shape[:-1], attention.head_dim)
        variance = heads.transpose(-3, -2).flatten(-2)  # [B, N, E]
    x = x + linear_moments(Moments(found.output, variance), attention.output.weight, attention.output.bias)
    hidden = linear_moments(_normed(part.norm, x), part.into.weight, part.into.bias)
    return x + linear_moments(activation_moments(hidden, "gelu"), part.back.weight, part.back.bias)


def _normed(norm: nn.LayerNorm, x: Moments) -> Moments:
    return layer_norm_moments(x, norm.weight, norm.bias, norm.eps)
