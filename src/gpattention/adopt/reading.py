"""How a host is called and what of its output is read."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from gpattention.models.rows import Inputs
from gpattention.models.transformer import Transformer

Task: TypeAlias = Literal["classification", "tokens", "regression", "embedding"]
TASKS: tuple[Task, ...] = ("classification", "tokens", "regression", "embedding")
Call: TypeAlias = Callable[[Any, Inputs], Any]  # model and inputs to output


def call_model(model: nn.Module, inputs: Inputs) -> Any:
    """Mappings become keyword arguments, but for our own models."""
    if isinstance(inputs, Tensor) or isinstance(model, Transformer):
        return model(inputs)
    return model(**inputs)


def uncompiled(model: nn.Module) -> nn.Module:
    """The module inside what `torch.compile` gives: compilers cannot follow what a thread asks of modules."""
    return model._modules.get("_orig_mod") or model


def find_task(model: nn.Module, output: Any) -> Task:
    """From what the model says of itself, else from the shape of its output."""
    config = getattr(model, "config", None)
    logits = _logits(output)
    if logits is None:
        return "embedding"
    if getattr(config, "problem_type", None) == "multi_label_classification":
        raise ValueError(
            "expected one class per item, got problem_type='multi_label_classification': pass task= and call="
        )
    if getattr(config, "problem_type", None) == "regression":
        return "regression"
    if logits.ndim == 3:
        return "tokens"
    return "classification" if logits.ndim == 2 and logits.shape[-1] > 1 else "regression"


def read(output: Any, task: Task, inputs: Inputs) -> Tensor:
    """Logits [B, C] or [B, N, C], values [B, D], or pooled embeddings [B, E]."""
    logits = _logits(output)
    if task == "embedding":
        return _pooled(output, inputs)
    if logits is None:
        raise ValueError(
            f"expected an output with logits for task={task!r}, got {type(output).__name__}: "
            "pass call=, which gives a tensor"
        )
    if task == "regression" and logits.ndim == 1:
        logits = logits[:, None]
    wanted = 3 if task == "tokens" else 2
    if logits.ndim != wanted:
        raise ValueError(f"expected logits of {wanted} axes for task={task!r}, got {tuple(logits.shape)}")
    return logits


def real_tokens(inputs: Inputs, shape: tuple[int, ...]) -> Tensor:
    """Tokens that are not padding, as the attention mask of the inputs says.  [B, N]"""
    mask = None if isinstance(inputs, Tensor) else inputs.get("attention_mask")
    if mask is None or tuple(mask.shape) != shape:
        return torch.ones(shape, dtype=torch.bool)
    return mask.bool()


def _logits(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and "logits" in output:
        found = output["logits"]
    else:
        found = getattr(output, "logits", None)
    return found if isinstance(found, Tensor) else None


def _pooled(output: Any, inputs: Inputs) -> Tensor:
    """The mean over the real tokens' last states, or what was given as [B, E] already.  [B, E]"""
    states = output if isinstance(output, Tensor) else getattr(output, "last_hidden_state", None)
    if not isinstance(states, Tensor):
        raise ValueError(
            f"expected an output with last_hidden_state, got {type(output).__name__}: "
            "pass call=, which gives a tensor [B, E]"
        )
    if states.ndim == 2:
        return states
    real = real_tokens(inputs, tuple(states.shape[:2])).to(states.device)[..., None]  # [B, N, 1]
    return torch.where(real, states, 0.0).sum(1) / real.sum(1).clamp_min(1)
