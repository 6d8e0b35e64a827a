"""The spread of a site, and the frame in which its kernel compares queries and keys (section 10).

Softmax weights leave an invertible A and two origins free; they are measured on calibration data.  The A with

    A^T A = S,   S = Sigma_q^-1 # Sigma_k   (the geometric mean of the two)

gives queries and keys one covariance and minimises E|A q|^2 + E|A^-T k|^2: the two sets are as near to each
other as possible, and the amplitudes of eq. 21 spread least.

The spread of one call of attention are the standard deviations of eq. 22:

    x_i = A (q_i - q0),  y_j = A^-T (k_j - k0);   x_i . y_j = q_i . k_j up to terms of i or of j alone
    u_i = 1 - |L^-1 kappa(y, x_i)|^2,             L = chol(kappa(y, y) + sigma^2 I)
    log a_i = 1/2 |x_i|^2 + q_i . k0 - lse_i                                                        (21)
    log std_i = log t + gamma (log a_i - a0) + 1/2 log u_i

gamma = 1 is eq. 22 exactly; a0 is a constant of the head that only sets the unit of t.  For gamma < 1 the
amplitude is tempered: the mean remains the host's, the covariance t^2 a_i^gamma a_j^gamma (kappa - ...)
remains positive semi-definite, and its variance still grows with t and sigma^2 and falls with every further
key, but mean and covariance are no longer those of one prior.  gamma = 0 is the posterior covariance of the
unit-amplitude process z_o at the queries, around the host's mean.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor

from gpattention.gp import (
    CausalVariance,
    UnitProcess,
    causal_unit_variance,
    direct_posterior,
    distance_log_amplitude,
    fill_rows,
    keep_rows,
    key_log_amplitude,
    query_exponent,
    query_log_amplitude,
    real_mean,
    unit_variance,
    why_not_fused,
)
from gpattention.hosts.families.base import AttentionCall, AttentionHook, Site
from gpattention.numerics import Tokens, checks_are_deferred, compute_dtype, full_precision
from gpattention.ops.exact import fused_direct

if TYPE_CHECKING:
    from gpattention.hosts.families.decoders import Past

Alignment: TypeAlias = Literal["none", "full"]
ALIGNMENTS: tuple[Alignment, ...] = ("none", "full")
MAX_KEYS = 256  # most keys to condition on, by default
TOGETHER = 2**27  # most entries of the matrices of several calls at once
RIDGE = 1e-2  # times the mean variance is added to each covariance, which may be singular


@dataclass(frozen=True)
class Frame:
    """Constants of one site."""

    q0: Tensor  # [H, C] mean query
    k0: Tensor  # [H, C] mean key
    A: Tensor  # [H, C, C] x = A (q - q0)
    inverse: Tensor  # [H, C, C] A^-1, so that y = A^-T (k - k0)
    unit: Tensor  # [H] root mean square of the values
    log_amplitude: Tensor  # [H] mean of log a_i: a0

    def to(self, device: torch.device | str) -> "Frame":
        """The same on another device."""
        return Frame(**{name: x.to(device) for name, x in vars(self).items()})


def aligning_maps(
    covariance_q: Tensor,  # [H, C, C]
    covariance_k: Tensor,  # [H, C, C]
    alignment: Alignment,
) -> tuple[Tensor, Tensor]:
    """A and its inverse.  [H, C, C] each"""
    width = covariance_q.shape[-1]
    eye = torch.eye(width, dtype=covariance_q.dtype, device=covariance_q.device).expand_as(covariance_q)
    if alignment == "none":
        return eye, eye

    def ridged(covariance: Tensor) -> Tensor:
        variance = covariance.diagonal(dim1=-2, dim2=-1).mean(-1)  # [H]
        return covariance + eye * (RIDGE * variance).clamp_min(1e-12)[:, None, None]

    root, unroot = _power(ridged(covariance_q), 0.5), _power(ridged(covariance_q), -0.5)
    mean = unroot @ _power(root @ ridged(covariance_k) @ root, 0.5) @ unroot  # S = Sigma_q^-1 # Sigma_k
    return _power(mean, 0.5), _power(mean, -0.5)


def measure_frames(
    sites: Sequence[Site], alignment: Alignment, run: Callable[[AttentionHook], object]
) -> tuple[Frame, ...]:
    """Frames of all sites, from two runs over the data: first moments, then mean amplitudes.

    `run(hook)` runs the calibration data.
    """
    every: list[dict[str, Any]] = [defaultdict(float) for _ in sites]  # sums, in float64
    frames: list[Frame] = []  # after the first run

    def hook(site: Site, call: AttentionCall) -> Tensor:
        """The host's mean, unchanged.  [B, H, Q, D]"""
        sums = every[site.index]
        real = torch.ones_like(call.k[:, :1, :, :1], dtype=torch.bool)  # [B, 1, K, 1]
        real = real if call.mask is None else real & call.mask[..., None]
        own = real if call.q.shape[-2] == call.k.shape[-2] else real.any(-2, keepdim=True)  # of queries
        if not frames:
            call = replace(call, k=call.per_query_head(call.k), v=call.per_query_head(call.v))
            for name, tokens, rows in (("q", call.q, own), ("k", call.k, real)):
                rows = rows.expand(-1, -1, tokens.shape[-2], -1)  # [B, 1, N, 1]
                x = torch.where(rows, tokens, 0.0).double()
                sums[name] += x.sum((0, 2))  # [H, C]
                sums[f"{name} square"] += torch.einsum("bhnc,bhnd->hcd", x, x)  # [H, C, C]
                sums[f"{name} count"] += rows.sum().double()
            sums["groups"] = call.groups
            sums["v square"] += torch.where(real, call.v, 0.0).double().square().mean(-1).sum((0, 2))  # [H]
        elif call.form != "rbf":
            amplitude = log_amplitude(call, kernel_inputs(call, frames[site.index]))  # [B, H, Q]
            sums["amplitude"] += torch.where(own[..., 0], amplitude, 0.0).sum((0, 2)).double()  # [H]
        return call.mean

    run(hook)
    frames = [_frame(sums, alignment) for sums in every]
    run(hook)
    for index, sums in enumerate(every):
        if "amplitude" in sums:
            mean = sums["amplitude"] / sums["q count"]
            frames[index] = replace(frames[index], log_amplitude=mean.float())
    return tuple(frames)


