"""Calls in the form of `nn.MultiheadAttention`, and converted attention that replaces it.

Converted modules keep the parameters under their old names.  Encoder layers call them, instead of running a
fused operation, because they claim to have separate projections.
"""

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from gpattention.models import converted
from gpattention.models.converted import ATTRIBUTE, ConvertedAttention
from gpattention.models.projected import KeyProjection
from gpattention.numerics import is_mapped

_COMPUTED = {"in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias"}


def answer_call(
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
    *,
    causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Answer a call of `nn.MultiheadAttention`; `attend` returns heads [B, Q, H, D] and optional weights.

    If `causal`, token i attends to tokens up to i, and a mask may say the same.
    """
    tokens, padding = _batched(module, key_padding_mask, query, key, value)
    if causal:
        _check_causal(name, attn_mask)
        attn_mask, is_causal = None, False
    real = _real_keys(name, padding, attn_mask, is_causal)  # [B, K] or None
    heads, weights = attend(tokens, *_projected(module, *tokens), real, need_weights)
    return _returned(module, heads, weights, query.ndim == 3, average_attn_weights)


def _batched(module: Any, padding: Tensor | None, *tokens: Tensor) -> tuple[list[Tensor], Tensor | None]:
    """Queries, keys and values [B, N, E] and padding [B, K]; the same tensor given twice stays the same."""
    alone = tokens[0].ndim != 3
    distinct = {id(x): x for x in tokens}
    if alone or not module.batch_first:
        distinct = {key: x[None] if alone else x.transpose(0, 1) for key, x in distinct.items()}
    return [distinct[id(x)] for x in tokens], padding[None] if alone and padding is not None else padding


def _returned(
    module: Any, heads: Tensor, weights: Tensor | None, batched: bool, average: bool
) -> tuple[Tensor, Tensor | None]:
    """Outputs of heads [B, Q, H, D], and weights [B, H, Q, K], in the shapes of PyTorch's own."""
    # tokens first in memory, as in PyTorch, so that dropout afterwards drops the same entries
    output = module.out_proj(heads.transpose(0, 1).flatten(2))  # [Q, B, E]
    if weights is not None and average:
        weights = weights.mean(1)
    if not batched:
        return output[:, 0], None if weights is None else weights[0]
    return output.transpose(0, 1) if module.batch_first else output, weights


def _projected(module: Any, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Queries, keys and values of the heads.  [B, H, N, D] each"""
    if module._qkv_same_embed_dim and query is key and key is value:
        # one product, as in PyTorch
        found = linear(query, module.in_proj_weight, module.in_proj_bias).chunk(3, -1)
    else:
        found = tuple(map(linear, (query, key, value), *split_projections(module)))
    return [x.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for x in found]


def _real_keys(name: str, padding: Tensor | None, attn_mask: Tensor | None, is_causal: bool) -> Tensor | None:
    """Keys that neither mask hides.  [B, K]"""
    masks = [] if padding is None else [padding]  # [B, K]
    if attn_mask is not None or is_causal:
        if attn_mask is None or attn_mask.ndim > 2:
            found = "is_causal=True (causal attention)" if attn_mask is None else "an attn_mask per head"
            raise converted.refused_call(name, "a key_padding_mask", found)
        masks.append(attn_mask[None, None])  # [1, 1, Q, K]
    # PyTorch's bool masks say True = ignore
    real = [converted.real_keys(~mask if mask.dtype == torch.bool else mask, name) for mask in masks]
    return reduce(torch.logical_and, real) if real else None


def _check_causal(name: str, attn_mask: Tensor | None) -> None:
    """Refuse masks of pairs [..., N, N] that hide anything else than later tokens."""
    if attn_mask is None or torch.compiler.is_compiling() or is_mapped():
        return
    attend = ~attn_mask if attn_mask.dtype == torch.bool else attn_mask > converted.MASKED_LOGIT
    added = attn_mask.dtype != torch.bool and bool(((attn_mask != 0) & attend).any())
    if added or not torch.equal(attend, torch.ones_like(attend).tril()):
        expected = f"{name}: expected attn_mask to hide later tokens and nothing else, as causal=True does"
        raise ValueError(f"{expected}, got another; padding goes into key_padding_mask")


def split_projections(module: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
    """Weights and biases of the projections to queries, keys and values."""
    bias = (None, None, None) if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    if module.in_proj_weight is not None:
        return module.in_proj_weight.chunk(3), bias
    return (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight), bias


def key_projection(module: nn.Module, name: str) -> KeyProjection:
    """The projection of an `nn.MultiheadAttention` from tokens to keys."""
    made = getattr(module, "parametrizations", None)
    parametrized = set(made) if isinstance(made, nn.ModuleDict) else set()
    # computed weights are not parameters, which alone a converted module can keep
    if computed := ", ".join(sorted(_COMPUTED & set(vars(module)) | parametrized)):
        got = "got pruned or parametrized ones: make that permanent first, by torch.nn.utils"
        raise ValueError(f"{name}: expected {computed} to be parameters, {got}")
    weights, biases = split_projections(module)
    return KeyProjection(weights[1], biases[1])


class ConvertedMultihead(nn.Module):
    """Replaces an `nn.MultiheadAttention`, with its parameters and its form of call."""

    num_heads: int
    out_proj: nn.Linear
    _qkv_same_embed_dim = False  # encoder layers look at it before they take the fast path

    def __init__(self, host: nn.MultiheadAttention, layer: ConvertedAttention) -> None:
        super().__init__()
        converted.inherit(self, host, layer, "embed_dim", "num_heads", "head_dim", "batch_first")

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """As `nn.MultiheadAttention`; masks that differ between queries are refused, except causal ones."""
        layer: Any = getattr(self, ATTRIBUTE)
        return answer_call(self, layer.title, self._attend, *args, causal=layer.attention.causal, **kwargs)

    def _attend(
        self, tokens: list[Tensor], q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, need: bool
    ) -> Any:
        own = {"queries": tokens[0], "keys": tokens[1], "real": real}
        return getattr(self, ATTRIBUTE)(q, k, v, **own, need_weights=need)
