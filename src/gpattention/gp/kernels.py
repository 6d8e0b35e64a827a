"""Covariance functions on token matrices; batch axes lead, never an [..., N, M, C] tensor.

Squared distances come from the expanded form |x|^2 + |y|^2 - 2 x.y of *centred* inputs: the kernels
are translation invariant, and without centring a common offset of 3 per coordinate costs two digits
and, at 1024 tokens, the Cholesky factor.  What remains after centring is the spread R of the tokens, in
length scales: the expanded form rounds the distance of two tokens by some eps R^2, however near they are.
So float32 serves up to `NEAR`, float64 beyond, and tokens beyond `FARTHEST` are refused: there the
coordinates themselves, and every gradient, have lost what a kernel of length scale 1 needs.  Only where
tokens can be looked at for free, which is on the CPU, does their spread choose the type; elsewhere, and
in compiled code, it is float64 always.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpattention.gp.inputs import check_parameter, expect
from gpattention.numerics import (
    FARTHEST,
    TooFarApartError,
    checks_are_deferred,
    compute_dtype,
    count_failures,
    describe_spread,
    full_precision,
    has_values,
    wants_plain_operations,
)

NEAR = 8.0  # length scales from the centre to which a distance by float32 products is good: to 1e-5
_LOST = 2 * FARTHEST  # from the centre of any of the tokens, where all are within FARTHEST of one point


def gram(x: Tensor) -> Tensor:
    """kappa(x, x) of eq. 1 with unit diagonal.  [..., N, N]"""
    dtype = x.dtype
    (placed,) = _placed(x)
    if wants_plain_operations():  # compilers fuse the plain form themselves, and torch 2.11's
        # loses gradients of several such functions in one graph
        exponents = _exponents(placed, placed, dtype)
        return torch.exp(exponents - torch.diag_embed(exponents.diagonal(dim1=-2, dim2=-1)))
    K: Tensor = _Gram.apply(placed, dtype)  # type: ignore[no-untyped-call]
    return K


def cross_gram(x: Tensor, y: Tensor) -> Tensor:
    """kappa(x, y) of eq. 1.  [..., N, M]"""
    dtype = x.dtype
    x, y = _placed(x, y)
    if wants_plain_operations():
        return torch.exp(_exponents(x, y, dtype))
    K: Tensor = _CrossGram.apply(x, y, dtype)  # type: ignore[no-untyped-call]
    return K


def log_kappa(x: Tensor, y: Tensor) -> Tensor:
    """-1/2 |x_i - y_j|^2, by plain differentiable operations.  [..., N, M]"""
    dtype = x.dtype
    x, y = _placed(x, y)
    return _exponents(x, y, dtype)


def about_centre(*sets: Tensor) -> tuple[Tensor, ...]:
    """Token sets moved by one translation, which takes the mean of the last to the origin."""
    centre = sets[-1].detach().mean(-2, keepdim=True)  # [..., 1, C]
    return tuple(x - centre for x in sets)


def _placed(*sets: Tensor) -> tuple[Tensor, ...]:
    """Token sets about one centre, in the type in which the distances between them are right."""
    device = sets[0].device.type
    if sets[0].dtype == torch.float64 or device == "mps":  # which has no float64
        return about_centre(*sets)
    looked_at = device == "cpu" and has_values(sets[0]) and not wants_plain_operations()
    if looked_at:
        near = about_centre(*sets)
        spreads = [float(x.detach().square().sum(-1).max()) ** 0.5 for x in near if x.numel()]
        farthest = max(spreads, default=0.0)
        if not farthest > NEAR:  # NaN has no spread, and stays NaN
            return near
        if farthest > _LOST and not checks_are_deferred():
            raise TooFarApartError(describe_spread(farthest))
    # In float32 moving a token would round it, by as much as its distance from the centre asks for.
    return about_centre(*(x.double() for x in sets))


def _exponents(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """x_i . y_j - 1/2 |x_i|^2 - 1/2 |y_j|^2 of placed tokens, at most 0.  [..., N, M]"""
    of_x, of_y = (0.5 * t.square().sum(-1, keepdim=True) for t in (x, y))  # [..., N, 1], [..., M, 1]
    if x.dtype == dtype:
        return (x @ y.mT - of_x - of_y.mT).clamp_max(0)
    of_x, of_y = _or_lost(of_x), _or_lost(of_y)
    left = torch.cat([x, of_x, torch.ones_like(of_x)], -1)  # [..., N, C + 2]
    right = torch.cat([y, -torch.ones_like(of_y), -of_y], -1)  # [..., M, C + 2]
    # one product for all of it: no further pass over a matrix of twice the size; in float64 nothing of the
    # two squares is lost before they cancel
    return (left @ right.mT).to(dtype).clamp_max(0)


def _or_lost(half_square: Tensor) -> Tensor:
    """NaN, and counted like a failed factor, for tokens that are too far away."""
    lost = count_failures(half_square.detach() > 0.5 * _LOST**2)
    return half_square.masked_fill(lost, float("nan"))


class _CrossGram(torch.autograd.Function):
    """dK -> E = dK * K,  dx_i = sum_j E_ij (y_j - x_i),  dy_j = sum_i E_ij (x_i - y_j).

    Written out because autograd would keep five matrices and make nine passes over them.
    """

    @staticmethod
    def forward(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
        return _exponents(x, y, dtype).exp_()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, torch.dtype], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2], output)

    @staticmethod
    @full_precision
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, y, K = ctx.saved_tensors
        E = grads[0] * K  # [..., N, M]
        dx = dy = None
        if ctx.needs_input_grad[0]:
            dx = pull(E, x, y).sum_to_size(x.shape)
        if ctx.needs_input_grad[1]:
            dy = pull(E.mT, y, x).sum_to_size(y.shape)
        return dx, dy, None


class _Gram(torch.autograd.Function):
    """The same for y = x, with an exact diagonal: dx_i = sum_j (E + E^T)_ij (x_j - x_i)."""

    @staticmethod
    def forward(x: Tensor, dtype: torch.dtype) -> Tensor:
        K = _exponents(x, x, dtype).exp_()
        K.diagonal(dim1=-2, dim2=-1).fill_(1)
        return K

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, torch.dtype], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    @full_precision
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        x, K = ctx.saved_tensors
        E = grads[0] * K  # [..., N, N]
        return pull(E, x, x) + pull(E.mT, x, x), None


def pull(E: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """sum_j E_ij (y_j - x_i), for the gradient of x.  [..., N, C]

    Off the CPU in the type of E, whose rounding grows with the spread: a matrix of float64 for tokens that
    are seldom far apart would cost every backward pass.
    """
    wide = x.dtype if x.device.type == "cpu" else E.dtype
    E, a, b = E.to(wide), x.to(wide), y.to(wide)
    return (E @ b - E.sum(-1)[..., None] * a).to(x.dtype)


def _as_pair(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Checked inputs in the type to compute in; `y is x` stays true where it was."""
    for name, t in (("x", x), ("y", y)):
        if t.ndim < 2 or not t.is_floating_point():
            raise ValueError(
                f"expected {name} to be a floating-point [..., N, C] tensor, "
                f"got shape {tuple(t.shape)} and {t.dtype}"
            )
    if x.shape[-1] != y.shape[-1]:
        raise ValueError(f"x has width {x.shape[-1]} but y has width {y.shape[-1]}")
    raised = x.to(compute_dtype(x.dtype))
    return raised, raised if y is x else y.to(compute_dtype(y.dtype))