def _frame(sums: Mapping[str, Any], alignment: Alignment) -> Frame:
    """Origins, maps and unit of one site, with a mean amplitude of 0."""
    q0, k0 = (sums[name] / sums[f"{name} count"] for name in ("q", "k"))  # [H, C]
    of_q, of_k = (
        sums[f"{name} square"] / sums[f"{name} count"] - mean[..., :, None] * mean[..., None, :]
        for name, mean in (("q", q0), ("k", k0))
    )
    if (groups := sums["groups"]) > 1:  # heads that share keys share the map
        of_q = of_q.unflatten(0, (-1, groups)).mean(1).repeat_interleave(groups, 0)
    maps = aligning_maps(of_q, of_k, alignment)
    unit = (sums["v square"] / sums["k count"]).clamp_min(1e-12).sqrt()  # [H]
    return Frame(*(x.float() for x in (q0, k0, *maps, unit, torch.zeros_like(unit))))


def _power(matrix: Tensor, exponent: float) -> Tensor:
    """The power of a symmetric positive definite matrix.  [H, C, C]"""
    values, vectors = torch.linalg.eigh(0.5 * (matrix + matrix.mT))
    return (vectors * values.clamp_min(1e-12)[..., None, :] ** exponent) @ vectors.mT


@dataclass(frozen=True)
class Prior:
    """The settings of the heads of one site."""

    scale: Tensor  # [H] t
    noise: Tensor  # [H] sigma^2
    power: Tensor  # [H] gamma in [0, 1]
    tempered: bool = True  # whether amplitudes count: a power may be other than 0


