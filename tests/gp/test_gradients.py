"""Gradients: against finite differences, with and without masks, in float32, and per parameter."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from gpattention import gp
from tests.gp.calls import Call, cgp_kl, over
from tests.gp.oracle_pairs import PAIRS
from tests.gp.samples import SHARED, Sample, sample

INPUTS = ("q", "k", "o", "v", *SHARED, "log_amplitude")


def as_function(
    name: str, s: Sample, *, masked: bool
) -> tuple[Callable[..., tuple[Tensor, ...]], list[Tensor]]:
    """The function of its tensors alone, with the tensors as leaves."""
    pair = PAIRS[name]
    masks = {m: getattr(s, m) for m in ("mask", "query_mask") if masked and m in pair.optional}

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(INPUTS, tensors, strict=True))
        optional = dict(masks)
        if "log_amplitude" in pair.optional:
            optional["log_amplitude"] = given["log_amplitude"]
        return tuple(pair.torch(dataclasses.replace(s, **given), optional, 0.1))

    leaves = [getattr(s, n).detach().clone().requires_grad_() for n in INPUTS]
    return call, leaves


@pytest.mark.parametrize("masked", [False, True], ids=["all real", "masked"])
@pytest.mark.parametrize("name", PAIRS)
def test_gradients_equal_finite_differences(name: str, masked: bool) -> None:
    s = sample(queries=4, keys=4, width=2, channels=2, inducing=(2, 3), seed=1)
    call, leaves = as_function(name, s, masked=masked)
    assert gradcheck(call, leaves, eps=1e-6, atol=1e-6, rtol=1e-5, fast_mode=True)


@pytest.mark.parametrize(
    "name", ["cgp", "scgp paper", "cgp kl", "cgp marginal noisy None", "softmax", "sgpa"]
)
def test_every_jacobian_entry_equals_finite_differences(name: str) -> None:
    s = sample(queries=3, keys=3, width=2, channels=2, inducing=(2, 2), seed=2)
    call, leaves = as_function(name, s, masked=True)
    assert gradcheck(call, leaves, eps=1e-6, atol=1e-6, rtol=1e-5)


def total(results: list[Tensor]) -> Tensor:
    """One number that weighs every entry differently."""
    parts = []
    for i, x in enumerate(results):
        weights = torch.linspace(0.5, 1.5, x.numel(), dtype=x.dtype).reshape(x.shape)
        parts.append((i + 1) * (weights * x).sum())
    return torch.stack(parts).sum()


# See float32_tolerance in test_against_oracles: backward passes through each solve once more.
@pytest.mark.parametrize("name", [n for n in PAIRS if not n.endswith("0.0") and "printed" not in n])
def test_float32_gradients_are_close_to_float64(name: str) -> None:
    def gradients(s: Sample) -> list[Tensor]:
        call, leaves = as_function(name, s, masked=True)
        found = torch.autograd.grad(total(list(call(*leaves))), leaves, allow_unused=True)
        return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]

    single = sample(2, dtype=torch.float32, seed=4)
    for rough, exact in zip(gradients(single), gradients(single.to(torch.float64)), strict=True):
        size = exact.abs().max().clamp_min(1e-3)
        assert (rough.double() - exact).abs().max() / size < 2e-3


@over(
    "direct", "softmax", "cgp", "scgp", "density-cgp-marginal-noisy", "kl-cgp", "density-scgp-jensen",
    "kl-scgp",
)  # fmt: skip
def test_noise_and_amplitudes_get_gradients_per_head(call: Call) -> None:
    s = sample(2, 3, queries=3, keys=3, width=2, channels=2, inducing=(2, 2), seed=5)
    numbers = ([0.1, 0.2, 0.3], [1.0, 1.5, 0.5], [0.7, 1.0, 1.3])
    leaves = [torch.tensor(x, dtype=torch.float64) for x in numbers[: len(call.parameters)]]

    def weighted(*values: Tensor) -> Tensor:
        found = call.outputs(s, **dict(zip(call.parameters, values, strict=True)))
        return total([x for name, x in found.items() if name not in ("log_variance", "stddev", "covariance")])

    assert gradcheck(weighted, [x.requires_grad_() for x in leaves])


def test_coinciding_tokens_have_finite_gradients() -> None:
    """Clamped distances and standard deviations must not divide by zero."""
    s = sample(2, dtype=torch.float32)
    x = s.q[:, :1].expand(-1, 7, -1).clone().requires_grad_()
    p = gp.cgp_posterior(x, x, x, s.v, noise=1e-3)
    (p.mean.sum() + p.stddev.sum() + cgp_kl(x, x, x, s.v, noise=1e-3).sum()).backward()
    assert isinstance(x.grad, Tensor)
    assert bool(x.grad.isfinite().all())
