"""timm's `Attention` and modules of its layout: their own forward runs, and its attention call is hooked."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from gpattention.concurrency import Handler
from gpattention.hosts.families import base
from gpattention.hosts.families.base import AttentionCall, AttentionHook, Family, Handlers, Site
from gpattention.models import converted
from gpattention.models.converted import ATTRIBUTE, ConvertedAttention
from gpattention.models.projected import KeyProjection, is_plain_linear

_KNOWN = {"qkv", "q_norm", "k_norm", "attn_drop", "norm", "proj", "proj_drop"}


class TimmFamily(Family):
    """One linear map to queries, keys and values, one out, and `scaled_dot_product_attention` between."""

    name = "timm"
    forms = "modules of timm's layout (qkv, num_heads, scaled_dot_product_attention)"
    scale_attribute = "scale"

    def matches(self, module: nn.Module) -> bool:
        """Recognise modules by their two linear maps and number of heads."""
        maps = (getattr(module, name, None) for name in ("qkv", "proj"))
        heads = getattr(module, "num_heads", None)
        return all(isinstance(linear, nn.Linear) for linear in maps) and isinstance(heads, int)

    def refusal(self, module: nn.Module, around: Sequence[nn.Module]) -> str | None:
        """Refuse biases, causal and grouped-query attention, and forward methods without attention calls."""
        reasons = base.bias_reasons(module)
        if base.is_patched(module):
            reasons.append("its forward was replaced, by one that would be passed over")
        if base.is_set(module, "is_causal") or base.is_set(module, "causal"):
            reasons.append(base.CAUSAL)
        shape, qkv = base.heads_of(module), module.qkv
        assert isinstance(qkv, nn.Linear)
        if shape is not None and qkv.out_features != 3 * shape[0] * shape[1]:
            reasons.append(base.GROUPED)
        if "scaled_dot_product_attention" not in base.forward_code(module).co_names:
            reasons.append("its forward does not call scaled_dot_product_attention, where it would be met")
        return "; ".join(reasons) or None

    def handlers(self, model: nn.Module, sites: Sequence[Site], hook: AttentionHook) -> Handlers:
        """Run the modules' own forward with fused attention, and hook that."""
        return {(site.module, "forward"): partial(_forward, site, hook) for site in sites}

    def key_projection(self, site: Site) -> KeyProjection | None:
        """The host's projection to keys, and their norm if there is one; refuse other layouts than timm's."""
        unknown = sorted({name for name, _ in site.module.named_children()} - _KNOWN)
        unknown += sorted(name for name, _ in site.module.named_parameters(recurse=False))
        if unknown:
            raise ValueError(f"{site.name}: expected timm's attention, got one that also has {unknown}")
        qkv, norm = site.module.qkv, getattr(site.module, "k_norm", None)
        if not is_plain_linear(qkv):
            return None
        bias = None if qkv.bias is None else qkv.bias.chunk(3)[1]
        return KeyProjection(qkv.weight.chunk(3)[1], bias, None if isinstance(norm, nn.Identity) else norm)

    def place(self, model: nn.Module, site: Site, layer: ConvertedAttention) -> None:
        """Replace the module by a converted one."""
        converted.take_place(model, site.module, ConvertedTimm(site.module, layer, site.heads, site.head_dim))


def _forward(site: Site, hook: AttentionHook, own: Handler, *args: Any, **kwargs: Any) -> Any:
    mode = _AttentionMode(site, hook)
    with mode:
        result = type(site.module).forward(_fused(site.module), *args, **kwargs)
    if mode.calls != 1:
        raise ValueError(f"{site.title}: expected one call of scaled_dot_product_attention, got {mode.calls}")
    return result


def _fused(module: nn.Module) -> nn.Module:
    """The module with fused attention switched on: a copy that shares its parameters and modules.

    The switch of the module itself is not changed, as other threads read it.
    """
    if vars(module).get("fused_attn", True):
        return module
    same = object.__new__(type(module))
    same.__dict__.update(vars(module), fused_attn=True)
    return same


class _AttentionMode(TorchFunctionMode):
    """Passes the one attention call on to the hook."""

    def __init__(self, site: Site, hook: AttentionHook) -> None:
        super().__init__()
        self.calls = 0
        self._site, self._hook = site, hook

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not scaled_dot_product_attention:
            return result
        self.calls += 1
        return self._attention(result, *args, **(kwargs or {}))

    def _attention(
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
        name = self._site.title
        if is_causal or other.get("enable_gqa"):
            raise converted.refused_call(name, "plain attention", "causal or grouped-query attention")
        if attn_mask is not None and attn_mask.ndim == 2:
            attn_mask = attn_mask[None, None]  # [1, 1, Q, K] pairs
        real = None if attn_mask is None else converted.real_keys(attn_mask, name)
        return self._hook(self._site, AttentionCall.scaled(mean, query, key, value, real, scale))


class ConvertedTimm(nn.Module):
    """Replaces a timm `Attention`, with its modules and its form of call."""

    def __init__(self, host: nn.Module, layer: ConvertedAttention, heads: int, head_dim: int) -> None:
        super().__init__()
        converted.inherit(self, host, layer)
        self.num_heads, self.head_dim = heads, head_dim

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """[B, N, E] -> [B, N, E]"""
        layer = getattr(self, ATTRIBUTE)
        if is_causal:
            raise converted.refused_call(layer.name, "plain attention", "causal attention")
        real = None if attn_mask is None else converted.real_keys(attn_mask, layer.name).expand(len(x), -1)
        qkv = self._through("qkv", x).unflatten(-1, (3, self.num_heads, self.head_dim))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # [B, H, N, D] each
        q, k = self._through("q_norm", q), self._through("k_norm", k)
        heads, _ = layer(q, k, v, queries=x, keys=x, real=real)
        out = self._through("norm", heads.flatten(2))
        return self._through("proj_drop", self._through("proj", out))

    def _through(self, name: str, x: Tensor) -> Tensor:
        module = self._modules.get(name)
        return x if module is None else module(x)
