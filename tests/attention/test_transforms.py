"""Modules under the transforms of `torch.func`: gradients of single sequences, ensembles, forward mode."""

import copy

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, jacfwd, jacrev, stack_module_state, vmap
from torch.testing import assert_close

from gpattention.gp import fused_kernels
from tests.attention.variants import (
    DEFAULTS,
    HEADS,
    TOKENS,
    VARIANTS,
    WIDTH,
    Variant,
    build,
    every,
    every_default,
    every_variant,
    padding,
    tokens,
)


@every_variant
def test_gradients_of_single_sequences(variant: Variant) -> None:
    module, x, ignore = build(variant), tokens(), padding()
    parameters = {name: p.detach() for name, p in module.named_parameters()}

    def loss(values: dict[str, Tensor], one: Tensor, hidden: Tensor) -> Tensor:
        need = ("output", "regularizer", *(("variance",) if module.draws else ()))
        found = functional_call(module, values, (one,), {"key_padding_mask": hidden, "need": need})
        total = found.output.square().sum() + found.regularizer.square()
        return total if found.variance is None else total + found.variance.log1p().square().sum()

    each = vmap(grad(loss), (None, 0, 0))(parameters, x, ignore)
    for number in range(len(x)):
        leaves = {name: p.clone().requires_grad_() for name, p in parameters.items()}
        value = loss(leaves, x[number], ignore[number])
        alone = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
        assert_close([one[number] for one in each.values()], list(alone), rtol=1e-7, atol=1e-7)


@every_default
def test_an_ensemble_is_one_mapped_call(variant: Variant) -> None:
    members, x = [build(variant, seed=seed) for seed in range(3)], tokens()
    parameters, buffers = stack_module_state(members)  # which require gradients
    host = copy.deepcopy(members[0]).to("meta")

    def call(values: dict[str, Tensor], kept: dict[str, Tensor]) -> Tensor:
        return functional_call(host, (values, kept), (x,)).output

    found = vmap(call)(parameters, buffers)
    assert_close(found, torch.stack([member(x).output for member in members]), rtol=1e-9, atol=1e-10)


@every_variant
def test_jacobians_of_both_modes(variant: Variant) -> None:
    module, x = build(variant), tokens()[0]
    backward, forward = (mode(lambda t: module(t).output)(x) for mode in (jacrev, jacfwd))
    assert_close(backward, forward, rtol=1e-8, atol=1e-9)
    if variant.draws:
        found = jacfwd(lambda t: module(t, need=("variance",)).variance)(x)
        assert found.shape[:2] == (HEADS, TOKENS)
        assert found.shape[2:] in (x.shape, (variant.options.get("rank", WIDTH), *x.shape))


@every([v for v in DEFAULTS if v.draws])
def test_mapped_draws_differ(variant: Variant) -> None:
    module, x = build(variant), tokens()[:1].expand(4, -1, -1)
    found = vmap(lambda t: module(t, draw="independent").output, randomness="different")(x)
    assert len({tuple(row.flatten().tolist()) for row in found}) == len(x)


@every([v for v in VARIANTS if v.kind in ("softmax", "softmax-gp", "kernel")] + DEFAULTS)
def test_double_backward(variant: Variant) -> None:
    """Equal to finite differences of the gradient, or refused by name."""
    module, x = build(variant), tokens()
    g = torch.Generator().manual_seed(3)
    direction = torch.randn(x.shape, generator=g, dtype=x.dtype)
    need = ("output", *(("variance",) if module.draws else ()))

    def loss(y: Tensor, ignore: Tensor | None) -> Tensor:
        found = module(y, key_padding_mask=ignore, need=need)
        weights = torch.linspace(0.5, 1.5, x.numel(), dtype=x.dtype).view(x.shape)
        total = (found.output * weights).sum()
        return total if found.variance is None else total + found.variance.square().sum()

    def first(y: Tensor, ignore: Tensor | None) -> list[Tensor]:
        y = y.clone().requires_grad_()
        leaves = [y, *module.parameters()]
        return list(torch.autograd.grad(loss(y, ignore), leaves, allow_unused=True, materialize_grads=True))

    for ignore in (None, padding()):
        y = x.clone().requires_grad_()
        if variant.kind in ("cgp", "direct", "scgp"):  # gradients that are written out
            with pytest.raises(RuntimeError, match="expected a backward pass without create_graph=True"):
                torch.autograd.grad(loss(y, ignore), y, create_graph=True)
        if variant.kind == "cgp":  # also in plain operations
            continue
        with fused_kernels("off"):
            (once,) = torch.autograd.grad(loss(y, ignore), y, create_graph=True)
        assert_close(once, first(x, ignore)[0], rtol=1e-9, atol=1e-10)
        leaves = [y, *module.parameters()]
        twice = torch.autograd.grad(
            (once * direction).sum(), leaves, allow_unused=True, materialize_grads=True
        )
        h = 1e-5
        for found, up, down in zip(
            twice, first(x + h * direction, ignore), first(x - h * direction, ignore), strict=True
        ):
            assert_close(found, (up - down) / (2 * h), rtol=1e-4, atol=1e-4)
