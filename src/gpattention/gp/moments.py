"""Mean, variance and log det of the exact CGP in one autograd function with its gradient written out.

With A = K_qo M^-1,  G = A K_ok,  F^T = G L_k^-T  (eq. 4, 6 at unit query amplitude)
    mean = G V,   u_i = 1 - sigma^2 |A_i|^2 - |F_i|^2,   ld = log det M_k
and incoming gradients g (mean), w (u), c (ld), with X = G M_k^-1:
    dV = G^T g,   dA = (g V^T - 2 diag(w) X) K_ko - 2 sigma^2 diag(w) A,   Z = dA M^-1
    dK_ok = A^T (g V^T - 2 diag(w) X),   dM_k = X^T diag(w) X + c M_k^-1
    dK_qo = Z,   dM = -A^T Z,   dsigma^2 = -sum_i w_i |A_i|^2
so that nothing is differentiated through a Cholesky factor: autograd's own way makes twenty triangular
solves of it.  Solves are from the right, on rows: in row-major memory twice as fast as from the left.
"""

from typing import Any

import torch
from torch import Tensor
from torch.linalg import solve_triangular

from gpattention.gp.cholesky import cholesky, inverse
from gpattention.gp.differentiation import once_differentiable
from gpattention.gp.inputs import Tokens
from gpattention.gp.precision import full_precision, wants_plain_operations
from gpattention.gp.shapes import broadcast


def key_noise(t: Tokens) -> Tensor:
    """sigma^2 / s_k^2: M_k has a factor in floating point as kappa(k, k) with this noise has.  [..., 1, 1]"""
    return t.noise.detach() / t.scale_k.detach().square()


def cgp_mean(M: Tensor, K_qo: Tensor, K_ok: Tensor, v: Tensor, noise: Tensor) -> Tensor:
    """K_qo M^-1 K_ok V (eq. 4).  [..., Q, D]"""
    if wants_plain_operations():
        return _plain(M, K_qo, K_ok, v, noise)[0]
    mean: Tensor = _Mean.apply(*_expand(M, K_qo, K_ok, v), noise)  # type: ignore[no-untyped-call]
    return mean


