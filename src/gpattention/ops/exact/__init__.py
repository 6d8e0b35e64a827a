"""The exact CGP and the direct model on Triton kernels, one program per sequence and head.

    fused_cgp                 mean, variance, key density and regulariser of the exact CGP (eq. 4, 6, 10, 23)
    fused_direct              the same of the direct model (eq. 2)
    fused_prior_density       log density of observations under an amplified GP prior (eq. 10)
    fused_row_log_amplitude   amplitudes that normalise the rows of attention (eq. 25)

Each is one operator; `kernels` holds the mathematics.  Their slow references are `gp.correlated`,
`gp.direct`, `gp.posterior` and `gp.softmax`.  The launches of density and divergence serve the functions of
whole models too, which take a regulariser and their moments together.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpattention.numerics import (
    Cost,
    Tokens,
    broadcast,
    checks_are_deferred,
    report_failures,
)
from gpattention.ops.draws import draw_with_lead, noise_of_draw, with_draw
from gpattention.ops.launching import counter_for, kernels_of
from gpattention.ops.layout import (
    Arrays,
    Room,
    View,
    allocator,
    as_two,
    launch,
    matrices,
    padded,
    room,
    rooms,
    scalars,
    token_major,
    vectors,
    view,
    views,
    with_lead,
)
from gpattention.ops.operators import Fused, Made

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
        *views(q, k, mask, query_mask), scalars(scale, lead), tokens_q, tokens_k, turned, log_sum,
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
        by_log_amplitude.contiguous(), *views(q, k, mask, query_mask), scalars(scale, lead),
        tokens_q, tokens_k, empty(B * H, CP, NP), log_sum, empty(B * H, QP, NP), most,
        *views(d_q, d_k), found, H, NQ, N, C,
        QP=QP, NP=NP, CP=CP, **launch("amplitude_backward", max(QP, NP)),
    )  # fmt: skip
    return {"q": d_q, "k": d_k, **to_parameters(found, lead, {"scale": scale}, needed[2:])}


_ROW_LOG_AMPLITUDE = Fused("row_log_amplitude", _amplitude, ("log_amplitude",), _amplitude_backward)


def to_parameters(
    found: Tensor, lead: Sequence[int], parameters: Mapping[str, Tensor], needed: Sequence[bool]
) -> dict[str, Tensor | None]:
    """Gradients [P, 2, B, H], in two parts each, as those of P parameters [..., 1, 1] shared by sequences.

    Parameters with one number per head, the usual ones, are summed in one launch, and come `together` where
    all are needed.
    """
    H = as_two(lead)[1]
    shapes = {x.shape for x in parameters.values()}
    if len(parameters) > 1 and shapes == {(H, 1, 1)} and all(needed[: len(parameters)]):
        return {"together": by_head_of(found).view(-1, H, 1, 1)}
    by_head = None
    gradients: dict[str, Tensor | None] = {}
    for place, ((name, parameter), need) in enumerate(zip(parameters.items(), needed, strict=False)):
        shape = parameter.shape
        if not need:
            gradients[name] = None
        elif parameter.numel() == H and shape[-3:] == (H, 1, 1):
            by_head = by_head_of(found) if by_head is None else by_head
            gradients[name] = by_head[place].view(shape)
        else:
            gradients[name] = found[place].sum(0).reshape(*lead, 1, 1).sum_to_size(shape)
    return gradients


def by_head_of(found: Tensor) -> Tensor:
    """[P, parts, B, H] summed over parts and sequences.  [P, H]"""
    P, parts, B, H = found.shape
    out = allocator(found)(P, H)
    kernels_of("exact").parameters_kernel[(P,)](found, out, parts * B, H, ROWS=128, HP=padded(H), num_warps=4)
    return out


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
    noise: View  # [B, H]
    scale: View  # [B, H]
    log_amplitude: Tensor | None  # [B, H, N]
    mask: Tensor | None  # [B, H, N]

    @property
    def views(self) -> tuple[View | None, ...]:
        """All but the inputs, as kernels take it."""
        return view(self.mask), self.noise, self.scale, view(self.log_amplitude)


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


def prior_sizes(cost: str, S: int, NP: int, CP: int, DP: int) -> dict[str, int]:
    """What the backward pass of a density ("marginal") or divergence ("kl") needs; nothing of "none"."""
    if cost == "none":
        return {}
    sizes = {"inputs": S * NP * CP, "white": S * NP * DP, "gram": S * NP * NP}
    if cost == "marginal":
        return sizes | {"prior_roots": S * NP * NP}
    return sizes | {"rest": S * NP * NP, "prior_roots": 2 * S * NP * NP}


def prior_scratch(cost: str, S: int, NP: int, CP: int, DP: int) -> tuple[dict[str, int], dict[str, int]]:
    """Scratch memory of the forward and of the backward pass of a density or divergence."""
    if cost == "none":
        return {}, {}
    square = S * NP * NP
    backward = {"prior_square": square, "dual": S * NP * DP}
    if cost == "kl":
        backward |= {"inverse": square, "by_explained": square}
    return {"prior_turned": S * CP * NP}, backward


def density_forward(
    prior: Prior, X: Tensor, value: Tensor, kept: Room, scratch: Room, *, name: str, key: Tensor | None = None
) -> None:
    """Write the density [B, H], or minus its sum with the keys' one, and what the backward pass needs."""
    x = prior.x
    (B, H, N, C), D = x.shape, X.shape[-1]
    NP = padded(N)
    info = torch.empty(B, H, dtype=torch.int32, device=x.device)
    kernels_of("exact").density_kernel[(B * H,)](
        *views(x, X), prior.views, kept["inputs"], scratch["prior_turned"], kept["white"], kept["gram"],
        kept["prior_roots"], key, value, info, *counter_for(x.device), H, N, C, D,
        NP=NP, CP=padded(C), DP=padded(D), **launch("density", NP),
    )  # fmt: skip
    report_failures(info, N, x.dtype, name=name, noise=prior.noise[0])


