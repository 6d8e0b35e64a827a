"""The spread behind one call of attention: standard deviations of eq. 22, and the freedoms it leaves.

    x_i = A (q_i - q0),  y_j = A^-T (k_j - k0);   x_i . y_j = q_i . k_j up to terms of i or of j alone
    u_i = 1 - |L^-1 kappa(y, x_i)|^2,             L = chol(kappa(y, y) + sigma^2 I)
    log a_i = 1/2 |x_i|^2 + q_i . k0 - lse_i                                                        (21)
    log std_i = log t + gamma (log a_i - a0) + 1/2 log u_i

gamma = 1 is eq. 22 exactly, a0 being a constant of the head that only names the unit of t.  For gamma < 1 the
amplitude is tempered: the mean is still the host's, the covariance t^2 a_i^gamma a_j^gamma (kappa - ...)
still positive semi-definite, its variance still grows with t, falls with every further key and rises with
sigma^2, but mean and covariance are no longer those of one prior.  gamma = 0 is the posterior covariance of
the unit-amplitude process z_o at the queries, put around the host's mean.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gpattention.adopt.attended import Attended
from gpattention.adopt.frames import Frame
from gpattention.gp import direct_posterior, why_not_fused
from gpattention.gp.inputs import fill_rows, keep_rows, real_mean
from gpattention.gp.precision import compute_dtype, full_precision
from gpattention.gp.softmax_amplitude import (
    distance_log_amplitude,
    key_log_amplitude,
    query_exponent,
    query_log_amplitude,
)
from gpattention.gp.unit_process import UnitProcess, unit_variance

MAX_KEYS = 256  # keys that are conditioned on unless told otherwise


@dataclass(frozen=True)
class Prior:
    """What may be chosen for the heads of one site."""

    scale: Tensor  # [H] t
    noise: Tensor  # [H] sigma^2
    power: Tensor  # [H] gamma in [0, 1]


@full_precision
def log_stddev(
    told: Attended,
    prior: Prior,
    frame: Frame | None = None,
    *,
    max_keys: int = MAX_KEYS,
    max_log_amplitude: float | None = None,
) -> Tensor:
    """log std_i of every token and head, for one dimension of the values.  [B, H, Q]

    Without a frame the unit of t, q0, k0 and a0 come from the sequence itself.  More than `max_keys` keys are
    thinned to that many, evenly: then u is never smaller than with all of them.  `max_log_amplitude` caps
    gamma (log a_i - a0).
    """
    placed = place(told, frame)
    y, mask = placed.y, placed.mask
    if y.shape[-2] > max_keys:
        y, mask = thinned(y, mask, max_keys)
    u = _unit_variance(placed.x, y, mask, prior.noise)  # [B, H, Q]
    log_std = prior.scale.to(u)[:, None].log() + 0.5 * u.log() + placed.log_unit  # [B, H, Q]
    if told.form != "rbf" and _is_used(prior.power):
        amplitude = log_amplitude(told, placed)  # [B, H, Q]
        tempered = prior.power.to(u)[:, None] * (amplitude - _reference(told, amplitude, frame))
        if max_log_amplitude is not None:
            tempered = tempered.clamp_max(max_log_amplitude)
        log_std = log_std + tempered
    if placed.mask is None:
        return log_std
    return torch.where(placed.mask.any(-1, keepdim=True), log_std, -torch.inf)


@dataclass(frozen=True, eq=False)
class Placed:
    """Queries and keys where the kernel sees them."""

    q: Tensor  # [B, H, Q, C] as attended
    k: Tensor  # [B, H, K, C] as attended, padding zeroed
    x: Tensor  # [B, H, Q, C]
    y: Tensor  # [B, H, K, C]
    q0: Tensor  # [H, 1, C] or [B, H, 1, C]
    k0: Tensor  # the same
    mask: Tensor | None  # [B, 1, K]
    log_unit: Tensor  # [H, 1] or [B, H, 1]: log of the values' root mean square


def place(told: Attended, frame: Frame | None) -> Placed:
    """Centre and align the queries and keys; padding counts for nothing, whatever is written there."""
    dtype = compute_dtype(told.q.dtype)
    q, k, v = told.q.to(dtype), keep_rows(told.k.to(dtype), told.mask), keep_rows(told.v.to(dtype), told.mask)
    if frame is None:
        log_unit = (
            0.5 * real_mean(v.square().mean(-1, keepdim=True), told.mask)[..., 0].clamp_min(1e-12).log()
        )
        q0, k0 = real_mean(q, _query_mask(told)), real_mean(k, told.mask)
    else:
        log_unit = frame.unit.to(q)[:, None].log()
        q0, k0 = frame.q0.to(q)[:, None], frame.k0.to(q)[:, None]
    if told.form in ("rows", "rbf"):  # distances, which know no origin
        return Placed(q, k, q, fill_rows(k, k0, told.mask), q0, k0, told.mask, log_unit)
    if frame is None:
        x, y = q - q0, k - k0
    else:
        x, y = (q - q0) @ frame.A.to(q).mT, (k - k0) @ frame.inverse.to(q)
    return Placed(q, k, x, keep_rows(y, told.mask), q0, k0, told.mask, log_unit)


def _unit_variance(
    x: Tensor,  # [B, H, Q, C]
    y: Tensor,  # [B, H, K, C]
    mask: Tensor | None,  # [B, 1, K]
    noise: Tensor,  # [H]
) -> Tensor:
    """u_i of eq. 22.  [B, H, Q]"""
    tokens, channels = max(x.shape[-2], y.shape[-2]), x.shape[-1]
    if why_not_fused(x, tokens=tokens, channels=channels) is None:
        none = torch.zeros_like(y[..., :1])  # of values: the mean is the host's
        unit = direct_posterior(
            x, y, none, noise=noise.to(x), mask=mask, query_mask=_everyone(x, mask), with_variance=True
        )
        return unit.variance
    return unit_variance(UnitProcess(x, y, noise.to(x)[:, None, None], mask))


def _everyone(x: Tensor, mask: Tensor | None) -> Tensor | None:
    """The mask of queries that says so in full, as padding too has a spread.  [B, 1, Q]"""
    return None if mask is None else mask.new_ones(mask.shape[0], 1, x.shape[-2])


def thinned(y: Tensor, mask: Tensor | None, most: int) -> tuple[Tensor, Tensor | None]:
    """`most` of the real keys, evenly spaced.  [B, H, most, C], [B, 1, most]"""
    place = torch.arange(most, device=y.device)
    if mask is None:
        return y[..., place * y.shape[-2] // most, :], None
    order = mask[:, 0].to(torch.int8).argsort(dim=-1, descending=True, stable=True)  # [B, K] real keys first
    real = mask[:, 0].sum(-1, keepdim=True)  # [B, 1]
    spread = torch.where(real > most, place * real // most, place)  # [B, most]
    index = order.gather(-1, spread)[:, None, :, None]  # [B, 1, most, 1]
    chosen = y.gather(-2, index.expand(-1, y.shape[1], -1, y.shape[-1]))
    return chosen, (place < real)[:, None]


def log_amplitude(told: Attended, placed: Placed) -> Tensor:
    """log a_i but for log t, which the host's mean fixes: eq. 21, or eq. 25 for kernel rows.  [B, H, Q]"""
    q, k, x, k0, mask = placed.q, placed.k, placed.x, placed.k0, placed.mask
    if told.form == "rows":
        return distance_log_amplitude(x, placed.y, mask=mask)
    if told.form == "exp_dot":
        return query_exponent(q, x, k0)
    return query_log_amplitude(q, k, x, k0, mask=mask)


