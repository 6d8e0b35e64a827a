"""`nn.MultiheadAttention` with GP attention, alone or inside `nn.TransformerEncoderLayer`.

The new module has the old one's parameters under their old names.  PyTorch runs whole encoder layers as one
fused operation in evaluation mode; it leaves the converted ones to themselves, since they say that their
projections are separate.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from gpattention.adopt.convert_kinds import KeyProjection
from gpattention.adopt.convert_layer import ATTRIBUTE, ConvertedAttention, take_place
from gpattention.adopt.convert_masks import ignored_keys
from gpattention.adopt.sites import Site

_COMPUTED = {"in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias"}


class ConvertedMultihead(nn.Module):
    """Takes the place, the call and the parameters of an `nn.MultiheadAttention`."""

    _qkv_same_embed_dim = False  # what encoder layers ask before they take the fast path

    def __init__(self, host: nn.MultiheadAttention, layer: ConvertedAttention) -> None:
        super().__init__()
        self.embed_dim, self.num_heads, self.head_dim = host.embed_dim, host.num_heads, host.head_dim
        self.batch_first = host.batch_first
        for name, parameter in host._parameters.items():
            self.register_parameter(name, parameter)
        self.out_proj = host.out_proj
        self.add_module(ATTRIBUTE, layer)
        self.training = host.training

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
            raise ValueError(
                f"{layer.name}: expected a key_padding_mask alone, got causal attention or an attn_mask: "
                "every query would need a posterior of its own"
            )
        batched, alone = query.ndim == 3, query is key and key is value
        tokens = [query] if alone else [query, key, value]
        if not batched:
            tokens = [x[None] for x in tokens]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            tokens = [x.transpose(0, 1) for x in tokens]
        queries, keys, values = tokens * 3 if alone else tokens
        maps = zip((queries, keys, values), *self._projections(), strict=True)
        q, k, v = (self._split(linear(x, weight, bias)) for x, weight, bias in maps)
        if key is query and value is not query:
            keys = queries  # the same tokens under two names
        padding = None
        if key_padding_mask is not None:
            real = ~key_padding_mask if key_padding_mask.dtype == torch.bool else key_padding_mask
            padding = ignored_keys(real, layer.name)
        heads, weights = layer(
            q, k, v, queries=queries, keys=keys, padding=padding, need_weights=need_weights
        )
        output = self.out_proj(heads.flatten(2))  # [B, Q, E]
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            return output[0], None if weights is None else weights[0]
        return output if self.batch_first else output.transpose(0, 1), weights

    def _projections(self) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
        return split_projections(self)

    def _split(self, x: Tensor) -> Tensor:
        """[B, N, E] -> [B, H, N, D]"""
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)


def split_projections(module: nn.Module) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
    """Weights and biases of queries, keys and values, however the module keeps them."""
    host: Any = module
    bias = (None, None, None) if host.in_proj_bias is None else host.in_proj_bias.chunk(3)
    if host.in_proj_weight is not None:
        return host.in_proj_weight.chunk(3), bias
    return (host.q_proj_weight, host.k_proj_weight, host.v_proj_weight), bias


def key_projection(site: Site) -> KeyProjection:
    """The host's map to keys, as a module of its own."""
    computed = sorted(_COMPUTED & set(site.module.__dict__) | _parametrized(site.module))
    if computed:  # only parameters can be taken over
        raise ValueError(
            f"{site.name}: expected {', '.join(computed)} to be parameters, got pruned or parametrized ones: "
            "make that permanent first (torch.nn.utils.prune.remove, "
            "torch.nn.utils.parametrize.remove_parametrizations)"
        )
    weights, biases = split_projections(site.module)
    return KeyProjection(as_linear(weights[1], biases[1]))


def _parametrized(module: nn.Module) -> set[str]:
    found = getattr(module, "parametrizations", None)
    return set(found) if isinstance(found, nn.ModuleDict) else set()


def as_linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A linear map with these values."""
    made: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
    copy = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, **made)
    with torch.no_grad():
        copy.weight.copy_(weight)
        if bias is not None:
            copy.bias.copy_(bias)
    return copy


def place(model: nn.Module, site: Site, layer: ConvertedAttention) -> None:
    """Put the converted module where the old one was, and keep encoders from nesting their tensors."""
    assert isinstance(site.module, nn.MultiheadAttention)
    take_place(model, site.module, ConvertedMultihead(site.module, layer))
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
