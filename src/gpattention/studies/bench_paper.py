"""The paper's own way to compute, transcribed: the baselines of our times, checked against ours."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Generator, Tensor, nn

from gpattention.attention import (
    Attention,
    CGPAttention,
    Heads,
    KernelAttention,
    SCGPAttention,
    build_attention,
)
from gpattention.gp import NoiseSource, NotPositiveDefiniteError, Posterior
from gpattention.models import AttentionConfig, Block, VisionConfig, VisionTransformer
from gpattention.ops import standard_normal

# What the paper's transcriptions share: its Gram matrix, and a Cholesky factor with growing jitter.

# ruff: noqa: N803  matrices are upper-case as in the paper


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


# Kernel attention as the paper's code computes it.


class PaperKernelAttention(KernelAttention):
    """Asymmetric rbf attention with its Gram matrix from a difference of every pair, per dimension."""

    def _mean(self, heads: Heads) -> Tensor:
        assert self.key is not None
        q, k = self._split(self.query(heads.queries)), self._split(self.key(heads.keys))
        return paper_gram(q, k) @ heads.v


# CGPT's attention as the paper computes it: explicit inverses, raw second moments, joint draws, one z_o.
#
# The algorithm is that of the paper's section 3 and appendices A and B with its arithmetic, but for the
# errors of its code that change the result (docs/derivations/errata.md: R1 a transposed matrix, R2 an
# overwritten one, R5 and R6 a density summed wrongly) and with amplitudes in all Gram matrices.

# ruff: noqa: N806  matrices are upper-case as in the paper


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


# SCGPT's attention as the paper computes it: N x N matrices, explicit inverses, raw second moments.
#
# The algorithm is that of the paper's section 4 and appendices D and E with its arithmetic, but for the
# errors of its code that change the result (docs/derivations/errata.md: R12 the regulariser's missing
# terms, R14 inducing inputs mixed from tokens) and with amplitudes in all Gram matrices.

# ruff: noqa: N803, N806  matrices are upper-case as in the paper


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


# The paper's way as modules and models: the baselines of our times, checked against our mathematics.

ALLOWED_GAP = 1e-5  # between a baseline and ours, relative to the largest number


@dataclass(frozen=True)
class Paper:
    """A transcription, and the kind of ours that has its mathematics and its weights."""

    module: type[Attention]
    kind: str
    options: Mapping[str, Any]


PAPERS = {
    "paper-kernel": Paper(PaperKernelAttention, "kernel", {"normalize": "none"}),
    "paper-cgp": Paper(PaperCGPAttention, "cgp", {"normalize": "none", "regularizer": "monte_carlo"}),
    "paper-scgp": Paper(
        PaperSCGPAttention, "scgp", {"normalize": "none", "num_inducing": 16, "regularizer": "double_jensen"}
    ),
}


def paper_attention(name: str, embed_dim: int, num_heads: int, **options: Any) -> Attention:
    """The attention module of a transcription."""
    paper = PAPERS[name]
    return paper.module(embed_dim, num_heads, **{**paper.options, **options})


def paper_model(name: str, shape: VisionConfig) -> VisionTransformer:
    """A vision transformer with that attention in every layer, and the weights that ours would have."""
    paper = PAPERS[name]
    model = VisionTransformer(replace(shape, attention=AttentionConfig(paper.kind, paper.options)))
    for block in model.blocks:
        assert isinstance(block, Block)
        ours = block.attention
        theirs = paper_attention(name, ours.embed_dim, ours.num_heads, dropout=ours.dropout.p)
        theirs.load_state_dict(ours.state_dict())
        block.attention = theirs
    return model


def gaps_to_ours(names: Iterable[str]) -> dict[str, float]:
    """The gap of every transcription among the names."""
    return {name: gap_to_ours(name) for name in names if name in PAPERS}


@torch.no_grad()
def gap_to_ours(name: str, *, tokens: int = 9, width: int = 16, heads: int = 2) -> float:
    """Largest relative difference in mean, variance and (where none is drawn) regulariser, in float64.

    Both have the same weights and LayerNorm'ed tokens.
    """
    paper = PAPERS[name]
    torch.manual_seed(0)
    theirs = paper_attention(name, width, heads, dtype=torch.float64).eval()
    ours = build_attention(
        paper.kind, embed_dim=width, num_heads=heads, dtype=torch.float64, **paper.options
    ).eval()  # fmt: skip
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, tokens, width, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    x = nn.functional.layer_norm(x, (width,))
    found = [_figures(module, x) for module in (theirs, ours)]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(*found, strict=True))


def _figures(module: Attention, x: Tensor) -> list[Tensor]:
    need = ("output", "variance") if module.draws else ("output",)
    if module.regularizer == "double_jensen":  # one that draws has another value each time
        need = (*need, "regularizer")
    facts = module(x, need=need)
    return [y for y in (facts.output, facts.variance, facts.regularizer) if y is not None]
