"""Amplitudes under which kernel attention is softmax attention (eq. 21).

    q_i, k_j   with logits q_i . k_j;   x_i = A (q_i - qbar),  y_j = A^-T (k_j - kbar) as the kernel sees them
    log a_i = log t + 1/2 |x_i|^2 + q_i . kbar - lse_i,   lse_i = log sum_j exp(q_i . k_j)
    log b_j = 1/2 |y_j|^2 + qbar . (k_j - kbar) - log t
    a_i b_j kappa(x_i, y_j) = exp(q_i . k_j - lse_i)                                                     (21)

log t is left to the caller.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from gpattention.gp.kernels import log_kappa
from gpattention.gp.precision import full_precision

_ROWS = 1024  # queries whose logits are formed at once


def query_log_amplitude(
    q: Tensor,  # [..., Q, C]
    k: Tensor,  # [..., K, C]
    x: Tensor,  # [..., Q, C]
    k_bar: Tensor,  # [..., 1, C]
    *,
    mask: Tensor | None = None,  # [..., K] True = real
    causal: bool = False,
) -> Tensor:
    """log a_i but for log t.  [..., Q]"""
    return query_exponent(q, x, k_bar) - log_sum_exp(q, k, mask=mask, causal=causal)


def query_exponent(q: Tensor, x: Tensor, k_bar: Tensor) -> Tensor:
    """1/2 |x_i|^2 + q_i . kbar: all of log a_i that is of query i alone.  [..., Q]"""
    return 0.5 * x.square().sum(-1) + (q * k_bar).sum(-1)


def key_log_amplitude(k: Tensor, y: Tensor, q_bar: Tensor, k_bar: Tensor) -> Tensor:
    """log b_j but for -log t.  [..., K]"""
    return 0.5 * y.square().sum(-1) + (q_bar * (k - k_bar)).sum(-1)


def distance_log_amplitude(
    q: Tensor,  # [..., Q, C]
    k: Tensor,  # [..., K, C]
    *,
    mask: Tensor | None = None,  # [..., K] True = real
) -> Tensor:
    """log a_i of eq. 25 but for log t: `row_log_amplitude` unchecked, by no fused kernel.  [..., Q]"""
    return -log_sum_exp(q, k, mask=mask, logits=log_kappa)


@full_precision
def log_sum_exp(
    q: Tensor,  # [..., Q, C]
    k: Tensor,  # [..., K, C]
    *,
    mask: Tensor | None = None,  # [..., K] True = real
    causal: bool = False,
    logits: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """log sum_j exp(q_i . k_j), or of other logits, over keys that query i sees; finite if it sees none.

    Long sequences have their logits formed for some rows at a time.  [..., Q]
    """
    parts, start = [], 0
    for rows in q.split(_ROWS, -2):
        exponents = rows @ k.mT if logits is None else logits(rows, k)  # [..., rows, K]
        visible = _visible(exponents, start, mask, causal)  # [..., rows, K]
        if visible is not None:
            blind = ~visible.any(-1, keepdim=True)  # infinities there would be NaN in gradients
            exponents = torch.where(visible, exponents, torch.where(blind, 0.0, -torch.inf))
        parts.append(exponents.logsumexp(-1))
        start += rows.shape[-2]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _visible(logits: Tensor, start: int, mask: Tensor | None, causal: bool) -> Tensor | None:
    """Keys that the rows from `start` on see.  [..., rows, K]"""
    visible = None if mask is None else mask[..., None, :]
    if causal:
        past = torch.ones_like(logits, dtype=torch.bool).tril(start)
        visible = past if visible is None else past & visible
    return visible
