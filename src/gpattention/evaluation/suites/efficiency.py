"""Suite `efficiency`: what training and predicting cost, against inducing points and sequence length."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gpattention.attention import attention_class
from gpattention.attention.output import Draw
from gpattention.evaluation.cost import measure_cost
from gpattention.evaluation.records import Record
from gpattention.evaluation.suites.findings import Findings
from gpattention.models import AttentionConfig, TextConfig, VisionConfig
from gpattention.models.config import TransformerConfig
from gpattention.models.rows import Inputs

INDUCING = (8, 16, 32)  # the paper's
LENGTHS = (0.5, 1, 2)  # times the side of an image, or the words of a sentence
CPU_ITEMS = 16  # of a step that is measured on a CPU, at most


@dataclass(frozen=True)
class EfficiencyPlan:
    """What is measured, and what it is scaled to."""

    batch: int  # items of an update in training
    training_items: int  # of an epoch
    samples: int  # draws of a prediction
    draw: Draw = "independent"  # in training
    steps: int = 3
    inducing: tuple[int, ...] = INDUCING
    lengths: tuple[float, ...] = LENGTHS


@dataclass(frozen=True)
class Size:
    """One size of a model."""

    inducing: int | None  # None: exact attention
    tokens: int
    config: TransformerConfig


def efficiency_findings(
    model: Any,
    plan: EfficiencyPlan,
    device: torch.device,
    progress: Callable[[int, int], object] | None = None,
) -> Findings:
    """Seconds and peak memory of models like this one, freshly made, at every size of the plan."""
    sizes = planned_sizes(model.config, plan)
    items = plan.batch if device.type == "cuda" else min(plan.batch, CPU_ITEMS)
    records: list[Record] = []
    for number, size in enumerate(sizes):
        inputs, labels = _random_items(size.config, items, device)
        config = size.config

        def build(config: TransformerConfig = config) -> Any:
            return type(model)(config).to(device)

        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(0)
            cost = measure_cost(build, inputs, labels, samples=plan.samples, draw=plan.draw, steps=plan.steps)
        values = {
            "train_epoch_seconds": cost.step_seconds * plan.training_items / items,
            "predict_seconds": cost.predict_seconds / items,
            "train_peak_mib": cost.train_peak_mib,
            "predict_peak_mib": cost.predict_peak_mib,
        }
        detail = {"inducing": size.inducing, "tokens": size.tokens, "items": items}
        records += [Record("train", "model", metric, value, detail) for metric, value in values.items()]
        if progress is not None:
            progress(number + 1, len(sizes))
    return Findings(tuple(records), {}, _notes(plan, items, device))


def planned_sizes(config: TransformerConfig, plan: EfficiencyPlan) -> list[Size]:
    """The model's own size first, then other lengths, and other numbers of inducing points if it has any."""
    own = inducing_of(config)
    changed = [_longer(config, factor) for factor in plan.lengths]
    if own is not None:
        changed += [_with_inducing(config, count) for count in plan.inducing]
    found = {(inducing_of(each), _tokens(each)): each for each in (config, *changed)}
    return [Size(inducing, tokens, each) for (inducing, tokens), each in found.items()]


def inducing_of(config: TransformerConfig) -> int | None:
    """The number of inducing points of the first layer that has some; the first of a pair."""
    for layer in config.layers:
        parameters = inspect.signature(attention_class(layer.kind)).parameters
        if "num_inducing" in parameters:
            number = layer.options.get("num_inducing", parameters["num_inducing"].default)
            return int(number if isinstance(number, int) else number[0])
    return None


def _with_inducing(config: TransformerConfig, count: int) -> TransformerConfig:
    layers = tuple(
        AttentionConfig(layer.kind, {**layer.options, "num_inducing": count})
        if "num_inducing" in inspect.signature(attention_class(layer.kind)).parameters
        else layer
        for layer in config.layers
    )
    return replace(config, attention=layers)


def _longer(config: TransformerConfig, factor: float) -> TransformerConfig:
    if isinstance(config, VisionConfig):
        height, width = (max(1, round(side * factor / config.patch)) * config.patch for side in config.sides)
        return replace(config, image_size=(height, width))
    assert isinstance(config, TextConfig)
    return replace(config, max_length=max(2, round(config.max_length * factor)))


def _tokens(config: TransformerConfig) -> int:
    if isinstance(config, VisionConfig):
        return config.tokens
    assert isinstance(config, TextConfig)
    return config.max_length


def _random_items(config: TransformerConfig, items: int, device: torch.device) -> tuple[Inputs, Tensor]:
    """Items of the right shape; what they show costs nothing."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(config.classes, (items,), generator=generator).to(device)
    if isinstance(config, VisionConfig):
        images = torch.randn(items, config.channels, *config.sides, generator=generator)
        return images.to(device), labels
    assert isinstance(config, TextConfig)
    shape = (items, config.max_length)
    inputs = {
        "tokens": torch.randint(1, config.vocabulary, shape, generator=generator).to(device),
        "padding_mask": torch.zeros(shape, dtype=torch.bool, device=device),
    }
    if config.contextual_width:
        vectors = torch.randn(*shape, config.contextual_width, generator=generator)
        inputs["contextual"] = vectors.to(device)
    return inputs, labels


def _notes(plan: EfficiencyPlan, items: int, device: torch.device) -> tuple[str, ...]:
    told = [
        f"train_epoch_seconds is the median of {plan.steps} steps of {items} items, scaled to "
        f"{plan.training_items} items; predict_seconds is of one item, predicted with {items - 1} others "
        f"and {plan.samples} draws where the model draws",
        "cost is that of fresh weights and random items of full length",
    ]
    if items < plan.batch:
        told.append(f"reduced: {items} items a step on the CPU, where training has {plan.batch}")
    if device.type == "cpu":
        told.append("peak memory counts the tensors that operations return, not what they use inside")
    return tuple(told)
