"""CGPT's attention as the paper computes it: explicit inverses, raw second moments, joint draws, one z_o.

The algorithm is that of the paper's section 3 and appendices A and B with its arithmetic, but for the errors
of its code that change the result (docs/derivations/errata.md: R1 a transposed matrix, R2 an overwritten one,
R5 and R6 a density summed wrongly) and with amplitudes in all Gram matrices.
"""

# ruff: noqa: N806  matrices are upper-case as in the paper

import math

import torch
from torch import Generator, Tensor

from gpattention.attention.base import Heads
from gpattention.attention.cgp import CGPAttention
from gpattention.experiments.bench.paper_gram import (
    PaperPosterior,
    latent_draw,
    noisy,
    outer,
    paper_gram,
    paper_root,
)
from gpattention.gp import NoiseSource, Posterior


class PaperCGPAttention(CGPAttention):
    """Exact CGP attention, normalize="none", with the Monte Carlo regulariser of one draw."""

    def _posterior(self, heads: Heads, *, with_variance: bool = False) -> Posterior:
        q, k, o, v = self._tokens(heads)
        noise, s_q, s_k = self.noise(), self.scale_q()[:, None, None], self.scale_k()[:, None, None]
        K_q, K_qo, K_o = s_q**2 * paper_gram(q, q), s_q * paper_gram(q, o), paper_gram(o, o)  # [B, H, N, N]
        K_k, K_ok = s_k**2 * paper_gram(k, k), s_k * paper_gram(o, k)
        M_k = noisy(K_k, noise)
        A = K_qo @ torch.linalg.inv(noisy(K_o, noise))  # [B, H, N, N]
        B = K_ok @ torch.linalg.inv(M_k)
        z_o = B @ (M_k @ v)  # [B, H, N, D] mean of z_o given z_k = M_k V
        mean = A @ z_o  # eq. 4
        moment_o = (K_o - B @ K_ok.mT)[..., None, :, :] + outer(z_o)  # [B, H, D, N, N] E z_o z_o^T
        A_each, S_q = A[..., None, :, :], (K_q - A @ K_qo.mT)[..., None, :, :]
        moment_q = S_q + A_each @ moment_o @ A_each.mT  # [B, H, D, N, N]
        return PaperPosterior(mean, moment_q - outer(mean))  # eq. 5

    def _regularizer(
        self, heads: Heads, posterior: Posterior, generator: Generator | NoiseSource | None
    ) -> Tensor:
        """Section 2 (i) of the derivations for z_q and for z_k, from one z_o each.  [B, H]"""
        q, k, o, v = self._tokens(heads)
        noise, s_q, s_k = self.noise(), self.scale_q()[:, None, None], self.scale_k()[:, None, None]
        K_o = paper_gram(o, o)
        inverse = torch.linalg.inv(noisy(K_o, noise))
        K_k = s_k**2 * paper_gram(k, k)
        total = torch.zeros(q.shape[:2], dtype=q.dtype, device=q.device)
        for z, K, K_xo in (
            (posterior.mean, s_q**2 * paper_gram(q, q), s_q * paper_gram(q, o)),
            (noisy(K_k, noise) @ v, K_k, s_k * paper_gram(k, o)),
        ):
            A = K_xo @ inverse  # [B, H, N, N]
            z_o = latent_draw(noisy(K_o, noise), z.shape[-1], generator)  # [B, H, N, D]
            root = paper_root(noisy(K - A @ K_xo.mT, noise))  # of S + tau^2 I, tau^2 = sigma^2
            white = torch.linalg.solve_triangular(root, z - A @ z_o, upper=False)  # [B, H, N, D]
            log_det = 2 * root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
            constant = log_det + z.shape[-2] * math.log(2 * math.pi)
            total = total + 0.5 * (white.square().sum((-2, -1)) + z.shape[-1] * constant)
        return total

    def _tokens(self, heads: Heads) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """[B, H, N, D] each"""
        return *self._projected(heads), self._split(self.latent(heads.keys)), heads.v
