"""Arguments of all posteriors: checked, masked and converted to the computing type.

Every error names the argument, its value and what was expected.  Every posterior, density and divergence
starts here, so that they agree on the meaning of a mask: `mask` [..., K] marks the real keys, latent inputs
and values, `query_mask` [..., Q] the real queries; True = real token.  Padded rows are overwritten, never
multiplied, so NaN in them is harmless forward and backward.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from gpattention.checks import check_tensor
from gpattention.numerics import (
    FARTHEST,
    NonFiniteError,
    Tokens,
    TooFarApartError,
    broadcast,
    checks_are_deferred,
    compute_dtype,
    describe_spread,
)


def check_observation_noise(value: float) -> None:
    """Refuse a tau^2 that is negative or not finite; the paper's is 0."""
    if not 0 <= value < math.inf:
        raise ValueError(f"expected observation_noise >= 0 and finite, got {value}")


def check_tokens(name: str, x: Tensor, like: Tensor, *, same_dtype: bool = True) -> None:
    """Require a floating-point [..., N, C] tensor on the device, and usually of the type, of `like`."""
    check_tensor(name, x)
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
    """Raise `ValueError` with the shape of x unless `holds`."""
    if not holds:
        raise ValueError(f"expected {expectation}, got shape {tuple(x.shape)}")


def common_lead(tensors: Mapping[str, Tensor]) -> torch.Size:
    """The leading axes that all tensors broadcast to."""
    try:
        return broadcast(*(x.shape[:-2] for x in tensors.values()))
    except RuntimeError:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in tensors.items())
        raise ValueError(f"expected leading axes that broadcast together, got {shapes}") from None


def broadcasts_into(shape: torch.Size, lead: torch.Size) -> bool:
    """Whether `shape` broadcasts to exactly `lead`."""
    try:
        return broadcast(shape, lead) == lead
    except RuntimeError:
        return False


def check_mask(name: str, mask: Tensor | None, lead: torch.Size, x: Tensor) -> None:
    """Require a bool mask whose axes can mean only one thing."""
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
    parameters: Mapping[str, Tensor] | None = None,
    spread: Tensor | None = None,  # [] largest squared distance from the centre
    noise: Tensor | None = None,  # for the message about the spread
) -> None:
    """Refuse non-finite tokens, parameters that are not positive and tokens too far apart, after one read."""
    parameters = parameters or {}
    # one pass instead of four: a finite sum has no NaN and no infinity in it; another may just be too large
    good = [x.detach().sum().isfinite() for x in named.values()]
    good += [((x > 0) & x.isfinite()).all() for x in parameters.values()]
    if spread is not None:
        good.append(~(spread > FARTHEST**2))
    verdict = torch.stack(good).tolist()
    for (name, x), fine in zip({**named, **parameters}.items(), verdict, strict=False):
        if not fine and name in parameters:
            check_positive(name, x)  # raises with the value
        elif not fine and (bad := int((~x.isfinite()).sum())):
            raise NonFiniteError(f"{name} holds {bad} non-finite numbers at real tokens")
    if spread is not None and not verdict[-1]:
        least = None if noise is None else float(noise.detach().min())
        raise TooFarApartError(describe_spread(float(spread) ** 0.5, least))


def check_amplitude(log_amplitude: Tensor) -> None:
    """Refuse amplitudes whose square, with which the latent models multiply, overflows."""
    if checks_are_deferred(log_amplitude) or log_amplitude.numel() == 0:
        return
    most = 0.5 * math.log(torch.finfo(log_amplitude.dtype).max) - 1
    largest = float(log_amplitude.detach().max())
    if largest > most:
        raise ValueError(
            f"log_amplitude reaches {largest:.1f}, whose squared amplitude overflows "
            f"{log_amplitude.dtype} (at most {most:.0f}): cap it with max_log_amplitude"
        )


def check_positive(name: str, value: Tensor) -> None:
    """Require positive and finite numbers."""
    if checks_are_deferred(value):
        return
    good = (value > 0) & value.isfinite()
    if not bool(good.all()):
        raise ValueError(
            f"expected {name} to be positive and finite, got {float(value.detach()[~good].flatten()[0])}"
        )


