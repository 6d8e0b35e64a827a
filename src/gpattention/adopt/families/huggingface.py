"""Attention of transformers, met where its forward pass looks for the attention function.

The function stands in the `AttentionInterface` of the module's file, or beside it if it is the eager one.
While a site listens anywhere, the one found there asks whether this call is listened to, and is what it was
otherwise; no configuration is touched.  It calls the function that was there, so that means, dropout and
weights stay the host's.
"""

import inspect
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

from torch import Tensor, nn

from gpattention.adopt.attended import Attended, Listener, key_mask
from gpattention.adopt.conversion import IMPLEMENTATION
from gpattention.adopt.sites import Site
from gpattention.gp.concurrency import Handler, Undo, borrowed, handled_by, handler_of, replacing

IMPLEMENTATIONS = ("sdpa", "eager")
_ATTENTION = "attention function"  # under which a site's listener is found
_EAGER = "eager_attention_forward"  # what the files of transformers call it


@contextmanager
def intercepting(model: nn.Module, sites: Sequence[Site], listener: Listener) -> Iterator[None]:
    """The attention functions that the sites call ask who listens."""
    changes = dict(_change(site) for site in sites)
    heard = {(id(site.module), _ATTENTION): partial(_attention, site, listener) for site in sites}
    with borrowed(changes), handled_by(heard):
        yield


def _change(site: Site) -> tuple[Hashable, Callable[[], Undo]]:
    """The one that makes the site's attention function ask."""
    named = getattr(getattr(site.module, "config", None), "_attn_implementation", None)
    if named == IMPLEMENTATION:
        raise ValueError(
            f"expected a model of which nothing is converted, got one whose {site.name} alone is not: "
            "convert all of it, or none"
        )
    if named not in IMPLEMENTATIONS:
        raise ValueError(
            f"expected the attention implementation of {site.name} to be sdpa or eager, got {named!r}: "
            "call model.set_attn_implementation('sdpa')"
        )
    file: dict[str, Any] = inspect.unwrap(type(site.module).forward).__globals__
    if named != "eager":
        interface = file["ALL_ATTENTION_FUNCTIONS"]
        # its own table comes before the one of all interfaces, which other files read too
        return replacing(interface._local_mapping, named, lambda own: _asking(own or interface[named]))
    if _EAGER not in file:
        raise ValueError(
            f"{type(site.module).__name__} has no eager attention beside it: "
            "call model.set_attn_implementation('sdpa')"
        )
    return replacing(file, _EAGER, _asking)


def _asking(own: Handler) -> Handler:
    """The attention function that asks who listens to the module it is called by."""

    @wraps(own)
    def attention(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        handler = handler_of(module, _ATTENTION)
        return own(module, *args, **kwargs) if handler is None else handler(own, module, *args, **kwargs)

    return attention


def _attention(
    site: Site,
    listener: Listener,
    own: Handler,
    module: nn.Module,
    query: Tensor,  # [B, H, Q, D]
    key: Tensor,  # [B, H, K, D]
    value: Tensor,
    attention_mask: Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """An attention function of transformers' shape."""
    mean, weights = own(module, query, key, value, attention_mask, *args, **kwargs)  # [B, Q, H, D]
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
