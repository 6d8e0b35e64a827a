"""Start a GP transformer from one trained with plain kernel attention, tensor by named tensor.

Everything is copied by an explicit map, and everything else is reported as initialised; a tensor that
does not fit is an error.  Length scales and variance of an ard_rbf source are folded exactly into the
projections and amplitudes of the target, whose kernel has none:
    variance * exp(-1/2 |(W_q x - W_k y) / l|^2) = s_q s_k kappa(W_q x / l, W_k y / l),
    s_q = s_k = variance^1/2
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gpattention.attention import (
    Attention,
    CGPAttention,
    GaussianAttention,
    KernelAttention,
    SCGPAttention,
    SGPAAttention,
)
from gpattention.models.rows import Inputs, evaluating
from gpattention.models.transformer import Transformer

LatentFrom = Literal["key", "query", "none"]


@dataclass(frozen=True)
class WarmStart:
    """What a warm start did."""

    copied: tuple[str, ...]  # names of the target's tensors that came from the source
    initialised: tuple[str, ...]  # those that kept their fresh values
    gap: float | None  # relative difference of the two models' logits, where inputs were given

    def table(self) -> str:
        """Two counts, the names that stayed fresh, and the gap."""
        lines = [f"{len(self.copied)} tensors copied, {len(self.initialised)} initialised afresh:"]
        lines += [f"  {name}" for name in self.initialised]
        if self.gap is not None:
            lines.append(f"relative difference of the logits: {self.gap:.2e}")
        return "\n".join(lines)


@torch.no_grad()
def warm_start(
    target: Transformer,
    source: Transformer,
    *,
    latent_from: LatentFrom = "key",
    inputs: Inputs | None = None,
) -> WarmStart:
    """Copy a kernel-attention model's weights into `target`, in place.

    `latent_from` says which projection W_o starts as ("none" leaves it fresh).  With `inputs` the gap
    between the two models' mean logits is measured: nothing for direct, small for cgp, and for scgp what
    its inducing inputs lose.  With normalised rows it is large where amplitudes reach `max_stddev`: the cap
    shrinks the mean with the deviation.
    """
    if type(target) is not type(source):
        raise ValueError(f"expected a source of {type(target).__name__}, got {type(source).__name__}")
    if len(target.blocks) != len(source.blocks):
        raise ValueError(f"expected a source of depth {len(target.blocks)}, got {len(source.blocks)}")
    if latent_from not in ("key", "query", "none"):
        raise ValueError(f"expected latent_from to be 'key', 'query' or 'none', got {latent_from!r}")
    plan: dict[str, Tensor] = {}
    inside = {f"blocks.{i}.attention." for i in range(len(target.blocks))}
    for name, tensor in source.state_dict().items():
        if not any(name.startswith(prefix) for prefix in inside):
            plan[name] = tensor
    for i, (ours, theirs) in enumerate(zip(target._blocks(), source._blocks(), strict=True)):
        attention = _attention_plan(ours.attention, theirs.attention, latent_from, layer=i)
        plan |= {f"blocks.{i}.attention.{name}": tensor for name, tensor in attention.items()}
    own = target.state_dict()
    _check_plan(plan, own)
    for name, tensor in plan.items():
        own[name].copy_(tensor)
    fresh = tuple(name for name in own if name not in plan)
    gap = None if inputs is None else output_gap(target, source, inputs)
    return WarmStart(tuple(name for name in own if name in plan), fresh, gap)


@torch.no_grad()
def output_gap(model: Transformer, other: Transformer, inputs: Inputs) -> float:
    """||logits - other's|| / ||other's|| of the mean forward passes."""
    with evaluating(model), evaluating(other):
        ours, theirs = model(inputs).logits, other(inputs).logits
    return float((ours - theirs).norm() / theirs.norm().clamp_min(1e-12))


def _attention_plan(
    target: Attention, source: Attention, latent_from: LatentFrom, *, layer: int
) -> dict[str, Tensor]:
    where = f"layer {layer}: {source.kind} -> {target.kind}"
    if target.num_heads != source.num_heads:
        raise ValueError(f"{where}: expected {target.num_heads} heads, got {source.num_heads}")
    if type(target) is type(source):
        for name in ("kernel", "symmetric", "normalize", "causal", "values"):
            _check_alike(target, source, name, where)
        return dict(source.state_dict())
    if not isinstance(source, KernelAttention):
        raise ValueError(f"{where}: expected a source with kernel attention")
    plan = {
        f"{part}.{name}": x
        for part in ("value", "output")
        for name, x in getattr(source, part).state_dict().items()
    }
    if isinstance(target, SGPAAttention):
        return plan | _symmetric_plan(target, source, where)
    if isinstance(target, GaussianAttention):
        return plan | _gaussian_plan(target, source, latent_from, where)
    raise ValueError(f"{where}: expected a target of kind direct, cgp, scgp, sgpa or kernel")


def _gaussian_plan(
    target: GaussianAttention, source: KernelAttention, latent_from: LatentFrom, where: str
) -> dict[str, Tensor]:
    if source.kernel == "exp_dot":
        raise ValueError(f"{where}: an exp_dot kernel is no rbf kernel and cannot start one")
    _check_alike(target, source, "normalize", where)
    _check_alike(target, source, "causal", where)
    query, key = _folded(source, source.query), _folded(source, source.key or source.query)
    plan = _named("query", query) | _named("key", key)
    if isinstance(target, CGPAttention | SCGPAttention) and latent_from != "none":
        plan |= _named("latent", key if latent_from == "key" else query)
    if target.normalize == "none" and source.kernel == "ard_rbf":
        root = source.variance().double().sqrt()  # [H]
        for name in ("scale_q", "scale_k"):
            plan[f"{name}.raw"] = _softplus_inverse(root, getattr(target, name).floor)
    elif target.normalize == "none":
        for name in ("scale_q", "scale_k"):
            one = torch.ones(target.num_heads, dtype=torch.float64)
            plan[f"{name}.raw"] = _softplus_inverse(one, getattr(target, name).floor)
    return plan


def _symmetric_plan(target: SGPAAttention, source: KernelAttention, where: str) -> dict[str, Tensor]:
    if not source.symmetric:
        raise ValueError(
            f"{where}: sgpa has one projection for queries and keys, expected a symmetric source"
        )
    if source.normalize != "none":
        raise ValueError(f"{where}: sgpa does not normalise rows, expected normalize='none'")
    _check_alike(target, source, "causal", where)
    if source.kernel == target.kernel:
        parts = ("query",) if source.kernel == "rbf" else ("query", "lengthscale", "variance")
        return {f"{p}.{n}": x for p in parts for n, x in getattr(source, p).state_dict().items()}
    if source.kernel == "ard_rbf" and target.kernel == "rbf" and _is_one(source.variance()):
        return _named("query", _folded(source, source.query))
    raise ValueError(f"{where}: expected a source with kernel {target.kernel!r}, got {source.kernel!r}")


def _folded(source: KernelAttention, linear: nn.Linear) -> Mapping[str, Tensor]:
    """The projection with the length scales divided out of its rows."""
    state = {name: x.double() for name, x in linear.state_dict().items()}
    if source.kernel == "rbf":
        return state
    scale = source.lengthscale().double().flatten()  # [E]
    return {name: x / (scale[:, None] if x.ndim == 2 else scale) for name, x in state.items()}


def _named(part: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{part}.{name}": x for name, x in state.items()}


def _softplus_inverse(value: Tensor, floor: float) -> Tensor:
    excess = value.double() - floor
    return excess + (-(-excess).expm1()).log()


def _check_alike(target: Attention, source: Attention, option: str, where: str) -> None:
    """An option under which the same tensors would mean another function; a kind without it has it off."""
    ours, theirs = getattr(target, option, False), getattr(source, option, False)
    if ours != theirs:
        raise ValueError(f"{where}: expected {option}={ours!r}, got {theirs!r}")


def _is_one(variance: Tensor) -> bool:
    return bool((variance - 1).abs().max() < 1e-6)


def _check_plan(plan: Mapping[str, Tensor], own: Mapping[str, Any]) -> None:
    for name, tensor in plan.items():
        if name not in own:
            raise ValueError(f"the source's {name} has no place in the target")
        if own[name].shape != tensor.shape:
            raise ValueError(
                f"expected {name} of shape {tuple(own[name].shape)}, the source has {tuple(tensor.shape)}"
            )
