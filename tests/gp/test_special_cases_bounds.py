"""Inequalities between the regularisers, where they are equalities, and attention switched off."""

import math
from dataclasses import replace

import pytest
import torch

from gpattention import gp
from tests.gp.calls import (
    DENSITIES,
    EVERY,
    EXACT_DENSITIES,
    EXACT_KLS,
    KLS,
    MODEL,
    NOISE,
    SCALE_K,
    SCALE_Q,
    SCGP_KLS,
    SPARSE_DENSITIES,
    Call,
    close,
    identity,
    kappa,
    log_normal,
    matrices,
    over,
    padding,
    same,
    seeded,
)
from tests.gp.samples import Sample, sample

SEEDS = range(12)
TERMS = ("query", "key")
MARGINALS = ("density-direct-marginal", "density-cgp-marginal-noisy", "density-cgp-jensen-noisy")
FLOORED = {name: call for name, call in DENSITIES.items() if name != "density-scgp-printed"}
NO_KEY = {"mask": torch.zeros(7, dtype=torch.bool), "query_mask": torch.ones(5, dtype=torch.bool)}
ZERO = {"rtol": 0.0, "atol": 1e-12}


def collapsed(s: Sample) -> Sample:
    """All tokens merged into one place, no values."""
    return replace(s, q=0 * s.q, k=0 * s.k, o=0 * s.o, v=0 * s.v)


@padding
@pytest.mark.parametrize("noise", [0.02, 0.2, 3.0])
def test_sparse_bounds_are_ordered(noise: float, padded: bool) -> None:
    for seed in SEEDS:
        s = sample(queries=5, seed=seed)
        found = {
            name.removeprefix("density-scgp-"): call(s, noise=noise, **(call.extra(s) if padded else {}))
            for name, call in SPARSE_DENSITIES.items()
        }
        for term in TERMS:
            value = {name: float(getattr(x, term)) for name, x in found.items()}
            assert value["double_jensen"] < value["jensen"] < value["marginal"]
            assert value["dtc_bound"] < value["dtc"]


@padding
@pytest.mark.parametrize("prior", ["noisy", "latent"])
@pytest.mark.parametrize("tau", [None, 0.0, 0.7])
def test_jensen_is_below_the_marginal(prior: str, tau: float | None, padded: bool) -> None:
    jensen, marginal = (EXACT_DENSITIES[f"density-cgp-{name}-{prior}"] for name in ("jensen", "marginal"))
    for seed in SEEDS:
        s = sample(queries=5, seed=seed)
        options = {"observation_noise": tau, **(jensen.extra(s) if padded else {})}
        for term in TERMS:
            assert getattr(jensen(s, **options), term) < getattr(marginal(s, **options), term)


@pytest.mark.parametrize("prior", ["noisy", "latent"])
def test_jensen_gap_is_known_and_vanishes_only_without_attention(prior: str) -> None:
    jensen, marginal = (EXACT_DENSITIES[f"density-cgp-{name}-{prior}"] for name in ("jensen", "marginal"))
    s = sample(queries=5, seed=1)
    g, nu = matrices(s), gp.cgp_posterior(s.q, s.k, s.o, s.v, **MODEL).mean
    S = g.S + NOISE * identity(5)
    spread = g.A @ (g.M if prior == "noisy" else g.K_o) @ g.A.T
    P = torch.linalg.solve(S, spread)
    gap = 2 * (torch.trace(P) - torch.logdet(identity(5) + P))  # 4 channels / 2
    gap = gap + 0.5 * (nu * (torch.linalg.solve(S, nu) - torch.linalg.solve(S + spread, nu))).sum()
    close(marginal(s).query - jensen(s).query, gap)
    off = replace(s, q=s.q + 100.0)
    close(marginal(off).query, jensen(off).query)


@padding
@over(table=FLOORED)
def test_noise_floor_is_below_every_negative_log_density(call: Call, padded: bool) -> None:
    for seed in SEEDS:
        noise = 0.02 * 1.6**seed  # up to 3.5
        s = call.problem(seed=seed)
        s = replace(s, v=0.1 * s.v)  # small values come close to it
        found = call(s, noise=noise, **(call.extra(s) if padded else {})).per_token()
        floor = gp.noise_floor(noise).double()
        assert -found.query > floor
        assert -found.key > floor