def cgp_moments(
    M: Tensor,  # [..., K, K] K_o + sigma^2 I
    K_qo: Tensor,  # [..., Q, K] at unit query amplitude
    K_ok: Tensor,  # [..., K, K]
    v: Tensor,  # [..., K, D]
    M_k: Tensor,  # [..., K, K] K_k + sigma^2 I
    noise: Tensor,  # [..., 1, 1]
    key_noise: Tensor,  # [..., 1, 1] sigma^2 / s_k^2, for the message only
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean [..., Q, D], unit variance u [..., Q] before clamping, and log det M_k [...]."""
    if wants_plain_operations():
        mean, A = _plain(M, K_qo, K_ok, v, noise)
        L_k = cholesky(M_k, name="K_k + noise I", noise=key_noise)
        F_t = _right_upper(A @ K_ok, L_k)  # [..., Q, K]
        u = 1 - noise[..., 0] * A.square().sum(-1) - F_t.square().sum(-1)
        return mean, u, 2 * L_k.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    M, K_qo, K_ok, v, M_k = _expand(M, K_qo, K_ok, v, M_k)
    noise = noise.expand(*M.shape[:-2], 1, 1)
    moments: tuple[Tensor, Tensor, Tensor] = _Moments.apply(  # type: ignore[no-untyped-call]
        M, K_qo, K_ok, v, M_k, noise, key_noise
    )
    return moments


def _plain(M: Tensor, K_qo: Tensor, K_ok: Tensor, v: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Mean [..., Q, D] and A [..., Q, K] by operations autograd and compilers know."""
    L = cholesky(M, name="K_o + noise I", noise=noise)
    W = _right_upper(K_qo, L)  # [..., Q, K]
    return W @ _right_upper((K_ok @ v).mT, L).mT, _right_lower(W, L)


def _expand(*matrices: Tensor) -> list[Tensor]:
    """All with the same leading axes, which gradients are then summed back to."""
    lead = broadcast(*(x.shape[:-2] for x in matrices))
    return [x.expand(*lead, *x.shape[-2:]) for x in matrices]


def _right_upper(X: Tensor, L: Tensor) -> Tensor:
    """X L^-T.  [..., N, K]"""
    return solve_triangular(L.mT, X, upper=True, left=False)


def _right_lower(X: Tensor, L: Tensor) -> Tensor:
    """X L^-1.  [..., N, K]"""
    return solve_triangular(L, X, upper=False, left=False)


class _Mean(torch.autograd.Function):
    """The mean alone: g V^T has rank D, so nothing N x N x N but the two solves of Z."""

    @staticmethod
    def forward(ctx: Any, M: Tensor, K_qo: Tensor, K_ok: Tensor, v: Tensor, noise: Tensor) -> Tensor:
        L = cholesky(M, name="K_o + noise I", noise=noise)
        W = _right_upper(K_qo, L)  # [..., Q, K]
        P = K_ok @ v  # [..., K, D]
        ctx.save_for_backward(L, W, K_ok, v, P)
        return W @ _right_upper(P.mT, L).mT

    @staticmethod
    @once_differentiable
    @full_precision
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        L, W, K_ok, v, P = ctx.saved_tensors
        (g,) = grads  # [..., Q, D]
        A = _right_lower(W, L)  # [..., Q, K]
        back = A.mT @ g  # [..., K, D]
        Z = _right_lower(_right_upper(g @ P.mT, L), L)  # [..., Q, K]
        return -A.mT @ Z, Z, back @ v.mT, K_ok.mT @ back, None


class _Moments(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        M: Tensor,
        K_qo: Tensor,
        K_ok: Tensor,
        v: Tensor,
        M_k: Tensor,
        noise: Tensor,
        key_noise: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        L = cholesky(M, name="K_o + noise I", noise=noise)
        L_k = cholesky(M_k, name="K_k + noise I", noise=key_noise)
        W = _right_upper(K_qo, L)  # [..., Q, K]
        P = K_ok @ v  # [..., K, D]
        mean = W @ _right_upper(P.mT, L).mT  # [..., Q, D]
        A = _right_lower(W, L)  # [..., Q, K]
        F_t = _right_upper(A @ K_ok, L_k)  # [..., Q, K]
        squares = A.square().sum(-1)  # [..., Q]
        u = 1 - noise[..., 0] * squares - F_t.square().sum(-1)
        log_det = 2 * L_k.diagonal(dim1=-2, dim2=-1).log().sum(-1)  # [...]
        ctx.save_for_backward(L, L_k, A, F_t, K_ok, v, P, squares, noise)
        return mean, u, log_det

    @staticmethod
    @once_differentiable
    @full_precision
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        L, L_k, A, F_t, K_ok, v, P, squares, noise = ctx.saved_tensors
        g, w, c = grads  # [..., Q, D], [..., Q], [...]
        X = _right_lower(F_t, L_k)  # [..., Q, K]  G M_k^-1
        wX = w[..., None] * X  # [..., Q, K]
        back = A.mT @ g  # [..., K, D]
        dA = g @ P.mT - 2 * (wX @ K_ok.mT) - (2 * noise * w[..., None]) * A  # [..., Q, K]
        Z = _right_lower(_right_upper(dA, L), L)  # [..., Q, K]
        dK_ok = back @ v.mT - 2 * (A.mT @ wX)  # [..., K, K]
        dM_k = X.mT @ wX  # [..., K, K]
        if ctx.needs_input_grad[4]:
            dM_k = dM_k + c[..., None, None] * inverse(L_k)
        dnoise = -(w * squares).sum(-1)[..., None, None]  # [..., 1, 1]
        return -A.mT @ Z, Z, dK_ok, K_ok.mT @ back, dM_k, dnoise, None
