"""Converted attention of transformers: the module stays, and its configuration names our attention function.

The function is given projected queries, keys and values; the tokens, which a latent projection needs, are
left for it by a hook before the module's own forward.
"""

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from gpattention.adopt.conversion import IMPLEMENTATION
from gpattention.adopt.convert_kinds import KeyProjection, is_plain_linear
from gpattention.adopt.convert_layer import ATTRIBUTE, ConvertedAttention
from gpattention.adopt.convert_masks import ignored_keys
from gpattention.adopt.shapes import forward_code
from gpattention.adopt.sites import Site

_TOKENS = "_gpattention_tokens"  # what a module is called with, while a compiler traces it
_Tokens = tuple[Tensor, Tensor]  # of queries and of keys
_left: ContextVar[Mapping[int, _Tokens]] = ContextVar("gpattention_tokens", default={})  # noqa: B039 never written to
_KEYS = ("key", "k_proj", "k_lin", "to_k", "Wk")
# arguments that cross-attention reads keys from
_OTHER_TOKENS = ("encoder_hidden_states", "key_value_states")


def key_projection(site: Site) -> KeyProjection | None:
    """The linear map from tokens to keys, where the module has one and does nothing more to the keys.

    Keys of other tokens than the module is called with, as of pyramids that merge them first, are refused.
    """
    for name, part in site.module.named_modules():
        if _merges(part):
            raise ValueError(
                f"{site.name}: expected keys of the tokens it is called with, got keys of fewer tokens, "
                f"which {name} merges"
            )
    code = forward_code(site.module)
    names = () if code is None else (*code.co_names, *code.co_varnames)
    if any("rotary" in name or "norm" in name for name in names):
        return None
    maps = [getattr(site.module, name, None) for name in _KEYS]
    return next((KeyProjection(linear) for linear in maps if is_plain_linear(linear)), None)


def _merges(part: nn.Module) -> bool:
    """Whether tokens that pass it become fewer: strided convolutions and pooling."""
    strided = isinstance(part, nn.modules.conv._ConvNd) and max(part.stride) > 1
    return strided or type(part).__module__ == nn.modules.pooling.__name__


def logit_scale(site: Site) -> float:
    """What the host multiplies q . k with."""
    scaling = getattr(site.module, "scaling", None)
    return float(scaling) if isinstance(scaling, float | int) else site.head_dim**-0.5


def place(model: nn.Module, site: Site, layer: ConvertedAttention) -> None:
    """Give the module its layer."""
    site.module.add_module(ATTRIBUTE, layer)
    site.module.register_forward_pre_hook(_leave_tokens, with_kwargs=True)
    site.module.register_forward_hook(_clear_tokens, always_call=True)


def finish(model: nn.Module, sites: list[Site]) -> None:
    """Name our attention function in every configuration the converted modules read."""
    register()
    _own_configs(model)
    configs: dict[int, Any] = {id(site.module.config): site.module.config for site in sites}
    for config in configs.values():
        # as set_attn_implementation does, which some hosts refuse for implementations they do not list
        config._attn_implementation = IMPLEMENTATION


def _own_configs(model: nn.Module) -> None:
    """Other models may have been built from the same configuration, and stay as they are."""
    memo: dict[int, Any] = {}  # one copy of each, wherever the model holds it
    for module in model.modules():
        if hasattr(module.__dict__.get("config"), "_attn_implementation"):
            module.config = deepcopy(module.config, memo)


def register() -> None:
    """Make attention and mask function known to transformers: without the second there would be no mask."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _padding)


def _leave_tokens(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    named = getattr(module.config, "_attn_implementation", None)
    if named != IMPLEMENTATION:  # the host's own attention would run, without a word
        raise ValueError(
            f"{_layer(module).name}: expected the attention implementation of a converted host to stay "
            f"{IMPLEMENTATION!r}, got {named!r}: call model.set_attn_implementation({IMPLEMENTATION!r})"
        )
    code = forward_code(module)
    names = () if code is None else code.co_varnames[1 : code.co_argcount]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    tokens = args[0] if args else kwargs.get("hidden_states")
    if not isinstance(tokens, Tensor):
        raise ValueError(
            f"expected {type(module).__name__} to be called with its tokens first, got {tokens!r}"
        )
    others = [given[name] for name in _OTHER_TOKENS if given.get(name) is not None]
    left = (tokens, others[0] if others else tokens)
    if torch.compiler.is_compiling():  # which cannot follow a context variable, and keeps this in its graph
        vars(module)[_TOKENS] = left
    else:
        _left.set({**_left.get(), id(module): left})


def _clear_tokens(module: nn.Module, *_: object) -> None:
    """Also where the module raised before anybody took them."""
    _taken_tokens(module)


def _taken_tokens(module: nn.Module) -> _Tokens | None:
    """What `_leave_tokens` left in this thread, once."""
    left: _Tokens | None = vars(module).pop(_TOKENS, None)
    if left is not None or torch.compiler.is_compiling():
        return left
    found = dict(_left.get())
    left = found.pop(id(module), None)
    _left.set(found)
    return left


def _layer(module: nn.Module) -> ConvertedAttention:
    layer = getattr(module, ATTRIBUTE)
    assert isinstance(layer, ConvertedAttention)
    return layer


def _attention(
    module: nn.Module,
    query: Tensor,  # [B, H, Q, D]
    key: Tensor,  # [B, H, K, D]
    value: Tensor,
    attention_mask: Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """What transformers calls: [B, Q, H, D] and the weights, where the host asks for them."""
    if not isinstance(getattr(module, ATTRIBUTE, None), ConvertedAttention):
        return _left_alone(module, query, key, value, attention_mask, *args, **kwargs)
    layer = _layer(module)
    if kwargs.get("is_causal") or kwargs.get("position_bias") is not None:
        raise ValueError(f"{layer.name}: expected plain attention, got causal attention or a position bias")
    tokens = _taken_tokens(module)
    if tokens is None or tokens[1].shape[1] != key.shape[2]:
        raise ValueError(f"{layer.name}: expected self-attention over the tokens given, got other keys")
    padding = None if attention_mask is None else ignored_keys(attention_mask, layer.name)
    scaling = kwargs.get("scaling")
    if scaling is not None and scaling != layer.logit_scale:  # some hosts scale their queries themselves
        query = query * (scaling / layer.logit_scale)
    return layer(
        query, key, value, queries=tokens[0], keys=tokens[1], padding=padding,
        need_weights=bool(kwargs.get("output_attentions")),
    )  # fmt: skip


def _left_alone(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """An attention of the same configuration that was not converted: softmax, as before."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if mask is not None and mask.ndim == 2:
        mask = mask[:, None, None]  # [B, 1, 1, K]
    softmax: Callable[..., tuple[Tensor, Tensor | None]] = ALL_ATTENTION_FUNCTIONS["sdpa"]
    return softmax(module, query, key, value, mask, *args, **kwargs)


def _padding(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The mask function of transformers' shape: padding [B, K] (True = real), else every pair of tokens.

    Causal and windowed masks are for attention of the same configuration that was left alone; a converted
    layer that is given one refuses it.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, bidirectional_mask_function

    if mask_function is not bidirectional_mask_function:
        # never skipped: attention that is given no mask is free to look everywhere
        allowed = {**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        pairs: Tensor = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **allowed
        )
        return pairs
    return None if attention_mask is None else attention_mask[:, -kv_length:].to(torch.bool)
