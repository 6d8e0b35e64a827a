"""What the fused pass of `nn.TransformerEncoder` does to padding, for the time it is switched off.

In evaluation mode the encoder packs the real tokens alone and unpacks its last layer's answers among zeros;
its other pass computes something for the padded rows too.  Whoever averages over all rows sees the
difference.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def padding_left_zero(model: nn.Module) -> Iterator[None]:
    """Encoders leave zeros at padding as the fused pass would; with gradients too, where it never runs."""
    encoders = [
        module
        for module in model.modules()
        # a subclass with a forward of its own may never pack anything
        if isinstance(module, nn.TransformerEncoder) and type(module).forward is nn.TransformerEncoder.forward
    ]
    before = [encoder.__dict__.get("forward") for encoder in encoders]
    try:
        for encoder in encoders:
            encoder.__dict__["forward"] = _forward(encoder, encoder.forward)
        yield
    finally:
        for encoder, own in zip(encoders, before, strict=True):
            encoder.__dict__.pop("forward", None)
            if own is not None:
                encoder.__dict__["forward"] = own


def _forward(encoder: nn.TransformerEncoder, own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forward(
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        dropped = None if mask is not None else _dropped(encoder, src, src_key_padding_mask)
        if dropped is None:
            return own(src, mask, src_key_padding_mask, is_causal)
        # before the encoder's own norm, which turns zeros into its bias
        hook = encoder.layers[-1].register_forward_hook(
            lambda layer, given, answer: answer.masked_fill(dropped[..., None], 0.0)
        )
        try:
            return own(src, mask, src_key_padding_mask, is_causal)
        finally:
            hook.remove()

    return forward


def _dropped(encoder: nn.TransformerEncoder, src: Tensor, padding: Tensor | None) -> Tensor | None:
    """The padded tokens, if the fused pass would take the call: the conditions of PyTorch.  [B, N]"""
    if padding is None or src.ndim != 3 or src.is_nested or torch.compiler.is_compiling():
        return None
    if not encoder.use_nested_tensor or encoder.layers[0].training or torch.is_autocast_enabled():
        return None
    dropped = padding if padding.dtype == torch.bool else padding != 0
    gaps = dropped[:, :-1] & ~dropped[:, 1:]  # a real token after padding
    return None if bool(gaps.any()) else dropped
