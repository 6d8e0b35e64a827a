"""The one line to add to a loss: what the converted layers told of the last forward pass."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gpattention.adopt.convert_layer import converted_layers
from gpattention.adopt.convert_own import ConvertedOwn
from gpattention.models import ModelOutput, Transformer
from gpattention.models.rows import is_predicting

_TOLD = "_gpattention_regularizer"  # where a transformer of ours keeps that of its last output


def regularizer(model: nn.Module) -> Tensor:
    """Sum of the layers' regularisers in the last forward pass in training mode.  []

    Per real token, head and head dimension, as everywhere in the library; a layer that ran several times in
    that pass counts as often.  Weigh it lightly: 0.01 is a start.  Works under DistributedDataParallel, and
    under gradient checkpointing with `use_reentrant=False`; `nn.DataParallel` is refused.

    >>> loss = cross_entropy(model(x), y) + 0.01 * regularizer(model)
    """
    own = [module for module in model.modules() if isinstance(module, Transformer)]
    if own:
        return _of_own(own)
    layers = converted_layers(model)
    if not layers:
        raise ValueError("expected a converted model, got one without a converted layer: call convert first")
    told = [value for layer in layers for value in layer.regularizers]
    if not told and any(isinstance(module, ConvertedOwn) for module in model.modules()):
        raise ValueError(
            "expected converted layers that remember their regulariser, got attention of gpattention, which "
            "tells it where it is called: attention(x, draw='independent', need=('output', 'regularizer'))"
        )
    if not told:
        raise ValueError(
            "expected a forward pass in training mode before, got none: the regulariser is not computed in "
            "evaluation mode"
        )
    learned = [
        value for layer in layers if layer.attention.regularizer != "none" for value in layer.regularizers
    ]
    trainable = any(p.requires_grad for layer in layers for p in layer.parameters())
    if (
        learned
        and torch.is_grad_enabled()
        and trainable
        and not any(value.requires_grad for value in learned)
    ):
        raise ValueError(
            "expected regularisers with gradients, got a forward pass without: gradient checkpointing needs "
            "use_reentrant=False, e.g. gradient_checkpointing_kwargs={'use_reentrant': False}"
        )
    return torch.stack([value.float() for value in told]).sum()


@dataclass(eq=False)
class _Told:
    """What a model told of its last pass; a copy of the model begins without, as it cannot have the graph."""

    regularizer: Tensor | None = None

    def __reduce__(self) -> tuple[type["_Told"], tuple[()]]:
        return _Told, ()


def remember_output(model: nn.Module, _: Any, output: Any) -> None:
    """Forward hook of our own transformers, which tell their regulariser themselves; no prediction does."""
    if is_predicting():
        return
    told = output.regularizer if isinstance(output, ModelOutput) else None
    if told is not None:
        model.__dict__[_TOLD] = _Told(told)
    else:
        model.__dict__.pop(_TOLD, None)


def _of_own(models: list[Transformer]) -> Tensor:
    found = [model.__dict__.get(_TOLD, _Told()).regularizer for model in models]
    told = [value for value in found if value is not None]
    if not told:
        raise ValueError(
            "expected a forward pass that was asked for the regulariser, got none: call "
            "model(x, draw='independent', need=('logits', 'regularizer')) of a converted transformer"
        )
    return torch.stack(told).sum()
