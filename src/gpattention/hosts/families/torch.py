"""`nn.MultiheadAttention`, alone or inside `nn.TransformerEncoderLayer`.

In evaluation mode PyTorch runs whole encoder layers as one fused operation that never calls their attention;
around a hooked site they run their plain pass (`models.dropout`).  Converted modules have the old parameters
under their old names; encoder layers leave them to themselves, since they say that their projections are
separate.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear, scaled_dot_product_attention

from gpattention.concurrency import Handler
from gpattention.hosts.families import base
from gpattention.hosts.families.base import AttentionCall, AttentionHook, Family, Handlers, Site
from gpattention.hosts.layers import ATTRIBUTE, ConvertedAttention, inherit, take_place
from gpattention.hosts.projected import KeyProjection, as_linear
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
        biased = module.bias_k is not None or module.bias_v is not None
        option = "add_bias_kv" if biased else "add_zero_attn" if module.add_zero_attn else None
        return option and f"{option}=True appends a key that belongs to no token"

    def handlers(self, model: nn.Module, sites: Sequence[Site], hook: AttentionHook) -> Handlers:
        """Forward passes of the sites are answered here, those of encoders around them by their modules."""
        around = plain_passes(model, [site.module for site in sites])
        return {**around, **{(s.module, "forward"): partial(_forward, s, hook) for s in sites}}

    def key_projection(self, site: Site) -> KeyProjection:
        """The host's map to keys, as a module of its own."""
        made = getattr(site.module, "parametrizations", None)
        parametrized = set(made) if isinstance(made, nn.ModuleDict) else set()
        computed = sorted(_COMPUTED & set(site.module.__dict__) | parametrized)
        if computed:  # only parameters can be taken over
            raise ValueError(
                f"{site.name}: expected {', '.join(computed)} to be parameters, got pruned or parametrized "
                "ones: make that permanent first (torch.nn.utils.prune.remove, "
                "torch.nn.utils.parametrize.remove_parametrizations)"
            )
        weights, biases = _split_projections(site.module)
        return KeyProjection(as_linear(weights[1], biases[1]))

    def place(self, model: nn.Module, site: Site, layer: ConvertedAttention) -> None:
        """Put the converted module where the old one was, and keep encoders from nesting their tensors."""
        assert isinstance(site.module, nn.MultiheadAttention)
        take_place(model, site.module, ConvertedMultihead(site.module, layer))
        for module in model.modules():
            if isinstance(module, nn.TransformerEncoder):
                module.use_nested_tensor = False


def _forward(
    site: Site,
    hook: AttentionHook,
    own: Handler,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    module: Any = site.module
    tokens, padding = _batched(module, key_padding_mask, query, key, value)
    real = _real_keys(site, padding, attn_mask, is_causal)  # [B, K] or None
    q, k, v = (_heads(x, module.num_heads) for x in _projected(module, *tokens))  # [B, H, N, D]
    attend = None if real is None else real[:, None, None]  # [B, 1, 1, K]
    rate = module.dropout if module.training else 0.0
    weights = None
    if need_weights:
        logits = (q * q.shape[-1] ** -0.5) @ k.mT
        logits = logits if attend is None else logits.masked_fill(~attend, -torch.inf)
        weights = dropout(logits.softmax(-1), rate)  # [B, H, Q, K]
        mean = weights @ v
    else:
        mean = scaled_dot_product_attention(q, k, v, attn_mask=attend, dropout_p=rate)
    drawn = hook(site, AttentionCall.scaled(mean, q, k, v, real))
    # tokens first in memory, as PyTorch leaves it: dropout after it then hits the same entries
    output = module.out_proj(drawn.permute(2, 0, 1, 3).flatten(2))  # [Q, B, E]
    return _returned(module, output.transpose(0, 1), weights, query.ndim == 3, average_attn_weights)


def _batched(module: Any, padding: Tensor | None, *tokens: Tensor) -> tuple[list[Tensor], Tensor | None]:
    """Queries, keys and values [B, N, E] and padding [B, K]; tokens that were one tensor stay one."""
    alone = tokens[0].ndim != 3
    distinct = {id(x): x for x in tokens}
    if alone or not module.batch_first:
        distinct = {key: x[None] if alone else x.transpose(0, 1) for key, x in distinct.items()}
    return [distinct[id(x)] for x in tokens], padding[None] if alone and padding is not None else padding


def _returned(
    module: Any, output: Tensor, weights: Tensor | None, batched: bool, average: bool
) -> tuple[Tensor, Tensor | None]:
    """Outputs [B, Q, E] and weights [B, H, Q, K] in the shapes that the caller expects."""
    if weights is not None and average:
        weights = weights.mean(1)
    if not batched:
        return output[0], None if weights is None else weights[0]
    return output if module.batch_first else output.transpose(0, 1), weights


def _projected(module: Any, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
    """[B, N, E] each."""
    if module._qkv_same_embed_dim and query is key and key is value:
        # one product, as PyTorch itself makes it
        return linear(query, module.in_proj_weight, module.in_proj_bias).chunk(3, -1)
    return [linear(x, w, b) for x, w, b in zip((query, key, value), *_split_projections(module), strict=True)]


def _heads(x: Tensor, heads: int) -> Tensor:
    """[B, N, E] -> [B, H, N, D]"""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _real_keys(
    site: Site, padding: Tensor | None, attn_mask: Tensor | None, is_causal: bool
) -> Tensor | None:
    """[B, K]"""
    pairs = None
    if attn_mask is not None or is_causal:
        if attn_mask is None or attn_mask.ndim > 2:
            found = "is_causal=True" if attn_mask is None else "an attn_mask per head"
            raise base.refused_call(site.title, "a key_padding_mask", found)
        pairs = base.real_keys(_attended(attn_mask)[None, None], site.title)  # [1, K]
    if padding is None:
        return pairs
    real = base.real_keys(_attended(padding), site.title)
    return real if pairs is None else real & pairs


def _attended(mask: Tensor) -> Tensor:
    """PyTorch's bool masks say True = ignore."""
    return ~mask if mask.dtype == torch.bool else mask


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

    def forward(
        self,
        query: Tensor,  # [B, Q, E] or, as nn.MultiheadAttention has it, [Q, B, E] or [Q, E]
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,  # [B, K]
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As `nn.MultiheadAttention`; a mask of pairs is refused."""
        layer = getattr(self, ATTRIBUTE)
        if attn_mask is not None or is_causal:
            raise base.refused_call(
                layer.name, "a key_padding_mask alone", "causal attention or an attn_mask"
            )
        tokens, padding = _batched(self, key_padding_mask, query, key, value)
        maps = zip(tokens, *_split_projections(self), strict=True)
        q, k, v = (_heads(linear(x, weight, bias), self.num_heads) for x, weight, bias in maps)
        real = None if padding is None else base.real_keys(_attended(padding), layer.name)
        own = {"queries": tokens[0], "keys": tokens[1], "real": real}
        heads, weights = layer(q, k, v, **own, need_weights=need_weights)
        output = self.out_proj(heads.flatten(2))  # [B, Q, E]
        return _returned(self, output, weights, query.ndim == 3, average_attn_weights)
