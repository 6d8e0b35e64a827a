"""Dropout whose masks belong to items: the same however a batch is cut or spread over processes.

The dropout modules stay in evaluation mode; entries are dropped after each of their calls.

In evaluation mode PyTorch runs layers of `nn.TransformerEncoder` as one fused operation, which does not call
their attention or dropout.  The switch for that is one of the process, so that the layers are given a plain
pass instead, in the calling thread only.  The fused encoder leaves padded tokens out, and its results for
them are zeros; the plain pass computes something for them.  Averages over all rows would differ, so that the
zeros are written here.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from gpattention.concurrency import Handler, handling
from gpattention.gp import ItemNoise
from gpattention.models.predict import Inputs, count_items, device_of, model_device, take


def plain_passes(model: Any, met: Iterable[nn.Module]) -> dict[tuple[nn.Module, str], Handler]:
    """Handlers (see `concurrency`) of all encoders and encoder layers that hold one of the modules met."""
    wanted, handlers = set(met), {}
    ours = {nn.TransformerEncoderLayer.forward: _layer, nn.TransformerEncoder.forward: _encoder}
    for module in model.modules():
        encodes = isinstance(module, nn.TransformerEncoderLayer | nn.TransformerEncoder)
        if encodes and not wanted.isdisjoint(module.modules()):
            own = ours.get(type(module).forward)  # subclasses may have passes of their own
            handlers[module, "forward"] = _unfused if own is None else partial(own, module)
    return handlers


class _Plain(TorchFunctionMode):
    """Changes nothing; but PyTorch takes no fused pass where a thread overrides functions."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def _unfused(own: Handler, *args: Any, **kwargs: Any) -> Any:
    """A forward pass of a subclass, which may call that of PyTorch's own class."""
    with _Plain():
        return own(*args, **kwargs)


def _layer(
    layer: Any, own: Handler, src: Tensor, src_mask: Any = None, src_key_padding_mask: Any = None,
    is_causal: bool = False,
) -> Tensor:  # fmt: skip
    masks = (src_mask, src_key_padding_mask)
    if layer.norm_first:
        x = src + layer._sa_block(layer.norm1(src), *masks, is_causal=is_causal)
        return x + layer._ff_block(layer.norm2(x))
    x = layer.norm1(src + layer._sa_block(src, *masks, is_causal=is_causal))
    return layer.norm2(x + layer._ff_block(x))


def _encoder(
    encoder: Any, own: Handler, src: Tensor, mask: Any = None, src_key_padding_mask: Any = None,
    is_causal: bool | None = None,
) -> Tensor:  # fmt: skip
    padding = src_key_padding_mask
    dropped = None if mask is not None else dropped_tokens(encoder, src, padding)
    output = src
    for layer in encoder.layers:
        output = layer(output, src_mask=mask, is_causal=bool(is_causal), src_key_padding_mask=padding)
    if dropped is not None:  # before the encoder's own norm, which turns zeros into its bias
        output = output.masked_fill(dropped[..., None], 0.0)
    return output if encoder.norm is None else encoder.norm(output)


def dropped_tokens(encoder: nn.TransformerEncoder, src: Tensor, padding: Tensor | None) -> Tensor | None:
    """The padded tokens, if the fused pass would take the call: the conditions of PyTorch.  [B, N]

    With gradients too, where it never runs: the same model is the same with them.
    """
    if padding is None or src.ndim != 3 or src.is_nested or torch.compiler.is_compiling():
        return None
    allowed = torch.backends.mha.get_fastpath_enabled() and not torch.is_autocast_enabled()
    if not allowed or not encoder.use_nested_tensor or encoder.layers[0].training:
        return None
    dropped = padding if padding.dtype == torch.bool else padding != 0
    gaps = dropped[:, :-1] & ~dropped[:, 1:]  # a real token after padding
    return None if bool(gaps.any()) else dropped


_CHANNELS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)  # drop whole channels of [B, C, ...]


@dataclass(frozen=True)
class Dropout:
    """A dropout module that drops, and its rate."""

    module: nn.Module
    rate: float


# a module's name, what it is, and what it gave; gives what it should have given, or None
Hook: TypeAlias = Callable[[str, Dropout, Tensor], Tensor | None]


def find_dropouts(model: Any, rate: float | None = None) -> dict[str, Dropout]:
    """Every dropout module with a rate above 0, or all of them at `rate` if given."""
    found: dict[str, Dropout] = {}
    for name, module in model.named_modules():
        own = (module.p if rate is None else rate) if isinstance(module, _DropoutNd) else 0
        if own > 0 and not isinstance(module, (nn.Dropout, *_CHANNELS)):
            raise ValueError(f"expected nn.Dropout as {name!r}, got {type(module).__name__} with p={own}")
        if own > 0:
            found[name] = Dropout(module, own)
    return found


@contextmanager
def hooked(model: Any, dropouts: Mapping[str, Dropout], hook: Hook) -> Iterator[None]:
    """Run the hook after every dropout that this thread calls."""

    def drop(name: str, dropout: Dropout, own: Handler, x: Tensor) -> Tensor:
        output: Tensor = own(x)
        dropped = hook(name, dropout, output)
        return output if dropped is None else dropped

    handlers = plain_passes(model, [dropout.module for dropout in dropouts.values()])
    for name, dropout in dropouts.items():
        handlers[dropout.module, "forward"] = partial(drop, name, dropout)
    with handling(handlers):
        yield


def calls_of_items(
    model: Any, forward: Callable[[Inputs], object], dropouts: Mapping[str, Dropout], inputs: Inputs
) -> list[bool]:
    """Whether the input leads with the batch, for every call of dropout in a forward pass, in order.

    One shape does not show it, as a batch of 4 rows looks like 4 heads, so that two batch sizes are tried.
    """
    count_items(inputs)
    device = model_device(model, inputs)

    def calls(rows: int) -> list[tuple[str, int]]:
        seen: list[tuple[str, int]] = []
        first = torch.zeros(rows, dtype=torch.int64, device=device_of(inputs))  # [R] the first item
        with hooked(model, dropouts, lambda name, _, x: seen.append((name, len(x) if x.ndim else 0))):
            forward(take(inputs, first, device))
        return seen

    own = []
    for (name, two), (_, three) in zip(calls(2), calls(3), strict=True):
        if two != three and (two, three) != (2, 3):
            expected = f"expected the input of dropout {name!r} to lead with the batch"
            raise ValueError(f"{expected}, got {two} rows for a batch of 2 and {three} for 3")
        own.append(two != three)
    if not any(own):
        raise ValueError("expected dropout on the items, got a forward pass that calls none")
    return own


def item_masks(noise: ItemNoise, own: list[bool]) -> Hook:
    """A hook that gives what dropout gives in training, with the items' own masks."""
    calls = iter(own)

    def drop(name: str, dropout: Dropout, x: Tensor) -> Tensor | None:
        if not next(calls):
            return None
        whole, rate = isinstance(dropout.module, _CHANNELS), dropout.rate
        shape = (*x.shape[:2], *[1] * (x.ndim - 2)) if whole else tuple(x.shape)
        # torch's own dropout has the batch's numbers, which change with how it is cut
        keep = noise.uniform(shape, torch.float32, x.device) >= rate  # [R, ...]
        return torch.where(keep, x / (1 - rate), 0.0) if rate < 1 else torch.zeros_like(x)

    return drop
