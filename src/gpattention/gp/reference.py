"""Eq. 3-5 the slow and obvious way, for readers and as what the fast way is measured against.

No masks, no amplitudes per token, explicit inverses: use float64.  Not exported.
"""

import torch
from torch import Tensor

from gpattention.gp.kernels import rbf


def cgp_moments(
    q: Tensor,  # [..., Q, C]
    k: Tensor,  # [..., K, C]
    o: Tensor,  # [..., K, C]
    v: Tensor,  # [..., K, D]
    *,
    noise: float,
    scale_q: float = 1.0,
    scale_k: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Mean and covariance by the two stages of eq. 3 and the sum of eq. 5.  [..., Q, D], [..., Q, Q]"""
    eye = torch.eye(k.shape[-2], dtype=k.dtype, device=k.device)
    K_qo, K_ok = scale_q * rbf(q, o), scale_k * rbf(o, k)
    M_k = scale_k**2 * rbf(k, k) + noise * eye  # [..., K, K]
    A = K_qo @ torch.linalg.inv(rbf(o, o) + noise * eye)  # [..., Q, K]
    B = K_ok @ torch.linalg.inv(M_k)  # [..., K, K]
    S_q = scale_q**2 * rbf(q, q) - A @ K_qo.mT  # [..., Q, Q]
    C = rbf(o, o) - B @ K_ok.mT  # [..., K, K]
    return A @ B @ M_k @ v, S_q + A @ C @ A.mT
