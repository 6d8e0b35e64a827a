"""Tiny transformers whose parameters are all different, and seeded inputs for them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor, nn

from gpattention.attention import Attention, attention_class, list_attention
from gpattention.models import AttentionConfig, TextConfig, TextTransformer, VisionConfig, VisionTransformer

KINDS = list_attention()
DRAWING = tuple(kind for kind in KINDS if attention_class(kind).draws)
MIXES = [("softmax", "cgp"), ("sgpa", "kernel"), ("cgp", "softmax", "scgp"), ("softmax-gp", "direct", "sgpa")]
STACKS = [(kind,) for kind in KINDS] + MIXES
SMALL: dict[str, dict[str, Any]] = {"scgp": {"num_inducing": 4}, "sgpa": {"num_inducing": 4}}

COMMON = {"classes": 3, "depth": 2, "width": 16, "heads": 2}
VISION = {**COMMON, "image_size": 8}  # 4 tokens
TEXT = {**COMMON, "vocabulary": 20, "embedding_width": 6, "max_length": 9}

Layer = AttentionConfig | str


def layer(kind: str, **options: Any) -> AttentionConfig:
    """A kind with few inducing inputs."""
    return AttentionConfig(kind, SMALL.get(kind, {}) | options)


def layers(*given: Layer) -> tuple[AttentionConfig, ...]:
    """One layer for each; a single one is meant twice."""
    made = tuple(x if isinstance(x, AttentionConfig) else layer(x) for x in given)
    return made * 2 if len(made) == 1 else made


def vision(*given: Layer, **changes: Any) -> VisionTransformer:
    """In evaluation mode and float64 unless asked otherwise."""
    return _made(VisionTransformer, VisionConfig, VISION, given, **changes)


def text(*given: Layer, **changes: Any) -> TextTransformer:
    """The same for text."""
    return _made(TextTransformer, TextConfig, TEXT, given, **changes)


def _made(
    model: Callable[[Any], Any],
    config: Callable[..., Any],
    sizes: dict[str, Any],
    given: tuple[Layer, ...],
    *,
    seed: int = 0,
    stir: float = 0.1,
    dtype: torch.dtype = torch.float64,
    **changes: Any,
) -> Any:
    torch.manual_seed(seed)
    attention = layers(*(given or ("cgp",)))
    made = model(config(**(sizes | {"depth": len(attention), "attention": attention} | changes))).double()
    with torch.no_grad():  # off the initial values: no bias is 0, no scale is 1, no two heads are alike
        for parameter in made.parameters():
            parameter.add_(stir * torch.randn(parameter.shape, dtype=torch.float64))
    return made.to(dtype).eval()


def seeded(seed: int) -> Generator:
    return torch.Generator().manual_seed(seed)


def images(count: int = 3, size: int = 8, *, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    """[B, 3, size, size]"""
    return torch.randn(count, 3, size, size, generator=seeded(seed), dtype=torch.float64).to(dtype)


def sentences(*lengths: int, to: int = 6, seed: int = 2) -> Tensor:
    """Word indices with index 0 after each sentence's end; a sentence is the same at any `to`.  [B, to]"""
    g = seeded(seed)
    rows = torch.zeros(len(lengths), to, dtype=torch.int64)
    for row, length in zip(rows, lengths, strict=True):
        row[:length] = torch.randint(1, TEXT["vocabulary"], (9,), generator=g)[:length]
    return rows


def attentions(model: nn.Module) -> list[Attention]:
    """The attention of each layer."""
    return [module for module in model.modules() if isinstance(module, Attention)]
