"""SGPA: sparse GP attention with symmetric kernels and a free variational posterior (eq. 19-20).

K_bb + jitter I = L_b L_b^T,  Phi = K_qb L_b^-T,  S_a = s_a s_a^T per value channel a
mean   = K_qq v - Phi Phi^T v + K_qb v_b
var_ia = [K_qq]_ii + |s_a^T Phi_i|^2 - |Phi_i|^2                                          (19)
KL     = sum_a 1/2 [tr S_a - m - log det S_a + v_b^T K_bb v_b + v^T (K_qq - Phi Phi^T) v]   (20)
"""

from collections.abc import Callable

import torch
from torch import Generator, Tensor
from torch.linalg import solve_triangular

from gpattention.gp.checks import check_positive
from gpattention.gp.cholesky import cholesky
from gpattention.gp.inputs import keep_columns, keep_rows, prepare, with_diagonal
from gpattention.gp.kernels import rbf
from gpattention.gp.noise import NoiseSource
from gpattention.gp.posterior import Posterior, prior_root
from gpattention.gp.precision import full_precision

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
) -> "SGPAPosterior":
    """Sparse GP attention (eq. 19), full variational covariance per value channel.

    `kernel(x, y)` is any function of the `rbf` form, e.g.
    `lambda x, y: ard_rbf(x, y, lengthscale, variance)`; the canonical `rbf` by default.
    The variance is [..., N, D], one per value channel.
    """
    return SGPAPosterior(q, v, inducing_k, inducing_v, scale_tril, kernel=kernel, jitter=jitter, mask=mask)


@full_precision
def sgpa_kl(
    q: Tensor,  # [..., N, C]
    v: Tensor,  # [..., N, D]
    inducing_k: Tensor,  # [..., m, C]
    inducing_v: Tensor,  # [..., m, D]
    scale_tril: Tensor,  # [..., D, m, m]
    *,
    kernel: Kernel = rbf,
    jitter: float = 1e-6,
    mask: Tensor | None = None,  # [..., N] True = real
) -> Tensor:
    """KL of the variational posterior from the prior (eq. 20), per sequence and head.  [...]

    The v_b term uses the inducing Gram without jitter, as SGPA's authors do.
    """
    posterior = SGPAPosterior(
        q, v, inducing_k, inducing_v, scale_tril, kernel=kernel, jitter=jitter, mask=mask
    )
    return posterior.kl()


class SGPAPosterior(Posterior):
    """Posterior of eq. 19; `.variance` is [..., N, D], `.covariance()` [..., D, N, N]."""

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
    ) -> None:
        if not 0 < jitter < 1:
            raise ValueError(f"expected jitter in (0, 1), got {jitter}")
        # kernels need not be translation invariant, so the inputs are checked but not centred
        t = prepare(
            q, q, v, inducing={"inducing_k": inducing_k}, noise=jitter, mask=mask,
            also_finite={"inducing_v": inducing_v, "scale_tril": scale_tril},
        )  # fmt: skip
        m, D = inducing_k.shape[-2], v.shape[-1]
        if inducing_v.shape[-2:] != (m, D):
            raise ValueError(f"expected inducing_v of shape [..., {m}, {D}], got {tuple(inducing_v.shape)}")
        if scale_tril.shape[-3:] != (D, m, m):
            raise ValueError(
                f"expected scale_tril of shape [..., {D}, {m}, {m}], got {tuple(scale_tril.shape)}"
            )
        check_positive("the diagonal of scale_tril", scale_tril.diagonal(dim1=-2, dim2=-1))
        dtype = t.v.dtype
        self.x = x = keep_rows(q.to(dtype), mask)  # [..., N, C]
        self.b = b = inducing_k.to(dtype)  # [..., m, C]
        self.kernel = kernel
        self.v, self.v_b = t.v, inducing_v.to(dtype)
        self.s = scale_tril.to(dtype).tril()  # [..., D, m, m]
        self.K_bb = kernel(b, b)  # [..., m, m]
        self.L_b = cholesky(with_diagonal(self.K_bb, jitter), name="K_bb + jitter I", noise=jitter)
        self.K_qb = keep_rows(kernel(x, b), mask)  # [..., N, m]
        self.Phi = solve_triangular(self.L_b.mT, self.K_qb, upper=True, left=False)  # [..., N, m]
        self.K_qq = keep_columns(keep_rows(kernel(x, x), mask), mask)  # [..., N, N]
        self.jitter = jitter
        self.residual = self.K_qq @ t.v - self.Phi @ (self.Phi.mT @ t.v)  # [..., N, D]
        super().__init__(self.residual + self.K_qb @ self.v_b, mask, t.dtype)

    @full_precision
    def _raw_variance(self) -> Tensor:
        prior = self.K_qq.diagonal(dim1=-2, dim2=-1) - self.Phi.square().sum(-1)  # [..., N]
        spread = (self.Phi[..., None, :, :] @ self.s).square().sum(-1)  # [..., D, N]
        return (prior[..., None].clamp_min(0) + spread.mT).clamp_min(0)

    def _prior_stddev(self) -> Tensor:
        prior = self.K_qq.diagonal(dim1=-2, dim2=-1)  # [..., N], zero at padded tokens
        return torch.where(prior > 0, prior, 1.0).sqrt()

    def _full_covariance(self) -> Tensor:
        root = self.Phi[..., None, :, :] @ self.s  # [..., D, N, m]
        prior = self.K_qq - self.Phi @ self.Phi.mT  # [..., N, N]
        return prior[..., None, :, :] + root @ root.mT

    def _joint_deviation(self, n: int, generator: Generator | NoiseSource | None) -> Tensor:
        """A prior draw at (b, q) without what b explains, plus the variational spread of b."""
        m, N = self.K_bb.shape[-1], self.K_qq.shape[-1]
        lead = torch.broadcast_shapes(self.b.shape[:-2], self.x.shape[:-2])
        both = torch.cat([self.b.expand(*lead, m, -1), self.x.expand(*lead, N, -1)], -2).double()
        prior = self.kernel(both, both)  # [..., m + N, m + N]
        f = prior_root(prior).to(self.x.dtype) @ self._normal(n, m + N, generator)
        nugget = self.jitter**0.5 * self._normal(n, m, generator)
        white = solve_triangular(self.L_b, f[..., :m, :] + nugget, upper=False)  # [n, ..., m, D]
        spread = self.s @ self._normal(n, m, generator).mT[..., None]  # [n, ..., D, m, 1]
        return f[..., m:, :] + self.Phi @ (spread[..., 0].mT - white)

    @full_precision
    def kl(self) -> Tensor:
        """Eq. 20 per sequence and head.  [...]"""
        diagonal = self.s.diagonal(dim1=-2, dim2=-1)  # [..., D, m]
        free = self.s.square().sum((-2, -1)) - diagonal.shape[-1] - 2 * diagonal.log().sum(-1)
        inducing = (self.v_b * (self.K_bb @ self.v_b)).sum((-2, -1))  # [...]
        tokens = (self.v * self.residual).sum((-2, -1))  # [...]
        return 0.5 * (free.sum(-1) + inducing + tokens)
