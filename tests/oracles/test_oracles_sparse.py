"""The sparse, softmax, row-normalised and SGPA oracles agree with ."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from . import amplitude, densities, divergences, exact, sgpa, sparse
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
from .gaussians import condition, log_density
from .kernels import Array, ard_rbf, exp_dot, rbf


def whitened(delta: float, z_k: Array) -> tuple[Array, Array, Array, Array, Array]:
    """Phi_q, R_c, mean and covariance without sigma^2 I of eq. 15, and c of eq. 24."""
    q, k, o, _ = draw()
    m, ell = draw_inducing()
    L_m = np.linalg.cholesky(rbf(m, m) + delta * np.eye(M_U))
    L_l = np.linalg.cholesky(rbf(ell, ell) + delta * np.eye(M_U + 1))
    Phi_q, Phi_o = S_Q * np.linalg.solve(L_m, rbf(m, q)).T, np.linalg.solve(L_m, rbf(m, o)).T
    Psi_o, Psi_k = np.linalg.solve(L_l, rbf(ell, o)).T, S_K * np.linalg.solve(L_l, rbf(ell, k)).T
    L_B = np.linalg.cholesky(np.eye(M_U) + Phi_o.T @ Phi_o / NOISE)
    L_Bl = np.linalg.cholesky(np.eye(M_U + 1) + Psi_k.T @ Psi_k / NOISE)
    L_B_inv = np.linalg.inv(L_B)
    T = np.linalg.solve(L_Bl, Psi_o.T @ Phi_o) @ L_B_inv.T / NOISE
    R = np.linalg.cholesky(2 * np.eye(M_U) - L_B_inv @ L_B_inv.T + T.T @ T)
    H = L_B_inv @ Phi_q.T
    c = L_B_inv.T @ T.T @ np.linalg.solve(L_Bl, Psi_k.T @ z_k) / NOISE
    return Phi_q, L_B_inv.T @ R, Phi_q @ c, H.T @ R @ R.T @ H, c


@pytest.mark.parametrize("delta", [0.0, 1e-3])
def test_sparse_posterior_equals_equations_13_14_and_15(delta: float) -> None:
    q, k, o, v = draw()
    m, ell = draw_inducing()
    g = sparse.sparse_grams(q, k, o, m, ell, S_Q, S_K, np.ones(N), delta)
    P_m = np.linalg.inv(g.K_mm + g.K_om.T @ g.K_om / NOISE)
    P_l = np.linalg.inv(g.K_ll + g.K_kl.T @ g.K_kl / NOISE)
    left = g.K_qm @ P_m @ g.K_om.T / NOISE
    eye = NOISE * np.eye(N)
    mean, cov = sparse.scgp_posterior(q, k, o, v, m, ell, noise=NOISE, delta=delta, **AMP)
    close(mean, left @ g.K_ol @ P_l @ g.K_kl.T @ v / NOISE)
    cov_o = eye + g.K_ol @ P_l @ g.K_ol.T
    close(cov, eye + g.K_qm @ P_m @ g.K_qm.T + left @ cov_o @ left.T)
    _, _, mean_w, cov_w, _ = whitened(delta, v)
    close(mean, mean_w)
    close(cov, cov_w + eye)
    assert min_eig(cov) > NOISE - 1e-12
    bare = sparse.scgp_posterior(q, k, o, v, m, ell, noise=NOISE, delta=delta, include_noise=False, **AMP)
    close(bare[1], cov_w)


def test_sparse_shared_inducing_inputs_amplitude_and_mask() -> None:
    q, k, o, v = draw()
    m = draw_inducing()[0]
    one = sparse.scgp_posterior(q, k, o, v, m, noise=NOISE)
    close(one[0], sparse.scgp_posterior(q, k, o, v, m, m, noise=NOISE)[0])
    log_a = np.linspace(-1.0, 1.0, N)
    D_a = np.diag(np.exp(log_a))
    mean, cov = sparse.scgp_posterior(q, k, o, v, m, noise=NOISE, log_amplitude=log_a)
    close(mean, D_a @ one[0])
    close(cov, D_a @ (one[1] - NOISE * np.eye(N)) @ D_a + NOISE * np.eye(N))
    mask = np.array([True, False, True, True, False, True])
    mean, cov = sparse.scgp_posterior(q, k, o, v, m, noise=NOISE, mask=mask)
    short = sparse.scgp_posterior(q[mask], k[mask], o[mask], v[mask], m, noise=NOISE)
    close(mean[mask], short[0])
    close(cov[np.ix_(mask, mask)], short[1])
    assert not mean[~mask].any()
    assert not cov[~mask].any()
    assert not cov[:, ~mask].any()


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


@pytest.mark.parametrize("values", ["paper", "dual"])
def test_sparse_divergence_equals_equation_24(values: str) -> None:
    q, k, o, v = draw()
    m, ell = draw_inducing()
    delta = 1e-3
    g = sparse.sparse_grams(q, k, o, m, ell, S_Q, S_K, np.ones(N), delta)
    z_k = sparse.observed_values(g, v, NOISE, values)
    Phi_q, R_c, _, _, c = whitened(delta, z_k)
    G, eye = Phi_q.T @ Phi_q, np.eye(M_U)
    B_0 = eye + G / NOISE
    B_0_inv = np.linalg.inv(B_0)
    y = B_0_inv @ c
    trace = np.sum((R_c @ R_c.T - eye) * (eye - B_0_inv))
    log_dets = np.linalg.slogdet(B_0)[1] - np.linalg.slogdet(eye + R_c.T @ G @ R_c / NOISE)[1]
    fit = np.sum(y * (G @ y)) / NOISE + np.sum((G @ y) ** 2) / NOISE**2
    dense = divergences.scgp_kl(q, k, o, v, m, ell, noise=NOISE, values=values, delta=delta, **AMP)
    close(dense, 0.5 * (fit + D * (trace + log_dets)))


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


@pytest.mark.parametrize("n_q", [4, N])
def test_softmax_mean_is_softmax_attention_and_variance_equation_22(n_q: int) -> None:
    q, k, _, v = draw()
    q = q[:n_q]
    q_t, k_t = q * C**-0.25, k * C**-0.25
    weights = np.exp(q @ k.T / np.sqrt(C))
    weights /= weights.sum(axis=1, keepdims=True)
    lse = np.log(np.exp(q_t @ k_t.T).sum(axis=1))
    for center in (None, np.zeros(C), np.array([0.3, -0.2, 0.5])):
        mean, cov = exact.softmax_posterior(
            q, k, v, noise=NOISE, prior_scale=1.7, center_q=center, center_k=center
        )
        close(mean, weights @ v)
        assert min_eig(cov) > -1e-12
        c_q = q_t.mean(0) if center is None else center
        c_k = k_t.mean(0) if center is None else center
        a = 1.7 * np.exp(0.5 * ((q_t - c_q) ** 2).sum(1) + q_t @ c_k - lse)
        L = np.linalg.cholesky(rbf(k_t - c_k, k_t - c_k) + NOISE * np.eye(N))
        u = 1 - (np.linalg.solve(L, rbf(k_t - c_k, q_t - c_q)) ** 2).sum(0)
        close(np.diag(cov), a**2 * u)
        assert np.all(u >= NOISE / (N + NOISE))
    shifted = exact.softmax_posterior(q, k + 0.7, v, noise=NOISE, prior_scale=1.7)
    centred = exact.softmax_posterior(q, k, v, noise=NOISE, prior_scale=1.7)
    close(shifted[1], centred[1])


def test_softmax_masks_and_sparse_form() -> None:
    q, k, _, v = draw()
    mask = np.array([True, False, True, True, False, True])
    mean, cov = exact.softmax_posterior(q, k, v, noise=NOISE, mask=mask)
    short = exact.softmax_posterior(q[mask], k[mask], v[mask], noise=NOISE)
    close(mean[mask], short[0])
    close(np.diag(cov)[mask], np.diag(short[1]))
    k_c = (k - k[mask].mean(0)) * C**-0.25
    var = exact.sparse_softmax_variance(
        q, k, k_c[mask], noise=NOISE, mask=mask, delta=0.0
    )  # inducing inputs at the real keys give the exact variance
    close(var, np.diag(cov), rtol=1e-6)
    none = exact.softmax_posterior(q, k[:4], v[:4], noise=NOISE, mask=np.zeros(4, bool))
    assert not none[0].any()
    assert not none[1].any()
    var = exact.sparse_softmax_variance(q, k, draw_inducing()[0], noise=NOISE)
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


@pytest.mark.parametrize("kind", ["rbf", "ard", "exp"])
def test_sgpa(kind: str) -> None:
    q, _, _, v = draw()
    q = 0.5 * q
    beta = 0.5 * draw_inducing()[0]
    rng = np.random.default_rng(7)
    v_b = rng.standard_normal((M_U, D))
    tril = np.tril(rng.standard_normal((D, M_U, M_U)))
    for a in range(D):
        np.fill_diagonal(tril[a], np.exp(0.3 * rng.standard_normal(M_U)))
    ls = np.array([0.8, 1.1, 1.3])
    kernels: dict[str, Any] = {
        "rbf": rbf,
        "ard": partial(ard_rbf, lengthscale=ls, variance=1.4),
        "exp": partial(exp_dot, lengthscale=ls, variance=1.4),
    }
    kernel, jitter = kernels[kind], 1e-3
    mean, cov = sgpa.sgpa_posterior(q, v, beta, v_b, tril, kernel=kernel, jitter=jitter)
    K_qq, K_qb, K_bb = kernel(q, q), kernel(q, beta), kernel(beta, beta)
    K_b = K_bb + jitter * np.eye(M_U)
    K_b_inv, L_inv = np.linalg.inv(K_b), np.linalg.inv(np.linalg.cholesky(K_b))
    close(mean, K_qq @ v - K_qb @ K_b_inv @ K_qb.T @ v + K_qb @ v_b)
    kl = 0.0
    residual = K_qq - K_qb @ K_b_inv @ K_qb.T
    for a in range(D):
        S = tril[a] @ tril[a].T
        close(cov[a], K_qq + K_qb @ L_inv.T @ (S - np.eye(M_U)) @ L_inv @ K_qb.T)
        assert min_eig(cov[a]) > -1e-12
        kl += 0.5 * (np.trace(S) - M_U - 2 * np.log(np.diag(tril[a])).sum())
        kl += 0.5 * (v_b[:, a] @ K_bb @ v_b[:, a] + v[:, a] @ residual @ v[:, a])
    close(sgpa.sgpa_kl(q, v, beta, v_b, tril, kernel=kernel, jitter=jitter), kl)
    prior = np.stack([np.eye(M_U)] * D)
    zero = sgpa.sgpa_kl(q, 0 * v, beta, 0 * v_b, prior, kernel=kernel, jitter=jitter)
    close(zero, 0.0)
    mask = np.arange(N) < 4
    part = sgpa.sgpa_posterior(q, v, beta, v_b, tril, kernel=kernel, jitter=jitter, mask=mask)
    short = sgpa.sgpa_posterior(q[:4], v[:4], beta, v_b, tril, kernel=kernel, jitter=jitter)
    close(part[0][:4], short[0])
    close(part[1][:, :4, :4], short[1])
    assert not part[0][4:].any()
    assert not part[1][:, 4:].any()


def test_condition_without_noise_interpolates() -> None:
    q, k, _, v = draw()
    cov = rbf(np.concatenate([q, k]), np.concatenate([q, k]))
    keys = np.arange(N, 2 * N)
    mean, posterior = condition(cov, keys, keys, v)
    close(mean, v, atol=1e-7)
    close(posterior, 0.0, atol=1e-7)
