"""Inequalities between the regularisers, where they are equalities, and attention switched off."""

import math
from dataclasses import replace

import pytest
import torch

from gpattention import gp
from tests.gp import calls
from tests.gp.calls import (
    MODEL,
    NOISE,
    SCALE_K,
    SCALE_Q,
    Call,
    close,
    over,
    padding,
    scgp_kl,
)
from tests.gp.samples import Sample, sample

SEEDS = range(12)
TERMS = ("query", "key")
MARGINALS = ("density-direct-marginal", "density-cgp-marginal-noisy", "density-cgp-jensen-noisy")
FLOORED = {name: call for name, call in calls.DENSITIES.items() if name != "density-scgp-printed"}
NO_KEY = {"mask": torch.zeros(7, dtype=torch.bool), "query_mask": torch.ones(5, dtype=torch.bool)}
ZERO = {"rtol": 0.0, "atol": 1e-12}


def collapsed(s: Sample) -> Sample:
    """All tokens merged into one place, no values."""
    return replace(s, q=0 * s.q, k=0 * s.k, o=0 * s.o, v=0 * s.v)


@padding
@pytest.mark.parametrize("tau", [None, 0.05, 3.0])
@over(table=FLOORED)
def test_noise_floor_is_below_every_negative_log_density(call: Call, tau: float | None, padded: bool) -> None:
    if tau is not None and call not in calls.EXACT_DENSITIES.values():
        pytest.skip("the sparse model has one noise")
    for seed in SEEDS:
        noise = 0.02 * 1.6**seed  # up to 3.5
        s = call.problem(seed=seed)
        s = replace(s, v=0.1 * s.v)  # small values come close to it
        options = {} if tau is None else {"observation_noise": tau}
        found = call(s, noise=noise, **options, **(call.extra(s) if padded else {})).per_token()
        assert -found.query > gp.noise_floor(noise, **options)
        keys = options if "o" in call.arguments else {}  # direct attention observes keys with sigma^2
        assert -found.key > gp.noise_floor(noise, **keys)


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


@over(table=calls.EXACT_KLS | calls.SCGP_KLS)
def test_divergence_vanishes_with_the_square_of_the_query_amplitude_and_without_a_key(call: Call) -> None:
    s = call.problem(seed=5)
    small, smaller = call(s, scale_q=1e-3), call(s, scale_q=1e-4)
    # next order: scale_q^2 over the noise, 1e-5 relative; rounding of the logarithms: 1e-15 absolute
    close(small, 100 * smaller, rtol=1e-4, atol=1e-12)
    close(call(s, **NO_KEY), torch.zeros_like(small), **ZERO)


def test_sparse_divergence_vanishes_for_keys_far_from_one_shared_inducing_set() -> None:
    # z_k tells nothing, so z_o has its sparse prior and so has z_q
    s = sample(seed=7)
    kl = scgp_kl(s.q, s.k + 100.0, s.o, s.v, s.inducing_q, delta=0.0, **MODEL)
    close(kl, torch.zeros_like(kl), **ZERO)


@over("scgp", "scgp-dual", "scgp-shared", "scgp-noise-free")
def test_queries_without_a_real_key_get_the_sparse_prior(call: Call) -> None:
    s = call.problem(seed=9)
    p = call(s, delta=0.0, **NO_KEY)
    K_qm = SCALE_Q * calls.kappa(s.q, s.inducing_q)
    prior = K_qm @ torch.linalg.solve(calls.kappa(s.inducing_q, s.inducing_q), K_qm.T)
    noise = NOISE if call.options.get("include_noise", True) else 0.0
    close(p.mean, torch.zeros_like(p.mean), rtol=0.0, atol=0.0)
    close(p.covariance(), prior + noise * calls.identity(5))


@over(*(name for name in calls.EXACT_DENSITIES if "marginal" in name))
def test_densities_without_a_real_key_are_those_of_the_prior(call: Call) -> None:
    s = call.problem(seed=11)
    found = call(s, **NO_KEY)
    close(found.key, torch.zeros_like(found.key), rtol=0.0, atol=0.0)
    prior = SCALE_Q**2 * calls.kappa(s.q, s.q) + NOISE * calls.identity(5)
    close(found.query, calls.log_normal(torch.zeros(5, 4, dtype=torch.float64), prior))
    assert float(found.per_token().key) == 0.0


def scgp(s: Sample, **options: object) -> gp.Posterior:
    arguments = (s.q, s.k, s.o, s.v, s.inducing_q, s.inducing_k)
    return gp.scgp_posterior(*arguments, **{"delta": 0.0, **MODEL, **options})


def test_far_from_all_inducing_inputs_an_independent_conditional_is_the_prior() -> None:
    s = sample(seed=4, queries=5)
    a = SCALE_Q * s.log_amplitude.exp()
    far = replace(s, q=s.q + 100.0)
    for include in (True, False):
        noise = NOISE if include else 0.0
        options = {"log_amplitude": s.log_amplitude, "include_noise": include}
        p = scgp(far, conditional="independent", **options)
        close(p.mean, torch.zeros_like(p.mean))
        close(p.variance, a.square() + noise)
        close(p.variance, p.prior_stddev.square())
        close(p.covariance(), torch.diag(a.square() + noise))
        # as printed, the model is the more certain the less it can know
        close(scgp(far, **options).variance, torch.full_like(a, noise))


def test_at_the_inducing_inputs_both_conditionals_are_one() -> None:
    s = sample(seed=5, queries=5, inducing=(5, 4))
    s = replace(s, q=s.inducing_q)
    one, other = scgp(s), scgp(s, conditional="independent")
    close(other.covariance(), one.covariance())
    draws = (p.sample(3, joint=True, generator=torch.Generator().manual_seed(0)) for p in (one, other))
    close(*draws, rtol=1e-6, atol=1e-6)
