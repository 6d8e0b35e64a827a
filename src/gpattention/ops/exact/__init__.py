"""The exact CGP and the direct model on Triton kernels, one program per sequence and head.

    fused_cgp                 mean, variance, key density and regulariser of the exact CGP (eq. 4, 6, 10, 23)
    fused_direct              the same of the direct model (eq. 2)
    fused_prior_density       log density of observations under an amplified GP prior (eq. 10)
    fused_row_log_amplitude   amplitudes that normalise the rows of attention (eq. 25)

Each is one operator; `kernels` holds the mathematics.  Their slow references are `gp.correlated`,
`gp.direct`, `gp.posterior` and `gp.softmax`.  The launches of density and divergence serve the functions of
whole models too, which take a regulariser and their moments together.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpattention.numerics import (
    Cost,
    Tokens,
    broadcast,
    report_failures,
)
from gpattention.ops.layout import (
    View,
    allocator,
    launch,
    matrices,
    padded,
    scalars,
    to_parameters,
    token_major,
    vectors,
    view,
    views,
    with_lead,
)
from gpattention.ops.operators import Fused, Made, counter_for, kernels_of

__all__ = [
    "PRIOR_COVARIANCE",
    "QUERY_COVARIANCE",
    "Moments",
    "fused_cgp",
    "fused_direct",
    "fused_prior_density",
    "fused_row_log_amplitude",
]

QUERY_COVARIANCE = "marginal covariance of the queries"
PRIOR_COVARIANCE = "K_q + tau^2 I"


def fused_row_log_amplitude(t: Tokens, most: float | None) -> Tensor:
    """log a_i of eq. 25 for the prior scale t.scale_q.

    Args:
        t: checked inputs, which need not be masked.
        most: the largest amplitude; None for no bound.

    Returns:
        [..., Q]; 0 at padding and where there is no key.
    """
    lead = broadcast(t.q.shape[:-2], t.k.shape[:-2])
    (log_amplitude,) = _ROW_LOG_AMPLITUDE(
        matrices(t.q, lead), matrices(t.k, lead), t.scale_q, vectors(t.mask, lead),
        vectors(t.query_mask, lead), lead, most,
    )  # fmt: skip
    found: Tensor = with_lead(log_amplitude, lead)
    return found


def _amplitude(
    q: Tensor,  # [B, H, Q, C]
    k: Tensor,  # [B, H, K, C]
    scale: Tensor,  # [..., 1, 1]
    mask: Tensor | None,  # [B, H, K]
    query_mask: Tensor | None,  # [B, H, Q]
    lead: Sequence[int],
    most: float | None,
) -> Made:
    (B, H, NQ, C), N, empty = q.shape, k.shape[2], allocator(q)
    QP, NP, CP = padded(NQ), padded(N), padded(C)
    tokens_q, tokens_k, log_sum = empty(B * H, QP, CP), empty(B * H, NP, CP), empty(B, H, NQ)
    log_amplitude, turned = empty(B, H, NQ), empty(B * H, CP, NP)
    kernels_of("exact").amplitude_kernel[(B * H,)](
        *views(q, k, mask, query_mask, scalars(scale, lead)), tokens_q, tokens_k, turned, log_sum,
        log_amplitude, most, H, NQ, N, C,
        QP=QP, NP=NP, CP=CP, **launch("amplitude", max(QP, NP)),
    )  # fmt: skip
    return {"log_amplitude": log_amplitude, "tokens_q": tokens_q, "tokens_k": tokens_k, "log_sum": log_sum}


def _amplitude_backward(
    by_log_amplitude: Tensor, q: Tensor, k: Tensor, scale: Tensor, mask: Tensor | None,
    query_mask: Tensor | None, tokens_q: Tensor, tokens_k: Tensor, log_sum: Tensor, lead: Sequence[int],
    most: float | None, needed: Sequence[bool],
) -> Made:  # fmt: skip
    (B, H, NQ, C), N, empty = q.shape, k.shape[2], allocator(q)
    (QP, CP), NP = tokens_q.shape[1:], tokens_k.shape[1]
    d_q, d_k = token_major(B, H, NQ, C, q), token_major(B, H, N, C, q)
    found = empty(1, 1, B, H)
    kernels_of("exact").amplitude_backward_kernel[(B * H,)](
        by_log_amplitude.contiguous(), *views(q, k, mask, query_mask, scalars(scale, lead)),
        tokens_q, tokens_k, empty(B * H, CP, NP), log_sum, empty(B * H, QP, NP), most,
        *views(d_q, d_k), found, H, NQ, N, C,
        QP=QP, NP=NP, CP=CP, **launch("amplitude_backward", max(QP, NP)),
    )  # fmt: skip
    (d_scale,) = to_parameters(found, lead, (scale,), needed[2:])
    return {"q": d_q, "k": d_k, "scale": d_scale}


_ROW_LOG_AMPLITUDE = Fused("row_log_amplitude", _amplitude, ("log_amplitude",), _amplitude_backward)


def fused_prior_density(
    x: Tensor,
    X: Tensor,
    *,
    scale: Tensor,
    log_amplitude: Tensor | None,
    noise: Tensor,
    mask: Tensor | None,
    name: str,
) -> Tensor:
    """log N(X; 0, D_a kappa(x, x) D_a + noise I), summed over channels (eq. 10).

    Args:
        x: inputs.  [..., N, C]
        X: observations, zero at padded tokens.  [..., N, D]
        scale: amplitude of all tokens.  [..., 1, 1]
        log_amplitude: of each.  [..., N]
        noise: on the diagonal.  [..., 1, 1]
        mask: which tokens are real.  [..., N]
        name: of the covariance, for the message.

    Returns:
        [...].

    Raises:
        NotPositiveDefiniteError: the covariance has no factor.
    """
    lead = broadcast(x.shape[:-2], X.shape[:-2])
    (value,) = _DENSITY(
        matrices(x, lead), matrices(X, lead), noise, scale, vectors(log_amplitude, lead),
        vectors(mask, lead), lead, name,
    )  # fmt: skip
    found: Tensor = with_lead(value, lead)
    return found


class Prior(NamedTuple):
    """The GP prior of one call: inputs, amplitudes and noise, every tensor with batch and heads."""

    x: Tensor  # [B, H, N, C]
    noise: Tensor  # [B, H]
    scale: Tensor  # [B, H]
    log_amplitude: Tensor | None  # [B, H, N]
    mask: Tensor | None  # [B, H, N]

    @property
    def views(self) -> tuple[View | None, ...]:
        """All but the inputs, as kernels take it."""
        return tuple(views(self.mask, self.noise, self.scale, self.log_amplitude))


class PriorGradients(NamedTuple):
    """Where the backward pass writes."""

    x: Tensor  # [B, H, N, C]
    X: Tensor  # [B, H, N, D]
    log_amplitude: Tensor | None  # [B, H, N]
    scale: Tensor  # [B, H]
    noise: Tensor  # [B, H]

    @property
    def views(self) -> tuple[Any, ...]:
        """Inputs and observations with their strides, then the others, as kernels take them."""
        return *views(self.x, self.X), self[2:]


def density_forward(prior: Prior, X: Tensor, value: Tensor, *, name: str, key: Tensor | None = None) -> Made:
    """Write the density [B, H], or minus its sum with the keys' one; returns what the backward pass needs."""
    x = prior.x
    (B, H, N, C), D = x.shape, X.shape[-1]
    S, NP, CP, DP, empty = B * H, padded(N), padded(C), padded(D), allocator(x)
    inputs, white, gram, root = empty(S, NP, CP), empty(S, NP, DP), empty(S, NP, NP), empty(S, NP, NP)
    turned = empty(S, CP, NP)
    info = torch.empty(B, H, dtype=torch.int32, device=x.device)
    kernels_of("exact").density_kernel[(S,)](
        *views(x, X), prior.views, inputs, turned, white, gram, root, key, value,
        info, *counter_for(x.device), H, N, C, D,
        NP=NP, CP=CP, DP=DP, **launch("density", NP),
    )  # fmt: skip
    report_failures(info, N, x.dtype, name=name, noise=prior.noise)
    return {"inputs": inputs, "white": white, "gram": gram, "prior_roots": root}


