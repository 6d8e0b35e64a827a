"""timm's `Attention` and modules of its layout: their own forward runs, and its one attention call is met."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from gpattention.adopt.attended import Attended, Listener, key_mask
from gpattention.adopt.sites import Site
from gpattention.gp.concurrency import Handler, handling


@contextmanager
def intercepting(model: nn.Module, sites: Sequence[Site], listener: Listener) -> Iterator[None]:
    """The instances run their own forward with the fused attention, which is listened to."""
    with handling({(site.module, "forward"): partial(_forward, site, listener) for site in sites}):
        yield


def _forward(site: Site, listener: Listener, own: Handler, *args: Any, **kwargs: Any) -> Any:
    met = _Met(site, listener)
    with met:
        result = type(site.module).forward(_fused(site.module), *args, **kwargs)
    if met.calls != 1:
        raise ValueError(
            f"{site.name or 'the model'}: expected its forward to call scaled_dot_product_attention "
            f"once, got {met.calls} calls"
        )
    return result


def _fused(module: nn.Module) -> nn.Module:
    """The module as it is with the fused attention: the same parameters and modules under another switch.

    The module's own switch is not touched, which other threads read too.
    """
    if vars(module).get("fused_attn", True):
        return module
    same = object.__new__(type(module))
    same.__dict__.update(vars(module), fused_attn=True)
    return same


class _Met(TorchFunctionMode):
    """Hands the one attention call on to the listener."""

    def __init__(self, site: Site, listener: Listener) -> None:
        super().__init__()
        self.calls = 0
        self._site, self._listener = site, listener

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is not scaled_dot_product_attention:
            return result
        self.calls += 1
        return self._heard(result, *args, **kwargs)

    def _heard(
        self,
        mean: Tensor,  # [B, H, Q, D]
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        **other: Any,
    ) -> Tensor:
        if is_causal or other.get("enable_gqa"):
            raise ValueError(
                f"{self._site.name or 'the model'}: expected plain attention, got causal or grouped-query "
                "attention: every query would need a posterior of its own"
            )
        shrink = (query.shape[-1] ** -0.5 if scale is None else scale) ** 0.5
        mask = None if attn_mask is None else key_mask(attn_mask, self._site)
        return self._listener(self._site, Attended(mean, query * shrink, key * shrink, value, mask))
