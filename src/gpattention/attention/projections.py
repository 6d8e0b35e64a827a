"""Several linear maps of one input as one product: queries, keys, latent inputs and values.

The modules and their parameters stay apart; their weights are put side by side where they are used.
"""

from collections.abc import Iterable, Sequence
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from gpattention.attention.column_sums import MOST_COLUMNS, gather_and_sum
from gpattention.gp.concurrency import is_handled
from gpattention.gp.differentiation import once_differentiable
from gpattention.gp.fused.switch import why_not_fused_on
from gpattention.gp.precision import autocast_is_on

Module = TypeVar("Module", bound=nn.Module)


def projected_together(x: Tensor, maps: Sequence[nn.Module]) -> list[Tensor] | None:
    """Every map of x [..., E], or None where the maps have to be called one by one."""
    if torch.compiler.is_compiling():  # the compiler sees to it
        return None
    linears = [m for m in maps if is_plain(m, nn.Linear)]
    if not 2 <= len(maps) <= 4 or len(linears) < len(maps) or not _alike(x, linears):
        return None
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return list(_Together.apply(x, len(linears), *(linear.weight for linear in linears), *biases))  # type: ignore[no-untyped-call]


def projected_rows(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[N, E] by all maps.  [N, count * out]"""
    return rows @ weight.t() if bias is None else torch.addmm(bias, rows, weight.t())


def was_projected_together(x: Tensor) -> bool:
    """Whether x is one of the tensors that `projected_together` gave, with its graph."""
    return type(x.grad_fn).__name__ == f"{_Together.__name__}Backward"


def project_again(node: Any) -> Tensor:
    """All that the graph's node made together, in one tensor, while the graph has what it was made of.

    [rows, count * out]
    """
    with torch.no_grad():
        return projected_rows(*node.saved_tensors)


def is_plain(module: nn.Module, kind: type[Module]) -> TypeGuard[Module]:
    """Whether a module is of that very class, with nothing that watches or changes its calls."""
    return type(module) is kind and not is_watched(module)


def is_watched(*modules: nn.Module) -> bool:
    """Whether a call of these modules has to be a call: somebody hooked on to it, or handles it."""
    if torch_modules._global_forward_hooks or torch_modules._global_forward_pre_hooks or is_handled(*modules):
        return True
    return any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks
        for m in modules
    )


def _alike(x: Tensor, linears: Iterable[nn.Linear]) -> bool:
    """One shape, all biases or none, float32 on a device that has the kernels, no autocast."""
    shapes = {linear.weight.shape for linear in linears}
    biased = {linear.bias is None for linear in linears}
    kinds = {(linear.weight.device, linear.weight.dtype) for linear in linears}
    if len(shapes) > 1 or len(biased) > 1 or kinds != {(x.device, x.dtype)}:
        return False
    out = next(iter(shapes))[0]
    if out > MOST_COLUMNS or x.numel() == 0 or autocast_is_on(x.device):
        return False
    return x.dtype == torch.float32 and why_not_fused_on(x.device, x.dtype) is None


class _Together(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, *parameters: Tensor) -> tuple[Tensor, ...]:
        weights, biases = parameters[:count], parameters[count:]
        out, width = weights[0].shape
        flat = torch.cat([p.reshape(-1) for p in parameters])  # one launch for weights and biases
        weight = flat[: count * out * width].view(count * out, width)  # [count * out, E]
        rows, bias = x.reshape(-1, width), flat[weight.numel() :] if biases else None
        ctx.save_for_backward(rows, weight, bias)
        y = projected_rows(rows, weight, bias)
        ctx.count, ctx.shape, ctx.biased = count, x.shape, bool(biases)
        return y.view(*x.shape[:-1], count * out).split(out, -1)

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
