"""`nn.MultiheadAttention`, alone or inside `nn.TransformerEncoderLayer`.

In evaluation mode PyTorch runs whole encoder layers as one fused operation, which does not call their
attention; layers with a hooked site run a plain pass instead (`models.dropout`).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, scaled_dot_product_attention

from gpattention.concurrency import Handler
from gpattention.hosts.families import base
from gpattention.hosts.families.base import AttentionCall, AttentionHook, Family, Handlers, Site
from gpattention.models.converted import ConvertedAttention, take_place
from gpattention.models.dropout import plain_passes
from gpattention.models.multihead import ConvertedMultihead, answer_call, key_projection
from gpattention.models.projected import KeyProjection


class TorchFamily(Family):
    """PyTorch's own attention."""

    name = "torch"
    forms = "nn.MultiheadAttention"

    def matches(self, module: nn.Module) -> bool:
        """Objects of the class and its subclasses."""
        return isinstance(module, nn.MultiheadAttention)

    def refusal(self, module: nn.Module, around: Sequence[nn.Module]) -> str | None:
        """Refuse attention of decoders, other forward methods, and keys that belong to no token."""
        assert isinstance(module, nn.MultiheadAttention)
        if around and isinstance(around[0], nn.TransformerDecoderLayer):
            return base.CAUSAL if around[0].self_attn is module else base.CROSS
        if type(module).forward is not nn.MultiheadAttention.forward or base.is_patched(module):
            return "it has a forward of its own, which would be passed over"
        option = "add_zero_attn" if module.add_zero_attn else None
        option = "add_bias_kv" if module.bias_k is not None else option
        return option and f"{option}=True appends a key that belongs to no token"

    def handlers(self, model: nn.Module, sites: Sequence[Site], hook: AttentionHook) -> Handlers:
        """Handle the forward methods of the sites, and run encoders around them without fused operations."""
        around = plain_passes(model, [site.module for site in sites])
        return {**around, **{(s.module, "forward"): partial(_forward, s, hook) for s in sites}}

    def key_projection(self, site: Site) -> KeyProjection:
        """The host's projection to keys."""
        return key_projection(site.module, site.name)

    def place(self, model: nn.Module, site: Site, layer: ConvertedAttention) -> None:
        """Replace the module by a converted one, and switch off nested tensors of encoders."""
        assert isinstance(site.module, nn.MultiheadAttention)
        take_place(model, site.module, ConvertedMultihead(site.module, layer))
        for module in model.modules():
            if isinstance(module, nn.TransformerEncoder):
                module.use_nested_tensor = False


def _forward(site: Site, hook: AttentionHook, own: Handler, *args: Any, **kwargs: Any) -> Any:
    return answer_call(site.module, site.title, partial(_hooked, site, hook), *args, **kwargs)


def _hooked(
    site: Site,
    hook: AttentionHook,
    _: object,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    real: Tensor | None,
    need: bool,
) -> tuple[Tensor, Tensor | None]:
    """Attend as the module does, then call the hook."""
    module: Any = site.module
    attend = None if real is None else real[:, None, None]  # [B, 1, 1, K]
    rate = module.dropout if module.training else 0.0
    weights = None
    if need:
        logits = (q * q.shape[-1] ** -0.5) @ k.mT
        logits = logits if attend is None else logits.masked_fill(~attend, -torch.inf)
        weights = dropout(logits.softmax(-1), rate)  # [B, H, Q, K]
        mean = weights @ v
    else:
        mean = scaled_dot_product_attention(q, k, v, attn_mask=attend, dropout_p=rate)
    return hook(site, AttentionCall.scaled(mean, q, k, v, real)).transpose(1, 2), weights