def density_backward(
    grad: Tensor, prior: Prior, saved: tuple[Tensor, ...], to: PriorGradients, *, cost: bool = False
) -> None:
    """Write all gradients; `prior.x` is not looked at."""
    inputs, white, gram, root = saved
    (B, H, N, C), D = to.x.shape, to.X.shape[-1]
    NP, CP, DP = gram.shape[-1], inputs.shape[-1], white.shape[-1]
    kernels_of("exact").density_backward_kernel[(B * H,)](
        view(grad), prior.views, inputs, white, gram, root, torch.empty_like(gram), torch.empty_like(white),
        *to.views, H, N, C, D, COST=cost, NP=NP, CP=CP, DP=DP, **launch("density_backward", NP),
    )  # fmt: skip


def _density(
    x: Tensor,  # [B, H, N, C]
    X: Tensor,  # [B, H, N, D]
    noise: Tensor,  # [..., 1, 1]
    scale: Tensor,  # [..., 1, 1]
    log_amplitude: Tensor | None,  # [B, H, N]
    mask: Tensor | None,  # [B, H, N]
    lead: Sequence[int],
    name: str,
) -> Made:
    prior = Prior(x, scalars(noise, lead), scalars(scale, lead), log_amplitude, mask)
    value = allocator(x)(*x.shape[:2])
    return {"value": value, **density_forward(prior, X, value, name=name)}


