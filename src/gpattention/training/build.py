"""Models of a recipe: the one it names, and the kernel-attention model it may start from."""

from collections.abc import Mapping
from typing import Any

from gpattention.attention import GaussianAttention, SGPAAttention, attention_class
from gpattention.models import (
    AttentionConfig,
    TextConfig,
    TextTransformer,
    Transformer,
    VisionConfig,
    VisionTransformer,
)
from gpattention.training.recipe import Recipe


def build_model(recipe: Recipe, facts: Mapping[str, Any]) -> Transformer:
    """The model of phase 2; `facts` are what the data decides (classes, image_size, vocabulary, ...)."""
    attention = AttentionConfig(recipe.model.attention, recipe.model.options)
    return _transformer(recipe, facts, attention)


def build_kernel_model(recipe: Recipe, facts: Mapping[str, Any]) -> Transformer:
    """The model of phase 1: kernel attention that phase 2 can start from, tensor by tensor."""
    return _transformer(recipe, facts, kernel_config(recipe))


def kernel_config(recipe: Recipe) -> AttentionConfig:
    """Kernel attention that fits the recipe's kind; kinds without a warm start are their own phase 1."""
    kind, options = recipe.model.attention, recipe.model.options
    cls = attention_class(kind)
    if issubclass(cls, SGPAAttention):
        kernel = {"kernel": options.get("kernel", "rbf"), "symmetric": True, "normalize": "none"}
    elif issubclass(cls, GaussianAttention):
        kernel = {"normalize": options.get("normalize", "rows"), "causal": options.get("causal", False)}
    elif recipe.phases.kernel_options:
        raise ValueError(
            f"expected phases.kernel_options to be empty for {kind!r} attention, which is its own first "
            f"phase, got {dict(recipe.phases.kernel_options)}"
        )
    else:
        return AttentionConfig(kind, options)
    return AttentionConfig("kernel", {**kernel, **recipe.phases.kernel_options})


def needs_warm_start(recipe: Recipe) -> bool:
    """Whether phase 2 has another model than phase 1."""
    return issubclass(attention_class(recipe.model.attention), GaussianAttention | SGPAAttention)


def may_leave_unused(recipe: Recipe) -> bool:
    """Whether a step may use only some of the parameters, which DDP must then look for."""
    cls = attention_class(recipe.model.attention)
    ours = cls.__module__.startswith("gpattention.")
    alone = not needs_warm_start(recipe) and cls.draws  # its own phase 1, without draws
    return recipe.phases.draw == "none" or alone or not ours


def _transformer(recipe: Recipe, facts: Mapping[str, Any], attention: AttentionConfig) -> Transformer:
    plain = {**facts, **recipe.model.config}
    if recipe.model.type == "vision":
        return VisionTransformer(VisionConfig(**_known(VisionConfig, plain), attention=attention))
    return TextTransformer(TextConfig(**_known(TextConfig, plain), attention=attention))


def _known(config: type[Any], plain: Mapping[str, Any]) -> dict[str, Any]:
    names = set(config.__dataclass_fields__) - {"attention"}
    unknown = sorted(set(plain) - names)
    if unknown:
        raise ValueError(
            f"unknown keys in model.config: {', '.join(unknown)}; known: {', '.join(sorted(names))}"
        )
    return dict(plain)
