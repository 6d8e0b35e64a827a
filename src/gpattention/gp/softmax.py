"""Softmax attention as a GP posterior mean, with its variance (eq. 21-22).

    q_i, k_j   with logits q_i . k_j;   x_i = A (q_i - qbar),  y_j = A^-T (k_j - kbar) as the kernel sees them
    log a_i = log t + 1/2 |x_i|^2 + q_i . kbar - lse_i,   lse_i = log sum_j exp(q_i . k_j)
    log b_j = 1/2 |y_j|^2 + qbar . (k_j - kbar) - log t
    a_i b_j kappa(x_i, y_j) = exp(q_i . k_j - lse_i)                                                     (21)

The functions of these amplitudes leave log t to the caller; `softmax_posterior` has A = I:

    q~ = q d^-1/4, k~ = k d^-1/4, each minus its own centre;  lse_i = log sum_j exp(q_i . k_j / sqrt d)
    log a_i = log t + 1/2 |q~_i - qbar|^2 + q~_i . kbar - lse_i                                   (21)
    mean = softmax(Q K^T / sqrt d) V exactly,   var_i = a_i^2 u_i                                 (22)
    u_i  = 1 - |L^-1 kappa(k~, q~_i)|^2,   L = chol(kappa(k~, k~) + sigma^2 I)

The key amplitudes b_j = exp(|k~_j|^2 / 2 + ...) overflow and are never formed; a_i stays a logarithm.

Amplitudes that normalise the rows of kernel attention stand here too (section 13); both are log-sum-exps:

    log a_i = log t - logsumexp_j(-1/2 |q_i - k_j|^2)                                         (25)

Row sums are those of kappa(q, k), which are positive; the sums of the CGP surrogate may not be.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.linalg import solve_triangular

from gpattention.gp.closed import closed_log_row_sums
from gpattention.gp.direct import UnitDirect, UnitProcess, prior_draw, real_key_counts, within_bounds
from gpattention.gp.inputs import (
    Scalar,
    check_delta,
    check_positive,
    expanded,
    expect,
    keep_real,
    keep_rows,
    masked,
    prepare,
    real_mean,
)
from gpattention.gp.kernels import log_kappa, softmax_attention
from gpattention.gp.posterior import Posterior, Source, lowrank_root
from gpattention.gp.roots import Root, trains_on_cpu
from gpattention.gp.sparse import UnitFeatures, inducing_root, similarities, whitened_features
from gpattention.numerics import Tokens, full_precision, kept
from gpattention.ops import check_group, sum_over_shards, why_not_fused
from gpattention.ops.exact import fused_row_log_amplitude
from gpattention.ops.sparse import fused_sparse_row_sum, why_not_fused_sparse

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


_ROWS = 1024  # queries whose logits are formed at once


def query_log_amplitude(
    q: Tensor, k: Tensor, x: Tensor, k_bar: Tensor, *, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """log a_i of eq. 21 but for log t.

    Args:
        q: queries.  [..., Q, C]
        k: keys.  [..., K, C]
        x: queries as the kernel sees them.  [..., Q, C]
        k_bar: centre of the keys.  [..., 1, C]
        mask: which keys are real.  [..., K]
        causal: query i sees keys up to i only.

    Returns:
        [..., Q].
    """
    return query_exponent(q, x, k_bar) - log_sum_exp(q, k, mask=mask, causal=causal)


def query_exponent(q: Tensor, x: Tensor, k_bar: Tensor) -> Tensor:
    """1/2 |x_i|^2 + q_i . kbar: all of log a_i (eq. 21) that is of query i alone.

    Args:
        q: queries.  [..., Q, C]
        x: queries as the kernel sees them.  [..., Q, C]
        k_bar: centre of the keys.  [..., 1, C]

    Returns:
        [..., Q].
    """
    return 0.5 * x.square().sum(-1) + (q * k_bar).sum(-1)


def key_log_amplitude(k: Tensor, y: Tensor, q_bar: Tensor, k_bar: Tensor) -> Tensor:
    """log b_j of eq. 21 but for -log t.

    Args:
        k: keys.  [..., K, C]
        y: keys as the kernel sees them.  [..., K, C]
        q_bar: centre of the queries.  [..., 1, C]
        k_bar: centre of the keys.  [..., 1, C]

    Returns:
        [..., K].
    """
    return 0.5 * y.square().sum(-1) + (q_bar * (k - k_bar)).sum(-1)


def distance_log_amplitude(q: Tensor, k: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """log a_i of eq. 25 but for log t: `row_log_amplitude` unchecked, by no fused kernel.

    Args:
        q: queries.  [..., Q, C]
        k: keys.  [..., K, C]
        mask: which keys are real.  [..., K]

    Returns:
        [..., Q].
    """
    return -log_sum_exp(q, k, mask=mask, logits=log_kappa)


@full_precision
def log_sum_exp(
    q: Tensor,  # [..., Q, C]
    k: Tensor,  # [..., K, C]
    *,
    mask: Tensor | None = None,  # [..., K] True = real
    causal: bool = False,
    logits: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """log sum_j exp(q_i . k_j), or of other logits, over keys that query i sees; finite if it sees none.

    Long sequences have their logits formed for some rows at a time.  [..., Q]
    """
    parts, start = [], 0
    for rows in q.split(_ROWS, -2):
        exponents = rows @ k.mT if logits is None else logits(rows, k)  # [..., rows, K]
        visible = _visible(exponents, start, mask, causal)  # [..., rows, K]
        if visible is not None:
            blind = ~visible.any(-1, keepdim=True)  # infinities there would be NaN in gradients
            exponents = torch.where(visible, exponents, torch.where(blind, 0.0, -torch.inf))
        parts.append(exponents.logsumexp(-1))
        start += rows.shape[-2]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _visible(logits: Tensor, start: int, mask: Tensor | None, causal: bool) -> Tensor | None:
    """Keys that the rows from `start` on see.  [..., rows, K]"""
    visible = None if mask is None else mask[..., None, :]
    if causal:
        past = torch.ones_like(logits, dtype=torch.bool).tril(start)
        visible = past if visible is None else past & visible
    return visible


# of queries and keys: their means, zero, or a pair of constants, each [..., C] in the units of q and k
Centre = Literal["tokens", "none"] | tuple[Tensor, Tensor]


@full_precision
def softmax_posterior(
    q: Tensor,  # [..., Q, C]
    k: Tensor,  # [..., K, C]
    v: Tensor,  # [..., K, D]
    *,
    noise: Scalar,
    prior_scale: Scalar = 1.0,  # t of eq. 21
    mask: Tensor | None = None,  # [..., K] True = real
    query_mask: Tensor | None = None,  # [..., Q]
    causal: bool = False,
    centre: Centre | None = None,
    inducing: Tensor | None = None,  # [..., l, C] in the units of k
    delta: float = 1e-6,
) -> Posterior:
    """Softmax attention, untouched, plus the predictive variance of eq. 22.

    The variance is proportional to `prior_scale`^2; `.log_variance` never overflows.  Queries that see no
    real key have mean and variance 0: the amplitude of eq. 21 contains the keys, and without any there is no
    prior, which other kinds answer with.

    Args:
        q: queries.
        k: keys.
        v: values.
        noise: sigma^2, one number or one per leading axis.
        prior_scale: t.
        mask: which keys are real.
        query_mask: which queries are real; `mask` when None and the numbers agree.
        causal: query i sees keys up to i only.
        centre: queries and keys are centred separately on their token means ("tokens", the default), which
            removes the arbitrary effect of a key bias; causal use takes constants instead (default "none",
            zero), because a mean over tokens would look ahead.
        inducing: inducing inputs, with which the variance takes its sparse form: no matrix of keys is
            factored.
        delta: perturbation of their Gram matrix.

    Returns:
        The posterior of every query.

    Raises:
        ValueError: an argument does not fit the others, or is out of its range.
        NumericalError: tokens are not finite, or a covariance has no factor.
    """
    check_delta(delta)
    if inducing is not None and causal:
        raise ValueError("the sparse variance has no causal form: drop inducing or causal")
    t = prepare(
        q, k, v, noise=noise, scale_q=prior_scale, mask=mask, query_mask=query_mask, causal=causal,
        inducing=None if inducing is None else {"inducing": inducing}, scale_name="prior_scale",
        distances=False,
    )  # fmt: skip
    dtype, shrink = t.v.dtype, q.shape[-1] ** -0.25
    q, k = keep_rows(q.to(dtype), t.query_mask), keep_rows(k.to(dtype), t.mask)
    mean = softmax_attention(*expanded(q, k, t.v), mask=t.mask, query_mask=t.query_mask, causal=causal)
    q, k = q * shrink, k * shrink
    q_bar, k_bar = _centres(q, k, t, centre, causal, shrink)  # each [..., 1, C]
    sees_key = sees_a_key(t, causal)  # [..., Q] or None
    process = UnitProcess(
        keep_rows(q - q_bar, sees_key), keep_rows(k - k_bar, t.mask), t.noise, t.mask, sees_key, causal
    )
    inducing = None if inducing is None else inducing.to(dtype) * shrink - k_bar
    return SoftmaxPosterior(mean, process, t, logits_of=(q, k, k_bar), inducing=inducing, delta=delta)


class SoftmaxPosterior(UnitDirect):
    """`UnitDirect` whose log amplitude (eq. 21) is computed only when a variance is asked for."""

    def __init__(
        self,
        mean: Tensor,  # [..., Q, D]
        process: UnitProcess,  # tokens scaled and centred
        t: Tokens,
        *,
        logits_of: tuple[Tensor, Tensor, Tensor],  # scaled q, scaled k, centre of the keys
        inducing: Tensor | None,  # [..., l, C] scaled and centred like the keys
        delta: float,
    ) -> None:
        super().__init__(mean, process.query_mask, t.dtype)
        self._given, self._log_t, self._logits_of = process, t.scale_q[..., 0].log(), logits_of
        self._inducing, self._delta = inducing, delta

    @property
    def _process(self) -> UnitProcess:
        return self._given

    @kept
    def _log_scale(self) -> Tensor:
        q, k, k_bar = self._logits_of
        p = self._given
        return self._log_t + query_log_amplitude(q, k, p.q, k_bar, mask=p.mask, causal=p.causal)

    def _features(self, inducing: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """L_l, Phi_q = kappa_ql L_l^-T and L_B (section 10).  [..., l, l], [..., Q, l], [..., l, l]"""
        p = self._given
        root = inducing_root(inducing, self._delta, Root)
        phi_q = whitened_features(p.q, inducing, root, p.query_mask)
        phi_k = whitened_features(p.k, inducing, root, p.mask)  # [..., K, l]
        return root.lower(), phi_q, lowrank_root(phi_k.mT @ phi_k, p.noise, "Phi_k^T Phi_k")

    @full_precision
    def _find_unit_variance(self) -> Tensor:
        if self._inducing is None:
            return super()._find_unit_variance()
        _, phi_q, L_B = self._features(self._inducing)
        shrunk = solve_triangular(L_B, phi_q.mT, upper=False)  # [..., l, Q]
        return within_bounds(1 - phi_q.square().sum(-1) + shrunk.square().sum(-2), self._given)

    def _full_covariance(self) -> Tensor:
        if self._inducing is None:
            return super()._full_covariance()
        _, phi_q, L_B = self._features(self._inducing)
        shrunk = solve_triangular(L_B, phi_q.mT, upper=False)  # [..., l, Q]
        unit = self._given.prior() - phi_q @ phi_q.mT + shrunk.mT @ shrunk  # [..., Q, Q]
        return self._amplify(self._amplify(unit).mT)

    def _joint_deviation(self, n: int, generator: Source) -> Tensor:
        if self._inducing is None:
            return super()._joint_deviation(n, generator)
        L, phi_q, L_B = self._features(self._inducing)
        m = self._inducing.shape[-2]
        # prior draw at (l, q), what l explains of q taken out, then the posterior of l put back
        p = self._given
        f = prior_draw(self, (self._inducing, p.q), (None, p.query_mask), n, generator)  # [n, ..., l + Q, D]
        nugget = self._delta**0.5 * self._normal(n, m, generator)
        white = solve_triangular(L, f[..., :m, :] + nugget, upper=False)
        put_back = solve_triangular(L_B.mT, self._normal(n, m, generator), upper=True)
        return self._amplify(f[..., m:, :] - phi_q @ (white - put_back))


def sees_a_key(t: Tokens, causal: bool) -> Tensor | None:
    """Real queries with at least one real key before them.  [..., Q]"""
    if t.mask is None:
        return t.query_mask
    some = real_key_counts(t.mask, t.k, causal) > 0  # [..., 1] or [..., Q]
    if t.query_mask is None:
        return some.expand(*some.shape[:-1], t.q.shape[-2])
    return t.query_mask & some


def _centres(
    q: Tensor, k: Tensor, t: Tokens, centre: Centre | None, causal: bool, shrink: float
) -> tuple[Tensor, Tensor]:
    """Centres of the scaled queries and keys.  Each [..., 1, C]"""
    if centre is None:
        centre = "none" if causal else "tokens"
    if isinstance(centre, tuple):
        for name, c in zip(("queries", "keys"), centre, strict=True):
            expect(c.shape[-1:] == q.shape[-1:], f"centre of the {name} of shape [..., {q.shape[-1]}]", c)
        q_bar, k_bar = (c.to(q.dtype)[..., None, :] * shrink for c in centre)
        return q_bar, k_bar
    if centre == "none":
        return (q.new_zeros(1, q.shape[-1]),) * 2
    if centre != "tokens":
        raise ValueError(f"expected centre 'tokens', 'none' or a pair of tensors, got {centre!r}")
    if causal:
        raise ValueError("centre='tokens' looks ahead in causal attention: pass constants or 'none'")
    return real_mean(q, t.query_mask), real_mean(k, t.mask)


@full_precision
def row_log_amplitude(
    q: Tensor,  # [..., Q, C]
    k: Tensor,  # [..., K, C]
    *,
    scale: Scalar = 1.0,  # t of eq. 25
    mask: Tensor | None = None,  # [..., K] True = real
    query_mask: Tensor | None = None,  # [..., Q]
    causal: bool = False,
    max_log_amplitude: float | None = None,
) -> Tensor:
    """log a_i of eq. 25, to be passed as `log_amplitude`.

    With `log_amplitude=row_log_amplitude(q, k)` the mean of `direct_posterior` is softmax attention
    over -1/2 |q_i - k_j|^2.  A prior scale t that leaves the mean alone needs the values divided by
    t as well.

    Args:
        q: queries.
        k: keys.
        scale: the prior scale t.
        mask: which keys are real.
        query_mask: which queries are real; `mask` when None and the numbers agree.
        causal: query i sees keys up to i only.
        max_log_amplitude: caps the amplitude of queries far from every key; capped rows shrink towards 0
            instead of being normalised.

    Returns:
        [..., Q]; 0 at padded queries and at queries that see no real key.

    Raises:
        ValueError: an argument does not fit the others, or is out of its range.
        NumericalError: tokens are not finite or too far apart.
    """
    checked = partial(
        prepare, q, k, k, noise=1.0, scale_q=scale, mask=mask, query_mask=query_mask, causal=causal,
        scale_name="scale", mask_tokens=False,
    )  # fmt: skip
    # the closed form finds what is not finite, or far away, in float32 for itself
    closes = not causal and q.dtype == torch.float32 and trains_on_cpu(q, k)
    t = checked(look=not closes)
    sizes = {"tokens": max(t.q.shape[-2], t.k.shape[-2]), "channels": t.q.shape[-1]}
    if not causal and why_not_fused(t.q, **sizes) is None:
        return fused_row_log_amplitude(t, max_log_amplitude)
    t = masked(t)
    log_sum = None if causal else closed_log_row_sums(t)
    if closes:
        check_positive("scale", t.scale_q)
    if log_sum is None:
        t = masked(checked()) if closes else t
        log_sum = log_sum_exp(t.q, t.k, mask=t.mask, causal=causal, logits=log_kappa)
    # a query that sees no key has no row sum: amplitude 1 leaves it the prior
    return _finish(t.scale_q[..., 0].log() - log_sum, sees_a_key(t, causal), max_log_amplitude)


@full_precision
def sparse_row_log_amplitude(
    q: Tensor,  # [..., Q, C]
    k: Tensor,  # [..., K, C]
    inducing: Tensor,  # [..., l, C]
    *,
    scale: Scalar = 1.0,
    mask: Tensor | None = None,  # [..., K] True = real
    query_mask: Tensor | None = None,  # [..., Q]
    floor: float = 1e-3,
    delta: float = 1e-6,
    max_log_amplitude: float | None = None,
    group: "ProcessGroup | None" = None,
    features: UnitFeatures | None = None,
) -> Tensor:
    """Eq. 25 from the Nystrom estimate of the row sums, clamped at `floor` (section 13).

    O(N l) time and memory: kappa(q, l) (K_ll + delta I)^-1 sum_j kappa(l, k_j).

    Args:
        q: queries.
        k: keys.
        inducing: inducing inputs l.
        scale: the prior scale t.
        mask: which keys are real.
        query_mask: which queries are real; `mask` when None and the numbers agree.
        floor: the least a row sum counts for.
        delta: perturbation of the inducing Gram matrix.
        max_log_amplitude: the most that is returned.
        group: the processes that share the tokens, as in `scgp_posterior`: the row sums run over the keys of
            all.  Their l numbers take an all-reduce of their own each way: the sums of the posterior need the
            amplitudes already.
        features: those of the same tokens, where a CPU's training step has them already; tokens are not
            checked again then.

    Returns:
        [..., Q]; 0 at padded queries.

    Raises:
        ValueError: an argument does not fit the others, or is out of its range.
        NumericalError: tokens are not finite or too far apart, or a covariance has no factor.
    """
    check_group(group)
    if not floor > 0:
        raise ValueError(f"expected floor > 0, got {floor}")
    check_delta(delta)
    if features is not None:
        scale = torch.as_tensor(scale, dtype=q.dtype)[..., None]  # [..., 1]
        log_amplitude = scale.log() - features.row_sums().clamp_min(floor).log()
        return _finish(log_amplitude, query_mask, max_log_amplitude)
    t = prepare(
        q, k, k, inducing={"inducing": inducing}, noise=1.0, scale_q=scale, mask=mask,
        query_mask=query_mask, scale_name="scale", mask_tokens=False,
    )  # fmt: skip
    fused = group is None and why_not_fused_sparse(t) is None  # the kernel sums and solves in one go
    row_sum = fused_sparse_row_sum(t, delta) if fused else _sparse_row_sum(masked(t), delta, group)
    log_amplitude = t.scale_q[..., 0].log() - row_sum.clamp_min(floor).log()
    return _finish(log_amplitude, t.query_mask, max_log_amplitude)


def _sparse_row_sum(t: Tokens, delta: float, group: "ProcessGroup | None") -> Tensor:
    """kappa(q, l) (K_ll + delta I)^-1 sum_j kappa(l, k_j), over the keys of all processes.  [..., Q]"""
    (l,) = t.inducing  # noqa: E741 - the paper's letter
    root = inducing_root(l, delta)  # [..., l, l]
    total = keep_rows(similarities(t.k, l), t.mask).sum(-2)[..., None]  # [..., l, 1]
    if group is not None:
        (total,) = sum_over_shards([total], group)
    weights = root.solve(total)  # [..., l, 1]
    return (similarities(t.q, l) @ weights)[..., 0]


def _finish(log_amplitude: Tensor, keep: Tensor | None, most: float | None) -> Tensor:
    if most is not None:
        log_amplitude = log_amplitude.clamp_max(most)
    return keep_real(log_amplitude, keep)
