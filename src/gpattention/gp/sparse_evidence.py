"""The sparse evidences that are functions of sums over tokens: dtc and dtc_bound (sections 4 and 12).

    G = Phi_q^T Phi_q,  B_0 = I + G / sigma^2,  y = B_0^-1 c,  mean N = Phi_q c
    N^T (sigma^2 I + Phi_q Phi_q^T)^-1 N = <y, G y> / sigma^2 + |G y|^2 / sigma^4
    log det(sigma^2 I + Phi_q Phi_q^T)   = n log sigma^2 + log det B_0

and the same for the keys, whose z_k need not lie in the span of their features.
"""

import math

import torch
from torch import Tensor

from gpattention.gp.cholesky import cholesky, solve
from gpattention.gp.density import LogDensity, log_det
from gpattention.gp.inputs import with_diagonal
from gpattention.gp.sharding import counted_once
from gpattention.gp.sparse import SCGPPosterior


def density_from_sums(p: SCGPPosterior, *, bound: bool) -> LogDensity:
    """Log density of the mean and of z_k under the DTC prior, or its lower bound."""
    terms = (_query_bound(p), _key_bound(p)) if bound else (_query_evidence(p), _key_evidence(p))
    query, key = torch.broadcast_tensors(*terms)  # keys shared by a batch count in each sequence
    sums = p.density_sums()
    return LogDensity(
        query=counted_once(query, p.kind.group),
        key=counted_once(key, p.kind.group),
        real_queries=sums.real_queries,
        real_keys=sums.real_keys,
        channels=p.t.v.shape[-1],
    )


def bound(square: Tensor, traces: Tensor, D: int, noise: Tensor, real: Tensor) -> Tensor:
    """-[|X|^2 + s traces] / (2 sigma^2) - (n s / 2) log 2 pi sigma^2 (eq. 16).  [...]"""
    scalar = noise[..., 0, 0]
    return -0.5 * ((square + D * traces) / scalar + real * D * (2 * math.pi * scalar).log())


def query_quadratic(p: SCGPPosterior) -> tuple[Tensor, Tensor]:
    """N^T (sigma^2 I + Phi_q Phi_q^T)^-1 N, summed over channels, and chol(B_0).  [...], [..., m, m]"""
    noise, scalar = p.t.noise, p.t.noise[..., 0, 0]
    G = p.density_sums().Phi_qq  # [..., m, m]
    L_0 = cholesky(with_diagonal(G / noise, 1.0), name="I + Phi_q^T Phi_q / noise", noise=noise)
    y = solve(p.c, L_0)  # [..., m, D]
    Gy = G @ y  # [..., m, D]
    quadratic = (y * Gy).sum((-2, -1)) / scalar + Gy.square().sum((-2, -1)) / scalar.square()
    return quadratic, L_0


def _query_evidence(p: SCGPPosterior) -> Tensor:
    """log N(N; 0, sigma^2 I + Phi_q Phi_q^T).  [...]"""
    return _evidence(p, *query_quadratic(p), p.density_sums().real_queries)


def _key_evidence(p: SCGPPosterior) -> Tensor:
    """log N(z_k; 0, sigma^2 I + Psi_k Psi_k^T).  [...]"""
    return _evidence(p, _key_quadratic(p), p.L_Bl, p.density_sums().real_keys)


def _evidence(p: SCGPPosterior, quadratic: Tensor, L: Tensor, real: Tensor) -> Tensor:
    scalar, D = p.t.noise[..., 0, 0], p.t.v.shape[-1]
    return -0.5 * (quadratic + D * (log_det(L) + real * (2 * math.pi * scalar).log()))


def _key_quadratic(p: SCGPPosterior) -> Tensor:
    """z_k^T (sigma^2 I + Psi_k Psi_k^T)^-1 z_k, summed over channels.  [...]

    For z_k = (sigma^2 I + Psi_k Psi_k^T) V it is a sum of squares; for z_k = V the minimum of a ridge
    regression, |V - Psi_k w|^2 / sigma^2 + |w|^2, whose residual is taken token by token where all tokens
    are here: from sums it loses its digits when V lies in the span of Psi_k.
    """
    scalar, P = p.t.noise[..., 0, 0], p.sums.Psi_kV
    if p.kind.values == "dual":
        return scalar * p.density_sums().VV + P.square().sum((-2, -1))
    w = solve(P / p.t.noise, p.L_Bl)  # [..., l, D]
    if p.kind.group is None:
        fit = (p.t.v - p.Psi_k @ w).square().sum((-2, -1))
    else:
        fit = _fit_from_sums(p, w)
    return fit / scalar + w.square().sum((-2, -1))


def _fit_from_sums(p: SCGPPosterior, w: Tensor) -> Tensor:
    """|V - Psi_k w|^2 = |V|^2 - 2 <P, w> + <w, S w>; a difference, so in float64.  [...]"""
    VV, P, S, wide = (x.double() for x in (p.density_sums().VV, p.sums.Psi_kV, p.sums.Psi_kk, w))
    return (VV + (wide * (S @ wide - 2 * P)).sum((-2, -1))).to(w.dtype)


def _query_bound(p: SCGPPosterior) -> Tensor:
    sums, D = p.density_sums(), p.t.v.shape[-1]
    square = (p.c * (sums.Phi_qq @ p.c)).sum((-2, -1))  # |N|^2
    return bound(square, _trace(sums.Phi_qq), D, p.t.noise, sums.real_queries)


def _key_bound(p: SCGPPosterior) -> Tensor:
    sums, P, S, D = p.density_sums(), p.sums.Psi_kV, p.sums.Psi_kk, p.t.v.shape[-1]
    square = sums.VV
    if p.kind.values == "dual":  # |Psi_k P + sigma^2 V|^2
        scalar = p.t.noise[..., 0, 0]
        cross = (P * (S @ P)).sum((-2, -1)) + 2 * scalar * P.square().sum((-2, -1))
        square = cross + scalar.square() * sums.VV
    return bound(square, _trace(S), D, p.t.noise, sums.real_keys)


def _trace(A: Tensor) -> Tensor:
    return A.diagonal(dim1=-2, dim2=-1).sum(-1)
