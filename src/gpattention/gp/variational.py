"""SGPA: sparse GP attention with symmetric kernels and a free variational posterior (eq. 19-20).

K_bb + jitter I = L_b L_b^T,  Phi = K_qb L_b^-T,  S_a = s_a s_a^T per value channel a
mean   = K_qq v - Phi Phi^T v + K_qb v_b
var_ia = [K_qq]_ii + |s_a^T Phi_i|^2 - |Phi_i|^2                                          (19)
KL     = sum_a 1/2 [tr S_a - m - log det S_a + v_b^T K_bb v_b + v^T (K_qq - Phi Phi^T) v]   (20)
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import solve_triangular
from torch.nn.functional import pad

from gpattention.checks import check_fraction
from gpattention.gp.inputs import (
    check_mask,
    check_positive,
    check_tokens,
    check_values,
    common_lead,
    expect,
    fill_rows,
    keep_pairs,
    keep_rows,
    real_mean,
    with_diagonal,
)
from gpattention.gp.kernels import ArdRbf, rbf
from gpattention.gp.posterior import Posterior, Source, prior_root
from gpattention.numerics import (
    broadcast,
    checks_are_deferred,
    cholesky,
    compute_dtype,
    full_precision,
    kept,
)
from gpattention.ops import why_not_fused_on
from gpattention.ops.sgpa import SGPAMoments, fused_sgpa, has_no_batch

Kernel = Callable[[Tensor, Tensor], Tensor]


@full_precision
def sgpa_posterior(
    q: Tensor,  # [..., N, C]
    v: Tensor,  # [..., N, D]
    inducing_k: Tensor,  # [..., m, C]
    inducing_v: Tensor,  # [..., m, D]
    scale_tril: Tensor,  # [..., D, m, m] lower triangular, positive diagonal
    *,
    kernel: Kernel = rbf,
    jitter: float = 1e-6,
    mask: Tensor | None = None,  # [..., N] True = real
    with_variance: bool = False,
    with_draw: bool = False,
) -> "SGPAPosterior":
    """Sparse GP attention (eq. 19), full variational covariance per value channel.

    Args:
        q: tokens, which are queries and keys.
        v: values.
        inducing_k: inducing inputs.
        inducing_v: their values.
        scale_tril: factors of the variational covariances, one per value channel.
        kernel: any function of two token sets as `rbf` is, e.g. `ArdRbf(lengthscale, variance)`.
        jitter: perturbation of the inducing Gram matrix.
        mask: which tokens are real.
        with_variance: announces that the variance will be asked for, which fused kernels like to know.
        with_draw: announces one independent draw with torch's own numbers, which fused kernels then make.

    Returns:
        The posterior of every token; its variance is [..., N, D], one per value channel.

    Raises:
        ValueError: an argument does not fit the others, or is out of its range.
        NumericalError: tokens are not finite or too far apart, or a covariance has no factor.
    """
    return SGPAPosterior(
        q, v, inducing_k, inducing_v, scale_tril, kernel=kernel, jitter=jitter, mask=mask,
        with_variance=with_variance, with_draw=with_draw,
    )  # fmt: skip


class Factors(NamedTuple):
    """Masked tokens and the matrices of eq. 19."""

    x: Tensor  # [..., N, C]
    v: Tensor  # [..., N, D]
    s: Tensor  # [..., D, m, m]
    K_bb: Tensor  # [..., m, m], without jitter
    L_b: Tensor  # [..., m, m], of K_bb + jitter I
    K_qb: Tensor  # [..., N, m]
    Phi: Tensor  # [..., N, m]
    K_qq: Tensor  # [..., N, N]
    residual: Tensor  # [..., N, D] K_qq v - Phi Phi^T v


class SGPAPosterior(Posterior):
    """Posterior of eq. 19; `.variance` is [..., N, D], `.covariance()` [..., D, N, N].

    Args:
        q: as in `sgpa_posterior`, and so are the others.
        v: likewise.
        inducing_k: likewise.
        inducing_v: likewise.
        scale_tril: likewise.
        kernel: likewise.
        jitter: likewise.
        mask: likewise.
        with_variance: likewise.
        with_draw: likewise.
    """

    def __init__(
        self,
        q: Tensor,
        v: Tensor,
        inducing_k: Tensor,
        inducing_v: Tensor,
        scale_tril: Tensor,
        *,
        kernel: Kernel,
        jitter: float,
        mask: Tensor | None,
        with_variance: bool = False,
        with_draw: bool = False,
    ) -> None:
        check_fraction("jitter", jitter)  # the inducing Gram matrix may be singular without any
        _check(q, v, inducing_k, inducing_v, scale_tril, mask)
        dtype = compute_dtype(q.dtype)
        self.q, self.mask = q.to(dtype), mask  # [..., N, C]
        self.b = inducing_k.to(dtype)  # [..., m, C]
        self.values, self.v_b = v.to(dtype), inducing_v.to(dtype)
        self.scale_tril = scale_tril.to(dtype)  # [..., D, m, m]
        self.kernel, self.jitter = kernel, jitter
        self._fused: SGPAMoments | None = None
        if self.why_not_fused() is None:
            self._fused = self._run_fused(with_variance, draw=with_draw)
            super().__init__(self._fused.mean, None, q.dtype)
            self._announced_draw = self._fused.draw
            self._query_mask = mask
        else:
            f = self.factors
            super().__init__(f.residual + f.K_qb @ self.v_b, mask, q.dtype)

    def why_not_fused(self) -> str | None:
        """None if mean, variance and KL come from fused kernels, else the reason."""
        if not (self.kernel is rbf or isinstance(self.kernel, ArdRbf)):
            return "the kernel is neither rbf nor ArdRbf"
        parts = [(self.b, 2), (self.v_b, 2), (self.scale_tril, 3)]
        if isinstance(self.kernel, ArdRbf):
            shapes = (self.kernel.lengthscale, 1), (self.kernel.variance, 0)
            parts += [(x, axes) for x, axes in shapes if isinstance(x, Tensor)]
        if not all(has_no_batch(x, axes) for x, axes in parts):
            return "inducing inputs differ between sequences"
        tokens, channels = self.q.shape[-2], max(*self.b.shape[-2:], self.values.shape[-1])
        return why_not_fused_on(self.q.device, self.q.dtype, tokens=tokens, channels=channels)

    def _run_fused(self, with_variance: bool, *, draw: bool = False) -> SGPAMoments:
        variance = self.kernel.variance if isinstance(self.kernel, ArdRbf) else None
        if variance is not None:
            variance = torch.as_tensor(variance, dtype=self.q.dtype, device=self.q.device)
        return fused_sgpa(
            self._scaled(self.q), self.values, self._scaled(self.b), self.v_b, self.scale_tril,
            variance=variance, jitter=self.jitter, mask=self.mask, with_variance=with_variance,
            draw=draw,
        )  # fmt: skip

    def _scaled(self, x: Tensor) -> Tensor:
        """Tokens between which the kernel is variance * kappa.  [..., N, C]"""
        return self.kernel.scaled(x) if isinstance(self.kernel, ArdRbf) else x

    def _masked_tokens(self) -> Tensor:
        """Tokens with padding overwritten by the mean of the real ones.  [..., N, C]

        Kernels need not be translation invariant, so nothing is centred here; one that centres its
        arguments about their mean finds that of real tokens, where zeros would cost it digits.
        """
        return fill_rows(self.q, real_mean(self.q.detach(), self.mask), self.mask)

    @kept
    @full_precision
    def factors(self) -> Factors:
        """The matrices of eq. 19 by plain operations."""
        x, v = self._masked_tokens(), keep_rows(self.values, self.mask)
        K_bb = self.kernel(self.b, self.b)
        L_b = cholesky(with_diagonal(K_bb, self.jitter), name="K_bb + jitter I", noise=self.jitter)
        K_qb = keep_rows(self.kernel(x, self.b), self.mask)
        Phi = solve_triangular(L_b.mT, K_qb, upper=True, left=False)
        K_qq = keep_pairs(self.kernel(x, x), self.mask, self.mask)
        residual = K_qq @ v - Phi @ (Phi.mT @ v)
        return Factors(x, v, self.scale_tril.tril(), K_bb, L_b, K_qb, Phi, K_qq, residual)

    def _full_variance(self) -> Tensor:
        if self._fused is None:
            return super()._full_variance()
        if self._fused.variance is None:
            self._fused = self._run_fused(True)
        assert self._fused.variance is not None
        return self._fused.variance  # the kernels have masked it

    @full_precision
    def _raw_variance(self) -> Tensor:
        f = self.factors
        prior = f.K_qq.diagonal(dim1=-2, dim2=-1) - f.Phi.square().sum(-1)  # [..., N]
        spread = (f.Phi[..., None, :, :] @ f.s).square().sum(-1)  # [..., D, N]
        return (prior[..., None].clamp_min(0) + spread.mT).clamp_min(0)

    def _prior_stddev(self) -> Tensor:
        prior = self.factors.K_qq.diagonal(dim1=-2, dim2=-1)  # [..., N], zero at padded tokens
        return torch.where(prior > 0, prior, 1.0).sqrt()

    def _full_covariance(self) -> Tensor:
        f = self.factors
        root = f.Phi[..., None, :, :] @ f.s  # [..., D, N, m]
        prior = f.K_qq - f.Phi @ f.Phi.mT  # [..., N, N]
        return prior[..., None, :, :] + root @ root.mT

    def _joint_deviation(self, n: int, generator: Source) -> Tensor:
        """A prior draw at (b, q) without what b explains, plus the variational spread of b."""
        f = self.factors
        m, N = f.K_bb.shape[-1], f.K_qq.shape[-1]
        lead = broadcast(self.b.shape[:-2], f.x.shape[:-2])
        both = torch.cat([self.b.expand(*lead, m, -1), f.x.expand(*lead, N, -1)], -2).double()
        prior = self.kernel(both, both)  # [..., m + N, m + N]
        real = None
        if self.mask is not None:  # inducing inputs first, which are no padding
            real = pad(self.mask.expand(*lead, N), (m, 0), value=True)  # [..., m + N]
        drawn = prior_root(prior, real).to(f.x.dtype) @ self._normal(n, m + N, generator)
        nugget = self.jitter**0.5 * self._normal(n, m, generator)
        white = solve_triangular(f.L_b, drawn[..., :m, :] + nugget, upper=False)  # [n, ..., m, D]
        spread = f.s @ self._normal(n, m, generator).mT[..., None]  # [n, ..., D, m, 1]
        return drawn[..., m:, :] + f.Phi @ (spread[..., 0].mT - white)

    @full_precision
    def kl(self) -> Tensor:
        """The divergence from the prior (eq. 20) per sequence and head.

        The v_b term uses the inducing Gram without jitter, as SGPA's authors do.

        Returns:
            [...].
        """
        if self._fused is not None:
            return self._fused.kl
        f = self.factors
        diagonal = f.s.diagonal(dim1=-2, dim2=-1)  # [..., D, m]
        free = f.s.square().sum((-2, -1)) - diagonal.shape[-1] - 2 * diagonal.log().sum(-1)
        inducing = (self.v_b * (f.K_bb @ self.v_b)).sum((-2, -1))  # [...]
        tokens = (f.v * f.residual).sum((-2, -1))  # [...]
        return 0.5 * (free.sum(-1) + inducing + tokens)


def _check(
    q: Tensor, v: Tensor, inducing_k: Tensor, inducing_v: Tensor, scale_tril: Tensor, mask: Tensor | None
) -> None:
    """Shapes, types and values of the arguments; errors name argument, value and expectation."""
    tokens, inducing = {"q": q, "v": v}, {"inducing_k": inducing_k}
    for name, x in {**tokens, **inducing}.items():
        check_tokens(name, x, like=q, same_dtype=name in tokens)
    expect(inducing_k.shape[-1] == q.shape[-1], f"inducing_k of width {q.shape[-1]} like q", inducing_k)
    expect(v.shape[-2] == q.shape[-2], f"v with {q.shape[-2]} tokens like q", v)
    check_mask("mask", mask, common_lead({**tokens, **inducing}), q)
    m, D = inducing_k.shape[-2], v.shape[-1]
    expect(inducing_v.shape[-2:] == (m, D), f"inducing_v of shape [..., {m}, {D}]", inducing_v)
    expect(scale_tril.shape[-3:] == (D, m, m), f"scale_tril of shape [..., {D}, {m}, {m}]", scale_tril)
    finite = {**tokens, **inducing, "inducing_v": inducing_v, "scale_tril": scale_tril}
    if not checks_are_deferred(q):
        check_values({name: keep_rows(x, mask if name in tokens else None) for name, x in finite.items()})
        check_positive("the diagonal of scale_tril", scale_tril.diagonal(dim1=-2, dim2=-1))
