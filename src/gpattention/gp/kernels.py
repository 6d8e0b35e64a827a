"""Covariance functions on token matrices; batch axes lead, never an [..., N, M, C] tensor.

Squared distances come from the expanded form |x|^2 + |y|^2 - 2 x.y of *centred* inputs: the kernels
are translation invariant, and without centring a common offset of 3 per coordinate costs two digits
and, at 1024 tokens, the Cholesky factor.  What remains after centring is the spread R of the tokens, in
length scales: the expanded form rounds the distance of two tokens by some eps R^2, however near they are.
So float32 serves up to `NEAR`, float64 beyond, and tokens beyond `FARTHEST` are refused: there the
coordinates themselves, and every gradient, have lost what a kernel of length scale 1 needs.  The spread
chooses the type on the CPU alone, where reading it costs nothing; elsewhere, and in compiled code, distances
are always computed in float64.

Kernel attention and softmax attention are the means from which the GP kinds start, without a posterior:

    kappa(q, k) V (eq. 1),  its rows divided by their sums (the mean of eq. 25),  softmax(Q K^T / sqrt d) V

The caller divides queries and keys by length scales.  Rows that see no key, and padded queries, are 0.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from gpattention.gp.inputs import Scalar, check_parameter, expect, fill_rows, keep_pairs, keep_rows, real_mean
from gpattention.numerics import (
    FARTHEST,
    TooFarApartError,
    checks_are_deferred,
    compute_dtype,
    count_failures,
    describe_spread,
    full_precision,
    has_values,
    is_transformed,
    wants_plain_operations,
)
from gpattention.ops import SHOWN_TOKENS, why_not_fused_on
from gpattention.ops.attention import fused_kernel_attention

NEAR = 8.0  # length scales from the centre up to which float32 products give distances to 1e-5
_LOST = 2 * FARTHEST  # from the centre of any of the tokens, where all are within FARTHEST of one point


def gram(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """kappa(x, x) of eq. 1 with unit diagonal, 0 at padded tokens.  [..., N, N]"""
    dtype = x.dtype
    (placed,) = _placed(x)
    if wants_plain_operations():  # compilers fuse the plain form themselves, and torch 2.11's
        # loses gradients of several such functions in one graph
        exponents = _exponents(placed, placed, dtype)
        K = torch.exp(exponents - torch.diag_embed(exponents.diagonal(dim1=-2, dim2=-1)))
    else:
        K = _Gram.apply(placed, dtype)  # type: ignore[no-untyped-call]
    return keep_pairs(K, mask, mask)


def cross_gram(x: Tensor, y: Tensor, x_mask: Tensor | None = None, y_mask: Tensor | None = None) -> Tensor:
    """kappa(x, y) of eq. 1, 0 at padded tokens.  [..., N, M]"""
    dtype = x.dtype
    x, y = _placed(x, y)
    if wants_plain_operations():
        K = torch.exp(_exponents(x, y, dtype))
    else:
        K = _CrossGram.apply(x, y, dtype)  # type: ignore[no-untyped-call]
    return keep_pairs(K, x_mask, y_mask)


def log_kappa(x: Tensor, y: Tensor) -> Tensor:
    """-1/2 |x_i - y_j|^2, by plain differentiable operations.  [..., N, M]"""
    dtype = x.dtype
    x, y = _placed(x, y)
    return _exponents(x, y, dtype)


def about_centre(*sets: Tensor) -> tuple[Tensor, ...]:
    """Token sets moved by one translation, which takes the mean of the last set to the origin."""
    centre = sets[-1].detach().mean(-2, keepdim=True)  # [..., 1, C]
    return tuple(x - centre for x in sets)


def _placed(*sets: Tensor) -> tuple[Tensor, ...]:
    """Token sets about one centre, in the type in which distances between them are accurate."""
    device = sets[0].device.type
    if sets[0].dtype == torch.float64 or device == "mps":  # which has no float64
        return about_centre(*sets)
    if device == "cpu" and has_values(sets[0]) and not wants_plain_operations():
        near = about_centre(*sets)
        spreads = [float(x.detach().square().sum(-1).max()) ** 0.5 for x in near if x.numel()]
        farthest = max(spreads, default=0.0)
        if not farthest > NEAR:  # NaN has no spread, and stays NaN
            return near
        if farthest > _LOST and not checks_are_deferred():
            raise TooFarApartError(describe_spread(farthest))
    # moving a token in float32 would round it, the more the farther it lies from the centre
    return about_centre(*(x.double() for x in sets))


def _exponents(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """x_i . y_j - 1/2 |x_i|^2 - 1/2 |y_j|^2 of placed tokens, at most 0.  [..., N, M]"""
    of_x, of_y = (0.5 * t.square().sum(-1, keepdim=True) for t in (x, y))  # [..., N, 1], [..., M, 1]
    if x.dtype == dtype:
        return (x @ y.mT).sub_(of_x).sub_(of_y.mT).clamp_max_(0)
    of_x, of_y = _or_lost(of_x), _or_lost(of_y)
    left = torch.cat([x, of_x, torch.ones_like(of_x)], -1)  # [..., N, C + 2]
    right = torch.cat([y, -torch.ones_like(of_y), -of_y], -1)  # [..., M, C + 2]
    # one product: no further pass over a matrix of twice the size; and in float64 the two squares cancel
    # without loss
    return (left @ right.mT).to(dtype).clamp_max(0)


def _or_lost(half_square: Tensor) -> Tensor:
    """NaN for tokens that are too far away, which are counted like failed factors."""
    lost = count_failures(half_square.detach() > 0.5 * _LOST**2)
    return half_square.masked_fill(lost, float("nan"))


class _CrossGram(torch.autograd.Function):
    """dK -> E = dK * K,  dx_i = sum_j E_ij (y_j - x_i),  dy_j = sum_i E_ij (x_i - y_j).

    Written out because autograd would keep five matrices and make nine passes over them.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
        K = _exponents(x, y, dtype).exp_()
        ctx.save_for_backward(x, y, K)
        return K

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
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        K = _exponents(x, x, dtype).exp_()
        K.diagonal(dim1=-2, dim2=-1).fill_(1)
        ctx.save_for_backward(x, K)
        return K

    @staticmethod
    @full_precision
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        x, K = ctx.saved_tensors
        E = grads[0] * K  # [..., N, N]
        return pull(E, x, x) + pull(E.mT, x, x), None


