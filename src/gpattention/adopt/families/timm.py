"""timm's `Attention` and modules of its layout: their own forward runs, and its one attention call is met."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from gpattention.adopt.attended import Attended, Listener, key_mask
from gpattention.adopt.sites import Site


@contextmanager
def intercepting(model: nn.Module, sites: Sequence[Site], listener: Listener) -> Iterator[None]:
    """The instances run their own forward with the fused attention, which is listened to."""
    fused = {site.name: site.module.__dict__.get("fused_attn") for site in sites}
    try:
        for site in sites:
            site.module.__dict__["forward"] = _forward(site, listener)
            if fused[site.name] is not None:
                site.module.__dict__["fused_attn"] = True
        yield
    finally:
        for site in sites:
            site.module.__dict__.pop("forward", None)
            if fused[site.name] is not None:
                site.module.__dict__["fused_attn"] = fused[site.name]


def _forward(site: Site, listener: Listener) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        met = _Met(site, listener)
        with met:
            result = type(site.module).forward(site.module, *args, **kwargs)
        if met.calls != 1:
            raise ValueError(
                f"{site.name or 'the model'}: expected its forward to call scaled_dot_product_attention "
                f"once, got {met.calls} calls"
            )
        return result

    return forward


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
