"""The exact models' training step on a CPU: moments and regulariser as one autograd function.

Autograd's way through `correlated` and `direct`, which stay the reference, keeps some forty matrices of a
layer and makes a hundred passes over them, and LAPACK takes one small matrix after the other on one core.
Here every matrix is made once, and all but the factors of small blocks (`roots`) are batched products,
which use all cores.  With unit processes k_xy = kappa(x, y),
N = k_kk + nu I, nu = sigma^2 / s_k^2, query amplitudes a_i = s_q a'_i:

    exact CGP   A = k_qo (k_oo + sigma^2 I)^-1,  G = A k_ok      (eq. 4, 6)
    direct      G = k_qk, A = 0                                  (eq. 2)
    mean = a s_k G v,   P = k_qq - Q,   Q = sigma^2 A A^T + G N^-1 G^T,   u = diag P
    key  = log N(M_k V; 0, M_k),   C = a k_qq a + sigma^2 I,   E = a Q a,   V = C - E
    marginal = -log N(mean; 0, C) - key                                                           (10)
    kl       = 1/2 [|L_C^-1 mean|^2 + s (log det C - log det V - tr C^-1 E)]                      (23)

and incoming gradients g of the mean, w of u, X = G N^-1, O = diag w - (gradient of Q):
    dG = s_k (a g) v^T - 2 O X,   dN = X^T O X,   dA = dG k_ok^T - 2 sigma^2 O A,   dk_ok = A^T dG

Where the posterior is near the prior, terms of the divergence's gradient cancel, once in that of E and twice
in that of C; with R and R_V the inverse roots of C and V, and H = R_V E C^-1 = R_V (R E)^T R, they are
    V^-1 - C^-1 = R_V^T H,   C^-1 + C^-1 E C^-1 - V^-1 = -H^T H
Amplitudes scale mean, k_qq and Q together, so that both costs depend on sigma^2 / a^2 alone, and the density
also on log a: d log a_i = -2 sigma^2 dC_ii, and s more for the density, is all that goes through them.

The sums that normalise rows are another function of the same kind:
    s_i = log sum_j exp(e_ij),  e_ij = -1/2 |q_i - k_j|^2,   de_ij = g_i exp(e_ij - s_i)              (25)

Where no gradient is asked for, the variance of a unit process (`direct`) is found by blocks of keys, from the
rows E of kappa(k, [k, q]): with R_b the inverse root of a block, W = R_b E_b is added up in squares, and what
the block explains, W^T W, leaves the rows below.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, baddbmm, bmm

from gpattention.gp.inputs import masked
from gpattention.gp.kernels import NEAR
from gpattention.gp.roots import factored, factored_together, is_closed_on_cpu, trains_on_cpu
from gpattention.numerics import (
    Cost,
    Tokens,
    broadcast,
    full_precision,
    once_differentiable,
)

CHUNK = 2**18  # numbers of the matrices that are passed over together
_BLOCK = 64  # keys that are factored together where only a variance is asked for


class ClosedMoments(NamedTuple):
    """What the function gives.

    Attributes:
        mean: amplified.  [..., Q, D]
        unit: variance at unit amplitude, before clamping.  [..., Q]
        key: log density of the observed keys.  [...]
        cost: the regulariser that was announced; None without one.  [...]
    """

    mean: Tensor
    unit: Tensor
    key: Tensor
    cost: Tensor | None


def closed_moments(
    t: Tokens,  # as they came
    amplitude: Tensor,  # [..., Q] or [..., 1]  s_q a_i
    *,
    cost: Cost,
    name: str,
) -> ClosedMoments | None:
    """Moments and regulariser of the exact CGP, or of the direct model where there are no latent inputs.

    Args:
        t: checked inputs.
        amplitude: of every query.
        cost: "marginal", "kl" or "none".
        name: of the queries' covariance, in errors.

    Returns:
        Them, or None where plain operations have to run: elsewhere than on a CPU, where no gradient is
        recorded, under compilers and transforms, and for tokens so far apart that distances need float64.

    Raises:
        NotPositiveDefiniteError: a covariance has no factor.
    """
    if not trains_on_cpu(t.q, t.k, t.v, *([] if t.o is None else [t.o])):
        return None
    t = masked(t)
    inputs = [t.q, t.k] if t.o is None else [t.q, t.k, t.o]
    lead = broadcast(*(x.shape[:-2] for x in (*inputs, t.v)))
    sets = _about_keys(lead, *inputs)
    if sets is None:
        return None
    numbers = [x.expand(*lead, 1, 1).reshape(-1, 1, 1) for x in (t.noise, t.scale_k)]
    a = amplitude.expand(*lead, t.q.shape[-2]).reshape(-1, t.q.shape[-2], 1)  # [S, Q, 1]
    masks = [None if m is None else _spread(m, lead) for m in (t.mask, t.query_mask)]
    pairs = [x for one in sets for x in one]
    found: Sequence[Any] = _Closed.apply(  # type: ignore[no-untyped-call]
        cost, name, lead, t.q, t.k, t.o, flat(t.v, lead), a, *numbers, *masks, *pairs
    )
    shaped: list[Any] = [None if x is None else x.reshape(*lead, *x.shape[1:]) for x in found]
    return ClosedMoments(*shaped)


def closed_explained(
    q: Tensor, k: Tensor, noise: Tensor, mask: Tensor | None, query_mask: Tensor | None
) -> Tensor | None:
    """1 - u_i of eq. 22, what keys explain of a process of unit amplitude, where no gradient is recorded.

    Args:
        q: where it is seen.  [..., Q, C]
        k: where it was observed.  [..., K, C]
        noise: of the observations.  [..., 1, 1]
        mask: which observations are real.  [..., K]
        query_mask: which queries are real.  [..., Q]

    Returns:
        [..., Q], or None where plain operations have to run: elsewhere than on a CPU, where a gradient is
        recorded, under compilers and transforms, and for tokens so far apart that distances need float64.

    Raises:
        NotPositiveDefiniteError: the keys' covariance has no factor.
    """
    if not is_closed_on_cpu(q, k) or any(x.requires_grad for x in (q, k, noise)):
        return None
    lead = broadcast(q.shape[:-2], k.shape[:-2], noise.shape[:-2])
    sets = _about_keys(lead, q, k)
    if sets is None:
        return None
    seen, observed = sets
    rows, columns = (None if m is None else _spread(m, lead) for m in (mask, query_mask))
    n, N = k.shape[-2], noise.expand(*lead, 1, 1).reshape(-1, 1, 1)
    E = bmm(observed.left, torch.cat([observed.right, seen.right], -2).mT).clamp_max_(0).exp_()
    E[..., :n].diagonal(dim1=-2, dim2=-1).fill_(1)
    _plus(_masked(E[..., :n], rows, rows), N, rows)
    _masked(E[..., n:], rows, columns)
    found: Tensor | float = 0.0
    while n:
        b = min(n, _BLOCK)
        root, _ = factored(E[:, :b, :b], "K_k + noise I", noise)
        W = bmm(root, E[:, :b, b:])  # [S, b, n - b + Q]
        n -= b
        found = found + W[..., n:].square().sum(-2)
        E = baddbmm(E[:, b:, b:], W[..., :n].mT, W, alpha=-1) if n else E
    assert isinstance(found, Tensor)
    return found.reshape(*lead, -1)


def closed_log_row_sums(t: Tokens) -> Tensor | None:
    """log sum_j kappa(q_i, k_j) over real keys (eq. 25), anything for queries of sequences without one.

    Args:
        t: checked inputs, masked.

    Returns:
        [..., Q], or None where plain operations have to run, as of `closed_moments`.
    """
    if not trains_on_cpu(t.q, t.k):
        return None
    lead = broadcast(t.q.shape[:-2], t.k.shape[:-2])
    sets = _about_keys(lead, t.q, t.k)
    if sets is None:
        return None
    sums: Tensor = _RowSums.apply(t.q, t.k, t.mask, lead, *sets[0], *sets[1])  # type: ignore[no-untyped-call]
    return sums


def flat(x: Tensor, lead: torch.Size) -> Tensor:
    """[..., N, X] as [S, N, X]"""
    return x.expand(*lead, *x.shape[-2:]).reshape(-1, *x.shape[-2:])


@torch.no_grad()
def _about_keys(lead: torch.Size, *given: Tensor) -> list["_Set"] | None:
    """Token sets, the second of which are the keys, about the centre of these; None for tokens too far."""
    centre = given[1].mean(-2, keepdim=True)  # [..., 1, C]
    sets = [_Set.about(centre, x, lead) for x in given]
    if centre.dtype == torch.float32:
        halves = [one.left[..., -2].min() for one in sets]
        if not bool(torch.stack(halves).min() >= -0.5 * NEAR**2):  # NaN too goes the way that says so
            return None
    return sets


def _spread(mask: Tensor, lead: torch.Size) -> Tensor:
    """[S, N, 1]"""
    return mask.expand(*lead, mask.shape[-1]).reshape(-1, mask.shape[-1], 1)


class _Set(NamedTuple):
    """Tokens so written that their products are exponents: left . right = -1/2 |x - y|^2."""

    left: Tensor  # [S, N, C + 2]  x, -|x|^2 / 2, 1
    right: Tensor  # [S, N, C + 2]  x, 1, -|x|^2 / 2

    @classmethod
    def about(cls, centre: Tensor, x: Tensor, lead: torch.Size) -> "_Set":
        """The same tokens [..., N, C] about a centre [..., 1, C], both ways."""
        N, C = x.shape[-2:]
        left, right = (x.new_empty(*lead, N, C + 2) for _ in range(2))
        points = torch.sub(x.expand(*lead, N, C), centre, out=left[..., :C])
        left[..., C] = points.square().sum(-1).mul_(-0.5)
        left[..., C + 1] = 1
        right[..., : C + 1], right[..., C + 1] = left[..., : C + 1], left[..., C]
        right[..., C] = 1
        return cls(left.view(-1, N, C + 2), right.view(-1, N, C + 2))

    @property
    def points(self) -> Tensor:
        """The tokens themselves.  [S, N, C]"""
        return self.left[..., :-2]

    def exponents(self, other: "_Set", to: Tensor | None = None) -> Tensor:
        """-1/2 |x - y|^2, in the place of what is given.  [S, N, M]"""
        return torch.bmm(self.left, other.right.mT, out=to).clamp_max_(0)

    def kappa(self, other: "_Set", to: Tensor | None = None) -> Tensor:
        """Likewise.  [S, N, M]"""
        K = self.exponents(other, to).exp_()
        if other is self:
            K.diagonal(dim1=-2, dim2=-1).fill_(1)
        return K


def _masked(K: Tensor, rows: Tensor | None, columns: Tensor | None) -> Tensor:
    """Rows and columns of padded tokens are 0."""
    K = K if rows is None else K.masked_fill_(~rows, 0.0)
    return K if columns is None else K.masked_fill_(~columns.mT, 0.0)


def _plus(K: Tensor, noise: Tensor, mask: Tensor | None) -> Tensor:
    """K + noise I in K's place, whose diagonal is 1 at padded tokens.  [S, N, N]"""
    diagonal = K.diagonal(dim1=-2, dim2=-1)
    diagonal.add_(noise[:, :, 0])
    if mask is not None:
        diagonal.masked_fill_(~mask[..., 0], 1.0)
    return K


