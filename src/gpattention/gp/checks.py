"""Argument checks of the mathematics: every error names the argument, its value and what was expected."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from gpattention.gp.errors import FARTHEST, NonFiniteError, TooFarApartError, describe_spread
from gpattention.gp.precision import checks_are_deferred
from gpattention.gp.shapes import broadcast


def check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """One of the names."""
    if value not in allowed:
        raise ValueError(f"expected {name} to be one of {', '.join(allowed)}, got {value!r}")


def check_jitter(jitter: float) -> None:
    """A perturbation of SGPA's inducing Gram matrix, which may be singular without it."""
    if not 0 < jitter < 1:
        raise ValueError(f"expected jitter in (0, 1), got {jitter}")


def check_observation_noise(value: float) -> None:
    """tau^2 as a number; 0 is the paper's."""
    if not 0 <= value < math.inf:
        raise ValueError(f"expected observation_noise >= 0 and finite, got {value}")


def check_tokens(name: str, x: Tensor, like: Tensor, *, same_dtype: bool = True) -> None:
    """A floating-point [..., N, C] tensor on the device, and usually of the type, of `like`."""
    if not isinstance(x, Tensor):
        raise ValueError(
            f"expected {name} to be a tensor, got {type(x).__name__}: torch.as_tensor makes one of it"
        )
    if x.ndim < 2 or not x.is_floating_point() or 0 in x.shape[-2:]:
        raise ValueError(
            f"expected {name} to be a floating-point [..., N, C] tensor with N, C >= 1, "
            f"got shape {tuple(x.shape)} and {x.dtype}"
        )
    if x.device != like.device:
        raise ValueError(f"expected {name} on {like.device} like q, got {x.device}")
    if same_dtype and x.dtype != like.dtype:
        raise ValueError(f"expected {name} of {like.dtype} like q, got {x.dtype}")


def expect(holds: bool, expectation: str, x: Tensor) -> None:
    """Raise unless `holds`, telling the shape found."""
    if not holds:
        raise ValueError(f"expected {expectation}, got shape {tuple(x.shape)}")


def common_lead(tensors: Mapping[str, Tensor]) -> torch.Size:
    """The leading axes all tensors broadcast to."""
    try:
        return broadcast(*(x.shape[:-2] for x in tensors.values()))
    except RuntimeError:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in tensors.items())
        raise ValueError(f"expected leading axes that broadcast together, got {shapes}") from None


def broadcasts_into(shape: torch.Size, lead: torch.Size) -> bool:
    """True if `shape` broadcasts to exactly `lead`."""
    try:
        return broadcast(shape, lead) == lead
    except RuntimeError:
        return False


def check_mask(name: str, mask: Tensor | None, lead: torch.Size, x: Tensor) -> None:
    """A bool mask whose axes can mean only one thing."""
    if mask is None:
        return
    # A [B, N] mask beside [B, H, N, C] tokens would broadcast over heads when B == H: refuse it.
    axes = (1, len(lead) + 1)
    fits = mask.ndim in axes and mask.shape[-1] == x.shape[-2]
    if mask.dtype != torch.bool or not fits or not broadcasts_into(mask.shape[:-1], lead):
        raise ValueError(
            f"expected {name} to be bool (True = real token) of shape [{x.shape[-2]}] or "
            f"{[*lead, x.shape[-2]]} with 1 allowed for leading axes (for a [B, N] mask pass "
            f"mask[:, None]), got shape {tuple(mask.shape)} and {mask.dtype}"
        )
    if mask.device != x.device:
        raise ValueError(f"expected {name} on {x.device} like its tokens, got {mask.device}")


def check_values(
    named: Mapping[str, Tensor],
    parameters: Mapping[str, Tensor],
    log_amplitude: Tensor | None,
    spread: Tensor | None = None,  # [] largest squared distance from the centre
    noise: Tensor | None = None,  # for the message about it
) -> None:
    """Non-finite tokens, parameters that are not positive, tokens too far apart; one read for all."""
    if checks_are_deferred(*named.values(), *parameters.values()):
        return
    if log_amplitude is not None:
        named = {**named, "log_amplitude": log_amplitude}
    # one pass instead of four: a finite sum has no NaN and no infinity in it; another may just be too large
    good = [x.detach().sum().isfinite() for x in named.values()]
    good += [((x > 0) & x.isfinite()).all() for x in parameters.values()]
    if spread is not None:
        good.append(~(spread > FARTHEST**2))
    verdict = torch.stack(good).tolist()
    for (name, x), fine in zip({**named, **parameters}.items(), verdict, strict=False):
        if fine:
            continue
        if name in parameters:
            bad_value = float(x.detach()[~((x > 0) & x.isfinite())][0])
            raise ValueError(f"expected {name} to be positive and finite, got {bad_value}")
        bad = int((~x.isfinite()).sum())
        if bad == 0:
            continue
        raise NonFiniteError(f"{name} holds {bad} non-finite numbers at real tokens")
    if spread is not None and not verdict[-1]:
        least = None if noise is None else float(noise.detach().min())
        raise TooFarApartError(describe_spread(float(spread) ** 0.5, least))


def check_amplitude(log_amplitude: Tensor) -> None:
    """The latent models multiply by a_i^2, which must stay finite; the direct ones keep logarithms."""
    if checks_are_deferred(log_amplitude) or log_amplitude.numel() == 0:
        return
    most = 0.5 * math.log(torch.finfo(log_amplitude.dtype).max) - 1
    largest = float(log_amplitude.detach().max())
    if largest > most:
        raise ValueError(
            f"log_amplitude reaches {largest:.1f}, whose squared amplitude overflows "
            f"{log_amplitude.dtype} (at most {most:.0f}): cap it with max_log_amplitude"
        )


def check_amplitude_shape(log_amplitude: Tensor, lead: torch.Size, q: Tensor) -> None:
    """[..., Q] that broadcasts against the leading axes."""
    fits = log_amplitude.ndim > 0 and log_amplitude.shape[-1] == q.shape[-2]
    if not fits or not broadcasts_into(log_amplitude.shape[:-1], lead):
        raise ValueError(
            f"expected log_amplitude of shape [..., {q.shape[-2]}] that broadcasts against the "
            f"leading axes {tuple(lead)}, got {tuple(log_amplitude.shape)}"
        )


def check_positive(name: str, value: Tensor) -> None:
    """A tensor of positive, finite numbers."""
    if checks_are_deferred(value):
        return
    good = (value > 0) & value.isfinite()
    if not bool(good.all()):
        raise ValueError(
            f"expected {name} to be positive and finite, got {float(value.detach()[~good].flatten()[0])}"
        )
