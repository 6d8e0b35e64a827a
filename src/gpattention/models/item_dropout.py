"""Dropout whose masks belong to items: the same however a batch is cut or spread over processes.

The modules themselves stay in evaluation mode and untouched; whoever calls for it drops after each of them.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from gpattention.gp import ItemNoise
from gpattention.gp.concurrency import Handler, handling
from gpattention.models.rows import Inputs, Network, count_items, device_of, model_device, take
from gpattention.models.torch_encoders import plain_passes

Hook: TypeAlias = Callable[[str, float, nn.Module, tuple[Tensor, ...], Tensor], Tensor | None]
_CHANNELS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)  # drop whole channels of [B, C, ...]


@dataclass(frozen=True)
class Dropout:
    """A dropout module that drops, and its rate."""

    module: nn.Module
    rate: float


def find_dropouts(model: Network, rate: float | None = None) -> dict[str, Dropout]:
    """Every dropout module with a rate above 0, or all of them at `rate` if given."""
    found: dict[str, Dropout] = {}
    for name, module in model.named_modules():
        if not isinstance(module, _DropoutNd):
            continue
        own = module.p if rate is None else rate
        if own > 0 and not isinstance(module, (nn.Dropout, *_CHANNELS)):
            raise ValueError(f"expected nn.Dropout as {name!r}, got {type(module).__name__} with p={own}")
        if own > 0:
            found[name] = Dropout(module, own)
    return found


@contextmanager
def hooked(model: Network, dropouts: Mapping[str, Dropout], hook: Hook) -> Iterator[None]:
    """Run the hook after every dropout that this thread calls."""
    handlers = plain_passes(model, [dropout.module for dropout in dropouts.values()])
    for name, dropout in dropouts.items():
        handlers[dropout.module, "forward"] = partial(
            _drop, partial(hook, name, dropout.rate), dropout.module
        )
    with handling(handlers):
        yield


def _drop(hook: Callable[..., Tensor | None], module: nn.Module, own: Handler, x: Tensor) -> Tensor:
    output: Tensor = own(x)
    dropped = hook(module, (x,), output)
    return output if dropped is None else dropped


def calls_of_items(
    model: Network, forward: Callable[[Inputs], object], dropouts: Mapping[str, Dropout], inputs: Inputs
) -> list[bool]:
    """For every call of a dropout in a forward pass, in order: does its input lead with the batch?

    One shape cannot tell: a batch of 4 rows looks like 4 heads.  So two batch sizes are tried.
    """
    count_items(inputs)
    passes: list[list[tuple[str, int]]] = []
    for rows in (2, 3):
        calls: list[tuple[str, int]] = []

        def note(name: str, rate: float, module: nn.Module, args: tuple[Tensor, ...], x: Tensor) -> None:
            calls.append((name, len(x) if x.ndim else 0))  # noqa: B023 called in this turn of the loop

        first = torch.zeros(rows, dtype=torch.int64, device=device_of(inputs))  # [R] the first item
        with hooked(model, dropouts, note):
            forward(take(inputs, first, model_device(model, inputs)))
        passes.append(calls)
    own = []
    for (name, two), (_, three) in zip(*passes, strict=True):
        if two != three and (two, three) != (2, 3):
            raise ValueError(
                f"expected the input of dropout {name!r} to lead with the batch, so that each item has "
                f"its own mask, got {two} rows for a batch of 2 and {three} for 3"
            )
        own.append(two != three)
    if not any(own):
        raise ValueError(
            "expected dropout on the items, got a forward pass that calls none: nothing would drop"
        )
    return own


def item_masks(noise: ItemNoise, own: list[bool]) -> Hook:
    """A hook that gives what dropout gives in training, with the items' own masks."""
    calls = iter(own)

    def drop(name: str, rate: float, module: nn.Module, args: tuple[Tensor, ...], x: Tensor) -> Tensor | None:
        if not next(calls):
            return None
        whole = isinstance(module, _CHANNELS)
        shape = (*x.shape[:2], *[1] * (x.ndim - 2)) if whole else tuple(x.shape)
        keep = noise.uniform(shape, torch.float32, x.device) >= rate  # [R, ...]
        return torch.where(keep, x / (1 - rate), 0.0) if rate < 1 else torch.zeros_like(x)

    return drop
