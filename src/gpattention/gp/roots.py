"""Cholesky factors as what they are used for: by substitution, or by inverses that are batched products.

LAPACK takes one small matrix after the other on one core, substitution has no faster way there, and autograd
makes many substitutions of each.  In a CPU's training step a block recursion gives L^-1 for the price of L,

    M = [[M_1, B^T], [B, M_2]],  L_1^-1 of M_1,  C = B L_1^-T,  L_2^-1 of M_2 - C C^T:
    L^-1 = [[L_1^-1, 0], [-L_2^-1 C L_1^-1, L_2^-1]]

as exact as substitution where the factor exists at all.  Its gradient needs no factor either: with R = L^-1,
S the lower triangle of dR R^T with half the diagonal,  dM = -1/2 R^T (S + S^T) R + d(log det) R^T R.
"""

from typing import Any

import torch
from torch import Tensor, baddbmm, bmm
from torch.linalg import solve_triangular

from gpattention.gp.inputs import with_diagonal
from gpattention.gp.posterior import log_det
from gpattention.numerics import (
    checks_are_deferred,
    cholesky,
    full_precision,
    once_differentiable,
    solve,
    wants_plain_operations,
)
from gpattention.ops import fused_mode

LEAF = 24  # largest matrix that LAPACK factors whole


def is_closed_on_cpu(*tensors: Tensor) -> bool:
    """Whether closed forms may run: on a CPU, where nobody needs to see plain operations.

    They take a batch in chunks: where it has no sequences there is none.
    """
    if tensors[0].device.type != "cpu" or fused_mode() == "off" or any(x.numel() == 0 for x in tensors):
        return False
    return not (wants_plain_operations() or checks_are_deferred(*tensors))


def trains_on_cpu(*tensors: Tensor) -> bool:
    """`is_closed_on_cpu` where a gradient is recorded."""
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return recorded and is_closed_on_cpu(*tensors)


