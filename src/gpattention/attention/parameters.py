"""Positive parameters, projections in one product, and their initialisation.

The linear maps to queries, keys, latent inputs and values are separate modules, whose weights are joined when
they are used.  Their outputs are four times as large as the tokens, which the backward pass needs anyway:
`recomputed` keeps only the tokens and computes the product again.

With nn.Linear's own initialisation kappa(q, k) is about 1e-4 at head width 32: kernel attention is
switched off and its posterior is the prior.  Spreading queries and keys evenly over all d dimensions
cannot help: a distance in many dimensions concentrates, so kappa is the same for every pair.  Instead a
few `ACTIVE` dimensions per head carry standard deviation `SPREAD`, the rest a little, which training may
raise.  For LayerNorm'ed tokens then, whatever the width of the head:
    E kappa = (1 + 2 s^2)^(-r/2) = 0.11,   E kappa^2 / (E kappa)^2 = ((1 + 2 s^2)^2 / (1 + 4 s^2))^(r/2) = 3.2
"""

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, softplus

from gpattention.numerics import autocast_is_on, is_exporting, once_differentiable
from gpattention.ops import is_plain, why_not_fused_on
from gpattention.ops.layers import MOST_COLUMNS, gather_and_sum

_View = tuple[torch.Size, tuple[int, ...], int]  # shape, strides, offset


def projected_together(x: Tensor, maps: Sequence[nn.Module]) -> list[Tensor] | None:
    """Every map of x [..., E], or None if the maps have to be called one by one."""
    if torch.compiler.is_compiling():
        return _compiled_together(x, maps)
    linears = [m for m in maps if is_plain(m, nn.Linear)]
    if not 2 <= len(maps) <= 4 or len(linears) < len(maps) or not _fit_together(x, linears):
        return None
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return list(_Together.apply(x, len(linears), *(linear.weight for linear in linears), *biases))  # type: ignore[no-untyped-call]


def _compiled_together(x: Tensor, maps: Sequence[nn.Module]) -> list[Tensor] | None:
    """The same in plain operations, on a GPU, where a step is as long as its launches are many."""
    if not x.is_cuda or is_exporting() or len(maps) < 2:
        return None
    linears = [m for m in maps if type(m) is nn.Linear and not (m._forward_hooks or m._forward_pre_hooks)]
    biases: list[Tensor] = [m.bias for m in linears if m.bias is not None]
    if len(linears) < len(maps) or len({m.weight.shape for m in linears}) > 1 or len(biases) % len(maps):
        return None
    weights: list[Tensor] = [m.weight for m in linears]
    weight, bias = torch.cat(weights), torch.cat(biases) if biases else None
    return list(linear(x, weight, bias).split(linears[0].out_features, -1))


