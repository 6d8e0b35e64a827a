"""The oracles agree with the paper-and-pencil facts of the derivations: limits, bounds, expectations.

The closed forms of the derivations need no tests here: `gp` is made of them and is compared with the oracles.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from . import amplitude, densities, divergences, exact, softmax, sparse
from .cases import AMP, M_U, NOISE, S_K, S_Q, C, D, N, close, draw, draw_inducing, min_eig
from .gaussians import log_density
from .kernels import rbf


def test_case_1_and_2_vanishing_noise() -> None:
    q, k, _, v = draw()
    mean, cov = exact.cgp_posterior(q, q, q, v, noise=1e-9)
    close(mean, rbf(q, q) @ v, atol=1e-6)
    close(cov, 0.0, atol=1e-6)
    for o in (q, k):
        mean, cov = exact.cgp_posterior(q, k, o, v, noise=1e-9, **AMP)
        close(mean, S_Q * S_K * rbf(q, k) @ v, atol=1e-6)
        close(cov, exact.direct_posterior(q, k, v, noise=1e-9, **AMP)[1], atol=1e-6)


def test_direct_is_kernel_attention_for_every_noise() -> None:
    q, k, _, v = draw()
    for noise in (1e-3, 0.2, 5.0):
        mean, cov = exact.direct_posterior(q[:4], k, v, noise=noise, **AMP)
        close(mean, S_Q * S_K * rbf(q[:4], k) @ v)
        assert min_eig(cov) > -1e-12


def test_case_3_inducing_inputs_at_the_tokens() -> None:
    q, k, o, v = draw()
    g = exact.cgp_matrices(q, k, o, NOISE, S_Q, S_K, np.ones(N))
    m, ell = np.concatenate([o, draw_inducing()[0]]), np.concatenate([k, draw_inducing()[1]])
    expected = g.A @ g.B @ v
    mean, _ = sparse.scgp_posterior(q, k, o, v, m, ell, noise=NOISE, delta=0.0, **AMP)
    close(mean, expected, rtol=1e-6)
    mean, cov = sparse.scgp_posterior(q, k, o, v, o, k, noise=NOISE, delta=0.0, **AMP)
    close(mean, expected)
    K_qo, K_ok, eye = S_Q * rbf(q, o), S_K * rbf(o, k), NOISE * np.eye(N)
    Q_q = K_qo @ np.linalg.inv(g.K_o) @ K_qo.T
    Q_o = K_ok @ np.linalg.inv(g.K_k) @ K_ok.T
    inner = g.C + eye - (g.K_o - Q_o)
    close(cov, g.S_q + eye - (g.K_q - Q_q) + g.A @ inner @ g.A.T)
    dual = sparse.scgp_posterior(q, k, o, v, o, k, noise=NOISE, delta=0.0, values="dual", **AMP)
    close(dual[0], exact.cgp_posterior(q, k, o, v, noise=NOISE, **AMP)[0])


def test_case_4_single_token() -> None:
    q, k, o, v = draw(n=1)
    r, r2, n2 = rbf(q, o)[0, 0], rbf(o, k)[0, 0], NOISE
    mean, cov = exact.cgp_posterior(q, k, o, v, noise=n2, **AMP)
    close(mean, S_Q * S_K * r * r2 / (1 + n2) * v)
    tail = 1 - S_K**2 * r2**2 / (S_K**2 + n2)
    close(cov, S_Q**2 * (1 - r**2 / (1 + n2) + r**2 / (1 + n2) ** 2 * tail))


def test_case_6_and_7_scaling_and_limits() -> None:
    q, k, o, v = draw()
    mean, cov = exact.cgp_posterior(q, k, o, v, noise=NOISE)
    mean2, cov2 = exact.cgp_posterior(q, k, o, 2.0 * v, noise=NOISE, scale_q=S_Q)
    close(mean2, 2.0 * S_Q * mean)
    close(cov2, S_Q**2 * cov)
    close(exact.cgp_posterior(q, k, o, v, noise=NOISE, scale_k=S_K)[0], S_K * mean)
    for far_q, noise in ((q + 100.0, NOISE), (q, 1e9)):
        mean, cov = exact.cgp_posterior(far_q, k, o, v, noise=noise, **AMP)
        close(mean, 0.0, atol=1e-7)
        close(cov, S_Q**2 * rbf(q, q), atol=1e-7)


def test_prior_consistency_and_bounds() -> None:
    q, k, o, v = draw()
    g = exact.cgp_matrices(q, k, o, NOISE, S_Q, S_K, np.ones(N))
    cov = exact.cgp_posterior(q, k, o, v, noise=NOISE, **AMP)[1]
    close(g.S_q + g.A @ g.M @ g.A.T, g.K_q)
    close(g.S_q + g.A @ g.K_o @ g.A.T, g.K_q - NOISE * g.A @ g.A.T)
    assert min_eig(cov) > -1e-12
    assert np.all(np.diag(cov) >= S_Q**2 * NOISE / (N + NOISE))
    same = np.repeat(q[:1], N, axis=0)
    attained = exact.direct_posterior(same, same, v, noise=NOISE)[1]
    close(np.diag(attained), NOISE / (N + NOISE))


def test_case_9_queries_at_the_latent_inputs() -> None:
    q, _, _, v = draw()
    g = exact.cgp_matrices(q, q, q, NOISE, 1.0, 1.0, np.ones(N))
    lam = np.linalg.eigvalsh(g.K_o)
    close(np.linalg.slogdet(g.S_q)[1], np.sum(np.log(NOISE * lam / (lam + NOISE))))
    T = np.trace(np.linalg.inv(g.S_q) @ g.A @ g.K_o @ g.A.T)
    close(T, np.sum(lam**2 / (NOISE * (lam + NOISE))))
    kw: dict[str, Any] = {"noise": NOISE, "objective": "jensen", "observation_noise": 0.0}
    value = densities.cgp_log_density(q, q, q, v, latent_prior="latent", **kw)[0]
    nu = exact.cgp_posterior(q, q, q, v, noise=NOISE)[0]
    close(value, log_density(nu, g.S_q) - 0.5 * D * T, rtol=1e-6)


@pytest.mark.parametrize("latent_prior", ["noisy", "latent"])
@pytest.mark.parametrize("observation_noise", [None, 0.05])
def test_cgp_densities(latent_prior: str, observation_noise: float | None) -> None:
    q, k, o, v = draw()
    kw: dict[str, Any] = dict(noise=NOISE, latent_prior=latent_prior, **AMP)
    kw |= {"observation_noise": observation_noise, "log_amplitude": np.linspace(-0.5, 0.5, 4)}
    args = (q[:4], k, o, v)
    jensen = densities.cgp_log_density(*args, objective="jensen", **kw)
    marginal = densities.cgp_log_density(*args, objective="marginal", **kw)
    joint = densities.cgp_log_density(*args, objective="joint", **kw)
    rng = np.random.default_rng(3)
    draws = densities.cgp_monte_carlo(*args, samples=1500, rng=rng, **kw)
    for value, upper, sample in zip(jensen, marginal, draws, strict=True):
        assert value <= upper
        assert abs(sample.mean() - value) < 5 * sample.std(ddof=1) / np.sqrt(len(sample))
    close(joint[1], marginal[1])
    if latent_prior == "noisy":  # the GP prior density, independent of o
        tau2 = NOISE if observation_noise is None else observation_noise
        a = S_Q * np.exp(kw["log_amplitude"])
        nu = exact.cgp_posterior(*args, noise=NOISE, log_amplitude=kw["log_amplitude"], **AMP)[0]
        cov = np.diag(a) @ rbf(q[:4], q[:4]) @ np.diag(a) + tau2 * np.eye(4)
        close(marginal[0], log_density(nu, cov))
        direct = densities.direct_log_density(
            q, k, v, noise=NOISE, objective="joint", observation_noise=tau2, **AMP
        )
        if tau2 == NOISE:  # the direct model always observes its keys with sigma^2
            close(direct[1], marginal[1])


def test_ci_model_with_latents_at_the_keys_tends_to_the_gp() -> None:
    q, k, _, v = draw()
    kw: dict[str, Any] = dict(noise=1e-9, objective="joint", observation_noise=0.3, **AMP)
    ci = densities.cgp_log_density(q, k, k, v, **kw)
    nu = exact.cgp_posterior(q, k, k, v, noise=1e-9, **AMP)[0]
    K_q, K_k, K_qk = S_Q**2 * rbf(q, q), S_K**2 * rbf(k, k), S_Q * S_K * rbf(q, k)
    both = np.block([[K_q, K_qk], [K_qk.T, K_k]]) + 0.3 * np.eye(2 * N)
    close(sum(ci), log_density(np.vstack([nu, K_k @ v]), both), rtol=1e-5)


@pytest.mark.parametrize("values", ["paper", "dual"])
def test_sparse_densities_and_case_10(values: str) -> None:
    q, k, o, v = draw()
    m, ell = draw_inducing()
    kw: dict[str, Any] = dict(noise=NOISE, values=values, delta=1e-3, **AMP)
    kw |= {"mask": np.arange(N) < 5}
    names = ("double_jensen", "jensen", "marginal", "dtc_bound", "dtc", "printed")
    t = {x: densities.scgp_log_density(q, k, o, v, m, ell, objective=x, **kw) for x in names}
    for term in range(2):
        assert t["double_jensen"][term] <= t["jensen"][term] <= t["marginal"][term]
        assert t["dtc_bound"][term] <= t["dtc"][term]


def test_sparse_jensen_bounds_are_expectations() -> None:
    q, k, o, v = draw()
    m, ell = draw_inducing()
    kw: dict[str, Any] = {"noise": NOISE, "delta": 1e-3}
    g = sparse.sparse_grams(q, k, o, m, ell, 1.0, 1.0, np.ones(N), 1e-3)
    J, E, cov_m = sparse.dtc_stage(g.K_qm, g.K_om, g.K_mm, NOISE)
    nu = sparse.scgp_posterior(q, k, o, v, m, ell, **kw)[0]
    rng = np.random.default_rng(5)
    draws = np.zeros((2, 2000))
    root_o, root_m = np.linalg.cholesky(g.K_o), np.linalg.cholesky(cov_m)
    cov_q = J @ cov_m @ J.T + NOISE * np.eye(N)
    for r in range(draws.shape[1]):
        z_o = root_o @ rng.standard_normal((N, D))
        z_m = E @ z_o + root_m @ rng.standard_normal((M_U, D))
        draws[0, r] = log_density(nu - J @ E @ z_o, cov_q)
        draws[1, r] = log_density(nu - J @ z_m, NOISE * np.eye(N))
    for sample, objective in zip(draws, ("jensen", "double_jensen"), strict=True):
        value = densities.scgp_log_density(q, k, o, v, m, ell, objective=objective, **kw)[0]
        assert abs(sample.mean() - value) < 5 * sample.std(ddof=1) / np.sqrt(len(sample))


def test_divergences_are_non_negative_ignore_padding_and_vanish_far_away() -> None:
    q, k, o, v = draw()
    m = draw_inducing()[0]
    mask = np.array([True, False, True, True, False, True])
    direct: Any = lambda q, k, o, v, **kw: divergences.direct_kl(q, k, v, **kw)  # noqa: E731
    scgp: Any = lambda q, k, o, v, **kw: divergences.scgp_kl(q, k, o, v, m, **kw)  # noqa: E731
    for fn in (divergences.cgp_kl, direct, scgp):
        full = fn(q, k, o, v, noise=NOISE, mask=mask, **AMP)
        close(full, fn(q[mask], k[mask], o[mask], v[mask], noise=NOISE, **AMP))
        assert full > 0
        assert fn(q, k, o, v, noise=NOISE, mask=np.zeros(N, bool)) == 0.0
        close(fn(q + 100.0, k, o, v, noise=NOISE), 0.0)
    assert divergences.cgp_kl(q, k, o, v, noise=NOISE, observation_noise=1.0) < (
        divergences.cgp_kl(q, k, o, v, noise=NOISE, observation_noise=0.0)
    )


def test_softmax_masks_and_sparse_form() -> None:
    q, k, _, v = draw()
    mask = np.array([True, False, True, True, False, True])
    mean, cov = softmax.softmax_posterior(q, k, v, noise=NOISE, mask=mask)
    short = softmax.softmax_posterior(q[mask], k[mask], v[mask], noise=NOISE)
    close(mean[mask], short[0])
    close(np.diag(cov)[mask], np.diag(short[1]))
    k_c = (k - k[mask].mean(0)) * C**-0.25
    var = softmax.sparse_softmax_variance(
        q, k, k_c[mask], noise=NOISE, mask=mask, delta=0.0
    )  # inducing inputs at the real keys give the exact variance
    close(var, np.diag(cov), rtol=1e-6)
    none = softmax.softmax_posterior(q, k[:4], v[:4], noise=NOISE, mask=np.zeros(4, bool))
    assert not none[0].any()
    assert not none[1].any()
    var = softmax.sparse_softmax_variance(q, k, draw_inducing()[0], noise=NOISE)
    assert np.all(var > 0)


def test_row_normalised_direct_attention() -> None:
    q, k, _, v = draw()
    mask = np.array([True, False, True, True, False, True])
    log_a = amplitude.row_log_amplitude(q, k, scale=1.5, mask=mask)
    assert not log_a[~mask].any()
    mean, cov = exact.direct_posterior(q, k, v, noise=NOISE, scale_k=1 / 1.5, mask=mask, log_amplitude=log_a)
    weights = rbf(q[mask], k[mask])
    close(mean[mask], weights @ v[mask] / weights.sum(1, keepdims=True))
    assert min_eig(cov) > -1e-12
    # With b_j = 1/t the observation noise of eq. 25 is sigma^2 b_j^2.
    _, cov = exact.direct_posterior(
        q, k, v, noise=NOISE / 1.5**2, scale_k=1 / 1.5, mask=mask, log_amplitude=log_a
    )
    M_inv = np.linalg.inv(rbf(k[mask], k[mask]) + NOISE * np.eye(4))
    u = 1 - np.diag(weights @ M_inv @ weights.T)
    close(np.diag(cov)[mask], np.exp(2 * log_a[mask]) * u)
    causal = amplitude.row_log_amplitude(q, k, scale=1.5, mask=mask, causal=True)
    close(causal[5], log_a[5])
    close(causal[0], np.log(1.5) + 0.5 * np.sum((q[0] - k[0]) ** 2))
    nystrom = amplitude.sparse_row_log_amplitude(q, k, k[mask], scale=1.5, mask=mask, delta=0.0)
    close(nystrom, log_a)
    far = amplitude.sparse_row_log_amplitude(q + 100.0, k, k, scale=1.5, floor=0.1)
    close(far, np.log(15.0))