def _per_feature(lengthscale: Tensor | float, like: Tensor) -> Tensor | float:
    """Length scales [..., C] (or one number) as [..., 1, C]."""
    check_parameter("lengthscale", lengthscale)
    if not isinstance(lengthscale, Tensor) or lengthscale.ndim == 0:
        return lengthscale
    width = like.shape[-1]
    expect(lengthscale.shape[-1] in (1, width), f"lengthscale of shape [..., {width}]", lengthscale)
    return lengthscale[..., None, :]


def _per_matrix(variance: Tensor | float) -> Tensor | float:
    """Variances [...] (or one number) as [..., 1, 1]."""
    check_parameter("variance", variance)
    return variance[..., None, None] if isinstance(variance, Tensor) else variance


@full_precision
def rbf(x: Tensor, y: Tensor) -> Tensor:
    """The canonical kernel exp(-1/2 |x_i - y_j|^2) of eq. 1.

    Args:
        x: tokens.  [..., N, C]
        y: tokens.  [..., M, C]

    Returns:
        [..., N, M]; when `y is x` the diagonal is exactly 1.

    Raises:
        ValueError: x and y are no floating-point tokens of one width.
        TooFarApartError: float32 tokens are too many length scales apart.
    """
    dtype = x.dtype
    x, y = _as_pair(x, y)
    return (gram(x) if y is x else cross_gram(x, y)).to(dtype)