@full_precision
def log_stddev(
    call: AttentionCall,
    prior: Prior,
    frame: Frame | None = None,
    *,
    max_keys: int = MAX_KEYS,
    max_log_amplitude: float | None = None,
) -> Tensor:
    """log std_i of every token and head, for one dimension of the values.  [B, H, Q]

    Without a frame the unit of t, q0, k0 and a0 come from the sequence itself.  More than `max_keys` keys are
    evenly thinned to that many, with which u is never smaller than with all of them.  `max_log_amplitude`
    caps gamma (log a_i - a0).
    """
    inputs = kernel_inputs(call, frame)
    u, _ = _unit_variances(call, inputs, prior.noise, max_keys)  # [B, H, Q]
    log_std = prior.scale.to(u)[:, None].log() + _log_unit(call, frame)  # [H, 1] or [B, H, 1] or [B, H, Q]
    log_std = log_std + 0.5 * u.log()  # [B, H, Q]
    if call.form != "rbf" and prior.tempered:
        amplitude = log_amplitude(call, inputs)  # [B, H, Q]
        # no cap is an infinite one
        most = torch.inf if max_log_amplitude is None else max_log_amplitude
        above = amplitude - _reference(call, amplitude, frame)
        log_std = log_std + (prior.power.to(u)[:, None] * above).clamp_max(most)
    if call.past is not None:
        return torch.where(call.past.seen, log_std, -torch.inf)
    if inputs.mask is None:
        return log_std
    return torch.where(inputs.mask.any(-1, keepdim=True), log_std, -torch.inf)


@full_precision
def unit_variances(
    call: AttentionCall, noise: Tensor, frame: Frame | None, max_keys: int = MAX_KEYS
) -> tuple[Tensor, Tensor | None]:
    """u_i alone [B, H, Q] and, of causal attention, the noisy variance of each row's own key [B, G, Q]."""
    return _unit_variances(call, kernel_inputs(call, frame), noise, max_keys)


def _unit_variances(
    call: AttentionCall, inputs: "KernelInputs", noise: Tensor, max_keys: int
) -> tuple[Tensor, Tensor | None]:
    """The same for queries and keys in their frame."""
    if call.past is not None:
        (found,) = causal_variances([placed(call, inputs, noise)], max_keys)
        return found.unit, found.of_keys
    y, mask = thinned(inputs.y, inputs.mask, max_keys)
    return _unit_variance(inputs.x, y, mask, noise.to(y)), None


@dataclass(frozen=True, eq=False)
class Placed:
    """One call of causal attention in its frame; each head of keys serves H / G heads of queries."""

    x: Tensor  # [B, H, Q, C]
    y: Tensor  # [B, G, K, C]
    noise: Tensor  # [G]
    past: "Past"


def placed(call: AttentionCall, inputs: "KernelInputs", noise: Tensor) -> Placed:
    """A causal call in its frame; heads of queries that share keys, and noise [H], share a factor."""
    assert call.past is not None
    x, y, groups = inputs.x, inputs.y, call.groups
    if groups > 1 and bool((noise.unflatten(0, (-1, groups)) == noise[::groups, None]).all()):
        noise = noise[::groups]
    else:
        y = call.per_query_head(y)
    return Placed(x, y, noise.to(y), call.past)


