"""Attention over distances or dot products as one operator that streams the keys.

Its slow references are the plain operations of `gp.kernel_attention`.
"""

from torch import Tensor

from gpattention.numerics import broadcast
from gpattention.ops.launching import kernels_of
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
from gpattention.ops.operators import Fused, Made

__all__ = ["fused_kernel_attention", "fused_softmax_attention"]

_WHOLE = 64  # keys that one program of the backward pass holds at once


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
    return _attend(q, k, v, mask, query_mask, True, normalised, causal, 1.0)


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
    return _attend(q, k, v, mask, query_mask, False, True, causal, q.shape[-1] ** -0.5)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, query_mask: Tensor | None, *kind: bool | float
) -> Tensor:
    lead = broadcast(*(x.shape[:-2] for x in (q, k, v)))
    (out,) = _ATTENTION(
        *(matrices(x, lead) for x in (q, k, v)), vectors(mask, lead), vectors(query_mask, lead), *kind
    )
    found: Tensor = with_lead(out, lead)
    return found


def _forward(
    q: Tensor,  # [B, H, Q, C]
    k: Tensor,  # [B, H, K, C]
    v: Tensor,  # [B, H, K, D]
    mask: Tensor | None,  # [B, H, K]
    query_mask: Tensor | None,  # [B, H, Q]
    distance: bool,
    normalised: bool,
    causal: bool,
    scale: float,  # of dot products
) -> Made:
    (B, H, NQ, C), (N, D) = q.shape, v.shape[2:]
    out = token_major(B, H, NQ, D, q)
    log_sum = allocator(q)(B, H, NQ) if normalised else None
    tiles = _tiles("attention", NQ, N)
    kernels_of("attention").attention_kernel[(B * H, -(-NQ // tiles["BQ"]))](
        *views(q, k, v, mask, query_mask, out), out if log_sum is None else log_sum, scale, H, NQ, N, C, D,
        DISTANCE=distance, NORMALISED=normalised, CAUSAL=causal, CP=padded(C), DP=padded(D), **tiles,
    )  # fmt: skip
    return {"out": out, "log_sum": log_sum}


def _backward(
    by_out: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, query_mask: Tensor | None,
    out: Tensor, log_sum: Tensor | None, distance: bool, normalised: bool, causal: bool, scale: float,
) -> Made:  # fmt: skip
    found = kernels_of("attention")
    (B, H, NQ, C), (N, D) = q.shape, v.shape[2:]
    d_q, d_k, d_v = (token_major(B, H, n, x, q) for n, x in ((NQ, C), (N, C), (N, D)))
    whole = padded(N) <= _WHOLE
    log_sum = out if log_sum is None else log_sum
    inputs = *views(by_out, q, k, v, mask, query_mask, out), log_sum, scale
    sizes = (H, NQ, N, C, D)
    options = {
        "DISTANCE": distance, "NORMALISED": normalised, "CAUSAL": causal, "CP": padded(C), "DP": padded(D),
    }  # fmt: skip
    tiles = _tiles("keys_backward", NQ, N) | ({"BK": padded(N)} if whole else {})
    found.keys_backward_kernel[(B * H, -(-N // tiles["BK"]))](
        *inputs, *views(d_q, d_k, d_v), *sizes, WHOLE=whole, **options, **tiles
    )
    if not whole:
        tiles = _tiles("queries_backward", NQ, N)
        found.queries_backward_kernel[(B * H, -(-NQ // tiles["BQ"]))](
            *inputs, view(d_q), *sizes, **options, **tiles
        )
    return {"q": d_q, "k": d_k, "v": d_v}


_ATTENTION = Fused("attention", _forward, ("out",), _backward)


def _tiles(kernel: str, queries: int, keys: int) -> dict[str, int]:
    """Tile sizes and launch options, no tile larger than what it holds."""
    found = launch(kernel, padded(keys))
    sizes = {"BQ": min(found["BQ"], padded(queries)), "BK": min(found["BK"], padded(keys))}
    return {**found, **sizes}