@pytest.mark.parametrize("tau", [0.05, 3.0])
@over(table=EXACT_DENSITIES)
def test_noise_floor_follows_the_observation_noise(call: Call, tau: float) -> None:
    key_noise = tau if "o" in call.arguments else NOISE  # direct attention observes keys with sigma^2
    for seed in SEEDS:
        s = call.problem(seed=seed)
        found = call(replace(s, v=0.1 * s.v), observation_noise=tau).per_token()
        assert -found.query > gp.noise_floor(NOISE, observation_noise=tau)
        assert -found.key > gp.noise_floor(NOISE, observation_noise=key_noise)


@pytest.mark.parametrize("prior", ["noisy", "latent"])
def test_noise_floor_is_below_monte_carlo_estimates(prior: str) -> None:
    for seed in SEEDS:
        s = sample(queries=5, seed=seed)
        options = {"objective": "monte_carlo", "latent_prior": prior, "generator": seeded(seed)}
        found = gp.cgp_log_density(s.q, s.k, s.o, 0.1 * s.v, **options, **MODEL).per_token()
        assert -found.query > gp.noise_floor(NOISE)
        assert -found.key > gp.noise_floor(NOISE)


@over(table=FLOORED)
def test_noise_floor_is_reached_when_everything_collapses(call: Call) -> None:
    s = collapsed(call.problem(seed=2))
    tiny = 1e-7  # its square over the noise, 5e-14, is what is left of the processes
    found = call(s, scale_q=tiny, scale_k=tiny, **call.extra(s)).per_token()
    floor = gp.noise_floor(torch.tensor(NOISE, dtype=torch.float64))
    close(floor, torch.tensor(0.5 * math.log(2 * math.pi * NOISE), dtype=torch.float64))
    close(-found.query, floor)
    close(-found.key, floor)


@padding
@over(*MARGINALS)
def test_floor_at_a_fixed_amplitude_is_a_bound(call: Call, padded: bool) -> None:
    for seed in SEEDS:
        s = sample(queries=5, seed=seed, spread=0.1 * (seed + 1))
        options = {k: x for k, x in call.extra(s).items() if k != "log_amplitude"} if padded else {}
        found = call(replace(s, v=0.1 * s.v), **options)
        for term, scale in zip(TERMS, (SCALE_Q, SCALE_K), strict=True):
            n = getattr(found, {"query": "real_queries", "key": "real_keys"}[term])
            noise = torch.tensor(NOISE, dtype=torch.float64)
            assert -getattr(found.per_token(), term) > gp.noise_floor(noise, scale=scale, tokens=n)


@over("density-direct-marginal", "density-cgp-marginal-noisy")
def test_floor_at_a_fixed_amplitude_is_reached_when_tokens_merge(call: Call) -> None:
    s = collapsed(call.problem(seed=3))
    found, noise = call(s).per_token(), torch.tensor(NOISE, dtype=torch.float64)
    close(-found.query, gp.noise_floor(noise, scale=SCALE_Q, tokens=5))
    close(-found.key, gp.noise_floor(noise, scale=SCALE_K, tokens=7))


def test_no_floor_without_observation_noise() -> None:
    assert float(gp.noise_floor(NOISE, observation_noise=0.0)) == -math.inf


@padding
@over(table=KLS)
def test_divergence_is_positive(call: Call, padded: bool) -> None:
    for seed in SEEDS:
        s = call.problem(seed=seed)
        assert call(s, **(call.extra(s) if padded else {})) > 1e-3
        assert call(replace(s, v=0 * s.v), **(call.extra(s) if padded else {})) > 1e-6


@over(table=EXACT_KLS | SCGP_KLS)
def test_divergence_vanishes_for_queries_far_from_everything(call: Call) -> None:
    s = call.problem(seed=4)
    kl = call(replace(s, q=s.q + 100.0))
    close(kl, torch.zeros_like(kl), **ZERO)


@over(table=EXACT_KLS | SCGP_KLS)
def test_divergence_vanishes_with_the_square_of_the_query_amplitude(call: Call) -> None:
    s = call.problem(seed=5)
    small, smaller = call(s, scale_q=1e-3), call(s, scale_q=1e-4)
    # next order: scale_q^2 over the noise, 1e-5 relative; rounding of the logarithms: 1e-15 absolute
    close(small, 100 * smaller, rtol=1e-4, atol=1e-12)


@over(table=EXACT_KLS | SCGP_KLS)
def test_divergence_vanishes_without_a_real_key(call: Call) -> None:
    kl = call(call.problem(seed=6), **NO_KEY)
    close(kl, torch.zeros_like(kl), **ZERO)


