"""One place where arguments are checked, masked and raised to the computing type.

Every posterior, density and divergence starts here, so that they agree on what a mask means:
`mask` [..., K] marks the real keys, latent inputs and values, `query_mask` [..., Q] the real
queries; True = real token.  Padded rows are overwritten, never multiplied, so NaN in them is
harmless forward and backward.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpattention.gp.checks import (
    broadcasts_into,
    check_amplitude,
    check_amplitude_shape,
    check_mask,
    check_observation_noise,
    check_positive,
    check_tokens,
    check_values,
    common_lead,
    expect,
)
from gpattention.gp.precision import checks_are_deferred, compute_dtype
from gpattention.gp.shapes import broadcast

Scalar = Tensor | float  # one number, or one per leading axis


@dataclass(frozen=True, slots=True)
class Tokens:
    """Checked inputs of one attention call, in the type to compute in.

    `masked` has overwritten padded rows: values with 0, inputs with the centre of the keys.
    """

    q: Tensor  # [..., Q, C]
    k: Tensor  # [..., K, C]
    o: Tensor | None  # [..., K, C]
    v: Tensor  # [..., K, D]
    inducing: tuple[Tensor, ...]  # each [..., m, C]
    noise: Tensor  # [..., 1, 1]  sigma^2
    scale_q: Tensor  # [..., 1, 1]
    scale_k: Tensor  # [..., 1, 1]
    mask: Tensor | None  # [..., K]
    query_mask: Tensor | None  # [..., Q]
    log_amplitude: Tensor | None  # [..., Q]
    dtype: torch.dtype  # of the results

    @property
    def latent(self) -> Tensor:
        """The latent inputs o of the canonical GP, where the model has them.  [..., K, C]"""
        if self.o is None:
            raise ValueError("this model has no latent inputs")
        return self.o

    def real_keys(self) -> Tensor:
        """Number of real keys per sequence.  [...]"""
        return count_real(self.mask, self.k)

    def real_queries(self) -> Tensor:
        """Number of real queries per sequence.  [...]"""
        return count_real(self.query_mask, self.q)

    def amplify(self, rows: Tensor) -> Tensor:
        """Multiply query rows [..., Q, X] by s_q a_i (section 13)."""
        rows = self.scale_q * rows
        return rows if self.log_amplitude is None else self.log_amplitude.exp()[..., None] * rows


def count_real(mask: Tensor | None, x: Tensor) -> Tensor:
    """Real tokens per sequence as a number of x's type.  [...]"""
    if mask is None:
        return x.new_full((), x.shape[-2])
    return mask.sum(-1).to(x.dtype)


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
    also_finite: Mapping[str, Tensor] | None = None,
    mask_tokens: bool = True,
    distances: bool = True,
) -> Tokens:
    """Check everything, then raise and mask.  Errors name argument, value and expectation.

    `scale_name` is what the caller calls `scale_q`; `also_finite` are searched for NaN and no more.
    `mask_tokens=False` leaves whatever is written at padded ones: for fused kernels, which mask what they
    read.  `masked` does it later.  Without `distances` between tokens as they came, these may
    lie anywhere.
    """
    tokens = {"q": q, "k": k, "v": v} | ({} if o is None else {"o": o})
    for name, x in tokens.items():
        check_tokens(name, x, like=q)
    inducing = inducing or {}
    for name, x in inducing.items():
        check_tokens(name, x, like=q, same_dtype=False)
    for name, x in ({"k": k} | ({} if o is None else {"o": o}) | dict(inducing)).items():
        expect(x.shape[-1] == q.shape[-1], f"{name} of width {q.shape[-1]} like q", x)
    for name, x in ({"v": v} | ({} if o is None else {"o": o})).items():
        expect(x.shape[-2] == k.shape[-2], f"{name} with {k.shape[-2]} tokens like k", x)
    if causal:
        expect(q.shape[-2] == k.shape[-2], f"q with {k.shape[-2]} tokens like k (causal)", q)

    lead = common_lead({**tokens, **inducing})
    check_mask("mask", mask, lead, k)
    check_mask("query_mask", query_mask, lead, q)
    if query_mask is None and q.shape[-2] == k.shape[-2]:
        query_mask = mask
    if log_amplitude is not None:
        check_amplitude_shape(log_amplitude, lead, q)

    dtype = compute_dtype(q.dtype)
    parameters = {
        name: as_parameter(name, value, lead, q, dtype)
        for name, value in (("noise", noise), (scale_name, scale_q), ("scale_k", scale_k))
    }
    if log_amplitude is not None:
        log_amplitude = log_amplitude.to(dtype)
        if query_mask is not None:
            log_amplitude = torch.where(query_mask, log_amplitude, 0.0)
    if not checks_are_deferred(q):
        masks = {"q": query_mask} | dict.fromkeys(("k", "o", "v"), mask)
        inputs = {name: x for name, x in {**tokens, **inducing}.items() if name != "v"}
        check_values(
            {
                name: keep_rows(x, masks.get(name))
                for name, x in {**tokens, **inducing, **(also_finite or {})}.items()
            },
            parameters,
            log_amplitude,
            _spread(inputs, masks) if dtype == torch.float32 and distances else None,
            None if v is k else parameters["noise"],  # amplitudes have neither values nor noise
        )
    if o is not None and log_amplitude is not None:
        check_amplitude(log_amplitude)
    found = Tokens(
        q=q.to(dtype),
        k=k.to(dtype),
        o=None if o is None else o.to(dtype),
        v=v.to(dtype),
        inducing=tuple(x.to(dtype) for x in inducing.values()),
        mask=mask,
        query_mask=query_mask,
        log_amplitude=log_amplitude,
        dtype=q.dtype,
        noise=parameters["noise"],
        scale_q=parameters[scale_name],
        scale_k=parameters["scale_k"],
    )
    return masked(found) if mask_tokens else found


