"""Amplitudes that make kernel attention start as the softmax attention it replaces (eq. 21).

Without the b_j, rows divided by their sums are softmax over q_i . k_j - 1/2 |k_j|^2: in a trained BERT the
lengths of the keys differ so much that half of the output is another.
"""

import math

import torch
from torch import Tensor

from gpattention.gp.inputs import keep_rows, real_mean
from gpattention.gp.precision import compute_dtype, full_precision
from gpattention.gp.softmax_amplitude import key_log_amplitude, query_log_amplitude


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