Scalar = Tensor | float  # one number, or one per leading axis


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    noise: Scalar,
    o: Tensor | None = None,
    inducing: Mapping[str, Tensor] | None = None,
    scale_q: Scalar = 1.0,
    scale_k: Scalar = 1.0,
    mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    log_amplitude: Tensor | None = None,
    causal: bool = False,
    scale_name: str = "scale_q",
    mask_tokens: bool = True,
    distances: bool = True,
    look: bool = True,
) -> Tokens:
    """All arguments checked, converted to the computing type and masked.

    `scale_name` is the caller's name of `scale_q`, for errors.  `mask_tokens=False` leaves padded tokens as
    they are, for fused kernels, which mask what they read; `masked` overwrites them later.  With
    `distances=False` tokens may lie any distance apart, and with `look=False` their values are left to the
    caller.
    """
    tokens = {"q": q, "k": k, "v": v} | ({} if o is None else {"o": o})
    inducing = dict(inducing or {})
    given = tokens | inducing
    for name, x in given.items():
        check_tokens(name, x, like=q, same_dtype=name in tokens)
    for name, x in given.items():
        if name != "v":
            expect(x.shape[-1] == q.shape[-1], f"{name} of width {q.shape[-1]} like q", x)
        if name in ("v", "o"):
            expect(x.shape[-2] == k.shape[-2], f"{name} with {k.shape[-2]} tokens like k", x)
    if causal:
        expect(q.shape[-2] == k.shape[-2], f"q with {k.shape[-2]} tokens like k (causal)", q)

    lead = common_lead(given)
    check_mask("mask", mask, lead, k)
    check_mask("query_mask", query_mask, lead, q)
    if query_mask is None and q.shape[-2] == k.shape[-2]:
        query_mask = mask
    dtype = compute_dtype(q.dtype)
    parameters = {
        name: as_parameter(name, value, lead, q, dtype)
        for name, value in (("noise", noise), (scale_name, scale_q), ("scale_k", scale_k))
    }
    if log_amplitude is not None:
        fits = log_amplitude.ndim > 0 and log_amplitude.shape[-1] == q.shape[-2]
        expected = f"log_amplitude of shape [..., {q.shape[-2]}] that broadcasts against {tuple(lead)}"
        expect(fits and broadcasts_into(log_amplitude.shape[:-1], lead), expected, log_amplitude)
        log_amplitude = keep_real(log_amplitude.to(dtype), query_mask)
    if look and not checks_are_deferred(q):
        masks = {"q": query_mask} | dict.fromkeys(("k", "o", "v"), mask)
        real = {name: keep_rows(x, masks.get(name)) for name, x in given.items()}
        check_values(
            real if log_amplitude is None else {**real, "log_amplitude": log_amplitude},
            parameters,
            _spread(given, masks) if dtype == torch.float32 and distances else None,
            None if v is k else parameters["noise"],  # amplitudes have neither values nor noise
        )
    if o is not None and log_amplitude is not None:
        check_amplitude(log_amplitude)
    checked = Tokens(
        q=q.to(dtype), k=k.to(dtype), o=None if o is None else o.to(dtype), v=v.to(dtype),
        inducing=tuple(x.to(dtype) for x in inducing.values()), noise=parameters["noise"],
        scale_q=parameters[scale_name], scale_k=parameters["scale_k"], mask=mask, query_mask=query_mask,
        log_amplitude=log_amplitude, dtype=q.dtype,
    )  # fmt: skip
    return masked(checked) if mask_tokens else checked


def _spread(given: Mapping[str, Tensor], masks: Mapping[str, Tensor | None]) -> Tensor:
    """The largest squared distance of a real token from the centre of inducing inputs, or of keys.  []"""
    inputs = {name: x for name, x in given.items() if name != "v"}
    about = next((name for name in inputs if name not in ("q", "k", "o")), "k")
    centre = real_mean(inputs[about].detach().float(), masks.get(about))  # [..., 1, C]
    squares = [
        keep_rows(x.detach().float() - centre, masks.get(name)).square().sum(-1).max()
        for name, x in inputs.items()
        if x.numel()
    ]
    return torch.stack(squares).max() if squares else centre.new_zeros(())


def masked(t: Tokens) -> Tokens:
    """Tokens with padding overwritten: values by 0, all others by the centre of the real ones.

    Kernels centre their inputs, in the type that the spread needs, since a token moved in float32 is rounded.
    Padding at the centre costs them no digits.
    """
    if t.mask is None and t.query_mask is None:
        return t
    # inducing inputs have no batch axis, and the centre must not gain one
    centre = t.inducing[0].detach().mean(-2, keepdim=True) if t.inducing else real_mean(t.k.detach(), t.mask)
    return replace(
        t,
        q=fill_rows(t.q, centre, t.query_mask),
        k=fill_rows(t.k, centre, t.mask),
        o=None if t.o is None else fill_rows(t.o, centre, t.mask),
        v=keep_rows(t.v, t.mask),
    )


def keep_rows(x: Tensor, mask: Tensor | None) -> Tensor:
    """Rows of padded tokens overwritten with 0 (section 5).

    Args:
        x: [..., N, X].
        mask: [..., N], True = real token; None keeps all.

    Returns:
        [..., N, X].
    """
    return x if mask is None else torch.where(mask[..., None], x, 0.0)


