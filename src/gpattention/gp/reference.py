"""The slow and obvious form of every fast path, for tests and for readers.

No masks, no amplitudes per token, explicit inverses: use float64.  Nothing here is exported.
"""

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, kl_divergence

from gpattention.gp.kernels import rbf


def _eye(n: int, like: Tensor) -> Tensor:
    return torch.eye(n, dtype=like.dtype, device=like.device)


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
    eye = _eye(k.shape[-2], k)
    K_qo, K_ok = scale_q * rbf(q, o), scale_k * rbf(o, k)
    M_k = scale_k**2 * rbf(k, k) + noise * eye  # [..., K, K]
    A = K_qo @ torch.linalg.inv(rbf(o, o) + noise * eye)  # [..., Q, K]
    B = K_ok @ torch.linalg.inv(M_k)  # [..., K, K]
    S_q = scale_q**2 * rbf(q, q) - A @ K_qo.mT  # [..., Q, Q]
    C = rbf(o, o) - B @ K_ok.mT  # [..., K, K]
    return A @ B @ M_k @ v, S_q + A @ C @ A.mT


def causal_cgp_rows(
    q: Tensor,  # [..., N, C]
    k: Tensor,  # [..., N, C]
    o: Tensor,  # [..., N, C]
    v: Tensor,  # [..., N, D]
    *,
    noise: float,
    scale_q: float = 1.0,
    scale_k: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """One exact posterior per prefix, last row of each: what eq. 17-18 compute at once.

    Mean [..., N, D] and variance [..., N], in O(N^4).
    """
    means, variances = [], []
    for i in range(1, q.shape[-2] + 1):
        seen = (x[..., :i, :] for x in (k, o, v))
        mean, cov = cgp_moments(
            q[..., i - 1 : i, :], *seen, noise=noise, scale_q=scale_q, scale_k=scale_k
        )  # [..., 1, D], [..., 1, 1]
        means.append(mean)
        variances.append(cov[..., 0])
    return torch.cat(means, -2), torch.cat(variances, -1)


def scgp_moments(
    q: Tensor,  # [..., Q, C]
    k: Tensor,  # [..., K, C]
    o: Tensor,  # [..., K, C]
    v: Tensor,  # [..., K, D]
    inducing_q: Tensor,  # [..., m, C]
    inducing_k: Tensor,  # [..., l, C]
    *,
    noise: float,
    scale_q: float = 1.0,
    scale_k: float = 1.0,
    delta: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """Mean and covariance of eq. 13-14 with N x N matrices.  [..., Q, D], [..., Q, Q]"""
    m, l = inducing_q, inducing_k  # noqa: E741 - the paper's letter
    K_mm = rbf(m, m) + delta * _eye(m.shape[-2], m)
    K_ll = rbf(l, l) + delta * _eye(l.shape[-2], l)
    K_qm, K_om = scale_q * rbf(q, m), rbf(o, m)  # [..., Q, m], [..., K, m]
    K_ol, K_kl = rbf(o, l), scale_k * rbf(k, l)  # [..., K, l]
    P_m = torch.linalg.inv(K_mm + K_om.mT @ K_om / noise)  # [..., m, m]
    P_l = torch.linalg.inv(K_ll + K_kl.mT @ K_kl / noise)  # [..., l, l]
    A = K_qm @ P_m @ K_om.mT / noise  # [..., Q, K]
    B = K_ol @ P_l @ K_kl.mT / noise  # [..., K, K]
    S_q = K_qm @ P_m @ K_qm.mT + noise * _eye(q.shape[-2], q)  # [..., Q, Q]
    S_o = K_ol @ P_l @ K_ol.mT + noise * _eye(o.shape[-2], o)  # [..., K, K]
    return A @ B @ v, S_q + A @ S_o @ A.mT


def lowrank_log_density(X: Tensor, F: Tensor, noise: float) -> Tensor:
    """sum over channels of log N(x; 0, noise I + F F^T), the N x N way.  [...]

    X is [..., N, D], F is [..., N, m].
    """
    cov = F @ F.mT + noise * _eye(F.shape[-2], F)  # [..., N, N]
    zero = torch.zeros_like(X[..., 0])  # [..., N]
    normal = MultivariateNormal(zero[..., None, :], cov[..., None, :, :])
    return normal.log_prob(X.mT).sum(-1)


def gaussian_kl(mean: Tensor, V: Tensor, K: Tensor) -> Tensor:
    """sum over channels of KL(N(mean_a, V) || N(0, K)) by torch.distributions (eq. 23-24).  [...]

    mean is [..., N, D], V and K are [..., N, N] with their noise inside.
    """
    posterior = MultivariateNormal(mean.mT, V[..., None, :, :])
    prior = MultivariateNormal(torch.zeros_like(mean.mT), K[..., None, :, :])
    return kl_divergence(posterior, prior).sum(-1)
