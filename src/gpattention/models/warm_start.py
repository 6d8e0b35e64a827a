"""Start a GP transformer from one that was trained with kernel attention.

Tensors are copied by an explicit map of their names, and all others are reported as initialised; a tensor
that does not fit is an error.  Each kind of attention defines what it takes over from kernel attention.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gpattention.attention import Attention, KernelAttention, attention_class, list_attention
from gpattention.checks import check_choice
from gpattention.models.predict import Inputs, evaluating
from gpattention.models.transformer import Transformer

LatentFrom = Literal["key", "query", "none"]


@dataclass(frozen=True)
class WarmStart:
    """The result of a warm start.

    Attributes:
        copied: names of the target's tensors that were copied from the source.
        initialised: names of those that kept their initial values.
        gap: relative difference of the logits of the two models, if inputs were passed.
    """

    copied: tuple[str, ...]
    initialised: tuple[str, ...]
    gap: float | None

    def table(self) -> str:
        """The two counts, the names of tensors that were not copied, and the gap."""
        lines = [f"{len(self.copied)} tensors copied, {len(self.initialised)} initialised afresh:"]
        lines += [f"  {name}" for name in self.initialised]
        if self.gap is not None:
            lines.append(f"relative difference of the logits: {self.gap:.2e}")
        return "\n".join(lines)


@torch.no_grad()
def warm_start(
    target: Transformer, source: Transformer, *, latent_from: LatentFrom = "key", inputs: Inputs | None = None
) -> WarmStart:
    """Copy a kernel-attention model's weights into `target`, in place.

    Args:
        target: the model to start; layers of the source's own kind are copied unchanged.
        source: a trained model of the same class and depth.
        latent_from: the projection that W_o starts as; "none" keeps its initial values.
        inputs: a batch to measure the gap between the mean logits of the two models: none for direct, small
            for cgp, and for scgp the loss by its inducing inputs.  With normalised rows it is large where
            amplitudes reach `max_stddev`, which caps the mean with the deviation.

    Returns:
        What was copied and what was not, and the gap.

    Raises:
        ValueError: the models do not fit each other, or a kind cannot start from its source.
    """
    if type(target) is not type(source):
        raise ValueError(f"expected a source of {type(target).__name__}, got {type(source).__name__}")
    if len(target.blocks) != len(source.blocks):
        raise ValueError(f"expected a source of depth {len(target.blocks)}, got {len(source.blocks)}")
    check_choice("latent_from", latent_from, ("key", "query", "none"))
    inside = tuple(f"blocks.{i}.attention." for i in range(len(target.blocks)))
    plan = {name: x for name, x in source.state_dict().items() if not name.startswith(inside)}
    for prefix, ours, theirs in zip(inside, target._blocks(), source._blocks(), strict=True):
        try:
            attention = _attention_plan(ours.attention, theirs.attention, latent_from)
        except ValueError as error:
            kinds = f"{theirs.attention.kind} -> {ours.attention.kind}"
            raise ValueError(f"layer {prefix.split('.')[1]}: {kinds}: {error}") from None
        plan |= {prefix + name: tensor for name, tensor in attention.items()}
    own = target.state_dict()
    for name, tensor in plan.items():
        if name not in own:
            raise ValueError(f"the source's {name} has no place in the target")
        wanted, got = tuple(own[name].shape), tuple(tensor.shape)
        if wanted != got:
            raise ValueError(f"expected {name} of shape {wanted}, the source has {got}")
    for name, tensor in plan.items():
        own[name].copy_(tensor)
    gap = None if inputs is None else output_gap(target, source, inputs)
    copied, fresh = ([name for name in own if (name in plan) is there] for there in (True, False))
    return WarmStart(tuple(copied), tuple(fresh), gap)


@torch.no_grad()
def output_gap(model: Transformer, other: Transformer, inputs: Inputs) -> float:
    """Relative difference of the logits of two mean forward passes.

    Args:
        model: any transformer.
        other: the model to compare with.
        inputs: a batch for both.

    Returns:
        ||logits - other's|| / ||other's||
    """
    with evaluating(model), evaluating(other):
        ours, theirs = model(inputs).logits, other(inputs).logits
    return float((ours - theirs).norm() / theirs.norm().clamp_min(1e-12))


def _attention_plan(target: Attention, source: Attention, latent_from: LatentFrom) -> dict[str, Tensor]:
    """Tensors of one layer by their names in the target."""
    if target.num_heads != source.num_heads:
        raise ValueError(f"expected {target.num_heads} heads, got {source.num_heads}")
    if type(target) is type(source):
        target._check_like(source, *target.meaning)
        return dict(source.state_dict())
    if not isinstance(source, KernelAttention):
        raise ValueError("expected a source with kernel attention")
    if source.kind not in target.converts_from:
        fit = [kind for kind in list_attention() if source.kind in attention_class(kind).converts_from]
        raise ValueError(f"expected a target of kind {', '.join(fit)} or {source.kind}")
    both = ((part, getattr(source, part).state_dict()) for part in ("value", "output"))
    plan = {f"{part}.{name}": x for part, state in both for name, x in state.items()}
    return plan | target._from_kernel(source, latent_from)
