"""What the paper's transcriptions share: its Gram matrix, and a Cholesky factor with growing jitter."""

# ruff: noqa: N803  matrices are upper-case as in the paper

import torch
from torch import Generator, Tensor

from gpattention.gp import NoiseSource, NotPositiveDefiniteError, Posterior
from gpattention.gp.noise import standard_normal

JITTER = 1e-7  # the first; each further attempt takes ten times as much
ATTEMPTS = 12  # the paper's loop knows no end


def paper_gram(a: Tensor, b: Tensor) -> Tensor:
    """kappa of eq. 1 from a difference of every pair, per dimension: [..., d, N, M] at once.  [..., N, M]"""
    difference = a.mT[..., :, None] - b.mT[..., None, :]  # [..., d, N, M]
    return torch.exp(-0.5 * difference.square().sum(-3))


def paper_root(covariance: Tensor) -> Tensor:
    """Lower factor of the first covariance + jitter I that has one for every matrix.  [..., N, N]"""
    eye = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    jitter = JITTER
    for _ in range(ATTEMPTS):
        root, info = torch.linalg.cholesky_ex(covariance + jitter * eye)
        if not bool(info.any()):
            return root
        jitter *= 10
    raise NotPositiveDefiniteError(f"no factor up to a jitter of {jitter / 10:.0e}")


def noisy(K: Tensor, noise: Tensor) -> Tensor:
    """K + sigma^2 I, noise one number for each head.  [B, H, N, N]"""
    eye = torch.eye(K.shape[-1], dtype=K.dtype, device=K.device)
    return K + noise[:, None, None] * eye


def outer(x: Tensor) -> Tensor:
    """One matrix x_a x_a^T for each channel a.  [..., N, D] -> [..., D, N, N]"""
    return x.mT[..., :, None] * x.mT[..., None, :]


class PaperPosterior(Posterior):
    """Mean, and a covariance for each channel: the paper subtracts products of means from raw moments."""

    def __init__(self, mean: Tensor, covariance: Tensor) -> None:
        super().__init__(mean, None, mean.dtype)
        self.channels = covariance  # [B, H, D, N, N], equal for all channels but for rounding

    def sample(
        self, n: int = 1, *, generator: Generator | NoiseSource | None = None, joint: bool = False
    ) -> Tensor:
        """Draws from the full covariance, whatever was asked for.  [n, B, H, N, D]"""
        noise = self._normal(n, self._mean.shape[-2], generator)  # [n, B, H, N, D]
        deviation = paper_root(self.channels) @ noise.mT[..., None]  # [n, B, H, D, N, 1]
        return self._mean + deviation[..., 0].mT

    def _raw_variance(self) -> Tensor:
        return self.channels.diagonal(dim1=-2, dim2=-1).mT.mean(-1)  # [B, H, N]


def latent_draw(K_o: Tensor, channels: int, source: Generator | NoiseSource | None) -> Tensor:
    """z_o ~ N(0, K_o + jitter I), one for each channel.  [B, H, N, D]"""
    shape = (1, *K_o.shape[:-1], channels)
    return paper_root(K_o) @ standard_normal(shape, K_o.dtype, K_o.device, source)[0]