def _density_backward(
    by_value: Tensor, x_shape: Sequence[int], X_shape: Sequence[int], noise: Tensor, scale: Tensor,
    log_amplitude: Tensor | None, mask: Tensor | None, inputs: Tensor, white: Tensor, gram: Tensor,
    prior_roots: Tensor, lead: Sequence[int], needed: Sequence[bool],
) -> Made:  # fmt: skip
    (B, H, N, C), D, empty = x_shape, X_shape[-1], allocator(gram)
    prior = Prior(gram, scalars(noise, lead), scalars(scale, lead), log_amplitude, mask)
    found = empty(2, 1, B, H)
    d_log = None if log_amplitude is None else empty(B, H, N)
    d_x, d_X = token_major(B, H, N, C, gram), token_major(B, H, N, D, gram)
    to = PriorGradients(d_x, d_X, d_log, scale=found[1, 0], noise=found[0, 0])
    density_backward(by_value, prior, (inputs, white, gram, prior_roots), to)
    d_noise, d_scale = to_parameters(found, lead, (noise, scale), needed[2:])
    return {"x": d_x, "X": d_X, "noise": d_noise, "scale": d_scale, "log_amplitude": d_log}


_DENSITY = Fused("prior_density", _density, ("value",), _density_backward)


def divergence_forward(
    prior: Prior,
    mean: Tensor,  # [B, H, Q, D]
    A: Tensor | None,  # [S, K', Q'] transposed, padded
    F: Tensor,  # [S, K', Q'] transposed
    value: Tensor,  # [B, H]
) -> Made:
    """Write the divergence; returns what the backward pass needs."""
    x = prior.x
    (B, H, N, C), D = x.shape, mean.shape[-1]
    S, NP, CP, DP, empty = B * H, padded(N), padded(C), padded(D), allocator(x)
    inputs, white, gram, rest = empty(S, NP, CP), empty(S, NP, DP), empty(S, NP, NP), empty(S, NP, NP)
    turned, roots = empty(S, CP, NP), empty(2, S, NP, NP)
    info = torch.empty(2, B, H, dtype=torch.int32, device=x.device)
    kernels_of("exact").divergence_kernel[(S,)](
        *views(x, mean), prior.views, A, F, inputs, turned, white, gram, rest, roots, value, info,
        *counter_for(x.device), S, H, N, C, D,
        NP=NP, KP=F.shape[-2], CP=CP, DP=DP, **launch("divergence", max(NP, F.shape[-2])),
    )  # fmt: skip
    for name, found in zip(("K_q + tau^2 I", "V + tau^2 I"), info, strict=True):
        report_failures(found, N, x.dtype, name=name, noise=prior.noise)
    return {
        "inputs": inputs, "white": white, "gram": gram, "rest": rest, "prior_roots": roots,
    }  # fmt: skip


