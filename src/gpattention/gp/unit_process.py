"""The process of unit amplitude behind direct and softmax attention, and what its keys leave open of it.

L = chol(kappa(k, k) + noise I),   R = L^-1 kappa(k, q)
u_i = 1 - |R_i|^2                                                                     (2), (22)
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import solve_triangular

from gpattention.gp.cholesky import cholesky
from gpattention.gp.inputs import keep_columns, keep_rows, with_diagonal
from gpattention.gp.kernels import cross_gram, gram
from gpattention.gp.precision import full_precision


class UnitProcess(NamedTuple):
    """Where it is seen, and where it was observed."""

    q: Tensor  # [..., Q, C]
    k: Tensor  # [..., K, C]
    noise: Tensor  # [..., 1, 1]  sigma^2 / s_k^2
    mask: Tensor | None = None  # [..., K] True = real
    query_mask: Tensor | None = None  # [..., Q]
    causal: bool = False

    def prior(self) -> Tensor:
        """kappa(q, q), zero at padded queries.  [..., Q, Q]"""
        return keep_columns(keep_rows(gram(self.q), self.query_mask), self.query_mask)

    def whitened(self) -> tuple[Tensor, Tensor]:
        """L and R.  [..., K, K], [..., K, Q]"""
        M = with_diagonal(gram(self.k), self.noise, self.mask)  # [..., K, K]
        L = cholesky(M, name="K_k + noise I", noise=self.noise)
        K_kq = keep_columns(keep_rows(cross_gram(self.k, self.q), self.mask), self.query_mask)  # [..., K, Q]
        return L, solve_triangular(L, K_kq, upper=False)


@full_precision
def unit_variance(process: UnitProcess) -> Tensor:
    """u_i within its proven bounds.  [..., Q]"""
    _, R = process.whitened()
    R = R.triu() if process.causal else R  # prefixes of a forward substitution are causal
    return within_bounds(1 - R.square().sum(-2), process)


def within_bounds(u: Tensor, process: UnitProcess) -> Tensor:
    """u_i between noise / (n + noise), for n keys seen, and 1.  [..., Q]"""
    noise = process.noise[..., 0]  # [..., 1]
    seen = real_key_counts(process.mask, process.k, process.causal)  # [..., 1] or [..., Q]
    return u.clamp(min=noise / (seen + noise), max=torch.ones_like(noise))


def real_key_counts(mask: Tensor | None, k: Tensor, causal: bool) -> Tensor:
    """How many real keys each query sees, as [..., 1] or, causally, [..., Q]."""
    K = k.shape[-2]
    if causal:
        if mask is None:
            return torch.arange(1, K + 1, dtype=k.dtype, device=k.device)
        return mask.cumsum(-1).to(k.dtype)
    if mask is None:
        return k.new_full((1,), K)
    return mask.sum(-1, keepdim=True).to(k.dtype)
