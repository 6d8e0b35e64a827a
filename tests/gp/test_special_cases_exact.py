"""Special cases of the exact models in which the answer is known in closed form."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gpattention import gp
from tests.gp.calls import (
    CAUSAL_POSTERIORS,
    MODEL,
    NOISE,
    PRIOR_SCALE,
    SCALE_K,
    SCALE_Q,
    SCALES,
    SOFTMAX,
    Call,
    close,
    identity,
    kappa,
    log_normal,
    matrices,
    over,
    scalar,
)
from tests.gp.samples import Sample, sample

EXACT = {"rtol": 0.0, "atol": 0.0}
TAU = 0.35  # observation noise


def cgp(s: Sample, **options: float) -> gp.Posterior:
    return gp.cgp_posterior(s.q, s.k, s.o, s.v, **{**MODEL, **options})


@pytest.mark.parametrize("noise", [0.2, 1e-3, 1e-6])
def test_one_input_for_everything_tends_to_kernel_attention_without_variance(noise: float) -> None:
    s = sample(seed=1, spread=1.5)
    p = gp.cgp_posterior(s.q, s.q, s.q, s.v, noise=noise)
    K = kappa(s.q, s.q)
    close(p.mean, K @ torch.linalg.solve(K + noise * identity(7), K @ s.v))
    lam, U = torch.linalg.eigh(K)
    keep = lam / (lam + noise)
    close(p.covariance(), U @ torch.diag(noise * keep * (1 + keep.square())) @ U.T)
    # K V - mean = noise keep V and the eigenvalues of the covariance are below 2 noise
    assert float((K @ s.v - p.mean).norm()) <= noise * float(s.v.norm()) + 1e-12
    assert float(torch.linalg.eigvalsh(p.covariance()).max()) <= 2 * noise + 1e-12


@pytest.mark.parametrize("noise", [1e-6, 0.2, 50.0])
def test_direct_attention_is_kernel_attention_for_every_noise(noise: float) -> None:
    s = sample(seed=2, queries=5)
    p = gp.direct_posterior(s.q, s.k, s.v, noise=noise, **SCALES)
    g = matrices(s, noise)
    close(p.mean, g.K_qk @ s.v)
    close(p.covariance(), g.K_q - g.K_qk @ torch.linalg.solve(g.M_k, g.K_qk.T))


@pytest.mark.parametrize("latent", ["q", "k"])
def test_latent_inputs_at_queries_or_keys_tend_to_direct_attention_linearly_in_the_noise(latent: str) -> None:
    s = sample(seed=3, spread=1.5)
    s = replace(s, o=getattr(s, latent))
    g = matrices(s, noise=0.0)
    limit_mean = g.K_qk @ s.v
    limit_cov = g.K_q - g.K_qk @ torch.linalg.solve(g.K_k, g.K_qk.T)

    def errors(noise: float) -> list[Tensor]:
        p = cgp(s, noise=noise)
        return [p.mean - limit_mean, p.covariance() - limit_cov]

    for small, large in zip(errors(1e-8), errors(1e-6), strict=True):
        assert 0 < float(small.norm()) < 1e-5
        # the next order is smaller by noise over the least eigenvalue, about 1e-4
        assert float((100 * small - large).norm()) < 1e-2 * float(large.norm())
    direct = gp.direct_posterior(s.q, s.k, s.v, noise=1e-8, **SCALES)
    close(cgp(s, noise=1e-8).mean, direct.mean, rtol=0.0, atol=1e-5)  # both are 1e-8 / eigenvalue away
    close(cgp(s, noise=1e-8).covariance(), direct.covariance(), rtol=0.0, atol=1e-5)


def test_covariance_is_the_sum_of_both_stages() -> None:
    s = sample(seed=4, queries=5)
    g, p = matrices(s), cgp(s)
    close(p.mean, g.A @ (g.B @ (g.M_k @ s.v)))
    close(p.covariance(), g.S + g.A @ g.C @ g.A.T)
    close(g.S + g.A @ g.M @ g.A.T, g.K_q)  # the noisy latent prior gives the query prior back


def test_key_scale_enters_the_covariance_as_a_noise_ratio() -> None:
    s = sample(seed=5)
    for scale_k in (0.1, 0.7, 4.0):
        g = matrices(s, scale_k=1.0)
        M_k = g.K_k + NOISE / scale_k**2 * identity(7)
        C = g.K_o - g.K_ok @ torch.linalg.solve(M_k, g.K_ok.T)
        close(cgp(s, scale_k=scale_k).covariance(), g.S + g.A @ C @ g.A.T)


def test_queries_far_from_everything_get_the_prior() -> None:
    s = sample(seed=6)
    s = replace(s, q=s.q + 100.0)
    prior = SCALE_Q**2 * kappa(s.q, s.q)
    causal = gp.causal_cgp_posterior(s.q, s.k, s.o, s.v, **MODEL)
    for p in (cgp(s), gp.direct_posterior(s.q, s.k, s.v, **MODEL), causal):
        close(p.mean, torch.zeros_like(s.v), **EXACT)
        close(p.variance, prior.diagonal())
        if p is not causal:
            close(p.covariance(), prior)


def test_large_noise_switches_attention_off() -> None:
    s, noise = sample(seed=7), 1e12
    g, p = matrices(s), cgp(s, noise=noise)
    close(p.covariance(), g.K_q)
    close(noise * p.mean, g.K_qo @ g.K_ok @ s.v)  # what is left is of order 1 / noise
    close(gp.direct_posterior(s.q, s.k, s.v, noise=noise, **SCALES).covariance(), g.K_q)


@over(table=CAUSAL_POSTERIORS)
def test_first_causal_row_is_one_token_and_the_last_is_all_of_them(call: Call) -> None:
    s = call.problem(seed=8)
    full = {3: gp.direct_posterior, 4: gp.cgp_posterior}[len(call.arguments)]
    options = dict(call.parameters)
    if "prior_scale" in options:
        full, options["centre"] = gp.softmax_posterior, "none"
    arguments = [getattr(s, name) for name in call.arguments]
    rows = call(s)
    one, whole = full(*(x[:1] for x in arguments), **options), full(*arguments, **options)
    close(rows.mean[0], one.mean[0])
    close(rows.variance[0], one.variance[0])
    close(rows.mean[-1], whole.mean[-1])
    close(rows.variance[-1], whole.variance[-1])


@pytest.mark.parametrize("noise", [0.05, 0.2, 1.0])
def test_queries_at_the_latent_inputs_have_a_closed_jensen_bound(noise: float) -> None:
    s = sample(seed=9, spread=1.5)
    lam = torch.linalg.eigvalsh(kappa(s.q, s.q))
    log_det = (noise * lam / (lam + noise)).log().sum()
    options = {"noise": noise, "objective": "jensen", "observation_noise": 0.0}
    for prior, traces in (("latent", lam.square() / (noise * (lam + noise))), ("noisy", lam / noise)):
        found = gp.cgp_log_density(s.q, s.k, s.q, 0 * s.v, latent_prior=prior, **options)
        close(found.query, -2 * (traces.sum() + log_det + 7 * math.log(2 * math.pi)))  # 4 channels / 2
    # away from zero values the quadratic form of the mean under the same covariance is added
    K = kappa(s.q, s.q)
    S = K - K @ torch.linalg.solve(K + noise * identity(7), K)
    nu = gp.cgp_posterior(s.q, s.k, s.q, s.v, noise=noise).mean
    found = gp.cgp_log_density(s.q, s.k, s.q, s.v, latent_prior="noisy", **options)
    close(found.query, log_normal(nu, S) - 2 * (lam / noise).sum())


def test_jensen_bound_diverges_at_the_latent_inputs_where_the_marginal_does_not() -> None:
    s = sample(seed=10, spread=1.5)
    marginal = []
    for noise in (1e-3, 1e-5):
        options = {"noise": noise, "observation_noise": 0.0}
        jensen = gp.cgp_log_density(s.q, s.k, s.q, 0 * s.v, objective="jensen", **options).query
        # -s n / (2 noise), relative corrections of order noise log(noise)
        close(jensen * noise, torch.tensor(-0.5 * 4 * 7, dtype=torch.float64), rtol=20 * noise, atol=0.0)
        marginal.append(gp.cgp_log_density(s.q, s.k, s.q, 0 * s.v, objective="marginal", **options).query)
    close(marginal[0], marginal[1])
    close(marginal[0], log_normal(0 * s.v, kappa(s.q, s.q)))


def one_token() -> tuple[Sample, float, float, float]:
    """One token and kappa(q, o), kappa(o, k), kappa(q, k)."""
    s = sample(queries=1, keys=1, seed=11, spread=0.6)
    return s, float(kappa(s.q, s.o)), float(kappa(s.o, s.k)), float(kappa(s.q, s.k))


def test_single_token_of_the_correlated_model() -> None:
    s, r, r_k, _ = one_token()
    tail = 1 - SCALE_K**2 * r_k**2 / (SCALE_K**2 + NOISE)
    variance = SCALE_Q**2 * (1 - r**2 / (1 + NOISE) + r**2 / (1 + NOISE) ** 2 * tail)
    row = gp.CausalCGPState(**MODEL).append(s.q[0], s.k[0], s.o[0], s.v[0])
    causal = gp.causal_cgp_posterior(s.q, s.k, s.o, s.v, **MODEL)
    for mean, found in (
        (cgp(s).mean, cgp(s).covariance()),
        (causal.mean, causal.variance[None]),
        (row.mean[None], row.variance[None, None]),
    ):
        close(mean, SCALE_Q * SCALE_K * r * r_k / (1 + NOISE) * s.v)
        close(found, scalar(variance))


def test_single_token_of_direct_attention() -> None:
    s, _, _, r = one_token()
    p = gp.direct_posterior(s.q, s.k, s.v, **MODEL)
    close(p.mean, SCALE_Q * SCALE_K * r * s.v)
    close(p.covariance(), scalar(SCALE_Q**2 * (1 - SCALE_K**2 * r**2 / (SCALE_K**2 + NOISE))))
    close(gp.row_log_amplitude(s.q, s.k, scale=1.5), torch.full((1,), math.log(1.5 / r), dtype=s.q.dtype))


def test_single_token_of_softmax_attention() -> None:
    s, *_ = one_token()
    least = NOISE / (1 + NOISE)
    p = gp.softmax_posterior(s.q, s.k, s.v, **SOFTMAX)
    close(p.mean, s.v)
    close(p.covariance(), scalar(PRIOR_SCALE**2 * least))  # both centred on themselves: they coincide
    p = gp.softmax_posterior(s.q, s.k, s.v, causal=True, **SOFTMAX)
    q, k = s.q[0] * 3**-0.25, s.k[0] * 3**-0.25
    amplitude = PRIOR_SCALE * float(torch.exp(0.5 * q.square().sum() - q @ k))
    r = float(kappa(q[None], k[None]))
    close(p.variance, torch.full((1,), amplitude**2 * (1 - r**2 / (1 + NOISE)), dtype=s.q.dtype))


@pytest.mark.parametrize("prior", ["noisy", "latent"])
def test_single_token_densities_of_the_correlated_model(prior: str) -> None:
    s, r, r_k, _ = one_token()
    spread = 1 + NOISE if prior == "noisy" else 1.0  # variance of z_o
    nu, Z = SCALE_Q * SCALE_K * r * r_k / (1 + NOISE) * s.v, (SCALE_K**2 + NOISE) * s.v
    gains, conditional = [], []
    for scale, kernel in ((SCALE_Q, r), (SCALE_K, r_k)):
        gains.append(scale * kernel / (1 + NOISE))
        conditional.append(scale**2 * (1 - kernel**2 / (1 + NOISE)) + TAU)
    marginal = [c + a**2 * spread for a, c in zip(gains, conditional, strict=True)]
    cross = gains[0] * gains[1] * spread
    both = torch.tensor([[marginal[0], cross], [cross, marginal[1]]], dtype=torch.float64)
    options = dict(latent_prior=prior, observation_noise=TAU, **MODEL)
    found = {
        name: gp.cgp_log_density(s.q, s.k, s.o, s.v, objective=name, **options)
        for name in ("marginal", "jensen", "joint")
    }
    for side, x in enumerate((nu, Z)):
        term = ("query", "key")[side]
        penalty = 2 * gains[side] ** 2 * spread / conditional[side]  # 4 channels / 2
        close(getattr(found["marginal"], term), log_normal(x, scalar(marginal[side])))
        close(getattr(found["jensen"], term), log_normal(x, scalar(conditional[side])) - penalty)
    close(found["joint"].total, log_normal(torch.cat([nu, Z]), both))


def test_single_token_densities_of_direct_attention() -> None:
    s, _, _, r = one_token()
    nu, Z = SCALE_Q * SCALE_K * r * s.v, (SCALE_K**2 + NOISE) * s.v
    K_q, K_k, K_qk = SCALE_Q**2 + TAU, SCALE_K**2 + NOISE, SCALE_Q * SCALE_K * r
    options = dict(observation_noise=TAU, **MODEL)
    found = gp.direct_log_density(s.q, s.k, s.v, objective="marginal", **options)
    close(found.query, log_normal(nu, scalar(K_q)))
    close(found.key, log_normal(Z, scalar(K_k)))
    found = gp.direct_log_density(s.q, s.k, s.v, objective="joint", **options)
    both = torch.tensor([[K_q, K_qk], [K_qk, K_k]], dtype=torch.float64)
    close(found.total, log_normal(torch.cat([nu, Z]), both))


@pytest.mark.parametrize("kind", ["direct", "cgp"])
def test_single_token_divergence(kind: str) -> None:
    s, *_ = one_token()
    if kind == "direct":
        p = gp.direct_posterior(s.q, s.k, s.v, **MODEL)
        found = gp.direct_kl(s.q, s.k, s.v, observation_noise=TAU, **MODEL)
    else:
        p, found = cgp(s), gp.cgp_kl(s.q, s.k, s.o, s.v, observation_noise=TAU, **MODEL)
    prior = SCALE_Q**2 + TAU
    ratio = (p.variance[0] + TAU) / prior
    close(found, 0.5 * (p.mean.square().sum() / prior + 4 * (ratio - 1 - ratio.log())))
