"""Modules under the transforms of `torch.func`: gradients of single sequences, ensembles, forward mode."""

import copy

import torch
from torch import Tensor
from torch.func import functional_call, grad, jacfwd, jacrev, stack_module_state, vmap
from torch.testing import assert_close

from gpattention.attention import Attention
from tests.attention.variants import (
    HEADS,
    TOKENS,
    WIDTH,
    Variant,
    build,
    every_default,
    every_variant,
    padding,
    tokens,
)


def told(module: Attention) -> tuple[str, ...]:
    return ("output", "regularizer", *(("variance",) if module.draws else ()))


@every_variant
def test_gradients_of_single_sequences(variant: Variant) -> None:
    module, x, ignore = build(variant), tokens(), padding()
    parameters = {name: p.detach() for name, p in module.named_parameters()}

    def loss(values: dict[str, Tensor], one: Tensor, hidden: Tensor) -> Tensor:
        options = {"key_padding_mask": hidden, "need": told(module)}
        found = functional_call(module, values, (one,), options)
        parts = [
            found.output,
            found.regularizer,
            *([] if found.variance is None else [found.variance.log1p()]),
        ]
        return torch.stack([part.square().sum() for part in parts]).sum()

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
        assert found.shape[2:] in (x.shape, (WIDTH, *x.shape))


@every_default
def test_mapped_draws_differ(variant: Variant) -> None:
    module, x = build(variant), tokens()[:1].expand(4, -1, -1)
    if not variant.draws:
        return
    found = vmap(lambda t: module(t, draw="independent").output, randomness="different")(x)
    assert len({tuple(row.flatten().tolist()) for row in found}) == len(x)