def divergence_backward(grad: Tensor, prior: Prior, saved: tuple[Tensor, ...], to: PriorGradients) -> Tensor:
    """Write all gradients and return that of P at unit amplitude; `prior.x` is not looked at.  [S, Q', Q']"""
    inputs, white, gram, rest, roots = saved
    (B, H, N, C), D = to.x.shape, to.X.shape[-1]
    by_explained = torch.empty_like(gram)
    kernels_of("exact").divergence_backward_kernel[(B * H,)](
        view(grad), prior.views, inputs, white, gram, rest, roots, torch.empty_like(gram),
        torch.empty_like(gram), torch.empty_like(white), by_explained, *to.views, B * H, H, N, C, D,
        NP=gram.shape[-1], CP=inputs.shape[-1], DP=white.shape[-1],
        **launch("divergence_backward", gram.shape[-1]),
    )  # fmt: skip
    return by_explained


class Moments(NamedTuple):
    """What the kernels give of a model, amplified and masked; None is what was not asked for.

    Attributes:
        mean: [..., Q, D].
        variance: [..., Q].
        key: log N(M_k V; 0, M_k), the keys' term of eq. 10.  [...]
        cost: minus both terms of eq. 10, or of eq. 12 (GP), or the divergence of eq. 23.  [...]
        stddev: of the direct model alone.  [..., Q]
        unit: variance at unit amplitude, of the direct model alone.  [..., Q]
    """

    mean: Tensor
    variance: Tensor | None
    key: Tensor | None
    cost: Tensor | None
    stddev: Tensor | None = None
    unit: Tensor | None = None


def fused_cgp(t: Tokens, *, with_variance: bool, cost: Cost = "none") -> Moments:
    """Mean (eq. 4) of the exact CGP and, if wanted, variance (eq. 6) with key density, and a cost.

    Args:
        t: checked inputs, which need not be masked.
        with_variance: whether variance and key density are wanted; a cost comes with them.
        cost: "marginal" (eq. 10) or "kl" (eq. 23), both with tau^2 = sigma^2.

    Returns:
        The moments.

    Raises:
        NotPositiveDefiniteError: a covariance has no factor.
    """
    return _moments(_CGP, t, (t.q, t.k, t.latent, t.v), with_variance, cost)


def fused_direct(t: Tokens, *, with_variance: bool, cost: Cost = "none") -> Moments:
    """Mean of the direct model (eq. 2) and, if wanted, spread with key density, and a cost.

    Args:
        t: checked inputs, which need not be masked.
        with_variance: whether spread and key density are wanted; a cost comes with them.
        cost: "marginal" or "kl", both with tau^2 = sigma^2.

    Returns:
        The moments.

    Raises:
        NotPositiveDefiniteError: a covariance has no factor.
    """
    return _moments(_DIRECT, t, (t.q, t.k, t.v), with_variance, cost)


def _moments(model: Fused, t: Tokens, inputs: tuple[Tensor, ...], with_variance: bool, cost: Cost) -> Moments:
    lead = broadcast(*(x.shape[:-2] for x in inputs))
    found = model(
        *(matrices(x, lead) for x in inputs), t.noise, t.scale_q, t.scale_k,
        *(vectors(x, lead) for x in (t.log_amplitude, t.mask, t.query_mask)),
        lead, with_variance or cost != "none", cost,
    )  # fmt: skip
    return Moments(*(with_lead(x, lead) for x in found))


class Sizes(NamedTuple):
    """Of the problem and of its padded matrices."""

    B: int
    H: int
    NQ: int
    N: int
    C: int
    D: int

    @property
    def heads(self) -> int:
        """How many programs: one for each sequence and head."""
        return self.B * self.H

    @property
    def padded(self) -> dict[str, int]:
        """Padded sides of queries, keys, inputs and values, as the kernels name them."""
        names = {"QP": self.NQ, "NP": self.N, "CP": self.C, "DP": self.D}
        return {name: padded(n) for name, n in names.items()}

    def launch(self, kernel: str) -> dict[str, int]:
        """Launch options of a kernel."""
        return launch(kernel, max(self.padded["QP"], self.padded["NP"]))


