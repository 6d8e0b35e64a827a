"""Attention over distances or dot products as one autograd function that streams the keys.

Its slow references are the plain operations of `gp.kernel_attention`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpattention.numerics import broadcast, once_differentiable
from gpattention.ops.layout import (
    allocator,
    launch,
    matrices,
    padded,
    token_major,
    vectors,
    view,
    views,
    with_lead,
)

__all__ = ["fused_kernel_attention", "fused_softmax_attention"]

_WHOLE = 64  # keys that one program of the backward pass holds at once


class _Kind(NamedTuple):
    """What sort of attention; `scale` multiplies dot products."""

    DISTANCE: bool
    NORMALISED: bool
    CAUSAL: bool
    scale: float

    @property
    def flags(self) -> dict[str, bool]:
        return {"DISTANCE": self.DISTANCE, "NORMALISED": self.NORMALISED, "CAUSAL": self.CAUSAL}


def fused_kernel_attention(
    q: Tensor,  # [..., Q, C]
    k: Tensor,  # [..., K, C]
    v: Tensor,  # [..., K, D]
    *,
    normalised: bool,
    causal: bool = False,
    mask: Tensor | None = None,  # [..., K] True = real
    query_mask: Tensor | None = None,  # [..., Q]
) -> Tensor:
    """kappa(q, k) v of eq. 1, or its rows divided by their sums (eq. 25's mean).

    Args:
        q: queries, divided by length scales.
        k: keys, likewise.
        v: values.
        normalised: whether rows are divided by their sums.
        causal: query i sees keys up to i only.
        mask: which keys are real.
        query_mask: which queries are real.

    Returns:
        [..., Q, D]; 0 at rows that see nothing, and at padded queries.
    """
    return _attend(q, k, v, _Kind(True, normalised, causal, 1.0), mask, query_mask)


def fused_softmax_attention(
    q: Tensor,  # [..., Q, C]
    k: Tensor,  # [..., K, C]
    v: Tensor,  # [..., K, D]
    *,
    causal: bool = False,
    mask: Tensor | None = None,  # [..., K] True = real
    query_mask: Tensor | None = None,  # [..., Q]
) -> Tensor:
    """softmax(q k^T / sqrt C) v.

    Args:
        q: queries.
        k: keys.
        v: values.
        causal: query i sees keys up to i only.
        mask: which keys are real.
        query_mask: which queries are real.

    Returns:
        [..., Q, D]; 0 at rows that see nothing, and at padded queries.
    """
    return _attend(q, k, v, _Kind(False, True, causal, q.shape[-1] ** -0.5), mask, query_mask)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, kind: _Kind, mask: Tensor | None, query_mask: Tensor | None
) -> Tensor:
    lead = broadcast(*(x.shape[:-2] for x in (q, k, v)))
    out: Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
        *(matrices(x, lead) for x in (q, k, v)), vectors(mask, lead), vectors(query_mask, lead), kind
    )
    return with_lead(out, lead)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,  # [B, H, Q, C]
        k: Tensor,  # [B, H, K, C]
        v: Tensor,  # [B, H, K, D]
        mask: Tensor | None,  # [B, H, K]
        query_mask: Tensor | None,  # [B, H, Q]
        kind: _Kind,
    ) -> Tensor:
        from gpattention.ops.attention.kernels import attention_kernel

        (B, H, NQ, C), (N, D) = q.shape, v.shape[2:]
        out = token_major(B, H, NQ, D, q)
        log_sum = allocator(q)(B, H, NQ) if kind.NORMALISED else out
        tiles = _tiles("attention", NQ, N)
        attention_kernel[(B * H, -(-NQ // tiles["BQ"]))](
            *views(q, k, v, mask, query_mask, out), log_sum, kind.scale, H, NQ, N, C, D,
            **kind.flags, CP=padded(C), DP=padded(D), **tiles,
        )  # fmt: skip
        ctx.kind = kind
        ctx.save_for_backward(q, k, v, mask, query_mask, out, log_sum)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from gpattention.ops.attention.kernels import keys_backward_kernel, queries_backward_kernel

        q, k, v, mask, query_mask, out, log_sum = ctx.saved_tensors
        kind: _Kind = ctx.kind
        (B, H, NQ, C), (N, D) = q.shape, v.shape[2:]
        d_q, d_k, d_v = (token_major(B, H, n, x, q) for n, x in ((NQ, C), (N, C), (N, D)))
        whole = padded(N) <= _WHOLE
        inputs = *views(grads[0], q, k, v, mask, query_mask, out), log_sum, kind.scale
        sizes = (H, NQ, N, C, D)
        options = {**kind.flags, "CP": padded(C), "DP": padded(D)}
        tiles = _tiles("keys_backward", NQ, N) | ({"BK": padded(N)} if whole else {})
        keys_backward_kernel[(B * H, -(-N // tiles["BK"]))](
            *inputs, *views(d_q, d_k, d_v), *sizes, WHOLE=whole, **options, **tiles
        )
        if not whole:
            tiles = _tiles("queries_backward", NQ, N)
            queries_backward_kernel[(B * H, -(-NQ // tiles["BQ"]))](
                *inputs, view(d_q), *sizes, **options, **tiles
            )
        return d_q, d_k, d_v, None, None, None


def _tiles(kernel: str, queries: int, keys: int) -> dict[str, int]:
    """Tile sizes and launch options, no tile larger than what it holds."""
    found = launch(kernel, padded(keys))
    sizes = {"BQ": min(found["BQ"], padded(queries)), "BK": min(found["BK"], padded(keys))}
    return {**found, **sizes}