def process_mean(told: Attended, frame: Frame | None) -> Tensor:
    """sum_j a_i b_j kappa(x_i, y_j) v_j, the posterior mean as the process has it.  [B, H, Q, D]

    It equals the host's mean to rounding whatever the frame: exponents cancel, so they are float64.
    """
    told = Attended(
        told.mean, told.q.double(), told.k.double(), told.v.double(), told.mask, told.form, told.amplitude
    )
    placed = place(told, frame)
    exponent = -0.5 * torch.cdist(placed.x, placed.y).square()  # [B, H, Q, K]
    if told.form != "rbf":
        exponent = exponent + log_amplitude(told, placed)[..., None]
    if told.form in ("softmax", "exp_dot"):
        exponent = exponent + key_log_amplitude(placed.k, placed.y, placed.q0, placed.k0)[..., None, :]
    if told.amplitude is not None:
        exponent = exponent + told.amplitude.to(exponent)[:, None, None].log()
    if told.mask is not None:
        exponent = exponent.masked_fill(~told.mask[..., None, :], -torch.inf)
    return exponent.exp() @ keep_rows(told.v, told.mask)


def _reference(told: Attended, amplitude: Tensor, frame: Frame | None) -> Tensor:
    """a0: the mean of log a_i, over calibration data or over the tokens at hand.  [H, 1] or [B, H, 1]"""
    if frame is not None:
        return frame.log_amplitude.to(amplitude)[:, None]
    return real_mean(amplitude[..., None], _query_mask(told))[..., 0]


def _query_mask(told: Attended) -> Tensor | None:
    """Real queries: in self-attention, which equal numbers give away, the real keys.  [B, 1, Q]"""
    return told.mask if told.q.shape[-2] == told.k.shape[-2] else None


def _is_used(power: Tensor) -> bool:
    return power.requires_grad or bool((power != 0).any())