def _cost_forward(
    cost: str, prior: Prior, mean: Tensor, A: Tensor | None, F: Tensor, key: Tensor, name: str
) -> Made:
    """A model's cost [B, H], and what the backward pass needs."""
    if cost == "none":
        return {}
    value = torch.empty_like(key)
    if cost == "marginal":
        return {"cost": value, **density_forward(prior, mean, value, name=name, key=key)}
    return {"cost": value, **divergence_forward(prior, mean, A, F, value)}


class CostGradients(NamedTuple):
    """What a model's backward pass takes from that of its cost, and writes its own part of."""

    d_q: Tensor  # [B, H, Q, C]
    d_log: Tensor | None  # [B, H, Q]
    found: Tensor  # [3, 2, B, H] of noise, s_q and s_k
    by_mean: Tensor | None  # [B, H, Q, D] None where there is no cost
    by_explained: Tensor | None  # [S, Q', Q'] of P at unit amplitude
    by_key: Tensor | None  # [B, H] of the keys' log density, and its sign
    key_sign: int


def _cost_backward(
    cost: str,
    by_key: Tensor | None,
    by_cost: Tensor | None,
    prior: Prior,
    saved: tuple[Tensor | None, ...],
    mean: Tensor,
    C: int,
) -> CostGradients:
    """Write the gradients of a cost through its prior: of queries, amplitudes, noise and s_q."""
    (B, H, NQ, D), empty = mean.shape, allocator(mean)
    d_q, found = token_major(B, H, NQ, C, mean), empty(3, 2, B, H)
    d_log = None if prior.log_amplitude is None else empty(B, H, NQ)
    key_sign = int(by_key is not None)
    if by_cost is None:
        return CostGradients(d_q, d_log, found, None, None, by_key, key_sign)
    to = PriorGradients(d_q, token_major(B, H, NQ, D, mean), d_log, found[1, 0], found[0, 0])
    made = tuple(x for x in saved if x is not None)
    if cost == "kl":
        by_explained = divergence_backward(by_cost, prior, made, to)
        return CostGradients(d_q, d_log, found, to.X, by_explained, by_key, key_sign)
    density_backward(by_cost, prior, made, to, cost=True)
    by_key, key_sign = (by_cost, -1) if by_key is None else (by_key - by_cost, 1)
    return CostGradients(d_q, d_log, found, to.X, None, by_key, key_sign)


class _Roots(NamedTuple):
    """Tokens, Gram matrices and their roots of the latent inputs, where there are any, and of the keys."""

    tokens_o: Tensor  # [S, K', C'], those of the keys where there are no latent inputs
    tokens_k: Tensor  # [S, K', C']
    tokens_v: Tensor  # [S, K', D']
    turned: Tensor  # [1 or 3, S, C', K']
    grams: Tensor  # [1 or 2, S, K', K'], anything where none was factored, as are the next two
    roots: Tensor  # [1 or 2, S, K', K']
    turned_roots: Tensor  # [1 or 2, S, K', K']
    key: Tensor  # [B, H]


def _roots(
    sizes: Sizes, k: Tensor, o: Tensor | None, v: Tensor, mask: Tensor | None,
    noise: Tensor, scale_k: Tensor, lead: Sequence[int], factored: int,
) -> _Roots:  # fmt: skip
    """The first `factored` roots, of which there are two with latent inputs and one without."""
    (B, H, _, N, C, D), S, P, empty = sizes, sizes.heads, sizes.padded, allocator(k)
    count, NP, CP, DP = 1 if o is None else 2, P["NP"], P["CP"], P["DP"]
    tokens_k, tokens_v = empty(S, NP, CP), empty(S, NP, DP)
    grams, roots, turned_roots = (empty(count, S, NP, NP) if factored else tokens_k for _ in range(3))
    tokens_o, turned = (tokens_k if o is None else empty(S, NP, CP)), empty(2 * count - 1, S, CP, NP)
    key, info = empty(B, H), torch.empty(count, B, H, dtype=torch.int32, device=k.device)
    kernels_of("exact").roots_kernel[(S, count)](
        *views(k, k if o is None else o, v, mask, scalars(noise, lead), scalars(scale_k, lead)),
        tokens_o, tokens_k, tokens_v, turned, grams, roots, turned_roots, key, info,
        *counter_for(k.device), S, H, N, C, D,
        LATENT=o is not None, FACTORED=factored, NP=NP, CP=CP, DP=DP, **sizes.launch("roots"),
    )  # fmt: skip
    named = (("K_o + noise I", lambda: noise), ("K_k + noise I", lambda: noise / scale_k.square()))
    for (name, least), found in zip(named[-count:], info[:factored], strict=False):
        report_failures(found, N, k.dtype, name=name, noise=least)
    return _Roots(tokens_o, tokens_k, tokens_v, turned, grams, roots, turned_roots, key)


