"""Models of a recipe: the one it names, and the kernel-attention model it may start from."""

from collections.abc import Mapping
from typing import Any

from gpattention.attention import Attention, GaussianAttention, SGPAAttention, attention_class
from gpattention.models import (
    AttentionConfig,
    TextConfig,
    TextTransformer,
    Transformer,
    VisionConfig,
    VisionTransformer,
)
from gpattention.training.recipe import Recipe, RegularizerRecipe


def build_model(recipe: Recipe, facts: Mapping[str, Any]) -> Transformer:
    """The model of phase 2; `facts` are what the data decides (classes, image_size, vocabulary, ...)."""
    attention = AttentionConfig(recipe.model.attention, recipe.model.options)
    model = _transformer(recipe, facts, attention)
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    if all(layer.regularizer == "none" for layer in layers):
        _refuse_weights(recipe)
    return model


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


def _refuse_weights(recipe: Recipe) -> None:
    """A weight of nothing would look like a setting that was tried.  0 says that there is nothing, and the
    default stands in every recipe that does not speak of it.
    """
    given, usual = recipe.regularizer, RegularizerRecipe()
    allowed = {"start": (0.0, usual.start), "end": (0.0, usual.end), "normalised": (usual.normalised,)}
    for name, choices in allowed.items():
        if getattr(given, name) not in choices:
            words = " or ".join(f"{choice}" for choice in dict.fromkeys(choices))
            raise ValueError(
                f"expected regularizer.{name} to be {words} for {recipe.model.attention!r} attention without "
                f"a regulariser, since it would have no effect, got {getattr(given, name)}"
            )


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
