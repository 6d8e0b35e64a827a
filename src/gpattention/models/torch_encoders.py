"""`nn.TransformerEncoder` by its own modules, where the fused pass of PyTorch would pass them over.

In evaluation mode PyTorch runs whole encoder layers as one fused operation that never calls their attention
or their dropout.  The switch for that belongs to the process; so whoever has to meet those modules calls the
plain pass instead, and other threads keep theirs.

The fused encoder packs the real tokens alone and unpacks its last layer's answers among zeros; the plain pass
computes something for the padded rows too.  Whoever averages over all rows sees the difference, so the zeros
are written here.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gpattention.gp.concurrency import Handler
from gpattention.models.rows import Network


def plain_passes(model: Network, met: Iterable[nn.Module]) -> dict[tuple[nn.Module, str], Handler]:
    """Handlers (see `gp.concurrency`) of all encoders and encoder layers that hold one of the modules met."""
    wanted = set(met)
    handlers: dict[tuple[nn.Module, str], Handler] = {}
    for module in model.modules():
        if not isinstance(module, nn.TransformerEncoderLayer | nn.TransformerEncoder):
            continue
        if wanted.isdisjoint(module.modules()):
            continue
        handler: Handler = _unfused
        if type(module).forward is nn.TransformerEncoderLayer.forward:
            handler = partial(_layer, module)
        elif type(module).forward is nn.TransformerEncoder.forward:
            handler = partial(_encoder, module)
        handlers[module, "forward"] = handler
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
    layer: Any,
    own: Handler,
    src: Tensor,
    src_mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    if layer.norm_first:
        x = src + layer._sa_block(layer.norm1(src), src_mask, src_key_padding_mask, is_causal=is_causal)
        return x + layer._ff_block(layer.norm2(x))
    x = layer.norm1(src + layer._sa_block(src, src_mask, src_key_padding_mask, is_causal=is_causal))
    return layer.norm2(x + layer._ff_block(x))


def _encoder(
    encoder: Any,
    own: Handler,
    src: Tensor,
    mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool | None = None,
) -> Tensor:
    padding = src_key_padding_mask
    dropped = None if mask is not None else _dropped(encoder, src, padding)
    output = src
    for layer in encoder.layers:
        output = layer(output, src_mask=mask, is_causal=bool(is_causal), src_key_padding_mask=padding)
    if dropped is not None:  # before the encoder's own norm, which turns zeros into its bias
        output = output.masked_fill(dropped[..., None], 0.0)
    return output if encoder.norm is None else encoder.norm(output)


def _dropped(encoder: nn.TransformerEncoder, src: Tensor, padding: Tensor | None) -> Tensor | None:
    """The padded tokens, if the fused pass would take the call: the conditions of PyTorch.  [B, N]

    With gradients too, where it never runs: the same model is the same with them.
    """
    if padding is None or src.ndim != 3 or src.is_nested or torch.compiler.is_compiling():
        return None
    if not torch.backends.mha.get_fastpath_enabled() or torch.is_autocast_enabled():
        return None
    if not encoder.use_nested_tensor or encoder.layers[0].training:
        return None
    dropped = padding if padding.dtype == torch.bool else padding != 0
    gaps = dropped[:, :-1] & ~dropped[:, 1:]  # a real token after padding
    return None if bool(gaps.any()) else dropped