def _count(mask: Tensor | None, x: Tensor) -> Tensor | int:
    return x.shape[-2] if mask is None else mask.sum((-2, -1)).to(x.dtype)


def _trace(K: Tensor, mask: Tensor | None) -> Tensor:
    """Of real tokens.  [S, 1, 1]"""
    diagonal = K.diagonal(dim1=-2, dim2=-1)
    diagonal = diagonal if mask is None else diagonal.masked_fill(~mask[..., 0], 0.0)
    return diagonal.sum(-1)[:, None, None]


class _Pulls:
    """Gradients of token sets, sums over the kernel matrices between them: dx_i = sum_j E_ij (y_j - x_i)."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[Tensor, Tensor]] = {}
        self._sets: list[_Set] = []  # held, so that no other takes their place

    def add(self, E: Tensor, x: _Set, y: _Set) -> None:
        """E = dK * K of the matrix between x and y; it is overwritten where y is x."""
        if y is x:
            E.diagonal(dim1=-2, dim2=-1).zero_()  # a token is no further from itself than 0
        self._add(E, x, y)
        self._add(E.mT, y, x)

    def add_symmetric(self, E: Tensor, x: _Set) -> None:
        """The same for a symmetric one between x and x."""
        E.diagonal(dim1=-2, dim2=-1).zero_()
        self._add(E.mul_(2), x, x)

    def _add(self, E: Tensor, x: _Set, y: _Set) -> None:
        # a sum apart, as products with a column more, of an odd width, take a third longer
        weight = E.sum(-1, keepdim=True)  # [S, N, 1]
        found = self._found.get(id(x))
        self._sets.append(x)
        if found is None:
            self._found[id(x)] = bmm(E, y.points), weight
        else:
            found[0].baddbmm_(E, y.points)
            found[1].add_(weight)

    def of(self, x: _Set) -> Tensor:
        """[S, N, C]"""
        found, weight = self._found[id(x)]
        return found.addcmul_(weight, x.points, value=-1)


def _forward(
    cost: Cost, name: str, v: Tensor, a: Tensor, noise: Tensor, scale_k: Tensor, mask: Tensor | None,
    query_mask: Tensor | None, *pairs: Tensor,
) -> tuple[tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:  # fmt: skip
    """Mean, unit variance, key density and cost of some sequences; and what the backward pass needs."""
    D, nu = v.shape[-1], noise / scale_k.square()
    Q, K, *latent = [_Set(*pairs[i : i + 2]) for i in range(0, len(pairs), 2)]
    count, n = 1 + len(latent) + (cost != "none"), v.shape[1]
    stacked = v.new_empty(count, len(v), n, n) if a.shape[1] == n else None
    places = iter([None] * count if stacked is None else stacked)
    K_kk = _masked(K.kappa(K, next(places)), mask, mask)
    Kv = bmm(K_kk, v)  # [S, K, D]
    N = _plus(K_kk, nu, mask)  # of which only what is off the diagonal is asked for later
    matrices = [(N, "K_k + noise I", nu)]
    A = K_ok = K_qo = root_o = M = C = None
    if latent:
        O = latent[0]  # noqa: E741 - the paper's letter
        M = _plus(_masked(O.kappa(O, next(places)), mask, mask), noise, mask)
        matrices.append((M, "K_o + noise I", noise))
    if cost != "none":
        C = _masked(Q.kappa(Q, next(places)), query_mask, query_mask)
        C = _plus(C.mul_(a).mul_(a.mT), noise, query_mask)
        matrices.append((C, name, noise))
    (root_k, log_det), *others = factored_together(
        *matrices, stacked=None if stacked is None else stacked.flatten(0, 1)
    )
    if not latent:
        G = _masked(Q.kappa(K), query_mask, mask)
        inner = bmm(G, v)
    else:
        root_o = others[0][0]
        K_qo, K_ok = _masked(Q.kappa(O), query_mask, mask), _masked(O.kappa(K), mask, mask)
        A = bmm(bmm(K_qo, root_o.mT), root_o)  # [S, Q, K]
        G = bmm(A, K_ok)  # [S, Q, K]
        inner = bmm(G, v)
    F = bmm(G, root_k.mT)  # [S, Q, K]
    mean = a * scale_k * inner  # [S, Q, D]
    Z = (scale_k.square() * Kv).addcmul_(noise, v)  # [S, K, D]  M_k V
    power, quadratic = v.square().sum((-2, -1), keepdim=True), (v * Z).sum((-2, -1), keepdim=True)
    log_det = log_det + _count(mask, v) * (scale_k[:, 0, 0].square().log() + math.log(2 * math.pi))
    key = -0.5 * (quadratic[:, 0, 0] + D * log_det)
    if cost == "kl":
        explained = bmm(F, F.mT)
        explained = explained if A is None else explained.baddbmm_(noise * A, A.mT)
        u = 1 - explained.diagonal(dim1=-2, dim2=-1)  # [S, Q]
    else:
        u = 1 - F.square().sum(-1)
        u = u if A is None else u - noise[:, :, 0] * A.square().sum(-1)
    # what the costs' gradients are but for a factor per sequence is found here, while it is in the cache
    X = bmm(F, root_k)  # [S, Q, K]
    precision = bmm(root_k.mT, root_k).mul_(D)  # [S, K, K]
    trace = _trace(precision, mask)
    precision.baddbmm_(scale_k.square() * v, v.mT)
    # the queries' density, or the divergence of their posterior
    value = Y = on = pulled = outer = None
    if C is not None:
        root_q, log_det_q = others[-1]
        white = bmm(root_q, mean)  # [S, Q, D]
        Y = bmm(root_q.mT, white)
        value = white.square().sum((-2, -1)) + D * log_det_q
        if cost == "marginal":
            value = 0.5 * (value + D * _count(query_mask, a) * math.log(2 * math.pi)) - key
            dC = baddbmm(bmm(root_q.mT, root_q), Y, Y.mT, beta=D, alpha=-1)  # [S, Q, Q]
        else:
            explained.mul_(a).mul_(a.mT)  # E
            drawn = bmm(root_q, explained)  # [S, Q, Q]  R E
            root_v, log_det_v = factored(C - explained, "V + tau^2 I", noise)
            value = 0.5 * (value - D * (log_det_v + (drawn * root_q).sum((-2, -1))))
            H = bmm(bmm(root_v, drawn.mT), root_q)  # [S, Q, Q]
            dC = bmm(H.mT, H).baddbmm_(Y, Y.mT, beta=-D, alpha=-1)
            outer = bmm(root_v.mT, H).mul_(-D * a).mul_(a.mT)  # O without diag w
        on = dC.diagonal(dim1=-2, dim2=-1)[..., None]  # [S, Q, 1]
        on = on.clone() if query_mask is None else on.masked_fill(~query_mask, 0.0)
        pulls = _Pulls()
        pulls.add_symmetric(dC.mul_(C), Q)
        pulled = pulls.of(Q)
    kept = (v, a, noise, scale_k, mask, query_mask, N, precision, trace, A, K_ok, K_qo, M, root_o, G, X,
            inner, Z, power, quadratic, Y, on, pulled, outer)  # fmt: skip
    return (mean, u, key, value), (*kept, *pairs)


def _backward(cost: Cost, scaled: bool, saved: Sequence[Any], *grads: Any) -> tuple[Any, ...]:
    """Gradients of q, k, o, v, a, sigma^2 and, where it has one, s_k."""
    (v, a, noise, scale_k, mask, query_mask, N, precision, trace, A, K_ok, K_qo, M, root_o, G, X, inner,
     Z_k, power, quadratic, Y, on, pulled, outer, *rest) = saved  # fmt: skip
    Q, K, *latent = (_Set(*rest[i : i + 2]) for i in range(0, len(rest), 2))
    g, w, by_key, by_cost = grads
    D, pulls = v.shape[-1], _Pulls()
    square = scale_k.square()
    d_a = scale_k * (g * inner).sum(-1, keepdim=True)  # [S, Q, 1] what does not go through the cost
    d_noise: Tensor | float = 0.0
    c = 0.5 * by_cost[:, None, None] if cost != "none" else None
    if c is not None:
        g = g + 2 * c * Y
        d_noise = c * on.sum(-2, keepdim=True)
        by_log = -2 * noise * c * on
        if cost == "marginal":
            by_key = by_key - by_cost
            by_log = by_log + 2 * c * D * (1.0 if query_mask is None else query_mask)
        else:
            outer = c * outer
            outer.diagonal(dim1=-2, dim2=-1).add_(w)
        d_a = d_a + torch.where(a > 0, by_log / a, 0.0)
    g = (a * scale_k) * g  # of G v
    OX = w[..., None] * X if outer is None else bmm(outer, X)  # [S, Q, K]
    dG = baddbmm(OX, g, v.mT, beta=-2)
    dN = bmm(X.mT, OX)  # [S, K, K]
    d_v = bmm(G.mT, g)
    if A is None:
        pulls.add(dG * G, Q, K)
    else:
        (o,) = latent
        OA = w[..., None] * A if outer is None else bmm(outer, A)
        d_noise = d_noise - (OA * A).sum((-2, -1), keepdim=True)
        dA = baddbmm(noise * OA, dG, K_ok.mT, beta=-2)
        Z = bmm(bmm(dA, root_o.mT), root_o)  # [S, Q, K]  gradient of K_qo
        dM = bmm(A.mT, Z).neg_()  # [S, K, K]
        d_noise = d_noise + _trace(dM, mask)
        pulls.add(Z * K_qo, Q, o)
        pulls.add(bmm(A.mT, dG) * K_ok, o, K)
        pulls.add(dM.mul_(M), o, o)
    # what is observed at the keys
    e = -0.5 * by_key[:, None, None]
    d_nu = _trace(dN, mask) + e * trace
    pulls.add_symmetric(dN.addcmul_(e, precision).mul_(N), K)
    d_v = d_v.addcmul_(2 * e, Z_k)
    d_noise = d_noise + e * power + d_nu / square
    d_scale = None
    if scaled:
        n = _count(mask, v)
        n = n[:, None, None] if isinstance(n, Tensor) else n
        d_scale = (g * inner).sum((-2, -1), keepdim=True) / scale_k
        d_scale = d_scale + 2 * (e * (quadratic - noise * power + D * n) - d_nu * noise / square) / scale_k
    by_q = pulls.of(Q) if c is None else pulls.of(Q).addcmul_(c, pulled)
    by_o = pulls.of(latent[0]) if latent else None
    return by_q, pulls.of(K), by_o, d_v, d_a, d_noise, d_scale


class _Closed(torch.autograd.Function):
    """Chunk by chunk of sequences, so that what is passed over again and again stays in a core's cache."""

    @staticmethod
    @full_precision
    def forward(
        ctx: Any, cost: Cost, name: str, lead: torch.Size, q: Tensor, k: Tensor, o: Tensor | None, *given: Any
    ) -> tuple[Tensor | None, ...]:
        # q, k and o take the gradients alone: about their centre they are among what is given
        ctx.shapes = [None if x is None else x.shape for x in (q, k, o)]
        ctx.scaled = ctx.needs_input_grad[9]
        each = evenly(len(given[0]), given[1].shape[1] ** 2)
        parts = [_forward(cost, name, *part) for part in chunked(given, each)]
        kept = [saved for _, saved in parts]
        ctx.save_for_backward(*(x for saved in kept for x in saved))
        ctx.cost, ctx.lead, ctx.count, ctx.chunks, ctx.each = cost, lead, len(given), len(parts), each
        return tuple(joined(column) for column in zip(*(found for found, _ in parts), strict=True))

    @staticmethod
    @once_differentiable
    @full_precision
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        width = len(saved) // ctx.chunks
        parts = [
            _backward(ctx.cost, ctx.scaled, saved[i * width : (i + 1) * width], *part)
            for i, part in enumerate(chunked(grads, ctx.each))
        ]
        by_q, by_k, by_o, *others = (joined(column) for column in zip(*parts, strict=True))
        by_tokens = [
            None if x is None else _as_given(x, ctx.lead, shape)
            for x, shape in zip((by_q, by_k, by_o), ctx.shapes, strict=True)
        ]
        return None, None, None, *by_tokens, *others, *[None] * (ctx.count - len(others))