def test_sparse_divergence_vanishes_for_keys_far_from_one_shared_inducing_set() -> None:
    # z_k tells nothing, so z_o has its sparse prior and so has z_q
    s = sample(seed=7)
    kl = gp.scgp_kl(s.q, s.k + 100.0, s.o, s.v, s.inducing_q, delta=0.0, **MODEL)
    close(kl, torch.zeros_like(kl), **ZERO)


def test_exact_divergence_for_keys_far_from_the_latent_inputs_is_the_lost_latent_noise() -> None:
    # the noise-free z_o enters a stage that expects a noisy one: V = K_q - sigma^2 A A^T
    s = sample(queries=5, seed=8)
    s = replace(s, k=s.k + 100.0)
    g = matrices(s)
    p = gp.cgp_posterior(s.q, s.k, s.o, s.v, **MODEL)
    close(p.mean, torch.zeros_like(p.mean), rtol=0.0, atol=0.0)
    close(p.covariance(), g.K_q - NOISE * g.A @ g.A.T)
    ratio = identity(5) - NOISE * torch.linalg.solve(g.K_q + NOISE * identity(5), g.A @ g.A.T)
    expected = 2 * (torch.trace(ratio) - 5 - torch.logdet(ratio))  # 4 channels / 2
    kl = gp.cgp_kl(s.q, s.k, s.o, s.v, **MODEL)
    close(kl, expected)
    assert float(kl) > 1e-3


@over("direct", "cgp")
def test_queries_without_a_real_key_get_the_prior(call: Call) -> None:
    s = call.problem(seed=9)
    p = call(s, log_amplitude=s.log_amplitude, **NO_KEY)
    a = SCALE_Q * s.log_amplitude.exp()
    close(p.mean, torch.zeros_like(p.mean), rtol=0.0, atol=0.0)
    close(p.variance, a.square())
    close(p.covariance(), a[:, None] * kappa(s.q, s.q) * a)


@over("scgp", "scgp-dual", "scgp-shared", "scgp-noise-free")
def test_queries_without_a_real_key_get_the_sparse_prior(call: Call) -> None:
    s = call.problem(seed=9)
    p = call(s, delta=0.0, **NO_KEY)
    K_qm = SCALE_Q * kappa(s.q, s.inducing_q)
    prior = K_qm @ torch.linalg.solve(kappa(s.inducing_q, s.inducing_q), K_qm.T)
    noise = NOISE if call.options.get("include_noise", True) else 0.0
    close(p.mean, torch.zeros_like(p.mean), rtol=0.0, atol=0.0)
    close(p.covariance(), prior + noise * identity(5))


@over("softmax", "softmax-inducing")
def test_softmax_queries_without_a_real_key_get_zeros(call: Call) -> None:
    for name, x in call.outputs(call.problem(seed=9), **NO_KEY).items():
        close(x, torch.full_like(x, -math.inf if name == "log_variance" else 0.0), rtol=0.0, atol=0.0)


def test_causal_queries_before_the_first_real_key_see_nothing() -> None:
    s = sample(seed=10)
    late, every = torch.arange(7) > 2, torch.ones(7, dtype=torch.bool)
    options = {"mask": late, "query_mask": every}
    p = EVERY["direct-causal"](s, **options)
    close(p.mean[:3], torch.zeros_like(p.mean[:3]), rtol=0.0, atol=0.0)
    close(p.variance[:3], torch.full((3,), SCALE_Q**2, dtype=torch.float64))
    found = EVERY["softmax-causal"].outputs(s, **options)
    same(
        {n: torch.zeros(3, dtype=torch.float64) for n in ("variance", "stddev")},
        {n: found[n][:3] for n in ("variance", "stddev")},
    )
    close(found["mean"][:3], torch.zeros_like(found["mean"][:3]), rtol=0.0, atol=0.0)
    assert bool((found["variance"][3:] > 0).all())


@over(*(name for name in EXACT_DENSITIES if "marginal" in name))
def test_densities_without_a_real_key_are_those_of_the_prior(call: Call) -> None:
    s = call.problem(seed=11)
    found = call(s, **NO_KEY)
    close(found.key, torch.zeros_like(found.key), rtol=0.0, atol=0.0)
    prior = SCALE_Q**2 * kappa(s.q, s.q) + NOISE * identity(5)
    close(found.query, log_normal(torch.zeros(5, 4, dtype=torch.float64), prior))
    assert float(found.per_token().key) == 0.0
