"""Amplitudes that make kernel attention start as the softmax attention it replaces (eq. 21).

    log a_i = log t + 1/2 |q_i - qbar|^2 + q_i . kbar - lse_i
    log b_j = 1/2 |k_j - kbar|^2 + qbar . (k_j - kbar)
    a_i b_j / t kappa(q_i - qbar, k_j - kbar) = exp(q_i . k_j) / sum_l exp(q_i . k_l)

Without the b_j, rows divided by their sums are softmax over q_i . k_j - 1/2 |k_j|^2: in a trained BERT the
lengths of the keys differ so much that half of the output is another.
"""

import math

import torch
from torch import Tensor

from gpattention.gp.inputs import keep_rows
from gpattention.gp.precision import compute_dtype, full_precision


def shift_queries(q: Tensor, k: Tensor, mask: Tensor | None, query_mask: Tensor | None) -> Tensor:
    """q - qbar + kbar, whose distances to k are those of both sides about their own means.  [B, H, Q, D]"""
    moved = q.to(compute_dtype(q.dtype)) + (real_mean(k, mask) - real_mean(q, query_mask))
    return moved.to(q.dtype)


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
    logits = q @ k.mT  # [B, H, Q, K]
    sees_key = None
    if mask is not None:
        sees_key = mask.any(-1, keepdim=True)  # [B, 1, 1]
        visible = mask[..., None, :] | ~sees_key[..., None]  # [B, 1, 1, K]
        logits = torch.where(visible, logits, -torch.inf)
    log_a = (
        scale.to(q.dtype).log()[:, None]
        + 0.5 * (q - q_bar).square().sum(-1)
        + (q * k_bar).sum(-1)
        - logits.logsumexp(-1)
    ).clamp_max(math.log(max_stddev))  # [B, H, Q]
    spread = k - k_bar  # [B, H, K, D]
    log_b = 0.5 * spread.square().sum(-1) + (spread * q_bar).sum(-1)  # [B, H, K]
    for keep in (query_mask, sees_key):
        log_a = log_a if keep is None else torch.where(keep, log_a, 0.0)
    return log_a, log_b if mask is None else torch.where(mask, log_b, 0.0)


def real_mean(x: Tensor, mask: Tensor | None) -> Tensor:
    """Mean over real tokens, 0 where there are none.  [B, H, 1, D]"""
    x = x.to(compute_dtype(x.dtype))
    if mask is None:
        return x.mean(-2, keepdim=True)
    return keep_rows(x, mask).sum(-2, keepdim=True) / mask.sum(-1).clamp_min(1)[..., None, None]
