"""Attention that is not a plain softmax over its keys: each kind by name, with the reason."""

from collections.abc import Sequence
from types import MethodType

from torch import nn

from gpattention.adopt.shapes import forward_code, heads_of
from gpattention.attention import Attention, KernelAttention, SoftmaxAttention
from gpattention.gp.concurrency import attribute_without_loans

CAUSAL = "causal attention: every query sees other keys, and one posterior per head does not hold"
GROUPED = "grouped-query attention: query heads share keys, so the heads of queries and keys do not pair up"
RELATIVE = "relative-position attention: its weights are no function of queries and keys alone"
ALIBI = "ALiBi attention: a bias of the distance is added to its dot products"
SLIDING = "sliding-window attention: every query sees other keys"
CROSS = "cross-attention of a decoder"
CAPPED = "soft-capped attention: its logits are not dot products"
SINKS = "attention with sinks: its weights do not sum to one"
FOUND_FORMS = (
    "nn.MultiheadAttention, attention of transformers that asks AttentionInterface, modules of timm's layout "
    "(qkv, num_heads, scaled_dot_product_attention), and our own softmax and kernel attention"
)

_RELATIVE_ATTRIBUTES = (
    "relative_attention_bias",
    "relative_position_bias",
    "relative_position_bias_table",
    "relative_position_embeddings",
    "relative_attn",
    "rel_pos",
    "rel_pos_h",
    "rel_pos_bias",
    "pos_bias_u",
)
_RELATIVE_SETTINGS = (
    "has_relative_attention_bias",
    "relative_attention",
    "use_relative_position_bias",
    "use_shared_relative_position_bias",
)
_RELATIVE_ARGUMENTS = ("position_bias", "relative_position_bias", "rel_pos", "shared_rel_pos_bias")


def why_not_torch(module: nn.Module, parent: nn.Module | None) -> str | None:
    """Why this `nn.MultiheadAttention` is no site; None if it is one."""
    assert isinstance(module, nn.MultiheadAttention)
    if isinstance(parent, nn.TransformerDecoderLayer):
        return CAUSAL if parent.self_attn is module else CROSS
    if type(module).forward is not nn.MultiheadAttention.forward or _is_patched(module):
        return "it has a forward of its own, not that of nn.MultiheadAttention, which would be passed over"
    if module.bias_k is not None or module.bias_v is not None:
        return "add_bias_kv=True appends a key that belongs to no token"
    if module.add_zero_attn:
        return "add_zero_attn=True appends a key that belongs to no token"
    return None


def why_not_huggingface(module: nn.Module, parent: nn.Module | None) -> str | None:
    """Why this module of transformers is no site; None if it is one."""
    config = getattr(module, "config", None)
    reasons = []
    if _says(module, "is_causal") or _says(module, "is_decoder") or _says(config, "is_decoder"):
        reasons.append(CAUSAL)
    if _is_grouped(module):
        reasons.append(GROUPED)
    reasons += _biases(module)
    if isinstance(getattr(module, "sliding_window", None), int):
        reasons.append(SLIDING)
    if any(_number(module, name) for name in ("attn_logit_softcapping", "softcap", "logit_cap")):
        reasons.append(CAPPED)
    if hasattr(module, "sinks"):
        reasons.append(SINKS)
    if _says(module, "is_cross_attention") or "CrossAttention" in type(module).__name__:
        reasons.append(CROSS)
    return "; ".join(reasons) or None


def why_not_timm(module: nn.Module, parent: nn.Module | None) -> str | None:
    """Why this module of timm's layout is no site; None if it is one."""
    reasons = _biases(module)
    if _is_patched(module):
        reasons.append("its forward was replaced, by one that would be passed over")
    if _says(module, "is_causal") or _says(module, "causal"):
        reasons.append(CAUSAL)
    shape, qkv = heads_of(module), module.qkv
    assert isinstance(qkv, nn.Linear)
    if shape is not None and qkv.out_features != 3 * shape[0] * shape[1]:
        reasons.append(GROUPED)
    code = forward_code(module)
    if code is None or "scaled_dot_product_attention" not in code.co_names:
        reasons.append("its forward does not call scaled_dot_product_attention, where it would be met")
    return "; ".join(reasons) or None


def why_not_own(module: nn.Module, parent: nn.Module | None) -> str | None:
    """Why this attention of ours is no site; None if it is one."""
    assert isinstance(module, Attention)
    if module.draws:
        return f"{module.kind!r} attention has a posterior of its own"
    if not isinstance(module, SoftmaxAttention | KernelAttention):
        return f"{module.kind!r} attention has no Gaussian process behind its mean"
    return CAUSAL if module.causal else None


def _is_patched(module: nn.Module) -> bool:
    """Whether the instance has another forward than its class."""
    own = attribute_without_loans(module, "forward")
    return own is not None and own != MethodType(type(module).forward, module)


def _biases(module: nn.Module) -> list[str]:
    """Terms beside the dot product that attributes or arguments give away."""
    code, config = forward_code(module), getattr(module, "config", None)
    arguments = () if code is None else code.co_varnames
    if "alibi" in arguments or type(module).__name__.startswith("Mpt"):  # MPT hands it on as a position bias
        return [ALIBI]
    relative = (
        any(getattr(module, name, None) is not None for name in _RELATIVE_ATTRIBUTES)
        or any(name in arguments for name in _RELATIVE_ARGUMENTS)
        or any(_says(holder, name) for holder in (module, config) for name in _RELATIVE_SETTINGS)
    )
    return [RELATIVE] if relative else []


def masks_causally(makers: Sequence[nn.Module]) -> bool:
    """Whether the nearest module around it that makes a mask makes causal ones only.

    `makers` are the modules around an attention of transformers, from the inside out.
    """
    for maker in makers:
        code = forward_code(maker)
        names = () if code is None else code.co_names
        if "create_bidirectional_mask" in names:
            return False
        if "create_causal_mask" in names:
            return True
    return False


def _is_grouped(module: nn.Module) -> bool:
    if (_number(module, "num_key_value_groups") or 1) > 1:
        return True
    shape, shared = heads_of(module), _number(module, "num_key_value_heads")
    return shape is not None and shared is not None and shared != shape[0]


def _says(holder: object, name: str) -> bool:
    value = getattr(holder, name, False)
    return value if isinstance(value, bool) else False


def _number(holder: object, name: str) -> float | None:
    value = getattr(holder, name, None)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