def _cgp(
    q: Tensor,  # [B, H, Q, C]
    k: Tensor,  # [B, H, K, C]
    o: Tensor,  # [B, H, K, C]
    v: Tensor,  # [B, H, K, D]
    noise: Tensor,  # [..., 1, 1]
    scale_q: Tensor,  # [..., 1, 1]
    scale_k: Tensor,  # [..., 1, 1]
    log_amplitude: Tensor | None,  # [B, H, Q]
    mask: Tensor | None,  # [B, H, K]
    query_mask: Tensor | None,  # [B, H, Q]
    lead: Sequence[int],
    with_variance: bool,
    with_cost: str,
) -> Made:
    (B, H, NQ, _), (N, C), D, empty = q.shape, k.shape[2:], v.shape[3], allocator(q)
    sizes = Sizes(B, H, NQ, N, C, D)
    S, P = sizes.heads, sizes.padded
    QP, NP, CP, DP = P.values()
    r = _roots(sizes, k, o, v, mask, noise, scale_k, lead, 1 + with_variance)
    tokens_q, values, scratch = empty(S, QP, CP), empty(S, NP, DP), empty(S, NP, max(QP, NP))
    K_qo, K_ok, A = empty(S, QP, NP), empty(S, NP, NP), empty(S, QP, NP)
    turned_A, F = empty(S, NP, QP), empty(S, NP, QP)
    mean, variance = token_major(B, H, NQ, D, q), empty(B, H, NQ)
    unit = empty(S, QP)
    noise, *scales = (scalars(x, lead) for x in (noise, scale_q, scale_k))
    kernels_of("exact").rows_kernel[(S,)](
        *views(q, k, o, mask, query_mask, noise, *scales, log_amplitude), tokens_q, *r[:4], *r[5:7],
        K_qo, K_ok, A, turned_A, F, scratch, values, view(mean), variance, unit, S, *sizes[1:],
        VARIANCE=with_variance, **P, **sizes.launch("rows"),
    )  # fmt: skip
    prior = Prior(q, noise, scales[0], log_amplitude, query_mask)
    given = {"variance": variance, "key": r.key} if with_variance else {}
    return {
        "mean": mean, **given, "unit": unit, "tokens_q": tokens_q,
        "tokens_o": r.tokens_o, "tokens_k": r.tokens_k, "tokens_v": r.tokens_v, "grams": r.grams,
        "roots": r.roots, "K_qo": K_qo, "K_ok": K_ok, "A": A, "F": F,
        **_cost_forward(with_cost, prior, mean, turned_A, F, r.key, QUERY_COVARIANCE),
    }  # fmt: skip


