"""SCGPT's attention as the paper computes it: N x N matrices, explicit inverses, raw second moments.

The algorithm is that of the paper's section 4 and appendices D and E with its arithmetic, but for the errors
of its code that change the result (docs/derivations/errata.md: R12 the regulariser's missing terms, R14
inducing inputs mixed from tokens) and with amplitudes in all Gram matrices.
"""

# ruff: noqa: N803, N806  matrices are upper-case as in the paper

import math

import torch
from torch import Generator, Tensor

from gpattention.attention.base import Heads
from gpattention.attention.scgp import SCGPAttention
from gpattention.experiments.bench.paper_gram import PaperPosterior, noisy, outer, paper_gram
from gpattention.gp import NoiseSource, Posterior

DELTA = 1e-6  # on the diagonal of the inducing inputs' Gram matrix


class PaperSCGPAttention(SCGPAttention):
    """Sparse CGP attention, normalize="none", one set of inducing inputs, the double-Jensen regulariser."""

    def _posterior(self, heads: Heads, *, with_variance: bool = False) -> Posterior:
        q, k, o, m = self._tokens(heads)
        noise = self.noise()
        sigma = noise[:, None, None]  # sigma^2
        K_qm, K_om, K_km = self._crossed(q, k, o, m)  # [B, H, N, m]
        K_mm = _inducing_gram(m)
        P_m = torch.linalg.inv(K_mm + K_om.mT @ K_om / sigma)  # [B, H, m, m]
        P_l = torch.linalg.inv(K_mm + K_km.mT @ K_km / sigma)
        A = K_qm @ P_m @ K_om.mT / sigma  # [B, H, N, N]
        z_o = K_om @ P_l @ K_km.mT @ heads.v / sigma  # [B, H, N, D]
        mean = A @ z_o  # eq. 13
        moment_o = noisy(K_om @ P_l @ K_om.mT, noise)[..., None, :, :] + outer(z_o)  # [B, H, D, N, N]
        S_q = noisy(K_qm @ P_m @ K_qm.mT, noise)[..., None, :, :]
        A_each = A[..., None, :, :]
        moment_q = S_q + A_each @ moment_o @ A_each.mT  # [B, H, D, N, N]
        return PaperPosterior(mean, moment_q - outer(mean))  # eq. 14

    def _regularizer(
        self, heads: Heads, posterior: Posterior, generator: Generator | NoiseSource | None
    ) -> Tensor:
        """Minus eq. 16 for z_q and for z_k, with K_o and its traces as N x N matrices.  [B, H]"""
        q, k, o, m = self._tokens(heads)
        noise = self.noise()  # [H]
        sigma = noise[:, None, None]
        K_qm, K_om, K_km = self._crossed(q, k, o, m)
        P = torch.linalg.inv(_inducing_gram(m) + K_om.mT @ K_om / sigma)  # [B, H, m, m]
        K_o = paper_gram(o, o)  # [B, H, N, N]
        total = torch.zeros(q.shape[:2], dtype=q.dtype, device=q.device)
        for z, K_xm in ((posterior.mean, K_qm), (heads.v, K_km)):
            A = K_xm @ P @ K_om.mT / sigma  # [B, H, N, N]
            traces = _trace(A @ K_o @ A.mT) + _trace(K_xm @ P @ K_xm.mT)  # t_1 + t_2
            quadratic = z.square().sum((-2, -1)) + z.shape[-1] * traces
            total = total + quadratic / (2 * noise) + z[0, 0].numel() / 2 * (2 * math.pi * noise).log()
        return total

    def _tokens(self, heads: Heads) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """[B, H, N, D] each, and the inducing inputs [1, H, m, D]"""
        o = self._split(self.latent(heads.keys))
        return *self._projected(heads), o, self.inducing_q(heads.keys, o, heads.mask)[None]

    def _crossed(self, q: Tensor, k: Tensor, o: Tensor, m: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        s_q, s_k = self.scale_q()[:, None, None], self.scale_k()[:, None, None]
        return s_q * paper_gram(q, m), paper_gram(o, m), s_k * paper_gram(k, m)


def _inducing_gram(m: Tensor) -> Tensor:
    return paper_gram(m, m) + DELTA * torch.eye(m.shape[-2], dtype=m.dtype, device=m.device)


def _trace(K: Tensor) -> Tensor:
    return K.diagonal(dim1=-2, dim2=-1).sum(-1)
