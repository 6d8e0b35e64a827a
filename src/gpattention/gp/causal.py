"""Causal CGP attention: row i is the exact CGP prediction from tokens up to i (eq. 17-18).

Leading blocks of a Cholesky factor and of a forward substitution belong to prefixes, so all prefixes
cost one factorisation:  W = L^-1 K_oq,  U = L^-1 K_ok,
    mean  = tril(triu(W)^T U) V                                                              (17)
    var_i = s_q^2 - sigma^2 |(L^-T triu(W))_i|^2 - |triu(L_k^-1 B_c^T)_i|^2,
            B_c = tril(triu(W)^T U)                                                          (18)

The same holds for the variance of softmax attention (eq. 22), where decoders need more: keys that several
heads of queries share, windows, padding, packed sequences, and more keys than one factor should hold.
`causal_unit_variance` does it at once, `CausalVarianceState` token by token.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import solve_triangular

from gpattention.gp.direct import log_query_scale, real_key_counts
from gpattention.gp.inputs import (
    Scalar,
    as_parameter,
    check_parameter,
    expanded,
    keep_rows,
    key_noise,
    prepare,
    with_diagonal,
)
from gpattention.gp.kernels import cross_gram, gram
from gpattention.gp.posterior import Posterior, Source, undefined_covariance
from gpattention.numerics import Tokens, broadcast, cholesky, full_precision


@full_precision
def causal_cgp_posterior(
    q: Tensor,  # [..., N, C]
    k: Tensor,  # [..., N, C]
    o: Tensor,  # [..., N, C]
    v: Tensor,  # [..., N, D]
    *,
    noise: Scalar,
    scale_q: Scalar = 1.0,
    scale_k: Scalar = 1.0,
    mask: Tensor | None = None,  # [..., N] True = real
    log_amplitude: Tensor | None = None,  # [..., N]
) -> Posterior:
    """CGP attention in which token i reads tokens 0..i only (eq. 17-18).

    Appending tokens never changes earlier rows.  Each row has its own data set M_k V of its prefix,
    so only per-row variances are defined: `.covariance()` and joint draws raise.

    Args:
        q: queries.
        k: keys.
        o: latent inputs.
        v: values.
        noise: sigma^2, one number or one per leading axis.
        scale_q: amplitude s_q of the queries.
        scale_k: amplitude s_k of the keys.
        mask: which tokens are real.
        log_amplitude: multiplies the query process per token.

    Returns:
        The posterior of every row.

    Raises:
        ValueError: an argument does not fit the others, or is out of its range.
        NumericalError: tokens are not finite or too far apart, or a covariance has no factor.
    """
    t = prepare(
        q, k, v, o=o, noise=noise, scale_q=scale_q, scale_k=scale_k, mask=mask,
        log_amplitude=log_amplitude, causal=True,
    )  # fmt: skip
    return CausalCGPPosterior(t)


class CausalCGPPosterior(Posterior):
    """Rows of eq. 17-18.

    Args:
        t: checked and masked inputs.
    """

    def __init__(self, t: Tokens) -> None:
        o = t.latent
        M = with_diagonal(gram(o), t.noise, t.mask)  # [..., N, N]
        K_oq = cross_gram(o, t.q, t.mask, t.mask)  # [..., N, N] unit
        K_ok = t.scale_k * cross_gram(o, t.k, t.mask, t.mask)
        self.t = t
        self._L = cholesky(M, name="K_o + noise I", noise=t.noise)
        W, U = solve_triangular(self._L, torch.cat(expanded(K_oq, K_ok), -1), upper=False).chunk(2, -1)
        self._W = W.triu()  # [..., N, N]
        self._B_c = (self._W.mT @ U).tril()  # [..., N, N]
        super().__init__(t.amplify(self._B_c @ t.v), t.query_mask, t.dtype)  # eq. 17

    @full_precision
    def _raw_variance(self) -> Tensor:
        t = self.t
        M_k = with_diagonal(t.scale_k.square() * gram(t.k), t.noise, t.mask)
        L_k = cholesky(M_k, name="K_k + noise I", noise=key_noise(t))
        A_t = solve_triangular(self._L.mT, self._W, upper=True)  # [..., N, N]
        F = solve_triangular(L_k, self._B_c.mT, upper=False).triu()  # [..., N, N]
        noise = t.noise[..., 0]  # [..., 1]
        u = 1 - noise * A_t.square().sum(-2) - F.square().sum(-2)  # eq. 18
        seen = real_key_counts(t.mask, t.k, causal=True)
        u = u.clamp(min=noise / (seen + noise), max=torch.ones_like(noise))
        return (2 * log_query_scale(t)).exp() * u

    def _prior_stddev(self) -> Tensor:
        return log_query_scale(self.t).exp()

    def _full_covariance(self) -> Tensor:
        raise undefined_covariance()

    def _joint_deviation(self, n: int, generator: Source) -> Tensor:
        raise undefined_covariance()


@dataclass(frozen=True, slots=True)
class CausalRow:
    """One new row of causal CGP attention.

    Attributes:
        mean: the attention output.  [..., D]
        variance: of that output.  [...]
    """

    mean: Tensor  # [..., D]
    variance: Tensor  # [...]


class CausalCGPState:
    """Causal CGP attention one token at a time, O(t^2 C) for token t; same rows as eq. 17-18.

    Keeps latent inputs, keys, values and the factors L, L_k, Y = L^-1 K_ok V of the prefix.

    Args:
        noise: sigma^2, one number or one per leading axis.
        scale_q: amplitude s_q of the queries.
        scale_k: amplitude s_k of the keys.

    Raises:
        ValueError: a parameter is not positive and finite.

    >>> state = CausalCGPState(noise=0.01)
    >>> for q, k, o, v in zip(...):        # each [..., C] or [..., D]
    ...     row = state.append(q, k, o, v)  # row.mean [..., D], row.variance [...]
    """

    def __init__(self, *, noise: Scalar, scale_q: Scalar = 1.0, scale_k: Scalar = 1.0) -> None:
        for name, value in (("noise", noise), ("scale_q", scale_q), ("scale_k", scale_k)):
            check_parameter(name, value)
        self._noise, self._scale_q, self._scale_k = noise, scale_q, scale_k
        self._past: _Past | None = None

    def __len__(self) -> int:
        """Tokens seen so far."""
        return 0 if self._past is None else self._past.o.shape[-2]

    @full_precision
    def append(
        self,
        q: Tensor,  # [..., C]
        k: Tensor,  # [..., C]
        o: Tensor,  # [..., C]
        v: Tensor,  # [..., D]
        *,
        mask: Tensor | None = None,  # [...] False where this sequence has no token here
        log_amplitude: Tensor | None = None,  # [...]
    ) -> CausalRow:
        """Take the next token in and return its row.

        Args:
            q: its query.
            k: its key.
            o: its latent input.
            v: its value.
            mask: which sequences have a token here.
            log_amplitude: of its query process.

        Returns:
            Mean and variance of its row; 0 where it is padding.

        Raises:
            ValueError: the token does not fit those before it, or the arguments one another.
            NumericalError: the token is not finite, or a factor cannot grow by it.
        """
        t = prepare(
            q[..., None, :], k[..., None, :], v[..., None, :], o=o[..., None, :],
            mask=None if mask is None else mask[..., None],
            log_amplitude=None if log_amplitude is None else log_amplitude[..., None],
            noise=self._noise, scale_q=self._scale_q, scale_k=self._scale_k,
        )  # fmt: skip
        past = self._past
        if past is not None:
            _check_continues(past, t)
        dtype = t.v.dtype
        tokens = [x[..., None, :].to(dtype) for x in (q, k, o)]
        mean, variance, self._past = _step(past, t, *tokens)  # [..., 1, D], [..., 1, 1]
        amplitude = log_query_scale(t).exp()[..., None]  # [..., 1, 1]
        mean = keep_rows(amplitude * mean, t.mask)
        variance = keep_rows(amplitude.square() * variance, t.mask)
        return CausalRow(mean[..., 0, :].to(q.dtype), variance[..., 0, 0].to(q.dtype))


@dataclass(slots=True)
class _Past:
    o: Tensor  # [..., t, C]
    k: Tensor  # [..., t, C]
    v: Tensor  # [..., t, D]
    real: Tensor  # [..., t, 1]
    L: Tensor  # [..., t, t]
    L_k: Tensor  # [..., t, t]
    Y: Tensor  # [..., t, D]


def _check_continues(past: _Past, t: Tokens) -> None:
    """A factor grows by rows of its own sequences: the next token must be one of each of them."""
    widths = past.o.shape[-1], past.v.shape[-1]
    if widths != (t.q.shape[-1], t.v.shape[-1]):
        raise ValueError(
            f"expected tokens of width {widths[0]} and values of width {widths[1]} as before, "
            f"got {t.q.shape[-1]} and {t.v.shape[-1]}"
        )
    lead = broadcast(*(x.shape[:-2] for x in (t.q, t.k, t.latent, t.v)))
    if lead != past.o.shape[:-2]:
        raise ValueError(
            f"expected tokens with leading axes {tuple(past.o.shape[:-2])} as before, got {tuple(lead)}"
        )
    if t.v.dtype != past.v.dtype:
        raise ValueError(f"expected tokens computed in {past.v.dtype} as before, got {t.v.dtype}")


def _step(past: _Past | None, t: Tokens, q: Tensor, k: Tensor, o: Tensor) -> tuple[Tensor, Tensor, _Past]:
    """Section 6, incremental step: unit-amplitude mean [..., 1, D], variance [..., 1, 1], new state."""
    q, k, o, v = expanded(q, k, o, t.v)
    lead = q.shape[:-2]
    real = (q.new_ones(1, 1) if t.mask is None else t.mask[..., None].to(q.dtype)).expand(*lead, 1, 1)
    if past is None:
        past = _Past(
            o=o[..., :0, :], k=k[..., :0, :], v=v[..., :0, :], real=real[..., :0, :],
            L=o.new_zeros(*lead, 0, 0), L_k=o.new_zeros(*lead, 0, 0), Y=v[..., :0, :],
        )  # fmt: skip
    if t.mask is not None:  # padding lies where a real token of its sequence does, so that it has no spread
        last = past.k[..., -1:, :] if past.k.shape[-2] else torch.zeros_like(k)  # [..., 1, C]
        q, k, o = (torch.where(real > 0, x, last) for x in (q, k, o))
        past.k, past.o = (torch.where(past.real > 0, x, k) for x in (past.k, past.o))
    here = past.real * real  # [..., t, 1] pairs of real tokens
    s_k, noise = t.scale_k, t.noise
    to_latent = [cross_gram(past.o, o), s_k * cross_gram(past.o, k), cross_gram(past.o, q)]  # [..., t, 1]
    l_o, u, w = solve_triangular(past.L, here * torch.cat(to_latent, -1), upper=False).split(1, -1)
    pivot = _pivot(1 + noise, l_o, real, "K_o + noise I", noise)
    l_k = solve_triangular(past.L_k, here * s_k.square() * cross_gram(past.k, k), upper=False)
    pivot_k = _pivot(s_k.square() + noise, l_k, real, "K_k + noise I", key_noise(t))

    Y = past.Y + u @ v  # first the new column of K_ok V in the old rows, then the new row
    k_all, v_all = torch.cat([past.k, k], -2), torch.cat([past.v, v], -2)
    real_all = torch.cat([past.real, real], -2)  # [..., t + 1, 1]
    K_okv = (s_k * real * (real_all * cross_gram(k_all, o)).mT) @ v_all  # [..., 1, D]
    Y = torch.cat([Y, (K_okv - l_o.mT @ Y) / pivot], -2)
    w_new = (real * cross_gram(o, q) - l_o.mT @ w) / pivot  # [..., 1, 1]
    w = torch.cat([w, w_new], -2)  # [..., t + 1, 1]
    now = _Past(
        o=torch.cat([past.o, o], -2), k=k_all, v=v_all, real=real_all,
        L=_bordered(past.L, l_o, pivot), L_k=_bordered(past.L_k, l_k, pivot_k), Y=Y,
    )  # fmt: skip
    a = solve_triangular(now.L.mT, w, upper=True)  # [..., t + 1, 1]
    K_koa = s_k * real_all * (cross_gram(k_all, now.o) @ (real_all * a))  # [..., t + 1, 1]
    f = solve_triangular(now.L_k, K_koa, upper=False)
    u_var = 1 - noise * a.square().sum(-2, keepdim=True) - f.square().sum(-2, keepdim=True)
    seen = real_all.sum(-2, keepdim=True)
    u_var = u_var.clamp(min=noise / (seen + noise), max=torch.ones_like(noise))
    return w.mT @ Y, u_var, now


def _pivot(diagonal: Tensor, row: Tensor, real: Tensor, name: str, noise: Tensor) -> Tensor:
    """The new diagonal entry of a growing Cholesky factor, 1 at a padded token.  [..., 1, 1]"""
    square = diagonal - row.square().sum(-2, keepdim=True)
    return cholesky(torch.where(real > 0, square, 1.0), name=name, noise=noise)


def _bordered(L: Tensor, row: Tensor, pivot: Tensor) -> Tensor:
    """Append a row to a lower-triangular factor.  [..., t + 1, t + 1]"""
    t = L.shape[-1]
    top = torch.cat([L, L.new_zeros(*L.shape[:-2], t, 1)], -1)
    pivot = pivot.expand(*L.shape[:-2], 1, 1)
    return torch.cat([top, torch.cat([row.mT.expand(*L.shape[:-2], 1, t), pivot], -1)], -2)


MAX_KEYS = 256  # earlier keys that a row conditions on exactly, by default
_ALONE = 2**24  # entries of the matrices of rows that share no factor, at once


@dataclass(frozen=True, slots=True, eq=False)
class CausalVariance:
    """Variances of rows that condition on their own past (eq. 22, row by row).

    Attributes:
        unit: u_i, of a process of unit amplitude; 0 for rows that see no key.  [B, H, Q]
        of_keys: variance of row i's own noisy key, given those before it: the squared pivots of chol(kappa +
            sigma^2 I), whose logarithms sum to its log determinant; 1 for rows that see no key.  [B, G, Q]
    """

    unit: Tensor  # [B, H, Q]
    of_keys: Tensor  # [B, G, Q]


@dataclass(frozen=True, slots=True, eq=False)
class _Prefixes:
    """Rows that see a prefix of a run of keys each; all runs are factored together."""

    count: Tensor  # [R or 1, T] keys that a row sees, its own one last; 0 = no row
    stride: Tensor  # [R or 1, T] of the earlier ones, which it conditions on
    levels: "tuple[_Level, ...]"
    real: Tensor | None = None  # [R, N] keys that are none are 0
    runs: Tensor | None = None  # [R] the item of every run; None: one run an item, in order
    keys: Tensor | None = None  # [R, N] which keys; None: all of them, in order
    rows: Tensor | None = None  # [R, T] which rows; None: all of them, in order


class _Level(NamedTuple):
    """Rows of one stride, in some run at least."""

    stride: int
    start: int
    stop: int
    width: int  # keys that they condition on, at most


@dataclass(frozen=True, slots=True, eq=False)
class _Alone:
    """Rows that share their set of keys with no other: those of a window that has begun to slide."""

    items: Tensor  # [P]
    rows: Tensor  # [P]
    keys: Tensor  # [P, M + 1] its own key last
    real: Tensor  # [P, M + 1]


class Sight:
    """Which keys every row of causal attention sees, sorted by which rows can share a factor.

    The last key that a row sees is its own.  Of more than `max_keys` earlier ones it conditions on every
    s-th, from the first on, s being the smallest power of 2 that suffices: fewer keys never make a variance
    smaller.  Rows whose keys are a prefix of those of a later row share its factor: plain causal attention,
    padding on either side, and the segments of packed sequences.  All others have one each.

    Args:
        visible: [B or 1, Q, K] True = seen; None for rows that end with the last key and see all keys up to
            their own.
        queries: number of rows, where `visible` is None.
        keys: number of keys, where `visible` is None.
        max_keys: earlier keys that are conditioned on at most.
        device: of the tokens, where `visible` is None.

    Attributes:
        visible: as given.
        queries: Q.
        keys: K.
        max_keys: as given.
        count: [B or 1, Q] keys that a row sees.

    Raises:
        ValueError: the numbers do not fit one another.
    """

    def __init__(
        self,
        visible: Tensor | None = None,
        *,
        queries: int = 0,
        keys: int = 0,
        max_keys: int = MAX_KEYS,
        device: torch.device | str = "cpu",
    ) -> None:
        if max_keys < 1:
            raise ValueError(f"expected max_keys >= 1, got {max_keys}")
        self.visible, self.max_keys, self._device = visible, max_keys, torch.device(device)
        self._prefixes: list[_Prefixes] = []
        self._alone: _Alone | None = None
        if visible is None:
            if not 0 < queries <= keys:
                raise ValueError(
                    f"expected from 1 to {keys} queries, one for each of the last keys, got {queries}"
                )
            self.queries, self.keys = queries, keys
            count = torch.arange(keys - queries + 1, keys + 1)[None]  # [1, Q]
            self._prefixes = [_prefixes(count, max_keys, device=self._device)]
            self.count = self._prefixes[0].count
            return
        if visible.dtype != torch.bool or visible.ndim != 3:
            raise ValueError(
                f"expected visible [B, Q, K] of bool, got {tuple(visible.shape)} of {visible.dtype}"
            )
        self.queries, self.keys = visible.shape[1:]
        self.count = visible.sum(-1)  # [B, Q]
        self._sort(visible)

    @property
    def shares(self) -> bool:
        """Whether all rows share the factor of their item: no windows, no segments."""
        return self._alone is None and all(group.runs is None for group in self._prefixes)

    def matrix(self) -> Tensor:
        """[B or 1, Q, K] True = seen."""
        if self.visible is not None:
            return self.visible
        past = torch.ones(self.queries, self.keys, dtype=torch.bool, device=self._device)
        return past.tril(self.keys - self.queries)[None]

    def _sort(self, visible: Tensor) -> None:
        """Prefixes of runs that begin at the same key, and rows that are alone."""
        items, _, keys = visible.shape
        place = torch.arange(keys, device=visible.device)
        seen = self.count > 0  # [B, Q]
        first = visible.to(torch.int8).argmax(-1)  # [B, Q]
        last = keys - 1 - visible.flip(-1).to(torch.int8).argmax(-1)
        used = visible.any(-2)  # [B, K]
        between = (place >= first[..., None]) & (place <= last[..., None]) & seen[..., None]
        whole = (visible == (between & used[:, None])).all(-1)  # [B, Q] no holes but keys that nobody sees
        start = torch.where(seen, first, -1)  # [B, Q]
        lowest = torch.where(seen, first, keys).amin(-1, keepdim=True)  # [B, 1]
        if bool((whole & (~seen | (start == lowest))).all()):
            self._prefixes = [self._one_run_an_item(used)]
            return
        item = torch.arange(items, device=visible.device)[:, None].expand_as(start)
        label = torch.where(whole & seen, item * keys + start, -1)  # [B, Q]
        names, member, size = label.unique(return_inverse=True, return_counts=True)
        shared = (names >= 0) & (size > 1)  # of the runs
        chosen = shared.nonzero()[:, 0].tolist()
        if chosen:
            self._prefixes = [self._several_runs(visible, member, chosen, last)]
        alone = (seen & ~shared[member]).nonzero()  # [P, 2]
        if len(alone):
            self._alone = self._lone_rows(visible, alone)

    def _one_run_an_item(self, used: Tensor) -> _Prefixes:
        if bool(used.all()):
            return _prefixes(self.count, self.max_keys)
        in_front = used == (torch.arange(self.keys, device=used.device) < used.sum(-1, keepdim=True))
        if bool(in_front.all()):
            return _prefixes(self.count, self.max_keys, real=used)
        order = used.to(torch.int8).argsort(dim=-1, descending=True, stable=True)  # [B, K] real keys first
        return _prefixes(self.count, self.max_keys, real=used.gather(-1, order), keys=order)

    def _several_runs(self, visible: Tensor, member: Tensor, chosen: list[int], last: Tensor) -> _Prefixes:
        runs, keys, rows = [], [], []
        for run in chosen:
            where = (member == run).nonzero()  # [T, 2]
            item, own = where[0, 0], where[:, 1]
            widest = own[last[item, own].argmax()]
            runs.append(item)
            rows.append(own)
            keys.append(visible[item, widest].nonzero()[:, 0])
        T, N = max(map(len, rows)), max(map(len, keys))
        pad = torch.nn.functional.pad
        count = [pad(self.count[item, own], (0, T - len(own))) for item, own in zip(runs, rows, strict=True)]
        counts = torch.stack(count)  # [R, T]
        real = torch.stack([pad(torch.ones_like(own, dtype=torch.bool), (0, N - len(own))) for own in keys])
        return _prefixes(
            counts, self.max_keys, real=real, runs=torch.stack(runs),
            keys=torch.stack([pad(own, (0, N - len(own))) for own in keys]),
            rows=torch.stack([pad(own, (0, T - len(own)), value=-1) for own in rows]),
        )  # fmt: skip

    def _lone_rows(self, visible: Tensor, alone: Tensor) -> _Alone:
        items, rows = alone.unbind(-1)
        earlier = self.count[items, rows] - 1  # [P]
        most = min(self.max_keys, int(earlier.max()))
        order = visible[items, rows].to(torch.int8).argsort(dim=-1, descending=True, stable=True)  # [P, K]
        place = torch.arange(most, device=visible.device) * _stride(earlier, self.max_keys)[:, None]  # [P, M]
        real = place < earlier[:, None]
        chosen = torch.cat([torch.where(real, place, 0), earlier[:, None]], -1)  # [P, M + 1]
        real = torch.cat(
            [real, torch.ones_like(real[:, :1] if most else earlier[:, None], dtype=torch.bool)], -1
        )
        return _Alone(items, rows, order.gather(-1, chosen), real)


def _stride(earlier: Tensor, max_keys: int) -> Tensor:
    """The smallest power of 2 of which so many earlier keys leave at most `max_keys`."""
    stride = torch.ones_like(earlier)
    while bool((short := earlier > max_keys * stride).any()):
        stride = torch.where(short, 2 * stride, stride)
    return stride


def _prefixes(
    count: Tensor, max_keys: int, device: torch.device | None = None, **chosen: Tensor
) -> _Prefixes:
    """With the strides that occur, and the rows that some run has each of them at."""
    stride = _stride(count - 1, max_keys)  # [R or 1, T]
    levels = []
    for each in stride.unique().tolist():
        own = stride == each
        rows = own.any(0).nonzero()[:, 0]
        width = int(_used(torch.where(own, count, 0), each).max())
        if width or each > 1:  # else no row sees any key
            levels.append(_Level(each, int(rows[0]), int(rows[-1]) + 1, width))
    device = device or count.device
    return _Prefixes(count.to(device), stride.to(device), tuple(levels), **chosen)


def _used(count: Tensor, stride: int) -> Tensor:
    """Keys of the factor that a row conditions on; with stride 1 its own stands there too."""
    return count if stride == 1 else -(-(count - 1).clamp_min(0) // stride)


@full_precision
def causal_unit_variance(
    q: Tensor, k: Tensor, *, noise: Scalar, sight: Sight | None = None
) -> CausalVariance:
    """u_i of eq. 22 of every row, given the keys that it sees (section 10, causal softmax).

        u_i = 1 - |L^-1 kappa(k, q_i)|^2,   L = chol(kappa(k, k) + sigma^2 I) of the keys of row i

    Leading blocks of a factor, and of a forward substitution, belong to prefixes, so that rows which see
    prefixes share one of each.  Where keys are thinned (see `Sight`), row i conditions on the thinned ones
    before it and on its own, which borders the factor:  with l = L^-1 kappa(k, k_i), w = L^-1 kappa(k, q_i),

        u_i = 1 - |w|^2 - (kappa(k_i, q_i) - l . w)^2 / (1 + sigma^2 - |l|^2)

    Args:
        q: queries, as the kernel sees them; each head of keys serves H / G heads of queries.  [B, H, Q, C]
        k: keys, likewise.  [B, G, K, C]
        noise: sigma^2, one number or one for each head of keys, [G] or [B, G].
        sight: which keys the rows see; None for plain causal attention.

    Returns:
        Variances of queries and keys.

    Raises:
        ValueError: an argument does not fit the others, or is out of its range.
        NumericalError: tokens are not finite or too far apart, or a covariance has no factor.
    """
    (B, H, Q, C), (_, G, K, _) = _check_heads(q, k)
    if sight is None:
        sight = Sight(queries=Q, keys=K, device=q.device)
    if (sight.queries, sight.keys) != (Q, K):
        raise ValueError(
            f"expected {sight.queries} queries and {sight.keys} keys, as sight has it, got {Q} and {K}"
        )
    if len(sight.count) < B and not sight.shares:
        assert sight.visible is not None
        sight = Sight(sight.visible.expand(B, -1, -1), max_keys=sight.max_keys)
    noise = _noise_of(noise, k)  # [1, 1], [G, 1, 1] or [B, G, 1, 1]
    grouped = q.unflatten(1, (G, -1))  # [B, G, g, Q, C]
    unit = q.new_zeros(B, G, H // G, Q)
    of_keys = q.new_ones(B, G, Q)
    for group in sight._prefixes:
        if group.runs is None:
            index, real = group.keys, group.real
            own_k = k if index is None else k.gather(2, index[:, None, :, None].expand(B, G, -1, C))
            own_k = own_k if real is None else keep_rows(own_k, real[:, None])
            unit, of_keys = _prefix_variance(grouped, own_k, noise, group)
            continue
        assert group.keys is not None
        assert group.rows is not None
        assert group.real is not None
        runs, keys, rows = group.runs, group.keys, group.rows
        own_noise = noise if noise.ndim < 4 else noise[runs]
        heads = torch.arange(G, device=k.device)[None, :, None]
        own_k = k[runs[:, None, None], heads, keys[:, None]]  # [R, G, N, C]
        own_q = grouped.transpose(2, 3)[runs[:, None, None], heads, rows[:, None]].transpose(2, 3)
        u, pivots = _prefix_variance(own_q, keep_rows(own_k, group.real[:, None]), own_noise, group)
        run, place = (rows >= 0).nonzero().unbind(-1)  # [all rows]
        item, row = runs[run], rows[run, place]
        unit[item, :, :, row] = u[run, :, :, place]
        of_keys[item, :, row] = pivots[run, :, place]
    if sight._alone is not None:
        _fill_alone(unit, of_keys, grouped, k, noise, sight._alone)
    return CausalVariance(unit.flatten(1, 2), of_keys)


def _check_heads(q: Tensor, k: Tensor) -> tuple[torch.Size, torch.Size]:
    """Shapes of tokens whose heads of queries share those of keys."""
    fits = q.ndim == 4 and k.ndim == 4 and (q.shape[0], q.shape[-1]) == (k.shape[0], k.shape[-1])
    if not fits or q.shape[1] % max(k.shape[1], 1):
        expected = "expected q [B, H, Q, C] and k [B, G, K, C], G a divisor of H"
        raise ValueError(f"{expected}, got {tuple(q.shape)} and {tuple(k.shape)}")
    return q.shape, k.shape


def _noise_of(noise: Scalar, k: Tensor) -> Tensor:
    """sigma^2 of every head of keys.  [1, 1], [G, 1, 1] or [B, G, 1, 1]"""
    check_parameter("noise", noise)
    return as_parameter("noise", noise, k.shape[:-2], k, k.dtype)


def _prefix_variance(q: Tensor, k: Tensor, noise: Tensor, group: _Prefixes) -> tuple[Tensor, Tensor]:
    """u_i and the pivots of own keys, for k [R, G, N, C].  [R, G, g, T], [R, G, T]"""
    R, G, g, T, C = q.shape
    unit, pivots = q.new_zeros(R, G, g, T), q.new_ones(R, G, T)
    for stride, start, stop, width in group.levels:
        rows, count, t = q[:, :, :, start:stop], group.count[:, start:stop], stop - start
        used = _used(count, stride)  # [R or 1, t]
        sub = k[:, :, : width * stride : stride]  # [R, G, m, C]
        L = cholesky(with_diagonal(gram(sub), noise), name="kappa(k, k) + noise I", noise=noise)
        own = (count - 1).clamp(0, k.shape[2] - 1)[:, None].expand(R, G, t)  # [R, G, t]
        mine = k.gather(2, own[..., None].expand(-1, -1, -1, C)) if stride > 1 else k[:, :, :0]
        targets = torch.cat([rows.flatten(2, 3), mine], 2)  # queries, and keys that are not in the factor
        W = solve_triangular(L, cross_gram(sub, targets), upper=False)  # [R, G, m, (g or g + 1) t]
        places = torch.arange(sub.shape[2], device=q.device)[:, None]  # [m, 1]
        before = places < used[:, None, None]  # [R or 1, 1, m, t]
        W = W.unflatten(-1, (-1, t)) * before[..., None, :]  # [R, G, m, g or g + 1, t]
        of_q, of_own = W[..., :g, :], W[..., g:, :]
        u = 1 - torch.linalg.vector_norm(of_q, dim=2).square()  # [R, G, g, t]
        if stride == 1:
            pivot = L.diagonal(dim1=-2, dim2=-1).square().gather(-1, own.clamp_max(width - 1))  # [R, G, t]
        else:
            pivot = 1 + noise[..., 0] - torch.linalg.vector_norm(of_own, dim=(2, 3)).square()
            left = rbf_of_pairs(rows, mine[:, :, None]) - (of_q * of_own).sum(2)  # [R, G, g, t]
            u = u - left.square() / pivot[:, :, None]
        u = _bounded(u, noise, (used + (stride > 1))[:, None, None])
        here = (count > 0) & (group.stride[:, start:stop] == stride)  # [R or 1, t]
        unit[..., start:stop] = torch.where(here[:, None, None], u, unit[..., start:stop])
        pivots[..., start:stop] = torch.where(here[:, None], pivot, pivots[..., start:stop])
    return unit, pivots


def rbf_of_pairs(x: Tensor, y: Tensor) -> Tensor:
    """kappa(x_i, y_i) of eq. 1.  [..., N]"""
    return (-0.5 * (x - y).square().sum(-1)).exp()


def _bounded(u: Tensor, noise: Tensor, seen: Tensor) -> Tensor:
    """Between noise / (n + noise), for n keys seen, and 1 (section 10)."""
    return u.clamp(min=noise / (seen + noise), max=torch.ones_like(noise))


def _fill_alone(unit: Tensor, of_keys: Tensor, q: Tensor, k: Tensor, noise: Tensor, alone: _Alone) -> None:
    """Rows with a factor of their own, as many at once as memory takes.

    They fill unit [B, G, g, Q] and of_keys [B, G, Q], for q [B, G, g, Q, C] and k [B, G, K, C].
    """
    G, width = k.shape[1], alone.keys.shape[1]
    heads = torch.arange(G, device=k.device)[:, None]
    at_once = max(1, _ALONE // (G * width**2))
    for some in torch.arange(len(alone.rows), device=k.device).split(at_once):
        item, row, real = alone.items[some], alone.rows[some], alone.real[some]
        keys = k[item[:, None, None], heads, alone.keys[some][:, None]]  # [P, G, m, C]
        keys = keep_rows(keys, real[:, None])
        own = noise if noise.ndim < 4 else noise[item]  # [G, 1, 1] or [P, G, 1, 1]
        M = with_diagonal(gram(keys), own, real[:, None])  # [P, G, m, m]
        L = cholesky(M, name="kappa(k, k) + noise I", noise=own)
        K_kq = cross_gram(keys, q[item, :, :, row]) * real[:, None, :, None]  # [P, G, m, g]
        u = 1 - solve_triangular(L, K_kq, upper=False).square().sum(-2)  # [P, G, g]
        unit[item, :, :, row] = _bounded(u, own[..., 0], real.sum(-1)[:, None, None])
        of_keys[item, :, row] = L[..., -1, -1].square()


class CausalVarianceState:
    """`causal_unit_variance` one row at a time, O(max_keys^2) for each: what stands beside a KV cache.

    Holds the keys, and the factor of those that the next row conditions on, which grows by a row with every
    key that joins them; where their stride doubles it is made anew.

    Args:
        k: keys that came before, each item's own in front.  [B, G, K, C]
        noise: sigma^2, one number or one for each head of keys, [G] or [B, G].
        count: [B] how many they are; all if not given.
        max_keys: earlier keys that are conditioned on at most, as of `Sight`.

    Raises:
        ValueError: an argument does not fit the others, or is out of its range.
        NumericalError: the keys are not finite or too far apart, or their covariance has no factor.

    >>> state = CausalVarianceState(keys, noise=0.1)
    >>> for q, k in zip(...):  # [B, H, 1, C], [B, G, 1, C]
    ...     row = state.append(q, k)
    """

    def __init__(
        self, k: Tensor, *, noise: Scalar, count: Tensor | None = None, max_keys: int = MAX_KEYS
    ) -> None:
        if k.ndim != 4 or max_keys < 1:
            raise ValueError(
                f"expected k [B, G, K, C] and max_keys >= 1, got {tuple(k.shape)} and {max_keys}"
            )
        self._noise, self._max_keys = _noise_of(noise, k), max_keys
        number = [k.shape[2]] * len(k) if count is None else count.tolist()
        self._earlier = torch.tensor(number)  # [B] on the CPU: where a factor is made anew is no one's secret
        place = torch.arange(k.shape[2], device=k.device)
        self._keys = keep_rows(k, (place < self._earlier.to(k.device)[:, None])[:, None])  # [B, G, room, C]
        self._stride = _stride(self._earlier, max_keys)  # [B]
        self._refactor()

    def __len__(self) -> int:
        """Keys of the longest item."""
        return int(self._earlier.max())

    @property
    def bytes(self) -> int:
        """Memory of its tensors."""
        return sum(x.numel() * x.element_size() for x in (self._keys, self._sub, self._L))

    @full_precision
    def _refactor(self) -> None:
        """The factor of the keys that the next rows condition on.  [B, G, M, M]"""
        keys, M, device = self._keys, self._max_keys, self._keys.device
        B, G, _, C = keys.shape
        place = torch.arange(M) * self._stride[:, None]  # [B, M]
        real = place < self._earlier[:, None]
        self._used = real.sum(-1)  # [B]
        width = int(self._used.max())
        place, real = place[:, :width].to(device), real[:, :width].to(device)
        index = torch.where(real, place, 0)[:, None, :, None].expand(-1, G, -1, C)
        sub = keep_rows(keys.gather(2, index), real[:, None]) if width else keys[:, :, :0]  # [B, G, m, C]
        K = with_diagonal(gram(sub), self._noise, real[:, None]) if width else keys.new_zeros(B, G, 0, 0)
        self._L = torch.eye(M, dtype=keys.dtype, device=device).repeat(B, G, 1, 1)
        self._L[..., :width, :width] = cholesky(K, name="kappa(k, k) + noise I", noise=self._noise)
        self._sub = keys.new_zeros(B, G, M, C)
        self._sub[:, :, :width] = sub

    @full_precision
    def append(self, q: Tensor, k: Tensor) -> CausalVariance:
        """Take the next key in, and give the variance of its row.

        Args:
            q: its queries.  [B, H, 1, C]
            k: the key itself.  [B, G, 1, C]

        Returns:
            Of the one row: [B, H, 1] and [B, G, 1].

        Raises:
            ValueError: the token does not fit those before it.
            NumericalError: it is not finite, or the factor cannot grow by it.
        """
        _check_heads(q, k)
        if k.shape != (*self._keys.shape[:2], 1, self._keys.shape[-1]) or q.shape[2] != 1:
            raise ValueError(f"expected one token of keys {tuple(self._keys.shape)}, got {tuple(k.shape)}")
        device, width = k.device, int(self._used.max())
        used = self._used.to(device)  # [B]
        sub, L = self._sub[:, :, :width], self._L[:, :, :width, :width]
        targets = torch.cat([q.unflatten(1, (k.shape[1], -1))[:, :, :, 0], k], 2)  # [B, G, g + 1, C]
        real = (torch.arange(width, device=device) < used[:, None])[:, None, :, None]  # [B, 1, m, 1]
        W = solve_triangular(L, cross_gram(sub, targets) * real, upper=False)  # [B, G, m, g + 1]
        of_q, of_own = W[..., :-1], W[..., -1:]
        pivot = 1 + self._noise - of_own.square().sum(2, keepdim=True)  # [B, G, 1, 1]
        root = cholesky(pivot, name="pivot of kappa(k, k) + noise I", noise=self._noise)
        left = rbf_of_pairs(targets[:, :, :-1], k)[:, :, None] - (of_q * of_own).sum(2, keepdim=True)
        u = 1 - of_q.square().sum(2, keepdim=True) - left.square() / pivot  # [B, G, 1, g]
        u = _bounded(u, self._noise, (used + 1)[:, None, None, None])
        self._take(k, of_own[..., 0], root[..., 0])
        return CausalVariance(u[:, :, 0].flatten(1)[..., None], pivot[..., 0])

    def _take(self, k: Tensor, row: Tensor, root: Tensor) -> None:
        """Keep the key, and where it joins those that rows condition on, the factor's new row."""
        items, device = torch.arange(len(k)), k.device
        room = self._keys.shape[2]
        if len(self) >= room:
            more = self._keys.new_zeros(*self._keys.shape[:2], max(64, room), self._keys.shape[-1])
            self._keys = torch.cat([self._keys, more], 2)
        self._keys[items.to(device), :, self._earlier.to(device)] = k[:, :, 0]
        joins = (self._earlier % self._stride == 0) & (self._used < self._max_keys)  # [B]
        self._earlier = self._earlier + 1
        stride = _stride(self._earlier, self._max_keys)
        if bool((stride != self._stride).any()):
            self._stride = stride
            self._refactor()
            return
        at, place = items[joins].to(device), self._used[joins].to(device)
        self._sub[at, :, place] = k[:, :, 0][at]
        width = row.shape[-1]
        self._L[at, :, place, :width] = row[at]
        self._L[at, :, place, place] = root[at][..., 0]
        self._used = self._used + joins