def fill_rows(x: Tensor, row: Tensor, mask: Tensor | None) -> Tensor:
    """Rows of padded tokens overwritten with another (section 5).

    Args:
        x: [..., N, X].
        row: [..., 1, X].
        mask: [..., N], True = real token; None keeps all.

    Returns:
        [..., N, X].
    """
    return x if mask is None else torch.where(mask[..., None], x, row)


def keep_real(x: Tensor, mask: Tensor | None) -> Tensor:
    """Numbers of padded tokens overwritten with 0.  [..., N]"""
    return x if mask is None else torch.where(mask, x, 0.0)


def keep_pairs(K: Tensor, rows: Tensor | None, columns: Tensor | None) -> Tensor:
    """K with rows and columns of padded tokens overwritten with 0 (section 5).  [..., N, M]"""
    K = keep_rows(K, rows)
    return K if columns is None else torch.where(columns[..., None, :], K, 0.0)


def real_mean(x: Tensor, mask: Tensor | None) -> Tensor:
    """Mean over real tokens (section 5).

    Args:
        x: [..., N, X].
        mask: [..., N], True = real token; None counts all.

    Returns:
        [..., 1, X]; 0 where there are none.
    """
    if mask is None:
        return x.mean(-2, keepdim=True)
    total = keep_rows(x, mask).sum(-2, keepdim=True)
    return total / mask.sum(-1).clamp_min(1)[..., None, None]


def with_diagonal(K: Tensor, diagonal: Scalar, mask: Tensor | None = None) -> Tensor:
    """K + diagonal I on real tokens, identity on padded ones (section 5).  [..., N, N]

    The noise is added *before* masking, so that a padded Cholesky pivot is exactly 1 and adds
    nothing to a log determinant.
    """
    eye = torch.eye(K.shape[-1], dtype=K.dtype, device=K.device)
    K = K + diagonal * eye
    if mask is None:
        return K
    return torch.where(mask[..., :, None] & mask[..., None, :], K, eye)


def expanded(*tensors: Tensor) -> list[Tensor]:
    """All tensors [..., N, X] expanded to their common leading axes; gradients are summed back."""
    lead = broadcast(*(x.shape[:-2] for x in tensors))
    return [x.expand(*lead, *x.shape[-2:]) for x in tensors]


def as_parameter(name: str, value: Scalar, lead: torch.Size, like: Tensor, dtype: torch.dtype) -> Tensor:
    """A positive number, or one per leading axis, as a tensor [..., 1, 1]."""
    if not isinstance(value, Tensor):
        check_parameter(name, value)
        return torch.full((1, 1), float(value), dtype=dtype, device=like.device)
    if value.device != like.device:
        raise ValueError(f"expected {name} on {like.device} like q, got {value.device}")
    if not value.is_floating_point() or not broadcasts_into(value.shape, lead):
        raise ValueError(
            f"expected {name} to be a floating-point scalar or tensor that broadcasts against the "
            f"leading axes {tuple(lead)}, got shape {tuple(value.shape)} and {value.dtype}"
        )
    return value.to(dtype)[..., None, None]


def check_parameter(name: str, value: Scalar) -> None:
    """Require positive and finite numbers; `as_parameter` checks the shape, once leading axes are known."""
    if isinstance(value, Tensor):
        check_positive(name, value)
    elif not 0 < value < float("inf"):
        raise ValueError(f"expected {name} to be positive and finite, got {value}")


def observation_variance(observation_noise: Scalar | None, t: Tokens) -> Tensor:
    """tau^2 as [..., 1, 1]: sigma^2 itself for None; 0.0 is allowed."""
    if observation_noise is None:
        return t.noise
    if not isinstance(observation_noise, Tensor):
        check_observation_noise(observation_noise)
        return torch.full_like(t.noise, observation_noise)
    lead = broadcast(t.q.shape[:-2], t.k.shape[:-2], t.v.shape[:-2])
    tau = as_parameter("observation_noise", observation_noise, lead, t.q, t.v.dtype)
    bad = ~((tau >= 0) & tau.isfinite())
    if not checks_are_deferred(tau) and bool(bad.any()):
        check_observation_noise(float(tau.detach()[bad][0]))  # raises
    return tau


def check_delta(delta: float) -> None:
    """Refuse a delta outside [0, 1), the perturbation of a Gram matrix of unit diagonal."""
    if not 0 <= delta < 1:
        raise ValueError(f"expected delta in [0, 1), got {delta}")


def key_noise(t: Tokens) -> Tensor:
    """sigma^2 / s_k^2, on which it depends whether M_k has a factor in floating point.  [..., 1, 1]"""
    return t.noise.detach() / t.scale_k.detach().square()
