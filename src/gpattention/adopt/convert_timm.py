"""timm's `Attention`, and modules of its layout, with GP attention."""

from torch import Tensor, nn

from gpattention.adopt.convert_kinds import KeyProjection, is_plain_linear
from gpattention.adopt.convert_layer import ATTRIBUTE, ConvertedAttention, take_place
from gpattention.adopt.convert_masks import ignored_keys
from gpattention.adopt.convert_torch import as_linear
from gpattention.adopt.sites import Site

_KNOWN = {"qkv", "q_norm", "k_norm", "attn_drop", "norm", "proj", "proj_drop"}


class ConvertedTimm(nn.Module):
    """Takes the place, the call and the modules of a timm `Attention`."""

    def __init__(self, host: nn.Module, layer: ConvertedAttention, heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, head_dim
        for name, module in host.named_children():
            self.add_module(name, module)
        self.add_module(ATTRIBUTE, layer)
        self.training = host.training

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """[B, N, E] -> [B, N, E]"""
        layer = getattr(self, ATTRIBUTE)
        if is_causal:
            raise ValueError(f"{layer.name}: expected plain attention, got causal attention")
        padding = None if attn_mask is None else ignored_keys(attn_mask, layer.name).expand(len(x), -1)
        qkv = self._modules["qkv"](x).unflatten(-1, (3, self.num_heads, self.head_dim))  # type: ignore[misc]
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # [B, H, N, D] each
        q, k = self._through("q_norm", q), self._through("k_norm", k)
        heads, _ = layer(q, k, v, queries=x, keys=x, padding=padding)
        out = self._through("norm", heads.flatten(2))
        return self._through("proj_drop", self._through("proj", out))

    def _through(self, name: str, x: Tensor) -> Tensor:
        module = self._modules.get(name)
        return x if module is None else module(x)


def key_projection(site: Site) -> KeyProjection | None:
    """The host's map to keys, and their norm where it has one; what is not timm's layout is refused."""
    unknown = sorted({name for name, _ in site.module.named_children()} - _KNOWN)
    unknown += sorted(name for name, _ in site.module.named_parameters(recurse=False))
    if unknown:
        raise ValueError(f"{site.name}: expected timm's attention, got one that also has {unknown}")
    qkv, norm = site.module.qkv, getattr(site.module, "k_norm", None)
    if not is_plain_linear(qkv):
        return None
    norm = norm if isinstance(norm, nn.Module) and not isinstance(norm, nn.Identity) else None
    bias = None if qkv.bias is None else qkv.bias.chunk(3)[1]
    return KeyProjection(as_linear(qkv.weight.chunk(3)[1], bias), norm)


def logit_scale(site: Site) -> float:
    """What the host multiplies q . k with."""
    scale = getattr(site.module, "scale", None)
    return float(scale) if isinstance(scale, float | int) else site.head_dim**-0.5


def place(model: nn.Module, site: Site, layer: ConvertedAttention) -> None:
    """Put the converted module where the old one was."""
    take_place(model, site.module, ConvertedTimm(site.module, layer, site.heads, site.head_dim))
