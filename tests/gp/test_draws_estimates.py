"""Random estimates of the regularisers are unbiased, and the chunked trace is the trace."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gpattention import gp
from gpattention.gp.sparse import latent_trace, latent_trace_estimate
from tests.gp.calls import MODEL, Call, cgp_log_density, close, over, seeded
from tests.gp.samples import sample

ERRORS = 5  # standard errors
LINEAR = ("density-scgp-jensen", "density-scgp-double_jensen", "density-scgp-printed")


def repeated(estimate: Callable[[int], gp.LogDensity], times: int) -> Tensor:
    """Both terms for many seeds.  [times, 2]"""
    found = [estimate(seed) for seed in range(times)]
    return torch.stack([torch.stack([x.query, x.key]) for x in found])


def assert_unbiased(values: Tensor, expected: gp.LogDensity) -> None:
    """The mean over seeds is within a few standard errors, which are small against the value itself."""
    target = torch.stack([expected.query, expected.key])
    error = values.std(0) / math.sqrt(len(values))
    assert bool((error > 0).all())
    assert bool((error < 0.05 * target.abs()).all())
    assert float(((values.mean(0) - target) / error).abs().max()) < ERRORS


@pytest.mark.parametrize("tau", [None, 0.5])
@pytest.mark.parametrize("prior", ["noisy", "latent"])
def test_monte_carlo_density_converges_to_the_jensen_bound(prior: str, tau: float | None) -> None:
    s = sample(queries=5, keys=4, channels=2, seed=1)
    options = {"latent_prior": prior, "observation_noise": tau, "mask": s.mask, **MODEL}

    def estimate(seed: int, samples: int = 50) -> gp.LogDensity:
        random = {"objective": "monte_carlo", "samples": samples, "generator": seeded(seed)}
        return cgp_log_density(s.q, s.k, s.o, s.v, **options, **random)

    jensen = cgp_log_density(s.q, s.k, s.o, s.v, objective="jensen", **options)
    values = repeated(estimate, 200)
    assert_unbiased(values, jensen)
    many = estimate(1000, samples=150_000)  # standard error 0.1 % of the density: a bias of 1 % shows
    error = values.std(0) * math.sqrt(50 / 150_000)
    assert bool((error < 0.002 * torch.stack([jensen.query, jensen.key]).abs()).all())
    assert abs(float(many.query - jensen.query)) < ERRORS * float(error[0])
    assert abs(float(many.key - jensen.key)) < ERRORS * float(error[1])


def test_monte_carlo_density_of_crowded_latent_inputs_works_in_float32() -> None:
    s = sample(queries=32, keys=32, spread=0.1, seed=3)
    options = {"objective": "monte_carlo", "latent_prior": "latent", "samples": 200, **MODEL}
    wide = cgp_log_density(s.q, s.k, s.o, s.v, generator=seeded(1), **options)
    s = s.to(torch.float32)
    found = cgp_log_density(s.q, s.k, s.o, s.v, generator=seeded(1), **options)
    # float32 and float64 generators draw different numbers: compare within the spread of 200 draws
    close(found.query.double(), wide.query, rtol=0.2, atol=0.0)
    close(found.key.double(), wide.key, rtol=0.2, atol=0.0)


@pytest.mark.parametrize("features", [1, 8])
@over(*LINEAR)
def test_random_features_are_unbiased(call: Call, features: int) -> None:
    s = sample(queries=5, keys=6, channels=2, inducing=(3, 4), seed=3)
    extra = call.extra(s)
    values = repeated(lambda seed: call(s, features=features, generator=seeded(seed), **extra), 600)
    assert_unbiased(values, call(s, **extra))


def test_variance_of_random_features_falls_with_their_number() -> None:
    o, G = (torch.randn(*shape, generator=seeded(4), dtype=torch.float64) for shape in ((6, 3), (4, 6)))
    spread = {}
    for features in (2, 32):
        values = [latent_trace_estimate(o, G, features=features, generator=seeded(i)) for i in range(2000)]
        stacked = torch.stack(values)  # [2000, m, m]
        spread[features] = stacked.std(0)
        excess = (stacked.mean(0) - by_definition(o, G)) / (spread[features] / 2000**0.5)
        assert float(excess.abs().max()) < ERRORS
    # 16 times the features have a quarter of the spread; 2000 numbers tell a spread to a few per cent
    ratio = spread[2] / spread[32]
    close(ratio, torch.full_like(ratio, 4.0), rtol=0.2, atol=0.0)


def by_definition(o: Tensor, G: Tensor) -> Tensor:
    return G @ gp.rbf(o, o) @ G.mT


def traced(trace: Callable[[Tensor, Tensor], Tensor], o: Tensor, G: Tensor) -> tuple[Tensor, ...]:
    """The trace and its gradients for a fixed, not symmetric, incoming gradient."""
    o, G = o.clone().requires_grad_(), G.clone().requires_grad_()
    J = trace(o, G)
    incoming = torch.randn(J.shape, generator=seeded(6), dtype=J.dtype)
    return (J, *torch.autograd.grad(J, (o, G), incoming))


@pytest.mark.parametrize("lead", [(), (2, 3), (1, 1)], ids=["one", "batch", "broadcast"])
@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_chunked_trace_and_its_gradients_equal_the_definition(chunk: int, lead: tuple[int, ...]) -> None:
    s, wide = sample(*lead, seed=7), sample(2, 3, seed=8)
    G = wide.v.mT if lead == (1, 1) else s.v.mT * s.mask[..., None, :]  # [..., m, N], zero at padded tokens
    found = traced(lambda o, G: latent_trace(o, G, chunk=chunk), s.o, G)
    for x, expected in zip(found, traced(by_definition, s.o, G), strict=True):
        close(x, expected)
