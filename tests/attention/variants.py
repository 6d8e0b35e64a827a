"""Every kind of attention with its main options, as small modules whose parameters are all different."""

from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from gpattention.attention import Attention, attention_class, build_attention

EMBED, HEADS, WIDTH = 12, 2, 6  # wider than the initialisation's active dimensions
BATCH, TOKENS = 3, 7  # batch and heads differ, so that their axes cannot be confused


class Variant(NamedTuple):
    """What to build, and a name to report."""

    name: str
    kind: str
    options: dict[str, Any]

    @property
    def causal(self) -> bool:
        return bool(self.options.get("causal", False))

    @property
    def draws(self) -> bool:
        return attention_class(self.kind).draws

    @property
    def crosses(self) -> bool:
        return attention_class(self.kind).crosses

    @property
    def weighs(self) -> bool:
        return attention_class(self.kind).weighs

    @property
    def any_length(self) -> bool:
        return self.options.get("merge") != "cat"


def _grid(kind: str, common: dict[str, Any] | None = None, **axes: tuple[Any, ...]) -> list[Variant]:
    found = []
    for values in product(*axes.values()):
        options = dict(zip(axes, values, strict=True))
        words = [name if value is True else _word(value) for name, value in options.items() if value]
        found.append(Variant(" ".join([kind, *words]), kind, {**(common or {}), **options}))
    return found


def _word(value: Any) -> str:
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)


WAYS, BOTH = ("none", "rows"), (False, True)
KERNELS = ("rbf", "ard_rbf", "exp_dot")
VARIANTS = [
    *_grid("softmax", causal=BOTH),
    *_grid("kernel", kernel=KERNELS, normalize=WAYS, symmetric=BOTH, causal=BOTH),
    *_grid("softmax-gp", causal=BOTH),
    *_grid("direct", normalize=WAYS, causal=BOTH),
    *_grid("cgp", normalize=WAYS, causal=BOTH),
    *_grid(
        "scgp", inducing=("learned", "pooled"), num_inducing=(5, (5, 4)), normalize=WAYS,
        values=("paper", "dual"),
    ),
    *_grid("scgp", {"num_inducing": 5}, conditional=("independent",), normalize=WAYS),
    *_grid("sgpa", {"num_inducing": 5}, kernel=KERNELS),
    *_grid("kep-svgp", {"rank": 3}, tokens=(None, 4)),  # rows for all tokens, and for fewer
    *_grid("kep-svgp", {"rank": 3}, merge=("cat",), tokens=(TOKENS,)),
]  # fmt: skip
NAMED = {variant.name: variant for variant in VARIANTS}
SMALL = {"scgp": {"num_inducing": 5}, "sgpa": {"num_inducing": 5}, "kep-svgp": {"rank": 3}}
DEFAULTS = [
    Variant(kind, kind, SMALL.get(kind, {}))
    for kind in ("softmax", "kernel", "softmax-gp", "direct", "cgp", "scgp", "sgpa", "kep-svgp")
]


def every(variants: list[Variant]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("variant", variants, ids=lambda variant: variant.name)


every_variant = every(VARIANTS)
every_default = every(DEFAULTS)
every_posterior = every([variant for variant in VARIANTS if variant.draws])


def build(
    variant: Variant, *, seed: int = 0, dtype: torch.dtype = torch.float64, stir: float = 0.2, **options: Any
) -> Attention:
    """The module in evaluation mode, its parameters moved off their initial values by `stir`: no bias is
    0, no scale is 1, no two heads are alike.
    """
    torch.manual_seed(seed)
    sizes = {"embed_dim": EMBED, "num_heads": HEADS}
    module = build_attention(variant.kind, **sizes, **(variant.options | options)).to(torch.float64)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(stir * torch.randn(parameter.shape, dtype=torch.float64))
    return module.to(dtype).eval()


def tokens(
    batch: int = BATCH, length: int = TOKENS, *, seed: int = 1, dtype: torch.dtype = torch.float64
) -> Tensor:
    """LayerNorm'ed random tokens.  [B, N, E]"""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, length, EMBED, generator=g, dtype=torch.float64)
    return torch.nn.functional.layer_norm(x, (EMBED,)).to(dtype)


def padding(batch: int = BATCH, length: int = TOKENS, *, seed: int = 2) -> Tensor:
    """True = ignore, anywhere in the sequence; at least two tokens are real.  [B, N]"""
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(batch, length, generator=g) < 0.4
    mask[:, 1] = mask[:, 4] = False
    mask[-1] = False
    mask[0, 2] = True
    return mask


def needs(module: Attention) -> tuple[str, ...]:
    """All that the module can be asked for, short of the posterior itself."""
    able = {"weights": module.weighs, "variance": module.draws}
    return ("output", "regularizer", *(name for name, can in able.items() if can))
