"""The frame in which the kernel sees a head's queries and keys, measured on calibration data.

Softmax weights leave an invertible A and two origins free (section 10).  Of all A, that with

    A^T A = S,   S = Sigma_q^-1 # Sigma_k   (the geometric mean of the two)

gives queries and keys one covariance and makes E|A q|^2 + E|A^-T k|^2 least: the kernel sees the two sets as
near to each other as they can be brought, and the amplitudes of eq. 21 spread least.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

Alignment: TypeAlias = Literal["none", "isotropic", "full"]
ALIGNMENTS: tuple[Alignment, ...] = ("none", "isotropic", "full")
RIDGE = 1e-2  # of the mean variance, added to each covariance: directions that carry none have no A


@dataclass(frozen=True)
class Frame:
    """Constants of one site."""

    q0: Tensor  # [H, C] mean query
    k0: Tensor  # [H, C] mean key
    A: Tensor  # [H, C, C] x = A (q - q0)
    inverse: Tensor  # [H, C, C] A^-1, so that y = A^-T (k - k0)
    unit: Tensor  # [H] root mean square of the values
    log_amplitude: Tensor  # [H] mean of log a_i: a0


def aligning_maps(
    covariance_q: Tensor,  # [H, C, C]
    covariance_k: Tensor,  # [H, C, C]
    alignment: Alignment,
) -> tuple[Tensor, Tensor]:
    """A and its inverse.  [H, C, C] each"""
    width = covariance_q.shape[-1]
    eye = torch.eye(width, dtype=covariance_q.dtype, device=covariance_q.device).expand_as(covariance_q)
    if alignment == "none":
        return eye, eye
    trace_q, trace_k = (c.diagonal(dim1=-2, dim2=-1).sum(-1) for c in (covariance_q, covariance_k))  # [H]
    if alignment == "isotropic":
        ratio = (trace_k / trace_q.clamp_min(1e-12)).clamp(1e-6, 1e6) ** 0.25  # [H]
        return eye * ratio[:, None, None], eye / ratio[:, None, None]
    covariance_q, covariance_k = (
        covariance + eye * (RIDGE * trace / width).clamp_min(1e-12)[:, None, None]
        for covariance, trace in ((covariance_q, trace_q), (covariance_k, trace_k))
    )
    root, unroot = _power(covariance_q, 0.5), _power(covariance_q, -0.5)
    mean = unroot @ _power(root @ covariance_k @ root, 0.5) @ unroot  # S = Sigma_q^-1 # Sigma_k
    return _power(mean, 0.5), _power(mean, -0.5)


def _power(matrix: Tensor, exponent: float) -> Tensor:
    """Of a symmetric positive definite matrix.  [H, C, C]"""
    values, vectors = torch.linalg.eigh(0.5 * (matrix + matrix.mT))
    return (vectors * values.clamp_min(1e-12)[..., None, :] ** exponent) @ vectors.mT


class Sums:
    """Sums over calibration data from which a frame is made, in float64."""

    def __init__(self) -> None:
        self._totals: dict[str, Tensor] = {}

    def add(self, name: str, x: Tensor) -> None:
        """Add to a total."""
        x = x.double()
        self._totals[name] = self._totals[name] + x if name in self._totals else x

    def moments(self, name: str) -> tuple[Tensor, Tensor]:
        """Mean and covariance of tokens counted under that name.  [H, C], [H, C, C]"""
        count = self._totals[f"{name} count"]
        mean = self._totals[name] / count  # [H, C]
        second = self._totals[f"{name} square"] / count  # [H, C, C]
        return mean, second - mean[..., :, None] * mean[..., None, :]

    def has(self, name: str) -> bool:
        """Whether anything was added under that name."""
        return name in self._totals

    def ratio(self, name: str, count: str) -> Tensor:
        """One total divided by another."""
        return self._totals[name] / self._totals[count]

    def add_tokens(self, name: str, x: Tensor, real: Tensor) -> None:
        """First and second moments of the real tokens of x [B, H, N, C]; `real` is [B, 1, N, 1]."""
        x = torch.where(real, x, 0.0).double()
        self.add(name, x.sum((0, 2)))
        self.add(f"{name} square", torch.einsum("bhnc,bhnd->hcd", x, x))
        self.add(f"{name} count", real.expand(len(x), 1, x.shape[2], 1).sum())