def _fit_together(x: Tensor, linears: Sequence[nn.Linear]) -> bool:
    """Whether they have one shape, all biases or none, and float32 on a device with kernels, no autocast."""
    kinds = {(m.weight.shape, m.weight.device, m.weight.dtype, m.bias is None) for m in linears}
    if len(kinds) > 1 or next(iter(kinds))[1:3] != (x.device, x.dtype):
        return False
    if len(linears[0].weight) > MOST_COLUMNS or x.numel() == 0 or autocast_is_on(x.device):
        return False
    return x.dtype == torch.float32 and why_not_fused_on(x.device, x.dtype) is None


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[N, E] by all maps.  [N, count * out]"""
    return rows @ weight.t() if bias is None else torch.addmm(bias, rows, weight.t())


class _Together(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, *parameters: Tensor) -> tuple[Tensor, ...]:
        weights, biases = parameters[:count], parameters[count:]
        out, width = weights[0].shape
        flat = torch.cat([p.reshape(-1) for p in parameters])  # one launch for weights and biases
        weight = flat[: count * out * width].view(count * out, width)  # [count * out, E]
        rows, bias = x.reshape(-1, width), flat[weight.numel() :] if biases else None
        ctx.save_for_backward(rows, weight, bias)
        ctx.count, ctx.shape, ctx.biased = count, x.shape, bool(biases)
        return _product(rows, weight, bias).view(*x.shape[:-1], count * out).split(out, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, _ = ctx.saved_tensors
        count, out = ctx.count, weight.shape[0] // ctx.count
        by_y, by_bias = gather_and_sum([g.reshape(-1, out) for g in grads])  # [rows, count * out]
        by_x = (by_y @ weight).view(ctx.shape) if ctx.needs_input_grad[0] else None
        by_weight = by_y.t() @ rows if any(ctx.needs_input_grad[2 : 2 + count]) else None
        by_weights = [None] * count if by_weight is None else by_weight.split(out)
        return by_x, None, *by_weights, *(by_bias.split(out) if ctx.biased else ())


@contextmanager
def recomputed(made: Mapping[str, Tensor]) -> Iterator[None]:
    """Operations in this block do not keep projections made together, but compute them again.

    `made` is the result of `projected_together` by name; all other tensors are kept as usual.
    """
    # what a compiler sees has no such node, and newer ones (torch 2.13) refuse to look for it
    first = None if torch.compiler.is_compiling() else next(iter(made.values()), None)
    if first is None or type(first.grad_fn).__name__ != f"{_Together.__name__}Backward":
        yield
        return
    again = _Again(first)
    with torch.autograd.graph.saved_tensors_hooks(again.pack, again.unpack):
        yield


class _Again:
    """Computes the projections once for all views of them that a backward pass needs."""

    def __init__(self, made: Tensor) -> None:
        self._node: Any = made.grad_fn
        self._place = made.untyped_storage().data_ptr()
        self._kept, self._asked = 0, 0
        self._made: Tensor | None = None

    def pack(self, x: Tensor) -> "Tensor | tuple[_Again, _View]":
        if x.untyped_storage().data_ptr() != self._place:
            return x
        self._kept += 1
        return self, (x.shape, x.stride(), int(x.storage_offset()))

    def unpack(self, packed: "Tensor | tuple[_Again, _View]") -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if self._made is None:
            with torch.no_grad():  # from the tensors that the node of the graph has saved
                self._made = _product(*self._node.saved_tensors)
        view = self._made.as_strided(*packed[1])
        self._asked += 1
        if self._asked == self._kept:  # the last view, so that memory is freed
            self._asked, self._made = 0, None
        return view


NOISE_FLOOR = 1e-4  # the least sigma^2 at which float32 is safe up to 1024 tokens


class Positive(nn.Module):
    """floor + softplus(raw): positive by construction, learned or fixed.

    Args:
        shape: of the values.
        initial: the value of all of them at first.
        floor: a bound below them.
        learned: whether they are trained.
        name: of the initial value in errors.
        device: of the values.
        dtype: of the values.

    Raises:
        ValueError: the initial value is not above the floor, or not finite in its type.

    >>> noise = Positive((heads,), 0.01, floor=1e-4)
    >>> noise()  # [H]
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        initial: float,
        *,
        floor: float = 0.0,
        learned: bool = True,
        name: str = "the initial value",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kept_as = dtype or torch.get_default_dtype()
        if not floor < initial <= torch.finfo(kept_as).max:
            expected = f"expected {name} to be finite and above the floor {floor}"
            raise ValueError(f"{expected}, got {initial} as {kept_as}")
        self.floor = floor
        excess = initial - floor
        raw = torch.full(shape, excess + math.log(-math.expm1(-excess)), device=device, dtype=dtype)
        if learned:
            self.raw = nn.Parameter(raw)
        else:
            self.register_buffer("raw", raw)

    def forward(self) -> Tensor:
        """The positive values, at least in float32, as half precision would round them to the floor."""
        raw = self.raw.float() if self.raw.dtype in (torch.float16, torch.bfloat16) else self.raw
        return softplus(raw) if self.floor == 0 else self.floor + softplus(raw)

    def raw_of(self, value: Tensor | float) -> Tensor:
        """The `raw` of these values in float64, the inverse of `forward`."""
        excess = torch.as_tensor(value, dtype=torch.float64, device=self.raw.device) - self.floor
        if not bool((excess > 0).all()):
            raise ValueError(f"expected values above the floor {self.floor}, got {value}")
        return excess + (-(-excess).expm1()).log()

    @torch.no_grad()
    def set(self, value: Tensor | float) -> None:
        """Set the values, for example in a warm start."""
        self.raw.copy_(self.raw_of(value).expand(self.raw.shape))

    def extra_repr(self) -> str:
        """Shape and floor in the module's print-out."""
        fixed = "" if isinstance(self.raw, nn.Parameter) else ", fixed"
        return f"{tuple(self.raw.shape)}, floor={self.floor}{fixed}"