def density_backward(
    grad: Tensor, prior: Prior, kept: Room, scratch: Room, to: PriorGradients, *, cost: bool = False
) -> None:
    """Write all gradients; `prior.x` is not looked at."""
    (B, H, N, C), D = to.x.shape, to.X.shape[-1]
    NP = padded(N)
    kernels_of("exact").density_backward_kernel[(B * H,)](
        view(grad), prior.views, kept["inputs"], kept["white"], kept["gram"], kept["prior_roots"],
        scratch["prior_square"], scratch["dual"], *to.views, H, N, C, D,
        COST=cost, NP=NP, CP=padded(C), DP=padded(D), **launch("density_backward", NP),
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
    sides = _prior_sides(x.shape, X.shape[-1])
    state, kept = room(x, Arrays(prior_sizes("marginal", *sides)))
    scratch = room(x, Arrays(prior_scratch("marginal", *sides)[0]))[1]
    density_forward(prior, X, value, kept, scratch, name=name)
    return {"value": value, "state": state}


def _prior_sides(shape: Sequence[int], D: int) -> tuple[int, int, int, int]:
    """Sequences and heads, and padded sides, of inputs [B, H, N, C] and D observed channels."""
    B, H, N, C = shape
    return B * H, padded(N), padded(C), padded(D)


def _density_backward(
    by_value: Tensor, x_shape: Sequence[int], X_shape: Sequence[int], noise: Tensor, scale: Tensor,
    log_amplitude: Tensor | None, mask: Tensor | None, state: Tensor, lead: Sequence[int],
    needed: Sequence[bool],
) -> Made:  # fmt: skip
    (B, H, N, C), D, empty = x_shape, X_shape[-1], allocator(state)
    prior = Prior(state, scalars(noise, lead), scalars(scale, lead), log_amplitude, mask)
    found = empty(2, 1, B, H)
    d_log = None if log_amplitude is None else empty(B, H, N)
    d_x, d_X = token_major(B, H, N, C, state), token_major(B, H, N, D, state)
    to = PriorGradients(d_x, d_X, d_log, scale=found[1, 0], noise=found[0, 0])
    sides = _prior_sides(x_shape, D)
    kept = rooms(state, Arrays(prior_sizes("marginal", *sides)))
    scratch = room(state, Arrays(prior_scratch("marginal", *sides)[1]))[1]
    density_backward(by_value, prior, kept, scratch, to)
    parameters = to_parameters(found, lead, {"noise": noise, "scale": scale}, needed[2:])
    return {"x": d_x, "X": d_X, "log_amplitude": d_log, **parameters}


_DENSITY = Fused("prior_density", _density, ("value",), _density_backward, together=("noise", "scale"))


def divergence_forward(
    prior: Prior,
    mean: Tensor,  # [B, H, Q, D]
    A: Tensor | None,  # [S, K', Q'] transposed, padded
    F: Tensor,  # [S, K', Q'] transposed
    KP: int,
    value: Tensor,  # [B, H]
    kept: Room,
    scratch: Room,
) -> None:
    """Write the divergence, and what the backward pass needs."""
    x = prior.x
    (B, H, N, C), D = x.shape, mean.shape[-1]
    S, NP = B * H, padded(N)
    info = torch.empty(2, B, H, dtype=torch.int32, device=x.device)
    kernels_of("exact").divergence_kernel[(S,)](
        *views(x, mean), prior.views, A, F, kept["inputs"], scratch["prior_turned"], kept["white"],
        kept["gram"], kept["rest"], kept["prior_roots"], value, info, *counter_for(x.device), S, H, N, C, D,
        NP=NP, KP=KP, CP=padded(C), DP=padded(D), **launch("divergence", max(NP, KP)),
    )  # fmt: skip
    if checks_are_deferred(info):
        return
    for name, found in zip(("K_q + tau^2 I", "V + tau^2 I"), info, strict=True):
        report_failures(found, N, x.dtype, name=name, noise=prior.noise[0])


def divergence_backward(grad: Tensor, prior: Prior, kept: Room, scratch: Room, to: PriorGradients) -> None:
    """Write all gradients, that of P at unit amplitude into the scratch; `prior.x` is not looked at."""
    (B, H, N, C), D = to.x.shape, to.X.shape[-1]
    NP = padded(N)
    kernels_of("exact").divergence_backward_kernel[(B * H,)](
        view(grad), prior.views, kept["inputs"], kept["white"], kept["gram"], kept["rest"],
        kept["prior_roots"], scratch["inverse"], scratch["prior_square"], scratch["dual"],
        scratch["by_explained"], *to.views, B * H, H, N, C, D,
        NP=NP, CP=padded(C), DP=padded(D), **launch("divergence_backward", NP),
    )  # fmt: skip


class Moments(NamedTuple):
    """What the kernels give of a model, amplified and masked; None is what was not asked for.

    Attributes:
        mean: [..., Q, D].
        variance: [..., Q].
        key: log N(M_k V; 0, M_k), the keys' term of eq. 10.  [...]
        cost: minus both terms of eq. 10, or of eq. 12 (GP), or the divergence of eq. 23.  [...]
        stddev: of the direct model alone.  [..., Q]
        unit: variance at unit amplitude, of the direct model alone.  [..., Q]
        draw: one of every token, if it was asked for.  [1, ..., Q, D]
    """

    mean: Tensor
    variance: Tensor | None
    key: Tensor | None
    cost: Tensor | None
    stddev: Tensor | None = None
    unit: Tensor | None = None
    draw: Tensor | None = None


def fused_cgp(t: Tokens, *, with_variance: bool, cost: Cost = "none", draw: bool = False) -> Moments:
    """Mean (eq. 4) of the exact CGP and, if wanted, variance (eq. 6) with key density, and a cost.

    Args:
        t: checked inputs, which need not be masked.
        with_variance: whether variance and key density are wanted; a cost comes with them.
        cost: "marginal" (eq. 10) or "kl" (eq. 23), both with tau^2 = sigma^2.
        draw: whether to draw every token once, with numbers of torch's own generator.

    Returns:
        The moments.

    Raises:
        NotPositiveDefiniteError: a covariance has no factor.
    """
    return _moments(_DRAWN_CGP if draw else _CGP, t, (t.q, t.k, t.latent, t.v), with_variance, cost)


def fused_direct(t: Tokens, *, with_variance: bool, cost: Cost = "none", draw: bool = False) -> Moments:
    """Mean of the direct model (eq. 2) and, if wanted, spread with key density, and a cost.

    Args:
        t: checked inputs, which need not be masked.
        with_variance: whether spread and key density are wanted; a cost comes with them.
        cost: "marginal" or "kl", both with tau^2 = sigma^2.
        draw: as for `fused_cgp`.

    Returns:
        The moments.

    Raises:
        NotPositiveDefiniteError: a covariance has no factor.
    """
    return _moments(_DRAWN_DIRECT if draw else _DIRECT, t, (t.q, t.k, t.v), with_variance, cost)


def _moments(model: Fused, t: Tokens, inputs: tuple[Tensor, ...], with_variance: bool, cost: Cost) -> Moments:
    lead = broadcast(*(x.shape[:-2] for x in inputs))
    drawing = model in (_DRAWN_CGP, _DRAWN_DIRECT)
    found = model(
        *(matrices(x, lead) for x in inputs), t.noise, t.scale_q, t.scale_k,
        *(vectors(x, lead) for x in (t.log_amplitude, t.mask, t.query_mask)),
        lead, with_variance or cost != "none" or drawing, cost,
        *([noise_of_draw(t.q, t.v, lead)] if drawing else []),
    )  # fmt: skip
    drawn, found = (found[0], found[1:]) if drawing else (None, found)
    moments = Moments(*(with_lead(x, lead) for x in found))
    return moments if drawn is None else moments._replace(draw=draw_with_lead(drawn, lead))


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


class Plan(NamedTuple):
    """How large what a call needs is, in numbers.

    Attributes:
        padded: sides of padded matrices.
        side: the larger one of queries and keys, by which launches are chosen.
        kept: what the backward pass needs.
        forward: scratch memory of the forward pass.
        backward: scratch memory of the backward pass.
    """

    padded: dict[str, int]
    side: int
    kept: Arrays
    forward: Arrays
    backward: Arrays


def _cgp_plan(sizes: Sizes, with_variance: bool, cost: str) -> Plan:
    S, P = sizes.heads, sizes.padded
    QP, NP, CP, DP = P.values()
    forward, backward = prior_scratch(cost, S, QP, CP, DP)
    kept = {
        "unit": S * QP, "tokens_q": S * QP * CP, "tokens_o": S * NP * CP, "tokens_k": S * NP * CP,
        "tokens_v": S * NP * DP, "grams": 2 * S * NP * NP, "roots": 2 * S * NP * NP, "K_qo": S * QP * NP,
        "K_ok": S * NP * NP, "A": S * QP * NP, "F": S * NP * QP,
    }  # fmt: skip
    forward |= {
        "turned": 3 * S * CP * NP, "turned_roots": 2 * S * NP * NP, "values": S * NP * DP,
        "square": S * NP * max(QP, NP), "turned_A": S * NP * QP,
    }  # fmt: skip
    backward |= dict.fromkeys(("X", "OX", "T", "Z", "E", "square"), S * QP * NP)
    backward |= {
        "unit_grad": S * QP * DP, "values": S * NP * DP, "turned_v": S * DP * NP, "squares": 2 * S * NP * NP,
    }  # fmt: skip
    kept |= prior_sizes(cost, S, QP, CP, DP)
    return Plan(P, max(QP, NP), Arrays(kept), Arrays(forward), Arrays(backward))


def _direct_plan(sizes: Sizes, with_variance: bool, cost: str, amplified: bool) -> Plan:
    S, P = sizes.heads, sizes.padded
    QP, NP, CP, DP = P.values()
    cost = cost if with_variance else "none"
    forward, backward = prior_scratch(cost, S, QP, CP, DP)
    kept = {
        "raw": S * QP, "tokens_q": S * QP * CP, "tokens_k": S * NP * CP, "tokens_v": S * NP * DP,
        "K": S * QP * NP, **({"weights": S * QP * NP} if amplified else {}),
    }  # fmt: skip
    forward |= {"turned": S * CP * NP}
    if with_variance:
        kept |= {"grams": S * NP * NP, "roots": S * NP * NP, "W": S * NP * QP}
        forward |= {"turned_roots": S * NP * NP}
    backward |= dict.fromkeys(("X", "OX", "E"), S * QP * NP)
    backward |= {
        "square": S * max(QP, NP) * NP, "unit_grad": S * QP * DP, "turned_v": S * DP * NP,
    }  # fmt: skip
    kept |= prior_sizes(cost, S, QP, CP, DP)
    return Plan(P, max(QP, NP), Arrays(kept), Arrays(forward), Arrays(backward))


def _cost_forward(
    cost: str, prior: Prior, mean: Tensor, A: Tensor | None, F: Tensor, key: Tensor, name: str, kept: Room,
    scratch: Room, NP: int,
) -> Made:  # fmt: skip
    """A model's cost [B, H]; what the backward pass needs is written."""
    if cost == "none":
        return {}
    value = torch.empty_like(key)
    if cost == "marginal":
        density_forward(prior, mean, value, kept, scratch, name=name, key=key)
    else:
        divergence_forward(prior, mean, A, F, NP, value, kept, scratch)
    return {"cost": value}


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
    kept: Room,
    scratch: Room,
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
    if cost == "kl":
        divergence_backward(by_cost, prior, kept, scratch, to)
        return CostGradients(d_q, d_log, found, to.X, scratch["by_explained"], by_key, key_sign)
    density_backward(by_cost, prior, kept, scratch, to, cost=True)
    by_key, key_sign = (by_cost, -1) if by_key is None else (by_key - by_cost, 1)
    return CostGradients(d_q, d_log, found, to.X, None, by_key, key_sign)


def _roots(
    sizes: Sizes, plan: Plan, k: Tensor, o: Tensor | None, v: Tensor, mask: Tensor | None, noise: Tensor,
    scale_k: Tensor, lead: Sequence[int], kept: Room, scratch: Room, factored: int,
) -> Tensor:  # fmt: skip
    """Write tokens, Gram matrices and their roots of the latent inputs, where there are any, and of the keys.

    The first `factored` are factored, of which there are two with latent inputs and one without; what is not
    is not written, and may be missing.  Returns the keys' log density [B, H].
    """
    (B, H, _, N, C, D), S, count = sizes, sizes.heads, 1 if o is None else 2
    tokens_k = kept["tokens_k"]
    grams, roots = kept.get("grams", tokens_k), kept.get("roots", tokens_k)
    key = torch.empty(B, H, dtype=torch.float32, device=k.device)
    info = torch.empty(count, B, H, dtype=torch.int32, device=k.device)
    kernels_of("exact").roots_kernel[(S, count)](
        *views(k, k if o is None else o, v, mask), scalars(noise, lead), scalars(scale_k, lead),
        kept.get("tokens_o", tokens_k), tokens_k, kept["tokens_v"], scratch["turned"], grams, roots,
        scratch.get("turned_roots", tokens_k), key, info, *counter_for(k.device), S, H, N, C, D,
        LATENT=o is not None, FACTORED=factored, NP=plan.padded["NP"], CP=plan.padded["CP"],
        DP=plan.padded["DP"], **launch("roots", plan.side),
    )  # fmt: skip
    if checks_are_deferred(info):
        return key
    named = (("K_o + noise I", lambda: noise), ("K_k + noise I", lambda: noise / scale_k.square()))
    for (name, least), found in zip(named[-count:], info[:factored], strict=False):
        report_failures(found, N, k.dtype, name=name, noise=least)
    return key


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
    (B, H, NQ, _), (N, C), D = q.shape, k.shape[2:], v.shape[3]
    sizes = Sizes(B, H, NQ, N, C, D)
    plan = _cgp_plan(sizes, with_variance, with_cost)
    (state, kept), (_, scratch) = room(q, plan.kept), room(q, plan.forward)
    key = _roots(sizes, plan, k, o, v, mask, noise, scale_k, lead, kept, scratch, 1 + with_variance)
    mean = token_major(B, H, NQ, D, q)
    variance = torch.empty(B, H, NQ, dtype=torch.float32, device=q.device)
    of_noise, *scales = (scalars(x, lead) for x in (noise, scale_q, scale_k))
    F = kept["F"]
    kernels_of("exact").rows_kernel[(sizes.heads,)](
        *views(q, k, o, mask, query_mask), of_noise, *scales, view(log_amplitude), kept["tokens_q"],
        kept["tokens_o"], kept["tokens_k"], kept["tokens_v"], scratch["turned"], kept["roots"],
        scratch["turned_roots"], kept["K_qo"], kept["K_ok"], kept["A"], scratch["turned_A"], F,
        scratch["square"], scratch["values"], view(mean), variance, kept["unit"], sizes.heads, *sizes[1:],
        VARIANCE=with_variance, **plan.padded, **launch("rows", plan.side),
    )  # fmt: skip
    prior = Prior(q, of_noise, scales[0], log_amplitude, query_mask)
    given = {"variance": variance, "key": key} if with_variance else {}
    cost = _cost_forward(
        with_cost, prior, mean, scratch["turned_A"], F, key, QUERY_COVARIANCE, kept, scratch,
        plan.padded["NP"],
    )  # fmt: skip
    return {"mean": mean, **given, "state": state, **cost}


def _cgp_backward(
    by_mean: Tensor | None, by_variance: Tensor | None, by_key: Tensor | None, by_cost: Tensor | None,
    k_shape: Sequence[int], noise: Tensor, scale_q: Tensor, scale_k: Tensor, log_amplitude: Tensor | None,
    mask: Tensor | None, query_mask: Tensor | None, mean: Tensor, variance: Tensor | None, state: Tensor,
    lead: Sequence[int], with_variance: bool, with_cost: str, needed: Sequence[bool],
) -> Made:  # fmt: skip
    (B, H, NQ, D), (N, C) = mean.shape, k_shape[2:]
    sizes = Sizes(B, H, NQ, N, C, D)
    plan, S = _cgp_plan(sizes, with_variance, with_cost), sizes.heads
    kept, (_, scratch) = rooms(state, plan.kept), room(state, plan.backward)
    by_mean = torch.zeros_like(mean) if by_mean is None else by_mean
    d_k, d_o, d_v = (token_major(B, H, N, x, mean) for x in (C, C, D))
    parameters = dict(zip(_PARAMETERS, (noise, scale_q, scale_k), strict=True))
    of_noise, *scales = (scalars(x, lead) for x in parameters.values())
    prior = Prior(mean, of_noise, scales[0], log_amplitude, query_mask)
    by = _cost_backward(with_cost, by_key, by_cost, prior, kept, scratch, mean, C)
    unit, X, OX, T, Z, E = (kept["unit"], *(scratch[name] for name in ("X", "OX", "T", "Z", "E")))
    kernels_of("exact").rows_backward_kernel[(S,)](
        view(by_mean), None if by_variance is None else by_variance.contiguous(), view(mean),
        unit if variance is None else variance, unit,
        *views(mask, query_mask), of_noise, scales[0], view(log_amplitude), kept["tokens_q"],
        kept["tokens_o"], kept["tokens_v"], kept["roots"], kept["K_qo"], kept["K_ok"], kept["A"], kept["F"],
        view(by.by_mean), by.by_explained, X, OX, T, Z, E, scratch["square"], scratch["unit_grad"],
        scratch["turned_v"], view(by.d_q), by.d_log, by.found, S, *sizes[1:],
        VARIANCE=with_variance, **plan.padded, **launch("rows_backward", plan.side),
    )  # fmt: skip
    kernels_of("exact").inputs_backward_kernel[(S, 2)](
        view(mask), scales[1], kept["tokens_q"], kept["tokens_o"], kept["tokens_k"], kept["tokens_v"],
        kept["grams"], kept["roots"], kept["K_ok"], kept["A"], X, OX, T, Z, E, scratch["unit_grad"],
        scratch["turned_v"], view(by.by_key), scratch["squares"], scratch["values"],
        *views(d_o, d_k, d_v), by.found, S, H, N, C, D,
        VARIANCE=with_variance, KEY_SIGN=by.key_sign, **plan.padded, **launch("inputs_backward", plan.side),
    )  # fmt: skip
    return {
        "q": by.d_q, "k": d_k, "o": d_o, "v": d_v, "log_amplitude": by.d_log,
        **to_parameters(by.found, lead, parameters, needed[4:]),
    }  # fmt: skip


_PARAMETERS = ("noise", "scale_q", "scale_k")
_CGP = Fused("cgp", _cgp, ("mean", "variance", "key", "cost"), _cgp_backward, together=_PARAMETERS)
_DRAWN_CGP = with_draw(_CGP, "variance", squared=True)


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
    sizes, amplified = Sizes(B, H, NQ, N, C, D), log_amplitude is not None
    plan = _direct_plan(sizes, with_variance, with_cost, amplified)
    (state, kept), (_, scratch) = room(q, plan.kept), room(q, plan.forward)
    key = _roots(sizes, plan, k, None, v, mask, noise, scale_k, lead, kept, scratch, int(with_variance))
    K, tokens_k = kept["K"], kept["tokens_k"]
    W = kept.get("W", K)
    mean = token_major(B, H, NQ, D, q)
    stddev, variance, unit = empty(B, H, NQ), empty(B, H, NQ), empty(B, H, NQ)
    of_noise, *scales = (scalars(x, lead) for x in (noise, scale_q, scale_k))
    kernels_of("exact").direct_kernel[(sizes.heads,)](
        *views(q, k, mask, query_mask), of_noise, *scales, view(log_amplitude), kept["tokens_q"], tokens_k,
        kept["tokens_v"], scratch["turned"], scratch.get("turned_roots", tokens_k), K,
        kept.get("weights", K), W, view(mean), stddev, variance, unit, kept["raw"], *sizes[1:],
        VARIANCE=with_variance, **plan.padded, **launch("direct", plan.side),
    )  # fmt: skip
    if not with_variance:
        return {"mean": mean, "state": state}
    prior = Prior(q, of_noise, scales[0], log_amplitude, query_mask)
    cost = _cost_forward(
        with_cost, prior, mean, None, W, key, PRIOR_COVARIANCE, kept, scratch, plan.padded["NP"]
    )
    return {
        "mean": mean, "variance": variance, "key": key, "stddev": stddev, "unit": unit, "state": state, **cost
    }  # fmt: skip


def _direct_backward(
    by_mean: Tensor | None, by_variance: Tensor | None, by_key: Tensor | None, by_cost: Tensor | None,
    by_stddev: Tensor | None, by_unit: Tensor | None, k_shape: Sequence[int], noise: Tensor,
    scale_q: Tensor, scale_k: Tensor, log_amplitude: Tensor | None, mask: Tensor | None,
    query_mask: Tensor | None, mean: Tensor, stddev: Tensor | None, variance: Tensor | None, state: Tensor,
    lead: Sequence[int], with_variance: bool, with_cost: str, needed: Sequence[bool],
) -> Made:  # fmt: skip
    (B, H, NQ, D), (N, C) = mean.shape, k_shape[2:]
    sizes, amplified = Sizes(B, H, NQ, N, C, D), log_amplitude is not None
    plan = _direct_plan(sizes, with_variance, with_cost, amplified)
    kept, (_, scratch) = rooms(state, plan.kept), room(state, plan.backward)
    by_mean = torch.zeros_like(mean) if by_mean is None else by_mean
    d_k, d_v = token_major(B, H, N, C, mean), token_major(B, H, N, D, mean)
    parameters = dict(zip(_PARAMETERS, (noise, scale_q, scale_k), strict=True))
    of_noise, *scales = (scalars(x, lead) for x in parameters.values())
    prior = Prior(mean, of_noise, scales[0], log_amplitude, query_mask)
    by = _cost_backward(with_cost, by_key, by_cost, prior, kept, scratch, mean, C)
    spreads = [None if g is None else g.contiguous() for g in (by_stddev, by_variance, by_unit)]
    raw, K, tokens_k = kept["raw"], kept["K"], kept["tokens_k"]
    kernels_of("exact").direct_backward_kernel[(sizes.heads,)](
        view(by_mean), *spreads, view(mean), raw if stddev is None else stddev,
        raw if variance is None else variance, raw,
        *views(mask, query_mask), of_noise, *scales, kept["tokens_q"], tokens_k, kept["tokens_v"],
        kept.get("grams", tokens_k), kept.get("roots", tokens_k), K, kept.get("weights", K),
        kept.get("W", K), view(by.by_mean), by.by_explained, view(by.by_key), scratch["X"], scratch["OX"],
        scratch["E"], scratch["square"], scratch["unit_grad"], scratch["turned_v"],
        *views(by.d_q, d_k, d_v), by.d_log, by.found, sizes.heads, *sizes[1:],
        FACTORED=with_variance, KEY_SIGN=by.key_sign, **plan.padded, **launch("direct_backward", plan.side),
    )  # fmt: skip
    return {
        "q": by.d_q, "k": d_k, "v": d_v, "log_amplitude": by.d_log,
        **to_parameters(by.found, lead, parameters, needed[3:]),
    }  # fmt: skip


_DIRECT = Fused(
    "direct", _direct, ("mean", "variance", "key", "cost", "stddev", "unit"), _direct_backward,
    together=_PARAMETERS,
)  # fmt: skip
_DRAWN_DIRECT = with_draw(_DIRECT, "stddev", squared=False)  # whose square may overflow
