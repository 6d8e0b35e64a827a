"""Every function under the transforms of `torch.func`: mapped, and differentiated both ways."""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

from gpattention import gp
from tests.gp.calls import Call, close, over, same, tensors
from tests.gp.samples import SHARED, Sample


def flat(call: Call, s: Sample, names: tuple[str, ...], values: tuple[Tensor, ...], **extra: Any) -> Tensor:
    """All that a call gives, as one weighted sum."""
    found = tensors(call(replace(s, **dict(zip(names, values, strict=True))), **extra)).values()
    weights = (torch.linspace(0.5, 1.5, x.numel(), dtype=x.dtype).view(x.shape) for x in found)
    return torch.stack([(x * w).sum() for x, w in zip(found, weights, strict=True)]).sum()


@over()
def test_mapped_over_sequences(call: Call) -> None:
    whole = call.problem(3, 2)
    names = [f.name for f in fields(whole) if f.name not in SHARED]

    def one(*values: Tensor) -> dict[str, Tensor]:
        s = replace(whole, **dict(zip(names, values, strict=True)))
        return call.outputs(s, **call.extra(s))

    found = vmap(one, randomness="same")(*(getattr(whole, name) for name in names))
    same(call.outputs(whole, **call.extra(whole)), found)
    gp.check_health()


@over()
def test_derivatives_of_both_modes(call: Call) -> None:
    s = call.problem(2)
    extra, names = call.extra(s), call.arguments
    values = tuple(getattr(s, name) for name in names)
    directions = tuple(torch.randn_like(x) for x in values)

    def loss(*leaves: Tensor) -> Tensor:
        return flat(call, s, names, leaves, **extra)

    leaves = tuple(x.clone().requires_grad_() for x in values)
    expected = torch.autograd.grad(loss(*leaves), leaves, allow_unused=True, materialize_grads=True)
    found = grad(loss, argnums=tuple(range(len(values))))(*values)
    for one, other in zip(found, expected, strict=True):
        close(one, other)
    _, along = jvp(loss, values, directions)
    close(along, sum((x * d).sum() for x, d in zip(expected, directions, strict=True)))


def test_failures_under_vmap_are_counted() -> None:
    s = {name: torch.randn(3, 5, 2) for name in "qkov"}
    s["o"][1] = s["o"][1, :1]  # one latent input five times, and a noise that float32 cannot see

    def one(q: Tensor, k: Tensor, o: Tensor, v: Tensor) -> Tensor:
        return gp.cgp_posterior(q, k, o, v, noise=1e-12).mean

    mean = vmap(one)(*s.values())
    assert mean.isnan().flatten(1).all(-1).tolist() == [False, True, False]
    with pytest.raises(gp.NotPositiveDefiniteError, match="last check: 1 on cpu"):
        gp.check_health()
    with pytest.raises(gp.NotPositiveDefiniteError, match="K_o"):  # values can be read here
        grad(lambda q: one(q, s["k"], s["o"], s["v"]).sum())(s["q"])


@over()
def test_second_derivatives(call: Call) -> None:
    s = call.problem()
    extra, names = call.extra(s), call.arguments
    values = tuple(getattr(s, name) for name in names)
    directions = tuple(torch.randn_like(x) for x in values)
    places = tuple(range(len(values)))

    def loss(*leaves: Tensor) -> Tensor:
        return flat(call, s, names, leaves, **extra)

    def first(step: float) -> tuple[Tensor, ...]:
        leaves = [(x + step * d).requires_grad_() for x, d in zip(values, directions, strict=True)]
        return torch.autograd.grad(loss(*leaves), leaves, allow_unused=True, materialize_grads=True)

    _, found = jvp(grad(loss, argnums=places), values, directions)
    for one, up, down in zip(found, first(1e-5), first(-1e-5), strict=True):
        torch.testing.assert_close(one, (up - down) / 2e-5, rtol=1e-4, atol=1e-4)

    leaves = [x.clone().requires_grad_() for x in values]
    try:
        once = torch.autograd.grad(
            loss(*leaves), leaves, create_graph=True, allow_unused=True, materialize_grads=True
        )
    except RuntimeError as error:  # rather than a part of them
        if "take torch.func" not in str(error):
            raise
        return
    along = sum((x * d).sum() for x, d in zip(once, directions, strict=True))
    twice = torch.autograd.grad(along, leaves, allow_unused=True, materialize_grads=True)
    for one, other in zip(twice, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-8)
