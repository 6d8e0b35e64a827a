"""Causal CGP attention: row i is the exact CGP prediction from tokens up to i (eq. 17-18).

Leading blocks of a Cholesky factor and of a forward substitution belong to prefixes, so all prefixes
cost one factorisation:  W = L^-1 K_oq,  U = L^-1 K_ok,
    mean  = tril(triu(W)^T U) V                                                              (17)
    var_i = s_q^2 - sigma^2 |(L^-T triu(W))_i|^2 - |triu(L_k^-1 B_c^T)_i|^2,
            B_c = tril(triu(W)^T U)                                                          (18)
"""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor
from torch.linalg import solve_triangular

from gpattention.gp.direct import log_query_scale, real_key_counts
from gpattention.gp.inputs import (
    Scalar,
    check_parameter,
    expanded,
    keep_columns,
    keep_rows,
    key_noise,
    prepare,
    with_diagonal,
)
from gpattention.gp.kernels import cross_gram, gram
from gpattention.gp.posterior import Posterior, undefined_covariance
from gpattention.numerics import Tokens, broadcast, cholesky, full_precision
from gpattention.ops import NoiseSource


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
        K_oq = keep_columns(keep_rows(cross_gram(o, t.q), t.mask), t.mask)  # [..., N, N] unit
        K_ok = t.scale_k * keep_columns(keep_rows(cross_gram(o, t.k), t.mask), t.mask)
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

    def _joint_deviation(self, n: int, generator: Generator | NoiseSource | None) -> Tensor:
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
    to_latent = torch.cat(
        [cross_gram(past.o, o), s_k * cross_gram(past.o, k), cross_gram(past.o, q)], -1
    )  # [..., t, 3]
    l_o, u, w = solve_triangular(past.L, here * to_latent, upper=False).split(1, -1)
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