def _spread(inputs: Mapping[str, Tensor], masks: Mapping[str, Tensor | None]) -> Tensor:
    """The largest squared distance of a real token from the centre of the keys, or inducing inputs.  []"""
    names = [name for name in inputs if name not in ("q", "k", "o")]
    about = names[0] if names else "k"
    centre = real_mean(inputs[about].detach().float(), masks.get(about))  # [..., 1, C]
    squares = [
        keep_rows(x.detach().float() - centre, masks.get(name)).square().sum(-1).max()
        for name, x in inputs.items()
        if x.numel()
    ]
    return torch.stack(squares).max() if squares else centre.new_zeros(())


def masked(t: Tokens) -> Tokens:
    """Tokens with padding overwritten: values by 0, inputs by the centre of the others.

    Kernels centre what they get, in the type that its spread asks for: a token moved in float32 is rounded.
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
    """Rows of padded tokens overwritten with 0.  [..., N, X]"""
    return x if mask is None else torch.where(mask[..., None], x, 0.0)


def fill_rows(x: Tensor, row: Tensor, mask: Tensor | None) -> Tensor:
    """Rows of padded tokens overwritten with `row` [..., 1, X].  [..., N, X]"""
    return x if mask is None else torch.where(mask[..., None], x, row)


def keep_columns(x: Tensor, mask: Tensor | None) -> Tensor:
    """Columns of padded tokens overwritten with 0.  [..., X, N]"""
    return x if mask is None else torch.where(mask[..., None, :], x, 0.0)


def real_mean(x: Tensor, mask: Tensor | None) -> Tensor:
    """Mean over real tokens, 0 where there are none.  [..., 1, X]"""
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


def beside(a: Tensor, b: Tensor) -> Tensor:
    """Columns of a, then columns of b, leading axes broadcast.  [..., N, X + Y]"""
    lead = broadcast(a.shape[:-2], b.shape[:-2])
    return torch.cat([x.expand(*lead, *x.shape[-2:]) for x in (a, b)], -1)


def as_parameter(name: str, value: Scalar, lead: torch.Size, like: Tensor, dtype: torch.dtype) -> Tensor:
    """A positive number, or one per leading axis, as [..., 1, 1]."""
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
    """Positive and finite, all of it; whether it fits is seen where the leading axes are known."""
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
        if observation_noise == 0:
            return torch.zeros_like(t.noise)
    lead = broadcast(t.q.shape[:-2], t.k.shape[:-2], t.v.shape[:-2])
    tau = as_parameter("observation_noise", observation_noise, lead, t.q, t.v.dtype)
    if not checks_are_deferred(tau) and not bool(((tau >= 0) & tau.isfinite()).all()):
        bad = tau.detach()[~((tau >= 0) & tau.isfinite())]
        raise ValueError(f"expected observation_noise >= 0 and finite, got {float(bad[0])}")
    return tau


def check_delta(delta: float) -> None:
    """Raise `ValueError` unless delta can perturb a Gram matrix of unit diagonal."""
    if not 0 <= delta < 1:
        raise ValueError(f"expected delta in [0, 1), got {delta}")
