"""Several linear maps of one input as one product: queries, keys, latent inputs and values.

The modules and their parameters stay apart; their weights are put side by side where they are used.  What
they give is four times as large as the tokens, which are kept for the backward pass anyway: `recomputed`
keeps only the tokens and makes the product again.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gpattention.numerics import autocast_is_on, once_differentiable
from gpattention.ops import is_plain, why_not_fused_on
from gpattention.ops.layers import MOST_COLUMNS, gather_and_sum

_View = tuple[torch.Size, tuple[int, ...], int]  # shape, strides, offset


def projected_together(x: Tensor, maps: Sequence[nn.Module]) -> list[Tensor] | None:
    """Every map of x [..., E], or None where the maps have to be called one by one."""
    if torch.compiler.is_compiling():  # the compiler sees to it
        return None
    linears = [m for m in maps if is_plain(m, nn.Linear)]
    if not 2 <= len(maps) <= 4 or len(linears) < len(maps) or not _fit_together(x, linears):
        return None
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return list(_Together.apply(x, len(linears), *(linear.weight for linear in linears), *biases))  # type: ignore[no-untyped-call]


def _fit_together(x: Tensor, linears: Sequence[nn.Linear]) -> bool:
    """One shape, all biases or none, float32 on a device that has the kernels, no autocast."""
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
    """Operations in this block keep, of projections made together, only how to make them again.

    `made` is what `projected_together` gave, by name; of anything else nothing changes.
    """
    first = next(iter(made.values()), None)
    if first is None or type(first.grad_fn).__name__ != f"{_Together.__name__}Backward":
        yield
        return
    again = _Again(first)
    with torch.autograd.graph.saved_tensors_hooks(again.pack, again.unpack):
        yield


class _Again:
    """Makes the projections once for all views of them that one backward pass asks for."""

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
            with torch.no_grad():  # all that the graph's node made, while it still has what it was made of
                self._made = _product(*self._node.saved_tensors)
        view = self._made.as_strided(*packed[1])
        self._asked += 1
        if self._asked == self._kept:  # the last of them: nothing is held beyond
            self._asked, self._made = 0, None
        return view
