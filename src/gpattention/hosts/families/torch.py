"""`nn.MultiheadAttention`, alone or inside `nn.TransformerEncoderLayer`.

In evaluation mode PyTorch runs whole encoder layers as one fused operation that never calls their attention;
around a hooked site they run their plain pass (`models.dropout`).  Converted modules have the old parameters
under their old names; encoder layers leave them to themselves, since they say that their projections are
separate.
"""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear, scaled_dot_product_attention

from gpattention.concurrency import Handler
from gpattention.hosts.families import base
from gpattention.hosts.families.base import AttentionCall, AttentionHook, Family, Handlers, Site
from gpattention.hosts.layers import ATTRIBUTE, ConvertedAttention, inherit, take_place
from gpattention.hosts.projected import KeyProjection
from gpattention.models.dropout import plain_passes

_COMPUTED = {"in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias"}


class TorchFamily(Family):
    """PyTorch's own attention."""

    name = "torch"
    forms = "nn.MultiheadAttention"

    def matches(self, module: nn.Module) -> bool:
        """All of the class and its subclasses."""
        return isinstance(module, nn.MultiheadAttention)

    def refusal(self, module: nn.Module, around: Sequence[nn.Module]) -> str | None:
        """Attention of decoders, forwards of its own, and keys that belong to no token."""
        assert isinstance(module, nn.MultiheadAttention)
        if around and isinstance(around[0], nn.TransformerDecoderLayer):
            return base.CAUSAL if around[0].self_attn is module else base.CROSS
        if type(module).forward is not nn.MultiheadAttention.forward or base.is_patched(module):
            return "it has a forward of its own, which would be passed over"
        option = "add_zero_attn" if module.add_zero_attn else None
        option = "add_bias_kv" if module.bias_k is not None else option
        return option and f"{option}=True appends a key that belongs to no token"

    def handlers(self, model: nn.Module, sites: Sequence[Site], hook: AttentionHook) -> Handlers:
        """Forward passes of the sites are answered here, those of encoders around them by their modules."""
        around = plain_passes(model, [site.module for site in sites])
        return {**around, **{(s.module, "forward"): partial(_forward, s, hook) for s in sites}}

    def key_projection(self, site: Site) -> KeyProjection:
        """The host's map to keys, as a module of its own."""
        made = getattr(site.module, "parametrizations", None)
        parametrized = set(made) if isinstance(made, nn.ModuleDict) else set()
        # only parameters can be taken over
        if computed := ", ".join(sorted(_COMPUTED & set(vars(site.module)) | parametrized)):
            got = "got pruned or parametrized ones: make that permanent first, by torch.nn.utils"
            raise ValueError(f"{site.name}: expected {computed} to be parameters, {got}")
        weights, biases = _split_projections(site.module)
        return KeyProjection(weights[1], biases[1])

    def place(self, model: nn.Module, site: Site, layer: ConvertedAttention) -> None:
        """Put the converted module where the old one was, and keep encoders from nesting their tensors."""
        assert isinstance(site.module, nn.MultiheadAttention)
        take_place(model, site.module, ConvertedMultihead(site.module, layer))
        for module in model.modules():
            if isinstance(module, nn.TransformerEncoder):
                module.use_nested_tensor = False


