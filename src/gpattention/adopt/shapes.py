"""How many heads an attention module has and how wide they are, whatever its library calls them."""

import inspect
from typing import Any

from torch import nn

_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head")
_HEAD_DIM = ("attention_head_size", "head_dim", "head_size", "attn_head_dim")
_PROJECTIONS = ("query", "q_proj", "q_lin", "qkv", "to_q", "qkv_proj", "Wqkv", "Wq", "key", "k_proj", "k_lin")


def heads_of(module: nn.Module) -> tuple[int, int, int] | None:
    """Heads, width of a head and width of the tokens; None where that cannot be read off."""
    heads = _first_number(module, _HEADS) or _first_number(getattr(module, "config", None), _HEADS)
    if heads is None:
        return None
    embed_dim = _first_number(module, ("embed_dim",)) or _projection_inputs(module)
    if embed_dim is None:
        embed_dim = _first_number(getattr(module, "config", None), ("hidden_size", "dim", "d_model"))
    head_dim = _first_number(module, _HEAD_DIM)
    if head_dim is None and embed_dim is not None and embed_dim % heads == 0:
        head_dim = embed_dim // heads
    if head_dim is None or embed_dim is None:
        return None
    return heads, head_dim, embed_dim


def goes_through_interface(module: nn.Module) -> bool:
    """Whether its forward asks transformers' `AttentionInterface` for the attention function."""
    if not hasattr(module, "config"):
        return False
    code = forward_code(module)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def looks_like_timm(module: nn.Module) -> bool:
    """The layout of timm's `Attention`: one linear map to queries, keys and values, and one out."""
    qkv, proj = getattr(module, "qkv", None), getattr(module, "proj", None)
    heads = getattr(module, "num_heads", None)
    return isinstance(qkv, nn.Linear) and isinstance(proj, nn.Linear) and isinstance(heads, int)


def forward_code(module: nn.Module) -> Any:
    """The compiled body of the class's own forward, under any decorators; None for built-in ones."""
    return getattr(inspect.unwrap(type(module).forward), "__code__", None)


def _first_number(holder: object, names: tuple[str, ...]) -> int | None:
    for name in names:
        value = getattr(holder, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def _projection_inputs(module: nn.Module) -> int | None:
    for name in _PROJECTIONS:
        linear = getattr(module, name, None)
        if isinstance(linear, nn.Linear):
            return linear.in_features
    return None