def _as_given(x: Tensor, lead: torch.Size, shape: torch.Size) -> Tensor:
    """A gradient [S, N, C] in the shape of its tokens."""
    return x.view(*lead, *x.shape[1:]).sum_to_size(shape)


class _RowSums(torch.autograd.Function):
    @staticmethod
    @full_precision
    def forward(
        ctx: Any, q: Tensor, k: Tensor, mask: Tensor | None, lead: torch.Size, *pairs: Tensor
    ) -> Tensor:
        ctx.lead, ctx.each = lead, evenly(len(pairs[0]), pairs[0].shape[1] ** 2)
        real = None if mask is None else _spread(mask, lead)
        parts = [_log_sums(*part) for part in chunked((real, *pairs), ctx.each)]
        ctx.save_for_backward(q, k, mask, *pairs, *(weights for _, weights in parts))
        return torch.cat([sums for sums, _ in parts]).view(*lead, -1)

    @staticmethod
    @full_precision
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, mask, *rest = ctx.saved_tensors
        if torch.is_grad_enabled():  # plain operations have a second derivative
            e = -0.5 * (q[..., :, None, :] - k[..., None, :, :]).square().sum(-1)  # [..., Q, K]
            sums = (e if mask is None else e.masked_fill(~mask[..., None, :], -torch.inf)).logsumexp(-1)
            return *torch.autograd.grad(sums, (q, k), grads[0], create_graph=True), *[None] * 6
        (Q, K), weights = (_Set(*rest[i : i + 2]) for i in (0, 2)), rest[4:]
        g = grads[0].reshape(len(Q.left), -1, 1)
        by_q, by_k = [], []
        for (x, y, own), P in zip(chunked((Q.points, K.points, g), ctx.each), weights, strict=True):
            E = P * own  # [S, Q, K]
            by_q.append(bmm(E, y).addcmul_(own, x, value=-1))  # rows of P sum to 1
            by_k.append(bmm(E.mT, x).addcmul_(E.sum(-2)[..., None], y, value=-1))
        by_tokens = (_as_given(torch.cat(x), ctx.lead, y.shape) for x, y in ((by_q, q), (by_k, k)))
        return *by_tokens, *[None] * 6