def values_of(*given: Positive) -> tuple[Tensor, ...]:
    """The values of each; compiled, a few numbers of one shape are worked out in one launch, and so back."""
    raws: list[Tensor] = [p.raw for p in given]
    plain = all(type(p) is Positive and not (p._forward_hooks or p._forward_pre_hooks) for p in given)
    if not torch.compiler.is_compiling() or not plain or len({(x.shape, x.dtype) for x in raws}) > 1:
        return tuple(p() for p in given)
    raw = torch.stack(raws).to(torch.promote_types(raws[0].dtype, torch.float32))
    place = torch.arange(len(given), device=raw.device).view(-1, *[1] * raws[0].ndim)
    values = softplus(raw)
    for i, p in enumerate(given):
        if p.floor:
            values = values + p.floor * (place == i).to(values.dtype)
    return values.unbind()


ACTIVE = 4
SPREAD = 1.0
BACKGROUND = 0.1  # squared distance the other dimensions add, in all


@torch.no_grad()
def spread_(linear: nn.Linear, num_heads: int, *, scale: float = 1.0) -> None:
    """Initialise a projection to queries, keys or latent inputs of all heads; the bias is zero."""
    width, head_dim = linear.in_features, linear.out_features // num_heads
    weight = torch.randn(num_heads, head_dim, width) / math.sqrt(width)
    weight = scale * _deviation(head_dim)[:, None] * weight  # [H, D, E]
    linear.weight.copy_(weight.reshape(-1, width))
    if linear.bias is not None:
        linear.bias.zero_()


@torch.no_grad()
def latent_points(num_heads: int, count: int, head_dim: int) -> torch.Tensor:
    """Random inducing inputs with the distribution of tokens projected after `spread_`.  [H, m, D]"""
    return _deviation(head_dim) * torch.randn(num_heads, count, head_dim)


def _deviation(head_dim: int) -> torch.Tensor:
    """Standard deviations of the dimensions of a head: a few active ones, small in the rest.  [D]"""
    active = min(ACTIVE, head_dim)
    deviation = torch.full((head_dim,), math.sqrt(BACKGROUND / (2 * head_dim)))
    deviation[:active] = SPREAD * math.sqrt(ACTIVE / active)
    return deviation


@torch.no_grad()
def preserve_(linear: nn.Linear) -> None:
    """Initialise a projection of values or outputs to keep the size of LayerNorm'ed tokens."""
    nn.init.normal_(linear.weight, std=1 / math.sqrt(linear.in_features))
    if linear.bias is not None:
        linear.bias.zero_()


def refuse_unused(owner: type, when: str, /, **given: Any) -> None:
    """Refuse values other than the defaults of `owner`'s constructor; `when` names the mode.

    >>> refuse_unused(CGPAttention, "where regularizer is 'kl'", latent_prior=latent_prior)
    """
    known = inspect.signature(owner).parameters
    for name, value in given.items():
        usual = known[name].default
        if value != usual:
            expected = f"expected {name} to be {usual!r}, its default, {when}"
            raise ValueError(f"{expected}, since it would have no effect, got {value!r}")
