"""The sparse model's training step on a CPU: moments and regulariser as one autograd function.

As in `closed`, every matrix is made once and products are batched; here they are m x m, and autograd would
make two hundred passes over those of a layer.  Per sequence and head, with one inducing set, s = sigma^2 and
amplified features F = a Phi_q, there are G_x = X^T X, B_x = I + G_x / s = L_x L_x^T and R_x = L_x^-1 for each
X of F (q), Phi_o (o) and Psi_k (k):

    T = R_k (G_o / s) R_o^T,   P = Psi_k^T V,   N = 2 I - R_o R_o^T + T^T T = L_N L_N^T,   R_N = L_N^-1
    y = T^T R_k P / s,  which is R_o (G_o / s) P for z_k = M_k V ("dual")
    c = R_o^T y,   R_c = R_o^T L_N,   mean = F c,   f = F R_c,   var_i = |f_i|^2                      (15)

With u = B_q^-1 c, e = G_q u / s and J = f^T f / s = R_I^-1 R_I^-T - I the costs are

    quad  = <u, e> + |e|^2,   query = quad + D log det B_q
    key   = |V - Psi_k w|^2 / s + |w|^2 + D log det B_k,   w = B_k^-1 P / s  ("dual": |P|^2 + s |V|^2 first)
    kl    = 1/2 [quad + D (<E, I - B_q^-1> + log det B_q - log det(I + J))],   E = R_c R_c^T - I        (24)

E = (T R_o)^T T R_o - (I - B_o^-1)^2 has no identity left in it, I - B_x^-1 = B_x^-1 G_x / s, and the terms of
the gradient that would cancel near the prior are products (`gpattention.ops.sparse.kernels` has them too):

    K = (I + G_q R_c R_c^T / s)^-1 = L_o (R_I R_N)^T R_I R_c^T,   H = (I - B_q^-1) E
    dG_q = [u u^T + D B_q^-1 E H K] / 2 s,   Q = D/2 R_o H L_o (R_N^T J R_I^T R_I R_N)

Nothing is differentiated through a factor: with gradients g of the mean and w of the variance, Q the
symmetric part of R_o (F^T (w f)) R_N and of the cost's, c' = R_o dc and dc = F^T g and the cost's,

    X_o = Q N + N Q - 2 Q + (c' y^T + y c'^T) / 2,   X_k = T Q T^T,   dC = R_k^T (2 T Q) R_o / s
    dG_o = -R_o^T X_o R_o / s + (dC + dC^T) / 2,   dG_k = -R_k^T X_k R_k / s
    "dual":   dC += P (R_o^T c')^T / s,   dP = (G_o / s) R_o^T c'
    "paper":  dC += R_k^T z c'^T R_o / s,   X_k += (T c' z^T + its transpose) / 2,   dP = R_k^T T c' / s

Features of inducing inputs that all sequences share, Phi = K R^T with R = L_m^-1, are a function of the same
kind: a head's tokens of all sequences are rows of one matrix, as they lie in memory,
    dR = dPhi^T K,   E = (dPhi R) * K,   dx_i = sum_j E_ij (m_j - x_i),   dm_j = sum_i E_ij (x_i - m_j)
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, baddbmm, bmm

from gpattention.gp.closed import chunked, evenly, flat, joined
from gpattention.gp.kernels import NEAR
from gpattention.gp.roots import factored, factored_together, trains_on_cpu
from gpattention.numerics import broadcast, full_precision, once_differentiable

SparseCost: TypeAlias = Literal["none", "dtc", "kl"]


def closed_features(m: Tensor, root: Tensor | None, *sets: Tensor) -> tuple[Tensor, ...] | None:
    """kappa(x, m), or kappa(x, m) R^T, of token sets for inducing inputs that all sequences share.

    Args:
        m: inducing inputs.  [H, m, C]
        root: R = L_m^-1; None for the kernel's values alone.  [H, m, m]
        *sets: tokens.  [B, H, N, C] each

    Returns:
        [H, B, N, m] each, or None where plain operations have to run, as of `closed_moments`.
    """
    fit = m.ndim == 3 and all(x.ndim == 4 and x.shape[1] == len(m) for x in sets)
    if not fit or not trains_on_cpu(m, *sets):
        return None
    H, _, C = m.shape
    with torch.no_grad():
        centre = m.mean(-2, keepdim=True)  # [H, 1, C]
        points, rows = m - centre, m.new_empty(sum(x.numel() for x in sets) // C, C + 1)
        rows[:, C] = 1  # a column that counts
        for x, to in zip(sets, _parts(rows, H, sets), strict=True):
            torch.sub(x.transpose(0, 1), centre[:, None], out=to.view(H, len(x), -1, C + 1)[..., :C])
        half, of_points = (0.5 * y.square().sum(-1, keepdim=True) for y in (rows[:, :C], points))
        if m.dtype == torch.float32:
            most = torch.maximum(half.max(), of_points.max())
            if not bool(most <= 0.5 * NEAR**2):  # NaN too goes the way that says so
                return None
        columns = torch.cat([points, -of_points], -1)  # [H, m, C + 1]
    found: tuple[Tensor, ...] = _Features.apply(m, root, rows, columns, half, *sets)  # type: ignore[no-untyped-call]
    return found


def _parts(x: Tensor, H: int, sets: Sequence[Tensor]) -> list[Tensor]:
    """[H sum(B N), X] as [H, B N, X] of each set."""
    counts = [y.numel() // y.shape[-1] for y in sets]
    return [part.view(H, -1, x.shape[-1]) for part in x.split(counts)]


class _Features(torch.autograd.Function):
    @staticmethod
    @full_precision
    def forward(
        ctx: Any, m: Tensor, root: Tensor | None, rows: Tensor, columns: Tensor, half: Tensor, *sets: Tensor
    ) -> tuple[Tensor, ...]:
        H, count, _ = m.shape
        K = rows.new_empty(len(rows), count)
        for x, to in zip(_parts(rows, H, sets), _parts(K, H, sets), strict=True):
            bmm(x, columns.mT, out=to)
        K.sub_(half).clamp_max_(0).exp_()
        found = K
        if root is not None:
            found = torch.empty_like(K)
            for x, to in zip(_parts(K, H, sets), _parts(found, H, sets), strict=True):
                bmm(x, root.mT, out=to)
        ctx.save_for_backward(rows, columns, K, root, *sets)
        return tuple(
            part.view(H, len(x), -1, count) for x, part in zip(sets, _parts(found, H, sets), strict=True)
        )

    @staticmethod
    @once_differentiable
    @full_precision
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, columns, K, root, *sets = ctx.saved_tensors
        H, _, C = columns.shape
        C -= 1
        given = [g.reshape(H, -1, g.shape[-1]) for g in grads]
        K_of, rows_of = _parts(K, H, sets), _parts(rows, H, sets)
        by_root = None
        E = torch.empty_like(K)  # [H sum(B N), m]
        for g, own, to in zip(given, K_of, _parts(E, H, sets), strict=True):
            if root is None:
                to.copy_(g)
            else:
                bmm(g, root, out=to)
                by_root = bmm(g.mT, own) if by_root is None else by_root.baddbmm_(g.mT, own)
        E.mul_(K)
        points = columns[..., :C]
        counting = torch.cat([points, torch.ones_like(points[..., :1])], -1)  # [H, m, C + 1]
        by_rows, by_m = torch.empty_like(rows), torch.zeros_like(columns)
        for e, own, to in zip(_parts(E, H, sets), rows_of, _parts(by_rows, H, sets), strict=True):
            bmm(e, counting, out=to)
            by_m.baddbmm_(e.mT, own)
        moved = torch.addcmul(by_rows[:, :C], by_rows[:, C:], rows[:, :C], value=-1)
        by_points = torch.addcmul(by_m[..., :C], by_m[..., C:], points, value=-1)
        parts = zip(sets, _parts(moved, H, sets), strict=True)
        by_sets = (part.view(H, len(x), -1, C).transpose(0, 1) for x, part in parts)
        return by_points, by_root, None, None, None, *by_sets


class ClosedSparse(NamedTuple):
    """What the function gives.

    Attributes:
        mean: [..., Q, D].
        signal: variance that the inducing values leave, without that of each query alone.  [..., Q]
        query: quadratic form and D times the log determinant, of "dtc"; None without it.  [...]
        key: the same of the keys.  [...]
        kl: eq. 24; None where another cost was announced.  [...]
    """

    mean: Tensor
    signal: Tensor
    query: Tensor | None
    key: Tensor | None
    kl: Tensor | None


def closed_sparse(
    Phi_q: Tensor,  # [..., Q, m] at unit amplitude
    Phi_o: Tensor,  # [..., K, m]
    Psi_k: Tensor,  # [..., K, m]
    v: Tensor,  # [..., K, D]
    amplitude: Tensor,  # [..., Q] or [..., 1]  s_q a_i
    noise: Tensor,  # [..., 1, 1]
    *,
    dual: bool,
    cost: SparseCost,
) -> ClosedSparse | None:
    """Moments and regulariser of the sparse model with one set of inducing inputs, from its features.

    Args:
        Phi_q: whitened features of the queries, 0 at padded tokens like all others.
        Phi_o: of the latent inputs.
        Psi_k: of the keys, times s_k.
        v: values.
        amplitude: of every query.
        noise: sigma^2.
        dual: whether z_k = (Q_k + sigma^2 I) V, else V.
        cost: which one is computed.

    Returns:
        Them, or None where plain operations have to run, as of `closed_moments`.

    Raises:
        NotPositiveDefiniteError: a matrix has no factor.
    """
    if not trains_on_cpu(Phi_q, Phi_o, Psi_k, v):
        return None
    tokens = (Phi_q, Phi_o, Psi_k, v)
    lead = broadcast(*(x.shape[:-2] for x in tokens))
    a = amplitude.expand(*lead, Phi_q.shape[-2]).reshape(-1, Phi_q.shape[-2], 1)  # [S, Q, 1]
    s = noise.expand(*lead, 1, 1).reshape(-1, 1, 1)
    found: Sequence[Any] = _ClosedSparse.apply(cost, dual, *(flat(x, lead) for x in tokens), a, s)  # type: ignore[no-untyped-call]
    shaped: list[Any] = [None if x is None else x.reshape(*lead, *x.shape[1:]) for x in found]
    return ClosedSparse(*shaped)


class _ClosedSparse(torch.autograd.Function):
    @staticmethod
    @full_precision
    def forward(ctx: Any, cost: SparseCost, dual: bool, *given: Tensor) -> tuple[Tensor | None, ...]:
        Phi_q, _, Psi_k, _, _, _ = given
        S, Q, m = Phi_q.shape
        ctx.each = evenly(S, m * max(m, Q, Psi_k.shape[1]))
        parts = [_forward(cost, dual, *part) for part in chunked(given, ctx.each)]
        kept = [saved for _, saved in parts]
        ctx.save_for_backward(*(x for saved in kept for x in saved))
        ctx.cost, ctx.dual, ctx.chunks = cost, dual, len(parts)
        return tuple(joined(column) for column in zip(*(found for found, _ in parts), strict=True))

    @staticmethod
    @once_differentiable
    @full_precision
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        width = len(saved) // ctx.chunks
        parts = [
            _backward(ctx.cost, ctx.dual, saved[i * width : (i + 1) * width], *part)
            for i, part in enumerate(chunked(grads, ctx.each))
        ]
        return None, None, *(joined(column) for column in zip(*parts, strict=True))


def _inner(A: Tensor, B: Tensor) -> Tensor:
    """<A, B> of each.  [S]"""
    return (A * B).sum((-2, -1))


def _forward(
    cost: SparseCost, dual: bool, Phi_q: Tensor, Phi_o: Tensor, Psi: Tensor, v: Tensor, a: Tensor, s: Tensor
) -> tuple[tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:
    """Mean, variance, query, key and divergence of some sequences; and what the backward pass needs."""
    S, _, m = Phi_q.shape
    D, F = v.shape[-1], a * Phi_q
    sets = [Phi_o, Psi] if cost == "none" else [F, Phi_o, Psi]
    G = F.new_empty(len(sets), S, m, m)  # all over s, in the order q, o, k
    for X, to in zip(sets, G, strict=True):
        bmm(X.mT, X, out=to)
    G.div_(s)
    names = ["Phi_q^T Phi_q", "Phi_o^T Phi_o", "Psi_k^T Psi_k"][-len(sets) :]
    B = G.clone()
    B.diagonal(dim1=-2, dim2=-1).add_(1)
    named = [(M, f"I + {name} / noise", s) for M, name in zip(B, names, strict=True)]
    *of_q, (R, _), (R_k, log_det_k) = factored_together(*named)
    RG = bmm(R, G[-2])  # [S, m, m]
    T = bmm(R_k, RG.mT)
    P = bmm(Psi.mT, v)  # [S, m, D]
    z = None if dual else bmm(R_k, P).div_(s)
    y = bmm(T.mT, z) if z is not None else bmm(RG, P)  # [S, m, D]
    c = bmm(R.mT, y)
    N = bmm(T.mT, T).baddbmm_(R, R.mT, alpha=-1)
    N.diagonal(dim1=-2, dim2=-1).add_(2)
    R_N, _ = factored(N, "2I - B^-1 + T^T T", s)
    R_c = bmm(R.mT, bmm(N, R_N.mT))
    f = bmm(F, R_c)  # [S, Q, m]
    query = key = kl = R_q = u = e = alpha = w = J = R_I = shrink = E = None
    if cost != "none":
        ((R_q, log_det),) = of_q
        u = bmm(R_q.mT, bmm(R_q, c))
        e = bmm(G[0], u)
        quadratic = _inner(u, e) + e.square().sum((-2, -1))
        if cost == "dtc":
            query = quadratic + D * log_det
            if z is None:
                key = P.square().sum((-2, -1)) + s[:, 0, 0] * v.square().sum((-2, -1))
            else:
                w = bmm(R_k.mT, z)
                alpha = baddbmm(v, Psi, w, alpha=-1).div_(s)  # M_k^-1 V
                key = s[:, 0, 0] * alpha.square().sum((-2, -1)) + w.square().sum((-2, -1))
            key = key + D * log_det_k
        else:
            J = bmm(f.mT, f).div_(s)
            R_I, log_det_i = factored(_plus_one(J), "R_c^T Phi_q^T Phi_q R_c / noise + I", s)
            shrink, X = bmm(R_q.mT, bmm(R_q, G[0])), bmm(R.mT, RG)  # I - B_q^-1, I - B_o^-1
            half = bmm(R_k, X)  # T R_o
            E = bmm(half.mT, half).baddbmm_(X, X, alpha=-1)
            kl = 0.5 * (quadratic + D * (_inner(E, shrink) + log_det - log_det_i))
    moments = (bmm(F, c), f.square().sum(-1))
    kept = (Phi_q, Phi_o, Psi, v, a, s, F, f, *G[-2:], R, R_k, R_N, R_c, N, T, P, z, y, c,
            None if cost == "none" else G[0], R_q, u, e, alpha, w, J, R_I, shrink, E)  # fmt: skip
    return (*moments, query, key, kl), kept


def _plus_one(M: Tensor) -> Tensor:
    M = M.clone()
    M.diagonal(dim1=-2, dim2=-1).add_(1)
    return M


def _backward(
    cost: SparseCost, dual: bool, saved: Sequence[Any], g: Tensor, by_signal: Tensor, *by_cost: Any
) -> tuple[Tensor, ...]:
    """Gradients of the features, v, a and s."""
    (Phi_q, Phi_o, Psi, v, a, s, F, f, G_o, G_k, R, R_k, R_N, R_c, N, T, P, z, y, c,
     G_q, R_q, u, e, alpha, w, J, R_I, shrink, E) = saved  # fmt: skip
    factors: list[Any] = [None if x is None else x[:, None, None] for x in by_cost]
    by_query, by_key, by_kl = factors
    D = v.shape[-1]
    wf = by_signal[..., None] * f
    dF = bmm(g, c.mT).baddbmm_(wf, R_c.mT, alpha=2)
    Q, dc, d_s = (
        bmm(F.mT, wf),
        bmm(F.mT, g),
        torch.zeros_like(s[:, 0, 0]),
    )  # Q without R_o and R_N at its sides
    if cost != "none":
        if cost == "dtc":
            dc = dc + 2 * by_query * e
            dG_q = bmm(R_q.mT, R_q).baddbmm_(u, u.mT, beta=D).mul_(2 * by_query / s)
        else:
            dc = dc + by_kl * e
            HL = bmm(bmm(shrink, E), bmm(_plus_one(G_o), R.mT))
            HL = bmm(HL, bmm(R_I, R_N).mT)  # H L_o (R_I R_N)^T
            dG_q = bmm(bmm(R_q.mT, bmm(R_q, E)), bmm(HL, bmm(R_I, R_c.mT))).baddbmm_(u, u.mT, beta=D)
            dG_q = dG_q.mul_(0.5 * by_kl / s)
            dG_q = dG_q + dG_q.mT
            Q = Q + bmm(HL, bmm(R_I, J)).mul_(0.5 * D * by_kl)
        d_s = d_s - 0.5 * _inner(dG_q, G_q)
        dF = dF.baddbmm_(F, dG_q)  # twice the gradient of G_q, whose symmetric part counts
    Q = bmm(bmm(R, Q), R_N)
    Q = (Q + Q.mT).mul_(0.5)
    c_white = bmm(R, dc)
    # of X_o, of which the other half is the transpose, and of dC without R_o on its right
    X = bmm(Q, N).sub_(Q).baddbmm_(c_white, y.mT, alpha=0.5)
    U = bmm(R_k.mT, T)  # [S, m, m]
    back = bmm(U, Q).mul_(2)
    dG_k = bmm(back, U.mT).neg_()
    if dual:
        c_back = bmm(R.mT, c_white)
        dP = bmm(G_o, c_back)
    else:
        by_z = bmm(T, c_white)
        dP = bmm(R_k.mT, by_z).div_(s)
        w_z = bmm(R_k.mT, z)
        half = bmm(dP * s, w_z.mT)
        dG_k = dG_k - half - half.mT
        back = back.baddbmm_(w_z, c_white.mT)
        d_s = d_s - _inner(by_z, z) / s[:, 0, 0]
    if cost == "dtc":
        dG_k = dG_k.baddbmm_(R_k.mT, R_k * (2 * D * by_key))
    dG_k = dG_k.div_(s)
    dG_o = bmm(back.baddbmm_(R.mT, X, alpha=-2), R)
    if dual:
        dG_o = dG_o.baddbmm_(P, c_back.mT)
    dG_o = (dG_o + dG_o.mT).div_(s)
    d_s = d_s - 0.5 * (_inner(dG_o, G_o) + _inner(dG_k, G_k))
    if cost == "dtc" and dual:
        dP = dP + 2 * by_key * P
    dPsi, d_v = bmm(Psi, dG_k).baddbmm_(v, dP.mT), bmm(Psi, dP)
    if cost == "dtc":
        if dual:
            d_v = d_v + (2 * by_key * s) * v
            d_s = d_s + by_key[:, 0, 0] * v.square().sum((-2, -1))
        else:
            scaled = 2 * by_key * alpha
            d_v = d_v + scaled
            dPsi = dPsi.baddbmm_(scaled, w.mT, alpha=-1)
            d_s = d_s - by_key[:, 0, 0] * alpha.square().sum((-2, -1))
    d_a = (dF * Phi_q).sum(-1, keepdim=True)
    return dF.mul_(a), bmm(Phi_o, dG_o), dPsi, d_v, d_a, d_s[:, None, None]
