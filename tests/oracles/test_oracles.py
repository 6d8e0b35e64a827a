"""The oracles agree with the paper-and-pencil facts of the derivations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from . import densities, exact, sparse
from .cases import (
    AMP,
    M_U,
    NOISE,
    S_K,
    S_Q,
    C,
    D,
    N,
    close,
    draw,
    draw_inducing,
    min_eig,
)
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


def test_case_8_causal_and_masks() -> None:
    q, k, o, v = draw()
    log_a = np.linspace(-0.5, 0.5, N)
    soft_kw: dict[str, Any] = {"noise": NOISE, "center_q": np.zeros(C), "center_k": np.zeros(C)}
    kw: dict[str, Any] = dict(noise=NOISE, log_amplitude=log_a, **AMP)
    row0 = dict(kw, log_amplitude=log_a[:1])
    mask = np.array([True, False, True, True, False, True])
    pairs: Any = (
        (exact.causal_cgp_posterior, exact.cgp_posterior, (q, k, o, v), kw, row0),
        (exact.causal_direct_posterior, exact.direct_posterior, (q, k, v), kw, row0),
        (exact.causal_softmax_posterior, exact.softmax_posterior, (q, k, v), soft_kw, soft_kw),
    )
    for causal, full, args, options, first in pairs:
        mean, var = causal(*args, **options)
        mean_full, cov_full = full(*args, **options)
        mean_0, cov_0 = full(*(x[:1] for x in args), **first)
        close(mean[-1], mean_full[-1])
        close(var[-1], cov_full[-1, -1])
        close(mean[0], mean_0[0])
        close(var[0], cov_0[0, 0])
        masked, masked_var = causal(*args, mask=mask, **options)
        full_masked, cov_masked = full(*args, mask=mask, **options)
        close(masked[-1], full_masked[-1])
        assert not masked[~mask].any()
        assert not masked_var[~mask].any()
        assert not full_masked[~mask].any()
        assert not cov_masked[~mask].any()
        empty, empty_cov = full(*args, mask=np.zeros(N, bool), **options)
        assert not empty.any()
        assert not empty_cov.any()


def test_causal_closed_form() -> None:
    q, k, o, v = draw()
    g = exact.cgp_matrices(q, k, o, NOISE, S_Q, S_K, np.ones(N))
    L, L_k = np.linalg.cholesky(g.M), np.linalg.cholesky(g.M_k)
    W = np.triu(np.linalg.solve(L, S_Q * rbf(o, q)))
    B_c = np.tril(W.T @ np.linalg.solve(L, S_K * rbf(o, k)))
    F = np.triu(np.linalg.solve(L_k, B_c.T))
    mean, var = exact.causal_cgp_posterior(q, k, o, v, noise=NOISE, **AMP)
    close(mean, B_c @ v)
    A_t = np.linalg.solve(L.T, W)
    close(var, S_Q**2 - NOISE * (A_t**2).sum(0) - (F**2).sum(0))


def test_compact_covariance_prior_consistency_and_bounds() -> None:
    q, k, o, v = draw()
    g = exact.cgp_matrices(q, k, o, NOISE, S_Q, S_K, np.ones(N))
    cov = exact.cgp_posterior(q, k, o, v, noise=NOISE, **AMP)[1]
    AK = g.A @ (S_K * rbf(o, k))
    close(cov, g.K_q - NOISE * g.A @ g.A.T - AK @ np.linalg.inv(g.M_k) @ AK.T)
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
    q, k, o, v = q[:5], k[:5], o[:5], v[:5]
    del kw["mask"]
    nu = sparse.scgp_posterior(q, k, o, v, m, ell, **kw)[0]
    K_mm, K_qm, K_om = rbf(m, m) + 1e-3 * np.eye(M_U), S_Q * rbf(q, m), rbf(o, m)
    Q_q = K_qm @ np.linalg.inv(K_mm) @ K_qm.T
    white = NOISE * np.eye(5)
    close(t["dtc"][0], log_density(nu, white + Q_q))
    close(t["dtc_bound"][0], log_density(nu, white) - D * np.trace(Q_q) / (2 * NOISE))
    P = np.linalg.inv(K_mm + K_om.T @ K_om / NOISE)
    t_1 = np.trace(K_om @ P @ K_qm.T @ K_qm @ P @ K_om.T @ rbf(o, o)) / NOISE**2
    t_2 = np.trace(K_qm @ P @ K_qm.T)
    close(t["double_jensen"][0], log_density(nu, white) - D * (t_1 + t_2) / (2 * NOISE))
    Pi = K_om @ np.linalg.inv(K_mm) @ K_om.T + white
    t_1 = np.trace(K_om @ P @ K_qm.T @ K_qm @ P @ K_om.T @ Pi) / NOISE**2
    close(t_1 + t_2, np.trace(Q_q))


def test_direct_densities() -> None:
    q, k, _, v = draw()
    kw: dict[str, Any] = {"noise": NOISE, "observation_noise": 0.05, **AMP}
    marginal = densities.direct_log_density(q, k, v, objective="marginal", **kw)
    joint = densities.direct_log_density(q, k, v, objective="joint", **kw)
    nu = S_Q * S_K * rbf(q, k) @ v
    close(marginal[0], log_density(nu, S_Q**2 * rbf(q, q) + 0.05 * np.eye(N)))
    close(joint[1], marginal[1])
    K_k = S_K**2 * rbf(k, k)
    Z, M_inv = (K_k + NOISE * np.eye(N)) @ v, np.linalg.inv(K_k + NOISE * np.eye(N))
    gain = S_Q * S_K * rbf(q, k) @ M_inv  # log p(z_q | z_k) is the query term of 'joint'
    cov = S_Q**2 * rbf(q, q) + 0.05 * np.eye(N) - gain @ (S_Q * S_K * rbf(k, q))
    close(joint[0], log_density(nu - gain @ Z, cov))
    far = densities.direct_log_density(q + 100.0, k, v, objective="joint", **kw)
    close(far, densities.direct_log_density(q + 100.0, k, v, objective="marginal", **kw))