def _answer(
    module: Any,
    name: str,
    attend: Callable[..., tuple[Tensor, Tensor | None]],
    query: Tensor,  # [B, Q, E] or, as nn.MultiheadAttention has it, [Q, B, E] or [Q, E]
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,  # [B, K]
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """A call of `nn.MultiheadAttention`; `attend` makes heads [B, Q, H, D], and weights where wanted."""
    tokens, padding = _batched(module, key_padding_mask, query, key, value)
    real = _real_keys(name, padding, attn_mask, is_causal)  # [B, K] or None
    heads, weights = attend(tokens, *_projected(module, *tokens), real, need_weights)
    return _returned(module, heads, weights, query.ndim == 3, average_attn_weights)


def _forward(site: Site, hook: AttentionHook, own: Handler, *args: Any, **kwargs: Any) -> Any:
    return _answer(site.module, site.title, partial(_hooked, site, hook), *args, **kwargs)


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
    """What the module itself does, and then the hook."""
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


def _batched(module: Any, padding: Tensor | None, *tokens: Tensor) -> tuple[list[Tensor], Tensor | None]:
    """Queries, keys and values [B, N, E] and padding [B, K]; tokens that were one tensor stay one."""
    alone = tokens[0].ndim != 3
    distinct = {id(x): x for x in tokens}
    if alone or not module.batch_first:
        distinct = {key: x[None] if alone else x.transpose(0, 1) for key, x in distinct.items()}
    return [distinct[id(x)] for x in tokens], padding[None] if alone and padding is not None else padding


def _returned(
    module: Any, heads: Tensor, weights: Tensor | None, batched: bool, average: bool
) -> tuple[Tensor, Tensor | None]:
    """Outputs from heads [B, Q, H, D], and weights [B, H, Q, K], in the shapes that the caller expects."""
    # tokens first in memory, as PyTorch leaves it: dropout after it then hits the same entries
    output = module.out_proj(heads.transpose(0, 1).flatten(2))  # [Q, B, E]
    if weights is not None and average:
        weights = weights.mean(1)
    if not batched:
        return output[:, 0], None if weights is None else weights[0]
    return output.transpose(0, 1) if module.batch_first else output, weights


def _projected(module: Any, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Queries, keys and values of the heads.  [B, H, N, D] each"""
    if module._qkv_same_embed_dim and query is key and key is value:
        # one product, as PyTorch itself makes it
        found = linear(query, module.in_proj_weight, module.in_proj_bias).chunk(3, -1)
    else:
        found = tuple(map(linear, (query, key, value), *_split_projections(module)))
    return [x.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for x in found]


def _real_keys(name: str, padding: Tensor | None, attn_mask: Tensor | None, is_causal: bool) -> Tensor | None:
    """Keys that both masks leave.  [B, K]"""
    masks = [] if padding is None else [padding]  # [B, K]
    if attn_mask is not None or is_causal:
        if attn_mask is None or attn_mask.ndim > 2:
            found = "is_causal=True (causal attention)" if attn_mask is None else "an attn_mask per head"
            raise base.refused_call(name, "a key_padding_mask", found)
        masks.append(attn_mask[None, None])  # [1, 1, Q, K]
    # PyTorch's bool masks say True = ignore
    real = [base.real_keys(~mask if mask.dtype == torch.bool else mask, name) for mask in masks]
    return reduce(torch.logical_and, real) if real else None


def _split_projections(module: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
    """Weights and biases of queries, keys and values, however the module keeps them."""
    bias = (None, None, None) if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    if module.in_proj_weight is not None:
        return module.in_proj_weight.chunk(3), bias
    return (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight), bias


class ConvertedMultihead(nn.Module):
    """Takes the place, the call and the parameters of an `nn.MultiheadAttention`."""

    num_heads: int
    out_proj: nn.Linear
    _qkv_same_embed_dim = False  # what encoder layers ask before they take the fast path

    def __init__(self, host: nn.MultiheadAttention, layer: ConvertedAttention) -> None:
        super().__init__()
        inherit(self, host, layer, "embed_dim", "num_heads", "head_dim", "batch_first")

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """As `nn.MultiheadAttention`; a mask that differs between queries is refused."""
        return _answer(self, getattr(self, ATTRIBUTE).name, self._attend, *args, **kwargs)

    def _attend(
        self, tokens: list[Tensor], q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, need: bool
    ) -> Any:
        own = {"queries": tokens[0], "keys": tokens[1], "real": real}
        return getattr(self, ATTRIBUTE)(q, k, v, **own, need_weights=need)