def inverse_root(M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """L^-1, the diagonal of L, and what LAPACK says of the pivots, for M [S, N, N] symmetric."""
    root = torch.zeros_like(M)
    info = _invert(M, root)
    return root, root.diagonal(dim1=-2, dim2=-1).reciprocal(), info


def _invert(M: Tensor, root: Tensor) -> Tensor:
    """Write L^-1 below the diagonal of zeros, so that no block of it is copied into the next larger one."""
    n = M.shape[-1]
    if n <= LEAF:
        L, info = torch.linalg.cholesky_ex(M)
        eye = torch.eye(n, dtype=M.dtype, device=M.device).expand_as(L)
        root.copy_(solve_triangular(L, eye, upper=False, left=False))  # faster than from the left
        return info
    h = n // 2 if n <= 2 * LEAF else (n // 2 + 7) // 8 * 8
    first, second = root[:, :h, :h], root[:, h:, h:]
    info = _invert(M[:, :h, :h], first)
    C = bmm(M[:, h:, :h], first.mT)  # [S, N - h, h]
    info = info + _invert(baddbmm(M[:, h:, h:], C, C.mT, alpha=-1), second)
    torch.neg(bmm(second, bmm(C, first)), out=root[:, h:, :h])
    return info


def factored(M: Tensor, name: str, noise: Tensor | float) -> tuple[Tensor, Tensor]:
    """L^-1 and log det M of [S, N, N], or the error that `cholesky` raises.  [S, N, N], [S]"""
    root, pivots, info = inverse_root(M)
    if bool((info != 0).any()):
        root = cholesky(M, name=name, noise=noise)
        pivots = root.diagonal(dim1=-2, dim2=-1)
        root = torch.linalg.inv(root)
    return root, 2 * pivots.log().sum(-1)


def factored_together(
    *given: tuple[Tensor, str, Tensor], stacked: Tensor | None = None
) -> list[tuple[Tensor, Tensor]]:
    """`factored` of each, those of one size in one batch: LAPACK's calls cost as much as small matrices.

    `stacked` are the matrices one after the other, where they lie so in memory.
    """
    if len({M.shape for M, _, _ in given}) > 1:
        return [factored(*each) for each in given]
    root, pivots, info = inverse_root(torch.cat([M for M, _, _ in given]) if stacked is None else stacked)
    if bool((info != 0).any()):
        return [factored(*each) for each in given]
    log_det = 2 * pivots.log().sum(-1)
    return list(zip(root.chunk(len(given)), log_det.chunk(len(given)), strict=True))


class Root:
    """L of L L^T = M, by substitution.  [..., m, m]"""

    def __init__(self, M: Tensor, *, name: str, noise: Tensor | float) -> None:
        self._L = cholesky(M, name=name, noise=noise)

    @staticmethod
    def of(M: Tensor, *, name: str, noise: Tensor | float) -> "Root":
        """The root of M, whose products are as fast as they can be here."""
        return (InvertedRoot if trains_on_cpu(M) else Root)(M, name=name, noise=noise)

    @staticmethod
    def of_one_plus(FF: Tensor, noise: Tensor, name: str) -> "Root":
        """The root of I + F^T F / noise, which errors call by the name of F^T F."""
        return Root.of(with_diagonal(FF / noise, 1.0), name=f"I + {name} / noise", noise=noise)

    def lower(self) -> Tensor:
        """L itself."""
        return self._L

    def log_det(self) -> Tensor:
        """log det M.  [...]"""
        return log_det(self._L)

    def white(self, X: Tensor) -> Tensor:
        """L^-1 X."""
        return solve_triangular(self._L, X, upper=False)

    def white_rows(self, X: Tensor) -> Tensor:
        """X L^-T."""
        return solve_triangular(self._L.mT, X, upper=True, left=False)

    def back(self, X: Tensor) -> Tensor:
        """L^-T X."""
        return solve_triangular(self._L.mT, X, upper=True)

    def solve(self, X: Tensor) -> Tensor:
        """M^-1 X."""
        return solve(X, self._L)


class InvertedRoot(Root):
    """The same by products with L^-1."""

    def __init__(self, M: Tensor, *, name: str, noise: Tensor | float) -> None:
        self._M = M
        given = M.reshape(-1, *M.shape[-2:])
        found, value = _InverseRoot.apply(given, name, noise)  # type: ignore[no-untyped-call]
        self._R, self._log_det = found.view(M.shape), value.view(M.shape[:-2])

    @property
    def inverse(self) -> Tensor:
        """L^-1.  [..., m, m]"""
        return self._R

    def lower(self) -> Tensor:
        """L itself."""
        return self._M @ self._R.mT

    def log_det(self) -> Tensor:
        """log det M.  [...]"""
        return self._log_det

    def white(self, X: Tensor) -> Tensor:
        """L^-1 X."""
        return self._R @ X

    def white_rows(self, X: Tensor) -> Tensor:
        """X L^-T."""
        return X @ self._R.mT

    def back(self, X: Tensor) -> Tensor:
        """L^-T X."""
        return self._R.mT @ X

    def solve(self, X: Tensor) -> Tensor:
        """M^-1 X."""
        return self._R.mT @ (self._R @ X)


class _InverseRoot(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, M: Tensor, name: str, noise: Tensor | float) -> tuple[Tensor, Tensor]:
        R, value = factored(M, name, noise)
        ctx.save_for_backward(R)
        return R, value

    @staticmethod
    @once_differentiable
    @full_precision
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (R,) = ctx.saved_tensors
        by_R, by_value = grads
        S = bmm(by_R, R.mT).tril_().mul_(-0.5)  # [S, m, m]
        S.diagonal(dim1=-2, dim2=-1).mul_(0.5)
        S = S + S.mT
        S.diagonal(dim1=-2, dim2=-1).add_(by_value[:, None])
        return bmm(R.mT, bmm(S, R)), None, None
