"""Attention of transformers, met through its `AttentionInterface`.

While a site listens, its configuration names an attention function of ours, registered beside a mask
function: without the second, transformers would make no mask and padding would be attended to.  The function
calls the one that was named before, so that means, dropout and weights stay the host's.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

from gpattention.adopt.attended import Attended, Listener, key_mask
from gpattention.adopt.conversion import IMPLEMENTATION
from gpattention.adopt.sites import Site

NAMES = {"sdpa": "gpattention", "eager": "gpattention_eager"}  # registered under, for each kind of mask
_Heard = dict[int, tuple[Site, Listener]]  # by the id of the module
_listening: ContextVar[_Heard | None] = ContextVar("gpattention_listening", default=None)


@contextmanager
def intercepting(model: nn.Module, sites: Sequence[Site], listener: Listener) -> Iterator[None]:
    """The configurations of the model name our function; afterwards what they named before."""
    _register()
    configs = _configs(model)
    before = [(config, config.__dict__.get("_attn_implementation_internal")) for config in configs]
    _check_implementations(sites)
    heard = {**(_listening.get() or {}), **{id(site.module): (site, listener) for site in sites}}
    token = _listening.set(heard)
    try:
        for config, name in before:
            # a handle within a handle finds our name there already
            config.__dict__["_attn_implementation_internal"] = NAMES.get(name or "", name)
        yield
    finally:
        _listening.reset(token)
        for config, name in before:
            config.__dict__["_attn_implementation_internal"] = name


def _check_implementations(sites: Sequence[Site]) -> None:
    for site in sites:
        name = _implementation(site.module)
        if name == IMPLEMENTATION:
            raise ValueError(
                f"expected a model of which nothing is converted, got one whose {site.name} alone is not: "
                "convert all of it, or none"
            )
        if name not in (*NAMES, *NAMES.values()):
            raise ValueError(
                f"expected the attention implementation of {site.name} to be sdpa or eager, got {name!r}: "
                "call model.set_attn_implementation('sdpa')"
            )


def _implementation(module: nn.Module) -> str | None:
    name = getattr(getattr(module, "config", None), "_attn_implementation", None)
    return name if isinstance(name, str) else None


def _configs(model: nn.Module) -> list[Any]:
    """Every configuration the model holds that names an implementation, once."""
    found: dict[int, Any] = {}

    def add(config: Any) -> None:
        if id(config) in found or not hasattr(config, "_attn_implementation_internal"):
            return
        found[id(config)] = config
        for name in getattr(config, "sub_configs", {}):
            add(getattr(config, name, None))

    for module in model.modules():
        add(getattr(module, "config", None))
    return list(found.values())


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    for original, name in NAMES.items():
        AttentionInterface.register(name, _attention(original))
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[original])


def _attention(original: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The attention function of transformers' shape that listens to `original`."""

    def attention(
        module: nn.Module,
        query: Tensor,  # [B, H, Q, D]
        key: Tensor,  # [B, H, K, D]
        value: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        mean, weights = _function(original, module)(
            module, query, key, value, attention_mask, *args, **kwargs
        )  # [B, Q, H, D]
        site, listener = (_listening.get() or {}).get(id(module), (None, None))
        if site is None or listener is None:  # an attention of the same configuration that was left alone
            return mean, weights
        if kwargs.get("is_causal") or kwargs.get("position_bias") is not None:
            raise ValueError(
                f"{site.name}: expected plain attention, got causal attention or a position bias: every "
                "query would need a posterior of its own"
            )
        scaling = kwargs.get("scaling")
        shrink = (query.shape[-1] ** -0.5 if scaling is None else scaling) ** 0.5
        mask = None if attention_mask is None else key_mask(attention_mask, site)
        told = Attended(mean.transpose(1, 2), query * shrink, key * shrink, value, mask)
        return listener(site, told).transpose(1, 2).contiguous(), weights

    return attention


def _function(original: str, module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """What the module would have called."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if original != "eager":
        found: Callable[..., tuple[Tensor, Tensor | None]] = ALL_ATTENTION_FUNCTIONS[original]
        return found
    own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if own is None:
        raise ValueError(
            f"{type(module).__name__} has no eager attention beside it: "
            "call model.set_attn_implementation('sdpa')"
        )
    return own