def pull(E: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """sum_j E_ij (y_j - x_i), for the gradient of x.  [..., N, C]

    Off the CPU it is computed in the type of E, with a rounding error that grows with the spread: float64
    would slow down every backward pass for the sake of tokens that are rarely far apart.
    """
    wide = x.dtype if x.device.type == "cpu" else E.dtype
    E, a, b = E.to(wide), x.to(wide), y.to(wide)
    return (E @ b - E.sum(-1)[..., None] * a).to(x.dtype)


def _as_pair(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """x and y, checked and in the computing type; `y is x` is preserved."""
    for name, t in (("x", x), ("y", y)):
        if t.ndim < 2 or not t.is_floating_point():
            raise ValueError(
                f"expected {name} to be a floating-point [..., N, C] tensor, "
                f"got shape {tuple(t.shape)} and {t.dtype}"
            )
    if x.shape[-1] != y.shape[-1]:
        raise ValueError(f"expected y of width {x.shape[-1]} like x, got width {y.shape[-1]}")
    raised = x.to(compute_dtype(x.dtype))
    return raised, raised if y is x else y.to(compute_dtype(y.dtype))


def _per_feature(lengthscale: Scalar, like: Tensor) -> Scalar:
    """Length scales [..., C] (or one number) as [..., 1, C]."""
    check_parameter("lengthscale", lengthscale)
    if not isinstance(lengthscale, Tensor) or lengthscale.ndim == 0:
        return lengthscale
    width = like.shape[-1]
    expect(lengthscale.shape[-1] in (1, width), f"lengthscale of shape [..., {width}]", lengthscale)
    return lengthscale[..., None, :]


def _per_matrix(variance: Scalar) -> Scalar:
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
def ard_rbf(x: Tensor, y: Tensor, lengthscale: Scalar = 1.0, variance: Scalar = 1.0) -> Tensor:
    """variance * exp(-1/2 sum_c (x_c - y_c)^2 / lengthscale_c^2) (section 7).

    Args:
        x: tokens.  [..., N, C]
        y: tokens.  [..., M, C]
        lengthscale: one number, or one for each channel.  [..., C]
        variance: one number, or one for each matrix.  [...]

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
    """`ard_rbf` with given parameters, for functions that take a kernel of two arguments (section 7).

    Attributes:
        lengthscale: of all channels or of each.
        variance: of all matrices or of each.
    """

    lengthscale: Scalar = 1.0  # one number or [..., C]
    variance: Scalar = 1.0  # one number or [...]

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """variance * exp(-1/2 sum_c (x_c - y_c)^2 / lengthscale_c^2).  [..., N, M]"""
        return ard_rbf(x, y, self.lengthscale, self.variance)

    def scaled(self, x: Tensor) -> Tensor:
        """Tokens divided by the length scales: `rbf` between them is this kernel at unit variance.

        Args:
            x: tokens.  [..., N, C]

        Returns:
            [..., N, C].
        """
        return x / _per_feature(self.lengthscale, x)


@full_precision
def exp_dot(x: Tensor, y: Tensor, lengthscale: Scalar = 1.0, variance: Scalar = 1.0) -> Tensor:
    """variance * exp(sum_c x_c y_c / lengthscale_c^2) (section 7).

    Args:
        x: tokens.  [..., N, C]
        y: tokens.  [..., M, C]
        lengthscale: one number, or one for each channel.  [..., C]
        variance: one number, or one for each matrix.  [...]

    Returns:
        [..., N, M].

    Raises:
        ValueError: x and y are no floating-point tokens of one width, or a parameter is not positive.
    """
    dtype = x.dtype
    x, y = _as_pair(x, y)
    scale = _per_feature(lengthscale, x)
    return (_per_matrix(variance) * torch.exp((x / scale) @ (y / scale).mT)).to(dtype)


@full_precision
def kernel_attention(
    q: Tensor,  # [..., Q, C]
    k: Tensor,  # [..., K, C]
    v: Tensor,  # [..., K, D]
    *,
    normalised: bool,
    dot: bool = False,
    variance: Tensor | None = None,  # [...]
    causal: bool = False,
    mask: Tensor | None = None,  # [..., K] True = real
    query_mask: Tensor | None = None,  # [..., Q]
) -> Tensor:
    """variance * kappa(q, k) v (eq. 1), or its rows divided by their sums (the mean of eq. 25).

    Args:
        q: queries, divided by length scales.
        k: keys, likewise.
        v: values.
        normalised: whether rows are divided by their sums.
        dot: takes exp(q . k) in the place of kappa.
        variance: of the kernel, which cancels in normalised rows; 1 for None.
        causal: query i sees keys up to i only.
        mask: which keys are real.
        query_mask: which queries are real.

    Returns:
        [..., Q, D] in v's type; 0 at rows that see no key, and at padded queries.
    """
    dtype, v = v.dtype, v.to(q.dtype)
    if why_not_streamed(q, v, dot=dot) is None:  # the kernel centres and masks tokens itself
        v = v if normalised or variance is None else variance[..., None, None] * v
        return fused_kernel_attention(
            q, k, v, normalised=normalised, causal=causal, mask=mask, query_mask=query_mask
        ).to(dtype)
    v = keep_rows(v, mask)
    if not (normalised and dot):
        weights = kernel_weights(
            q, k, normalised=normalised, dot=dot, variance=variance, causal=causal, mask=mask,
            query_mask=query_mask,
        )  # fmt: skip
        return (weights @ v).to(dtype)
    q, k = keep_rows(q, query_mask), keep_rows(k, mask)
    visible = _visible(q, k, causal, mask, query_mask)  # [..., Q, K]
    seen = visible.any(-1, keepdim=True)  # [..., Q, 1]
    # a row that sees no key attends to all, and is set to 0 afterwards
    mean = _attend(q, k, v, attn_mask=visible | ~seen, scale=1.0)
    return torch.where(seen, mean, 0.0).to(dtype)


@full_precision
def kernel_weights(
    q: Tensor,  # [..., Q, C]
    k: Tensor,  # [..., K, C]
    *,
    normalised: bool,
    dot: bool = False,
    variance: Tensor | None = None,  # [...]
    causal: bool = False,
    mask: Tensor | None = None,  # [..., K] True = real
    query_mask: Tensor | None = None,  # [..., Q]
) -> Tensor:
    """The weights with which `kernel_attention` multiplies the values (eq. 1).

    Args:
        q: queries.
        k: keys.
        normalised: as in `kernel_attention`.
        dot: likewise.
        variance: likewise.
        causal: likewise.
        mask: likewise.
        query_mask: likewise.

    Returns:
        [..., Q, K].
    """
    q, k = without_padding(q, k, dot=dot, mask=mask, query_mask=query_mask)
    visible = _visible(q, k, causal, mask, query_mask)  # [..., Q, K]
    if not normalised:
        K = exp_dot(q, k) if dot else rbf(q, k)
        K = K if variance is None else variance[..., None, None] * K
        return torch.where(visible, K, 0.0)
    exponents = q @ k.mT if dot else log_kappa(q, k)
    blind = ~visible.any(-1, keepdim=True)  # infinities there would be NaN in gradients
    weights = torch.where(visible | blind, exponents, -torch.inf).softmax(-1)
    return torch.where(visible, weights, 0.0)


def why_not_streamed(q: Tensor, v: Tensor, *, dot: bool = False) -> str | None:
    """None if a fused kernel computes `kernel_attention`, else the reason."""
    if dot:
        return "exp_dot has no fused kernel"
    channels = max(q.shape[-1], v.shape[-1])
    # any length fits; "auto" takes the kernel only at lengths where it was measured to be faster
    shown = v.shape[-2] <= SHOWN_TOKENS
    return why_not_fused_on(v.device, q.dtype, channels=channels, measured=shown)


def without_padding(
    q: Tensor, k: Tensor, *, dot: bool = False, mask: Tensor | None = None, query_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Queries and keys with padding overwritten: by 0 for dot products, else by the keys' mean (section 5).

    Args:
        q: queries.  [..., Q, C]
        k: keys.  [..., K, C]
        dot: whether they are for a kernel of dot products.
        mask: which keys are real.  [..., K]
        query_mask: which queries are real.  [..., Q]

    Returns:
        Both.  [..., N, C] each
    """
    if dot:
        return keep_rows(q, query_mask), keep_rows(k, mask)
    centre = real_mean(k.detach(), mask)
    return fill_rows(q, centre, query_mask), fill_rows(k, centre, mask)


def softmax_attention(
    q: Tensor,  # [..., Q, C]
    k: Tensor,  # [..., K, C]
    v: Tensor,  # [..., K, D]
    *,
    causal: bool = False,
    mask: Tensor | None = None,  # [..., K] True = real
    query_mask: Tensor | None = None,  # [..., Q]
) -> Tensor:
    """softmax(q k^T / sqrt C) v, the mean of eq. 21, by torch's own kernels.

    Args:
        q: queries.
        k: keys.
        v: values.
        causal: query i sees keys up to i only.
        mask: which keys are real.
        query_mask: which queries are real.

    Returns:
        [..., Q, D]; 0 at rows that see no key, and at padded queries.
    """
    if mask is None:
        return keep_rows(_attend(q, k, v, is_causal=causal), query_mask)
    visible = mask[..., None, :].expand(*mask.shape[:-1], q.shape[-2], -1)  # [..., Q, K]
    if causal:
        visible = visible.tril()
    real = visible.any(-1, keepdim=True)  # [..., Q, 1]
    if query_mask is not None:
        real = real & query_mask[..., None]
    # a row that sees no key, which is NaN in some backends, attends to all and is set to 0 afterwards
    mean = _attend(q, k, v, attn_mask=visible | ~real)
    return torch.where(real, mean, 0.0)


def _attend(q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None = None, **options: Any) -> Tensor:
    """Torch's own attention, in plain operations where `torch.func` has no rules for its kernels."""
    if is_transformed():
        return _attend_plainly(q, k, v, attn_mask, options)
    mean = scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, **options)
    if torch.compiler.is_compiling() or not mean.requires_grad:
        return mean
    again: Tensor = _TwiceDifferentiable.apply(mean, q, k, v, attn_mask, options)  # type: ignore[no-untyped-call]
    return again


def _attend_plainly(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, options: dict[str, Any]
) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, **options)