def _cgp_backward(
    by_mean: Tensor | None, by_variance: Tensor | None, by_key: Tensor | None, by_cost: Tensor | None,
    k_shape: Sequence[int], noise: Tensor, scale_q: Tensor, scale_k: Tensor, log_amplitude: Tensor | None,
    mask: Tensor | None, query_mask: Tensor | None, mean: Tensor, variance: Tensor | None, unit: Tensor,
    tokens_q: Tensor, tokens_o: Tensor, tokens_k: Tensor, tokens_v: Tensor, grams: Tensor, roots: Tensor,
    K_qo: Tensor, K_ok: Tensor, A: Tensor, F: Tensor, inputs: Tensor | None, white: Tensor | None,
    gram: Tensor | None, rest: Tensor | None, prior_roots: Tensor | None, lead: Sequence[int],
    with_variance: bool, with_cost: str, needed: Sequence[bool],
) -> Made:  # fmt: skip
    (B, H, NQ, D), (N, C) = mean.shape, k_shape[2:]
    sizes = Sizes(B, H, NQ, N, C, D)
    S, P, empty = sizes.heads, sizes.padded, allocator(mean)
    QP, NP, _, DP = P.values()
    by_mean = torch.zeros_like(mean) if by_mean is None else by_mean
    X, OX, T, Z, E, scratch = (empty(S, QP, NP) for _ in range(6))
    unit_grad, values, turned_v = empty(S, QP, DP), empty(S, NP, DP), empty(S, DP, NP)
    d_k, d_o, d_v = (token_major(B, H, N, x, mean) for x in (C, C, D))
    parameters = noise, scale_q, scale_k
    noise, *scales = (scalars(x, lead) for x in parameters)
    prior = Prior(mean, noise, scales[0], log_amplitude, query_mask)
    by = _cost_backward(with_cost, by_key, by_cost, prior, (inputs, white, gram, rest, prior_roots), mean, C)
    kernels_of("exact").rows_backward_kernel[(S,)](
        view(by_mean), None if by_variance is None else by_variance.contiguous(), view(mean),
        unit if variance is None else variance, unit,
        *views(mask, query_mask, noise, scales[0], log_amplitude), tokens_q, tokens_o, tokens_v, roots, K_qo,
        K_ok, A, F, view(by.by_mean), by.by_explained, X, OX, T, Z, E, scratch, unit_grad,
        turned_v, view(by.d_q), by.d_log, by.found, S, *sizes[1:],
        VARIANCE=with_variance, **P, **sizes.launch("rows_backward"),
    )  # fmt: skip
    kernels_of("exact").inputs_backward_kernel[(S, 2)](
        *views(mask, scales[1]), tokens_q, tokens_o, tokens_k, tokens_v, grams, roots, K_ok, A,
        X, OX, T, Z, E, unit_grad, turned_v, view(by.by_key), empty(2, S, NP, NP), values,
        *views(d_o, d_k, d_v), by.found, S, H, N, C, D,
        VARIANCE=with_variance, KEY_SIGN=by.key_sign, **P, **sizes.launch("inputs_backward"),
    )  # fmt: skip
    d_noise, d_scale_q, d_scale_k = to_parameters(by.found, lead, parameters, needed[4:])
    return {
        "q": by.d_q, "k": d_k, "o": d_o, "v": d_v, "noise": d_noise, "scale_q": d_scale_q,
        "scale_k": d_scale_k, "log_amplitude": by.d_log,
    }  # fmt: skip


_CGP = Fused("cgp", _cgp, ("mean", "variance", "key", "cost"), _cgp_backward)


def _direct(
    q: Tensor,  # [B, H, Q, C]
    k: Tensor,  # [B, H, K, C]
    v: Tensor,  # [B, H, K, D]
    noise: Tensor,  # [..., 1, 1]
    scale_q: Tensor,  # [..., 1, 1]
    scale_k: Tensor,  # [..., 1, 1]
    log_amplitude: Tensor | None,  # [B, H, Q]
    mask: Tensor | None,  # [B, H, K]
    query_mask: Tensor | None,  # [B, H, Q]
    lead: Sequence[int],
    with_variance: bool,
    with_cost: str,
) -> Made:
    (B, H, NQ, _), (N, C), D, empty = q.shape, k.shape[2:], v.shape[3], allocator(q)
    sizes = Sizes(B, H, NQ, N, C, D)
    S, P = sizes.heads, sizes.padded
    QP, NP, CP, _ = P.values()
    r = _roots(sizes, k, None, v, mask, noise, scale_k, lead, int(with_variance))
    tokens_q, K = empty(S, QP, CP), empty(S, QP, NP)
    W = empty(S, NP, QP) if with_variance else None
    weights = None if log_amplitude is None else empty(S, QP, NP)  # else they are K
    mean, raw = token_major(B, H, NQ, D, q), empty(S, QP)
    stddev, variance, unit = empty(B, H, NQ), empty(B, H, NQ), empty(B, H, NQ)
    noise, *scales = (scalars(x, lead) for x in (noise, scale_q, scale_k))
    kernels_of("exact").direct_kernel[(S,)](
        *views(q, k, mask, query_mask, noise, *scales, log_amplitude), tokens_q, r.tokens_k, r.tokens_v,
        r.turned, r.turned_roots, K, K if weights is None else weights, K if W is None else W, view(mean),
        stddev, variance, unit, raw, *sizes[1:], VARIANCE=with_variance, **P, **sizes.launch("direct"),
    )  # fmt: skip
    prior = Prior(q, noise, scales[0], log_amplitude, query_mask)
    given: Made = {"variance": variance, "key": r.key, "stddev": stddev, "unit": unit}
    return {
        "mean": mean, **(given if with_variance else {}), "raw": raw, "tokens_q": tokens_q,
        "tokens_k": r.tokens_k, "tokens_v": r.tokens_v, "grams": r.grams, "roots": r.roots, "K": K,
        "weights": weights, "W": W,
        **({} if W is None else _cost_forward(with_cost, prior, mean, None, W, r.key, PRIOR_COVARIANCE)),
    }  # fmt: skip