@full_precision
def ard_rbf(
    x: Tensor,  # [..., N, C]
    y: Tensor,  # [..., M, C]
    lengthscale: Tensor | float = 1.0,  # one number or [..., C]
    variance: Tensor | float = 1.0,  # one number or [...]
) -> Tensor:
    """variance * exp(-1/2 sum_c (x_c - y_c)^2 / lengthscale_c^2) (section 7).

    Args:
        x: tokens.
        y: tokens.
        lengthscale: of all channels or of each.
        variance: of all matrices or of each.

    Returns:
        [..., N, M]; when `y is x` the diagonal is exactly the variance.

    Raises:
        ValueError: x and y are no floating-point tokens of one width, or a parameter is not positive.
        TooFarApartError: float32 tokens are too many length scales apart.
    """
    dtype = x.dtype
    x, y = _as_pair(x, y)
    scale = _per_feature(lengthscale, x)
    K = gram(x / scale) if y is x else cross_gram(x / scale, y / scale)  # [..., N, M]
    return (_per_matrix(variance) * K).to(dtype)


@dataclass(frozen=True, slots=True, eq=False)
class ArdRbf:
    """`ard_rbf` with its parameters filled in, for functions that take a kernel of two arguments (section 7).

    Attributes:
        lengthscale: of all channels or of each.
        variance: of all matrices or of each.
    """

    lengthscale: Tensor | float = 1.0  # one number or [..., C]
    variance: Tensor | float = 1.0  # one number or [...]

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """variance * exp(-1/2 sum_c (x_c - y_c)^2 / lengthscale_c^2).  [..., N, M]"""
        return ard_rbf(x, y, self.lengthscale, self.variance)

    def scaled(self, x: Tensor) -> Tensor:
        """Tokens between which `rbf` is this kernel at unit variance.

        Args:
            x: tokens.  [..., N, C]

        Returns:
            [..., N, C].
        """
        return x / _per_feature(self.lengthscale, x)


@full_precision
def exp_dot(
    x: Tensor,  # [..., N, C]
    y: Tensor,  # [..., M, C]
    lengthscale: Tensor | float = 1.0,  # one number or [..., C]
    variance: Tensor | float = 1.0,  # one number or [...]
) -> Tensor:
    """variance * exp(sum_c x_c y_c / lengthscale_c^2) (section 7).

    Args:
        x: tokens.
        y: tokens.
        lengthscale: of all channels or of each.
        variance: of all matrices or of each.

    Returns:
        [..., N, M].

    Raises:
        ValueError: x and y are no floating-point tokens of one width, or a parameter is not positive.
    """
    dtype = x.dtype
    x, y = _as_pair(x, y)
    scale = _per_feature(lengthscale, x)
    return (_per_matrix(variance) * torch.exp((x / scale) @ (y / scale).mT)).to(dtype)