class _TwiceDifferentiable(torch.autograd.Function):
    """The mean of torch's kernels, whose gradient cannot be differentiated, passed through unchanged.

    A backward pass with `create_graph=True` takes plain operations on the same inputs instead.
    """

    @staticmethod
    def forward(ctx: Any, mean: Tensor, *inputs: Any) -> Tensor:
        *tensors, ctx.options = inputs
        ctx.save_for_backward(*tensors)
        return mean.view_as(mean)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return grad, *(None for _ in ctx.saved_tensors), None
        # aliases, because one input may be computed from another, whose gradient must not count twice
        tensors: list[Any] = [None if x is None else x.view_as(x) for x in ctx.saved_tensors]
        wanted = [x is not None and x.requires_grad for x in tensors]
        leaves = [x for x, want in zip(tensors, wanted, strict=True) if want]
        q, k, v, attn_mask = tensors
        mean = _attend_plainly(q, k, v, attn_mask, ctx.options)
        found = iter(torch.autograd.grad(mean, leaves, grad, create_graph=True))
        return None, *(next(found) if want else None for want in wanted), None


def _visible(q: Tensor, k: Tensor, causal: bool, mask: Tensor | None, query_mask: Tensor | None) -> Tensor:
    """Pairs of real tokens.  [..., Q, K]"""
    visible = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device)
    visible = visible.tril() if causal else visible
    if mask is not None:
        visible = visible & mask[..., None, :]
    if query_mask is not None:
        visible = visible & query_mask[..., None]
    return visible