def _direct_backward(
    by_mean: Tensor | None, by_variance: Tensor | None, by_key: Tensor | None, by_cost: Tensor | None,
    by_stddev: Tensor | None, by_unit: Tensor | None, k_shape: Sequence[int], noise: Tensor,
    scale_q: Tensor, scale_k: Tensor, log_amplitude: Tensor | None, mask: Tensor | None,
    query_mask: Tensor | None, mean: Tensor, stddev: Tensor | None, variance: Tensor | None, raw: Tensor,
    tokens_q: Tensor, tokens_k: Tensor, tokens_v: Tensor, grams: Tensor, roots: Tensor, K: Tensor,
    weights: Tensor | None, W: Tensor | None, inputs: Tensor | None, white: Tensor | None,
    gram: Tensor | None, rest: Tensor | None, prior_roots: Tensor | None, lead: Sequence[int],
    with_variance: bool, with_cost: str, needed: Sequence[bool],
) -> Made:  # fmt: skip
    (B, H, NQ, D), (N, C) = mean.shape, k_shape[2:]
    sizes = Sizes(B, H, NQ, N, C, D)
    S, P, empty = sizes.heads, sizes.padded, allocator(mean)
    QP, NP, _, DP = P.values()
    by_mean = torch.zeros_like(mean) if by_mean is None else by_mean
    X, OX, E, scratch = (empty(S, n, NP) for n in (QP, QP, QP, max(QP, NP)))
    d_k, d_v = token_major(B, H, N, C, mean), token_major(B, H, N, D, mean)
    parameters = noise, scale_q, scale_k
    noise, *scales = (scalars(x, lead) for x in parameters)
    prior = Prior(mean, noise, scales[0], log_amplitude, query_mask)
    by = _cost_backward(with_cost, by_key, by_cost, prior, (inputs, white, gram, rest, prior_roots), mean, C)
    spreads = [None if g is None else g.contiguous() for g in (by_stddev, by_variance, by_unit)]
    kernels_of("exact").direct_backward_kernel[(S,)](
        view(by_mean), *spreads, view(mean), raw if stddev is None else stddev,
        raw if variance is None else variance, raw,
        *views(mask, query_mask, noise, *scales), tokens_q, tokens_k, tokens_v, grams, roots,
        K, K if weights is None else weights, K if W is None else W, view(by.by_mean), by.by_explained,
        view(by.by_key), X, OX, E, scratch, empty(S, QP, DP), empty(S, DP, NP),
        *views(by.d_q, d_k, d_v), by.d_log, by.found, S, *sizes[1:],
        FACTORED=with_variance, KEY_SIGN=by.key_sign, **P, **sizes.launch("direct_backward"),
    )  # fmt: skip
    d_noise, d_scale_q, d_scale_k = to_parameters(by.found, lead, parameters, needed[3:])
    return {
        "q": by.d_q, "k": d_k, "v": d_v, "noise": d_noise, "scale_q": d_scale_q, "scale_k": d_scale_k,
        "log_amplitude": by.d_log,
    }  # fmt: skip


_DIRECT = Fused(
    "direct",
    _direct,
    ("mean", "variance", "key", "cost", "stddev", "unit"),
    _direct_backward)
