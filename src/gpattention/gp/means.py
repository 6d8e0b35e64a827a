"""Kernel and softmax attention: the means that the GP kinds start from, without a posterior.

    kappa(q, k) V (eq. 1),  its rows divided by their sums (the mean of eq. 25),  softmax(Q K^T / sqrt d) V

The caller divides queries and keys by length scales.  Rows that see no key, and padded queries, are 0.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from gpattention.gp.inputs import fill_rows, keep_rows, real_mean
from gpattention.gp.kernels import exp_dot, log_kappa, rbf
from gpattention.numerics import full_precision, is_transformed
from gpattention.ops import SHOWN_TOKENS, why_not_fused_on
from gpattention.ops.attention import fused_kernel_attention


@full_precision
def kernel_attention(
    q: Tensor,  # [..., Q, C]
    k: Tensor,  # [..., K, C]
    v: Tensor,  # [..., K, D]
    *,
    normalised: bool,
    dot: bool = False,
    variance: Tensor | None = None,  # [...]
    causal: bool = False,
    mask: Tensor | None = None,  # [..., K] True = real
    query_mask: Tensor | None = None,  # [..., Q]
) -> Tensor:
    """variance * kappa(q, k) v (eq. 1), or its rows divided by their sums (the mean of eq. 25).

    Args:
        q: queries, divided by length scales.
        k: keys, likewise.
        v: values.
        normalised: whether rows are divided by their sums.
        dot: takes exp(q . k) in the place of kappa.
        variance: of the kernel, which cancels in normalised rows; 1 for None.
        causal: query i sees keys up to i only.
        mask: which keys are real.
        query_mask: which queries are real.

    Returns:
        [..., Q, D] in v's type; 0 at rows that see no key, and at padded queries.
    """
    dtype, v = v.dtype, v.to(q.dtype)
    if why_not_streamed(q, v, dot=dot) is None:  # whose kernel sees to origin and masks
        v = v if normalised or variance is None else variance[..., None, None] * v
        return fused_kernel_attention(
            q, k, v, normalised=normalised, causal=causal, mask=mask, query_mask=query_mask
        ).to(dtype)
    v = keep_rows(v, mask)
    if not (normalised and dot):
        weights = kernel_weights(
            q, k, normalised=normalised, dot=dot, variance=variance, causal=causal, mask=mask,
            query_mask=query_mask,
        )  # fmt: skip
        return (weights @ v).to(dtype)
    q, k = keep_rows(q, query_mask), keep_rows(k, mask)
    visible = _visible(q, k, causal, mask, query_mask)  # [..., Q, K]
    seen = visible.any(-1, keepdim=True)  # [..., Q, 1]
    # a row with nothing to attend to attends anywhere, then to nothing
    mean = _attend(q, k, v, attn_mask=visible | ~seen, scale=1.0)
    return torch.where(seen, mean, 0.0).to(dtype)


@full_precision
def kernel_weights(
    q: Tensor,  # [..., Q, C]
    k: Tensor,  # [..., K, C]
    *,
    normalised: bool,
    dot: bool = False,
    variance: Tensor | None = None,  # [...]
    causal: bool = False,
    mask: Tensor | None = None,  # [..., K] True = real
    query_mask: Tensor | None = None,  # [..., Q]
) -> Tensor:
    """What `kernel_attention` weighs the values with (eq. 1).

    Args:
        q: queries.
        k: keys.
        normalised: as in `kernel_attention`.
        dot: likewise.
        variance: likewise.
        causal: likewise.
        mask: likewise.
        query_mask: likewise.

    Returns:
        [..., Q, K].
    """
    q, k = without_padding(q, k, dot=dot, mask=mask, query_mask=query_mask)
    visible = _visible(q, k, causal, mask, query_mask)  # [..., Q, K]
    if not normalised:
        K = exp_dot(q, k) if dot else rbf(q, k)
        K = K if variance is None else variance[..., None, None] * K
        return torch.where(visible, K, 0.0)
    exponents = q @ k.mT if dot else log_kappa(q, k)
    blind = ~visible.any(-1, keepdim=True)  # infinities there would be NaN in gradients
    weights = torch.where(visible | blind, exponents, -torch.inf).softmax(-1)
    return torch.where(visible, weights, 0.0)


def why_not_streamed(q: Tensor, v: Tensor, *, dot: bool = False) -> str | None:
    """None if a fused kernel does `kernel_attention`, else the reason."""
    if dot:
        return "exp_dot has no fused kernel"
    channels = max(q.shape[-1], v.shape[-1])
    # any length fits; "auto" stays with those at which the kernel was measured to be the faster way
    shown = v.shape[-2] <= SHOWN_TOKENS
    return why_not_fused_on(v.device, q.dtype, channels=channels, measured=shown)


def without_padding(
    q: Tensor,  # [..., Q, C]
    k: Tensor,  # [..., K, C]
    *,
    dot: bool = False,
    mask: Tensor | None = None,  # [..., K] True = real
    query_mask: Tensor | None = None,  # [..., Q]
) -> tuple[Tensor, Tensor]:
    """Queries and keys with padding overwritten: by 0 for dot products, else by the keys' mean (section 5).

    Args:
        q: queries.
        k: keys.
        dot: whether a kernel of dot products will see them.
        mask: which keys are real.
        query_mask: which queries are real.

    Returns:
        Both.  [..., N, C] each
    """
    if dot:
        return keep_rows(q, query_mask), keep_rows(k, mask)
    centre = real_mean(k.detach(), mask)
    return fill_rows(q, centre, query_mask), fill_rows(k, centre, mask)


def softmax_attention(
    q: Tensor,  # [..., Q, C]
    k: Tensor,  # [..., K, C]
    v: Tensor,  # [..., K, D]
    *,
    causal: bool = False,
    mask: Tensor | None = None,  # [..., K] True = real
    query_mask: Tensor | None = None,  # [..., Q]
) -> Tensor:
    """softmax(q k^T / sqrt C) v, the mean of eq. 21, by torch's own kernels.

    Args:
        q: queries.
        k: keys.
        v: values.
        causal: query i sees keys up to i only.
        mask: which keys are real.
        query_mask: which queries are real.

    Returns:
        [..., Q, D]; 0 at rows that see no key, and at padded queries.
    """
    if mask is None:
        return keep_rows(_attend(q, k, v, is_causal=causal), query_mask)
    visible = mask[..., None, :].expand(*mask.shape[:-1], q.shape[-2], -1)  # [..., Q, K]
    if causal:
        visible = visible.tril()
    real = visible.any(-1, keepdim=True)  # [..., Q, 1]
    if query_mask is not None:
        real = real & query_mask[..., None]
    # a row with nothing to attend to, which is NaN in some backends, attends anywhere, then to nothing
    mean = _attend(q, k, v, attn_mask=visible | ~real)
    return torch.where(real, mean, 0.0)


def _attend(q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None = None, **options: Any) -> Tensor:
    """Torch's own attention, by plain operations where `torch.func` has no rules for its kernels."""
    if is_transformed():
        return _attend_plainly(q, k, v, attn_mask, options)
    mean = scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, **options)
    if torch.compiler.is_compiling() or not mean.requires_grad:
        return mean
    again: Tensor = _TwiceDifferentiable.apply(mean, q, k, v, attn_mask, options)  # type: ignore[no-untyped-call]
    return again


