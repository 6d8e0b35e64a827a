"""J = G K_o G^T, the only O(N^2) quantity of the sparse densities (section 4), in O(N m) memory.

Exactly, in chunks of rows that are recomputed in the backward pass; or without bias from random
Fourier features, in O(N r).
"""

import math
from typing import Any

import torch
from torch import Generator, Tensor
from torch.utils.checkpoint import checkpoint

from gpattention.checks import check_count
from gpattention.gp.differentiation import once_differentiable
from gpattention.gp.kernels import about_centre, cross_gram, pull
from gpattention.gp.precision import full_precision, is_transformed
from gpattention.gp.shapes import broadcast


def latent_trace_reference(o: Tensor, G: Tensor) -> Tensor:
    """The definition, with the whole kernel matrix.  [..., m, m]"""
    return G @ cross_gram(o, o) @ G.mT


def latent_trace(
    o: Tensor,  # [..., N, C]
    G: Tensor,  # [..., m, N], zero at padded tokens
    *,
    chunk: int = 1024,
) -> Tensor:
    """G kappa(o, o) G^T by chunks of rows, forward and backward.  [..., m, m]"""
    chunk = check_count("chunk", chunk)
    lead = broadcast(o.shape[:-2], G.shape[:-2])
    o, G = o.expand(*lead, *o.shape[-2:]), G.expand(*lead, *G.shape[-2:])
    if torch.compiler.is_compiling():  # see kernels.gram
        return _recomputed(o, G, chunk)
    if is_transformed():  # torch.func can neither recompute nor differentiate what is written out below
        return latent_trace_reference(o, G)
    J: Tensor = _LatentTrace.apply(o, G, chunk)  # type: ignore[no-untyped-call]
    return J


def latent_trace_estimate(
    o: Tensor,  # [..., N, C]
    G: Tensor,  # [..., m, N]
    *,
    features: int,
    generator: Generator | None = None,
) -> Tensor:
    """Unbiased estimate of the same from `features` random cosine and sine pairs.  [..., m, m]"""
    features = check_count("features", features)
    frequencies = torch.randn(o.shape[-1], features, dtype=o.dtype, device=o.device, generator=generator)
    (centred,) = about_centre(o)
    angle = centred @ frequencies  # [..., N, r]
    projected = G @ torch.cat([angle.cos(), angle.sin()], -1) / math.sqrt(features)
    return projected @ projected.mT


def _recomputed(o: Tensor, G: Tensor, chunk: int) -> Tensor:
    """By plain operations, each chunk recomputed in the backward pass.  [..., m, m]"""

    def part(x: Tensor, G_x: Tensor) -> Tensor:
        return G_x @ (cross_gram(x, o) @ G.mT)

    pieces = [
        checkpoint(part, o[..., rows, :], G[..., rows], use_reentrant=False)
        for rows in _chunks(o.shape[-2], chunk)
    ]
    return torch.stack(pieces).sum(0)


class _LatentTrace(torch.autograd.Function):
    """With E = K * (G^T S G), S the symmetric part of the incoming gradient:
    dG = 2 S G K,  do_i = -2 sum_j E_ij (o_i - o_j)."""

    # Nothing is written in place: compiled backward passes of torch 2.11 lose such writes.

    @staticmethod
    def forward(ctx: Any, o: Tensor, G: Tensor, chunk: int) -> Tensor:
        ctx.save_for_backward(o, G)
        ctx.chunk = chunk
        J = G.new_zeros(*G.shape[:-1], G.shape[-2])  # [..., m, m]
        for rows in _chunks(o.shape[-2], chunk):
            J = J + G[..., rows] @ (cross_gram(o[..., rows, :], o) @ G.mT)
        return J

    @staticmethod
    @once_differentiable
    @full_precision
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        o, G = ctx.saved_tensors
        S = 0.5 * (grads[0] + grads[0].mT)  # [..., m, m]
        (centred,) = about_centre(o)
        SG = S @ G  # [..., m, N]
        grad_o, grad_G = [], []
        for rows in _chunks(o.shape[-2], ctx.chunk):
            K = cross_gram(o[..., rows, :], o)  # [..., b, N]
            grad_G.append(2 * SG @ K.mT)  # [..., m, b]
            E = K * (SG[..., rows].mT @ G)  # [..., b, N]
            grad_o.append(2 * pull(E, centred[..., rows, :], centred))  # [..., b, C]
        return torch.cat(grad_o, -2), torch.cat(grad_G, -1), None


def _chunks(n: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, n)) for start in range(0, n, chunk)]
