"""Covariance functions on token matrices; batch axes lead, never an [..., N, M, C] tensor.

Squared distances come from the expanded form |x|^2 + |y|^2 - 2 x.y of *centred* inputs: the kernels
are translation invariant, and without centring a common offset of 3 per coordinate costs two digits
and, at 1024 tokens, the Cholesky factor.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpattention.gp.checks import check_positive
from gpattention.gp.precision import compute_dtype, full_precision, wants_plain_operations


def squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """|x_i - y_j|^2, clamped at 0; the caller has centred x and y.  [..., N, M]"""
    squares = x.square().sum(-1)[..., :, None] + y.square().sum(-1)[..., None, :]
    return (squares - 2 * (x @ y.mT)).clamp_min(0)


def gram(x: Tensor) -> Tensor:
    """kappa(x, x) of eq. 1 with unit diagonal.  [..., N, N]"""
    x = x - x.detach().mean(-2, keepdim=True)
    if wants_plain_operations():  # compilers fuse the plain form themselves, and torch 2.11's
        return gram_reference(x)  # loses gradients of several such functions in one graph
    K: Tensor = _Gram.apply(x)  # type: ignore[no-untyped-call]
    return K


def cross_gram(x: Tensor, y: Tensor) -> Tensor:
    """kappa(x, y) of eq. 1 for inputs that are centred already.  [..., N, M]"""
    if wants_plain_operations():
        return cross_gram_reference(x, y)
    K: Tensor = _CrossGram.apply(x, y)  # type: ignore[no-untyped-call]
    return K


def gram_reference(x: Tensor) -> Tensor:
    """The same by plain differentiable operations.  [..., N, N]"""
    squared = squared_distances(x, x)
    return torch.exp(-0.5 * (squared - torch.diag_embed(squared.diagonal(dim1=-2, dim2=-1))))


def cross_gram_reference(x: Tensor, y: Tensor) -> Tensor:
    """The same by plain differentiable operations.  [..., N, M]"""
    return torch.exp(-0.5 * squared_distances(x, y))


def _kappa(x: Tensor, y: Tensor) -> Tensor:
    """exp(x . y - 1/2 |x|^2 - 1/2 |y|^2), the exponent clamped at 0, in as few passes as can be."""
    exponent = x @ y.mT  # [..., N, M]
    exponent -= 0.5 * x.square().sum(-1)[..., :, None]
    exponent -= 0.5 * y.square().sum(-1)[..., None, :]
    return exponent.clamp_max_(0).exp_()


class _CrossGram(torch.autograd.Function):
    """dK -> E = dK * K,  dx_i = sum_j E_ij (y_j - x_i),  dy_j = sum_i E_ij (x_i - y_j).

    Written out because autograd would keep five matrices and make nine passes over them.
    """

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        return _kappa(x, y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    @full_precision
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, y, K = ctx.saved_tensors
        E = grads[0] * K  # [..., N, M]
        dx = dy = None
        if ctx.needs_input_grad[0]:
            dx = (E @ y - E.sum(-1)[..., None] * x).sum_to_size(x.shape)
        if ctx.needs_input_grad[1]:
            dy = (E.mT @ x - E.sum(-2)[..., None] * y).sum_to_size(y.shape)
        return dx, dy


class _Gram(torch.autograd.Function):
    """The same for y = x, with an exact diagonal: dx_i = sum_j (E + E^T)_ij (x_j - x_i)."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        K = _kappa(x, x)
        K.diagonal(dim1=-2, dim2=-1).fill_(1)
        return K

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    @full_precision
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        x, K = ctx.saved_tensors
        E = grads[0] * K  # [..., N, N]
        rows = E.sum(-1) + E.sum(-2)  # [..., N]
        return E @ x + E.mT @ x - rows[..., None] * x


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
    if not isinstance(lengthscale, Tensor):
        if not lengthscale > 0:
            raise ValueError(f"expected lengthscale > 0, got {lengthscale}")
        return lengthscale
    check_positive("lengthscale", lengthscale)
    if lengthscale.ndim == 0:
        return lengthscale
    if lengthscale.shape[-1] not in (1, like.shape[-1]):
        raise ValueError(
            f"expected lengthscale of shape [..., {like.shape[-1]}], got {tuple(lengthscale.shape)}"
        )
    return lengthscale[..., None, :]


def _per_matrix(variance: Tensor | float) -> Tensor | float:
    """Variances [...] (or one number) as [..., 1, 1]."""
    if not isinstance(variance, Tensor):
        if not variance > 0:
            raise ValueError(f"expected variance > 0, got {variance}")
        return variance
    check_positive("variance", variance)
    return variance[..., None, None]


@full_precision
def rbf(x: Tensor, y: Tensor) -> Tensor:
    """The canonical kernel exp(-1/2 |x_i - y_j|^2) of eq. 1.

    x is [..., N, C], y is [..., M, C], the result [..., N, M].  When `y is x` the diagonal is
    exactly 1.
    """
    dtype = x.dtype
    x, y = _as_pair(x, y)
    return _rbf(x, y).to(dtype)


def _rbf(x: Tensor, y: Tensor) -> Tensor:
    if y is x:
        return gram(x)
    centre = y.detach().mean(-2, keepdim=True)
    return cross_gram(x - centre, y - centre)


@full_precision
def ard_rbf(
    x: Tensor,  # [..., N, C]
    y: Tensor,  # [..., M, C]
    lengthscale: Tensor | float = 1.0,  # one number or [..., C]
    variance: Tensor | float = 1.0,  # one number or [...]
) -> Tensor:
    """variance * exp(-1/2 sum_c (x_c - y_c)^2 / lengthscale_c^2) (section 7).  [..., N, M]

    When `y is x` the diagonal is exactly the variance.
    """
    dtype = x.dtype
    x, y = _as_pair(x, y)
    scale = _per_feature(lengthscale, x)
    scaled = x / scale
    K = _rbf(scaled, scaled if y is x else y / scale)  # [..., N, M]
    return (_per_matrix(variance) * K).to(dtype)


@dataclass(frozen=True, slots=True, eq=False)
class ArdRbf:
    """`ard_rbf` with its parameters filled in, for functions that take a kernel of two arguments."""

    lengthscale: Tensor | float = 1.0  # one number or [..., C]
    variance: Tensor | float = 1.0  # one number or [...]

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """variance * exp(-1/2 sum_c (x_c - y_c)^2 / lengthscale_c^2).  [..., N, M]"""
        return ard_rbf(x, y, self.lengthscale, self.variance)

    def scaled(self, x: Tensor) -> Tensor:
        """Tokens between which `rbf` is this kernel at unit variance.  [..., N, C]"""
        return x / _per_feature(self.lengthscale, x)


@full_precision
def exp_dot(
    x: Tensor,  # [..., N, C]
    y: Tensor,  # [..., M, C]
    lengthscale: Tensor | float = 1.0,  # one number or [..., C]
    variance: Tensor | float = 1.0,  # one number or [...]
) -> Tensor:
    """variance * exp(sum_c x_c y_c / lengthscale_c^2) (section 7).  [..., N, M]"""
    dtype = x.dtype
    x, y = _as_pair(x, y)
    scale = _per_feature(lengthscale, x)
    return (_per_matrix(variance) * torch.exp((x / scale) @ (y / scale).mT)).to(dtype)