def _attend_plainly(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, options: dict[str, Any]
) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, **options)


class _TwiceDifferentiable(torch.autograd.Function):
    """Hands on the mean of torch's kernels, whose gradient cannot be differentiated.

    A backward pass with `create_graph=True` goes by plain operations instead, from the same inputs.
    """

    @staticmethod
    def forward(ctx: Any, mean: Tensor, *inputs: Any) -> Tensor:
        *tensors, ctx.options = inputs
        ctx.save_for_backward(*tensors)
        return mean.view_as(mean)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return grad, *(None for _ in ctx.saved_tensors), None
        # aliases: one of them may be made of another, whose gradient must not count that way twice
        tensors: list[Any] = [None if x is None else x.view_as(x) for x in ctx.saved_tensors]
        wanted = [x is not None and x.requires_grad for x in tensors]
        leaves = [x for x, want in zip(tensors, wanted, strict=True) if want]
        q, k, v, attn_mask = tensors
        mean = _attend_plainly(q, k, v, attn_mask, ctx.options)
        found = iter(torch.autograd.grad(mean, leaves, grad, create_graph=True))
        return None, *(next(found) if want else None for want in wanted), None


def _visible(q: Tensor, k: Tensor, causal: bool, mask: Tensor | None, query_mask: Tensor | None) -> Tensor:
    """Pairs of real tokens.  [..., Q, K]"""
    visible = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device)
    visible = visible.tril() if causal else visible
    if mask is not None:
        visible = visible & mask[..., None, :]
    if query_mask is not None:
        visible = visible & query_mask[..., None]
    return visible