@full_precision
def causal_variances(calls: Sequence[Placed], max_keys: int) -> list[CausalVariance]:
    """Variances of several calls; those of one shape and past are one batch of matrices, if memory allows."""
    found: dict[int, CausalVariance] = {}
    alike: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for n, call in enumerate(calls):
        alike[id(call.past), call.x.shape, call.y.shape].append(n)
    for numbers in alike.values():
        first = calls[numbers[0]]
        items, heads, queries, _ = first.x.shape
        entries = items * (heads + first.y.shape[1]) * queries * min(first.y.shape[2], max_keys + 1)
        most = max(1, TOGETHER // entries)
        for start in range(0, len(numbers), most):
            some = numbers[start : start + most]
            x, y = first.x, first.y
            if len(numbers) > 1:
                x, y = (torch.cat([getattr(calls[n], name) for n in some]) for name in ("x", "y"))
            noise = torch.stack([calls[n].noise for n in some]).repeat_interleave(items, 0)  # [S B, G]
            sight = first.past.sight(max_keys, len(some))
            whole = causal_unit_variance(x, y, noise=noise, sight=sight)
            parts = zip(whole.unit.split(items), whole.of_keys.split(items), strict=True)
            found |= {n: CausalVariance(*part) for n, part in zip(some, parts, strict=True)}
    return [found[n] for n in range(len(calls))]


@dataclass(frozen=True, eq=False)
class KernelInputs:
    """Queries and keys of a call, as attended and in their frame."""

    q: Tensor  # [B, H, Q, C] as attended
    k: Tensor  # [B, G, K, C] as attended, padding zeroed; G = H where heads share no keys
    x: Tensor  # [B, H, Q, C]
    y: Tensor  # [B, G, K, C]
    q0: Tensor  # [H, 1, C] or [B, H, 1, C]
    k0: Tensor  # the same
    mask: Tensor | None  # [B, 1, K]


def kernel_inputs(call: AttentionCall, frame: Frame | None) -> KernelInputs:
    """Centre and align the queries and keys; padding has no influence."""
    dtype = compute_dtype(call.q.dtype)
    q, k = call.q.to(dtype), keep_rows(call.k.to(dtype), call.mask)
    if frame is None and call.past is not None:  # means over tokens would look ahead
        q0 = k0 = q.new_zeros(1, 1, q.shape[-1])
    elif frame is None:
        q0, k0 = real_mean(q, query_mask(call)), real_mean(k, call.mask)
    else:
        q0, k0 = frame.q0.to(q)[:, None], frame.k0.to(q)[:: call.groups, None]
    if call.form in ("rows", "rbf"):  # distances do not depend on origins
        return KernelInputs(q, k, q, fill_rows(k, k0, call.mask), q0, k0, call.mask)
    if frame is None:
        x, y = q - q0, k - k0
    else:
        x, y = (q - q0) @ frame.A.to(q).mT, (k - k0) @ frame.inverse.to(q)[:: call.groups]
    return KernelInputs(q, k, x, keep_rows(y, call.mask), q0, k0, call.mask)


def _log_unit(call: AttentionCall, frame: Frame | None) -> Tensor:
    """Log of the values' root mean square, [H, 1] or [B, H, 1], or of those each row sees, [B, H, Q]."""
    if frame is not None:
        return frame.unit.to(call.v.device, compute_dtype(call.v.dtype))[:, None].log()
    v = keep_rows(call.v.to(compute_dtype(call.v.dtype)), call.mask)
    if call.past is not None:
        return call.per_query_head(call.past.log_unit(v))
    power = real_mean(v.square().mean(-1, keepdim=True), call.mask)[..., 0]  # [B, H, 1]
    return 0.5 * power.clamp_min(1e-12).log()


def _unit_variance(
    x: Tensor,  # [B, H, Q, C]
    y: Tensor,  # [B, H, K, C]
    mask: Tensor | None,  # [B, 1, K]
    noise: Tensor,  # [H]
) -> Tensor:
    """u_i of eq. 22.  [B, H, Q]"""
    tokens, channels = max(x.shape[-2], y.shape[-2]), x.shape[-1]
    if why_not_fused(x, tokens=tokens, channels=channels) is None:
        noise, values = noise.to(x), y[..., :1]  # of which nothing is asked: the mean is the host's
        if checks_are_deferred(x):  # looking at arguments takes longer than starting the kernels
            one = x.new_ones(1, 1)
            numbers = noise[:, None, None], one, one
            given = Tokens(x, y, None, values, (), *numbers, mask, None, None, x.dtype)
            unit = fused_direct(given, with_variance=True).unit
            assert unit is not None
            return unit
        # every query counts, as padding has a spread too  [B, 1, Q]
        everyone = None if mask is None else mask.new_ones(mask.shape[0], 1, x.shape[-2])
        masks: dict[str, Any] = {"mask": mask, "query_mask": everyone}
        return direct_posterior(x, y, values, noise=noise, **masks, with_variance=True).variance
    return unit_variance(UnitProcess(x, y, noise.to(x)[:, None, None], mask))


def thinned(y: Tensor, mask: Tensor | None, most: int) -> tuple[Tensor, Tensor | None]:
    """At most `most` of the real keys, evenly spaced.  [B, H, most, C], [B, 1, most]"""
    if y.shape[-2] <= most:
        return y, mask
    place = torch.arange(most, device=y.device)
    if mask is None:
        return y[..., place * y.shape[-2] // most, :], None
    order = mask[:, 0].to(torch.int8).argsort(dim=-1, descending=True, stable=True)  # [B, K] real keys first
    real = mask[:, 0].sum(-1, keepdim=True)  # [B, 1]
    spread = torch.where(real > most, place * real // most, place)  # [B, most]
    index = order.gather(-1, spread)[:, None, :, None]  # [B, 1, most, 1]
    chosen = y.gather(-2, index.expand(-1, y.shape[1], -1, y.shape[-1]))
    return chosen, (place < real)[:, None]


def log_amplitude(call: AttentionCall, inputs: KernelInputs) -> Tensor:
    """log a_i without log t, determined by the host's mean: eq. 21, or eq. 25 for kernel rows.  [B, H, Q]"""
    if call.past is not None:
        k0 = inputs.k0 if len(inputs.k0) == 1 else inputs.k0.repeat_interleave(call.groups, 0)
        return query_exponent(inputs.q, inputs.x, k0) - call.past.log_sum_exp(call, inputs.q, inputs.k)
    if call.form == "rows":
        return distance_log_amplitude(inputs.x, inputs.y, mask=inputs.mask)
    if call.form == "exp_dot":
        return query_exponent(inputs.q, inputs.x, inputs.k0)
    return query_log_amplitude(inputs.q, inputs.k, inputs.x, inputs.k0, mask=inputs.mask)


def process_mean(call: AttentionCall, frame: Frame | None) -> Tensor:
    """sum_j a_i b_j kappa(x_i, y_j) v_j, the posterior mean of the process.  [B, H, Q, D]

    It equals the host's mean up to rounding in every frame; exponents cancel, so that they are float64.
    """
    if call.cap is not None:
        raise ValueError("expected logits that are dot products, got soft-capped ones: they are no process's")
    call = call.map(Tensor.double)
    call = replace(call, k=call.per_query_head(call.k), v=call.per_query_head(call.v), groups=1)
    inputs = kernel_inputs(call, frame)
    exponent = -0.5 * torch.cdist(inputs.x, inputs.y).square()  # [B, H, Q, K]
    if call.form != "rbf":
        exponent = exponent + log_amplitude(call, inputs)[..., None]
    if call.form in ("softmax", "exp_dot"):
        exponent = exponent + key_log_amplitude(inputs.k, inputs.y, inputs.q0, inputs.k0)[..., None, :]
    if call.amplitude is not None:
        exponent = exponent + call.amplitude.to(exponent)[:, None, None].log()
    if call.past is not None:
        exponent = exponent.masked_fill(~call.past.rows(0, call.past.queries), -torch.inf)
    elif call.mask is not None:
        exponent = exponent.masked_fill(~call.mask[..., None, :], -torch.inf)
    return exponent.exp() @ keep_rows(call.v, call.mask)


def _reference(call: AttentionCall, amplitude: Tensor, frame: Frame | None) -> Tensor:
    """a0: the mean of log a_i, over calibration data or over the tokens of the call.  [H, 1] or [B, H, 1]"""
    if frame is not None:
        return frame.log_amplitude.to(amplitude)[:, None]
    if call.past is not None:  # a mean would look ahead
        return amplitude.new_zeros(())
    return real_mean(amplitude[..., None], query_mask(call))[..., 0]


def query_mask(call: AttentionCall) -> Tensor | None:
    """Real queries: the real keys in self-attention, recognised by equal lengths.  [B, 1, Q]"""
    return call.mask if call.q.shape[-2] == call.k.shape[-2] else None