def _log_sums(mask: Tensor | None, *pairs: Tensor) -> tuple[Tensor, Tensor]:
    """s [S, Q] and exp(e - s) [S, Q, K]; finite numbers where there is no key."""
    e = _Set(*pairs[:2]).exponents(_Set(*pairs[2:]))
    if mask is not None:
        e = e.masked_fill_(~mask.mT, torch.finfo(e.dtype).min)
    most = e.amax(-1, keepdim=True)  # [S, Q, 1]
    P = e.sub_(most).exp_()
    total = P.sum(-1, keepdim=True)
    return (most + total.log())[..., 0], P.div_(total)


def evenly(count: int, numbers: int) -> int:
    """How many of so many sequences, whose matrices have so many numbers, a chunk has: all about the same."""
    most = max(1, CHUNK // numbers)
    return -(-count // -(-count // most))


def chunked(tensors: Sequence[Tensor | None], each: int) -> Iterator[list[Any]]:
    """So many sequences of each tensor after the other."""
    count = next(len(x) for x in tensors if x is not None)
    for start in range(0, count, each):
        yield [None if x is None else x[start : start + each] for x in tensors]


def joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """The parts of all chunks as one tensor."""
    found = [x for x in parts if x is not None]
    return None if not found else found[0] if len(found) == 1 else torch.cat(found)
