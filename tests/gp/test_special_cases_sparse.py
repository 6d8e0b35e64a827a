"""Special cases of the sparse models in which the answer is known in closed form."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from gpattention import gp
from tests.gp.calls import (
    MODEL,
    NOISE,
    SCALE_K,
    SCALE_Q,
    SOFTMAX,
    close,
    free_parameters,
    identity,
    kappa,
    log_normal,
    matrices,
    scalar,
)
from tests.gp.samples import Sample, sample


def at_tokens(s: Sample, *, more: bool = False) -> Sample:
    """Inducing inputs at the latent inputs and at the keys, or those and more."""
    extra = (s.inducing_q, s.inducing_k) if more else (s.inducing_q[:0], s.inducing_k[:0])
    return replace(s, inducing_q=torch.cat([s.o, extra[0]]), inducing_k=torch.cat([s.k, extra[1]]))


def scgp(s: Sample, **options: object) -> gp.Posterior:
    arguments = (s.q, s.k, s.o, s.v, s.inducing_q, s.inducing_k)
    return gp.scgp_posterior(*arguments, **{"delta": 0.0, **MODEL, **options})


def density(s: Sample, objective: str, **options: object) -> gp.LogDensity:
    arguments = (s.q, s.k, s.o, s.v, s.inducing_q, s.inducing_k)
    return gp.scgp_log_density(*arguments, objective=objective, **{"delta": 0.0, **MODEL, **options})


@pytest.mark.parametrize("more", [False, True], ids=["at the tokens", "at the tokens and elsewhere"])
def test_inducing_inputs_at_the_tokens_give_the_exact_mean(more: bool) -> None:
    s = at_tokens(sample(seed=1, queries=5, spread=1.5, inducing=(3, 3)), more=more)
    g = matrices(s)
    expected = g.A @ g.B @ s.v  # E[z_q | z_k = V] of the exact model
    close(scgp(s).mean, expected)
    dual = torch.linalg.solve(g.M_k, s.v)
    close(scgp(s).mean, gp.cgp_posterior(s.q, s.k, s.o, dual, **MODEL).mean)
    exact = gp.cgp_posterior(s.q, s.k, s.o, s.v, **MODEL).mean
    close(scgp(s, values="dual").mean, exact)


def test_inducing_inputs_at_the_tokens_give_the_exact_covariance_but_for_what_they_miss() -> None:
    s = at_tokens(sample(seed=2, queries=5, spread=1.5))
    g = matrices(s)
    Q_q = g.K_qo @ torch.linalg.solve(g.K_o, g.K_qo.T)
    Q_o = g.K_ok @ torch.linalg.solve(g.K_k, g.K_ok.T)
    latent = g.C + NOISE * identity(7) - (g.K_o - Q_o)
    expected = g.S + NOISE * identity(5) - (g.K_q - Q_q) + g.A @ latent @ g.A.T
    close(scgp(s).covariance(), expected)
    close(scgp(s, include_noise=False).covariance(), expected - NOISE * identity(5))


def test_an_independent_conditional_gives_each_query_what_the_inducing_inputs_miss() -> None:
    s = at_tokens(sample(seed=2, queries=5, spread=1.5))
    g = matrices(s)
    missed = g.K_q - g.K_qo @ torch.linalg.solve(g.K_o, g.K_qo.T)
    plain = scgp(s).covariance()
    close(scgp(s, conditional="independent").covariance(), plain + torch.diag(missed.diagonal()))


def test_far_from_all_inducing_inputs_an_independent_conditional_is_the_prior() -> None:
    s = sample(seed=4, queries=5)
    a = SCALE_Q * s.log_amplitude.exp()
    far = replace(s, q=s.q + 100.0)
    for include in (True, False):
        noise = NOISE if include else 0.0
        options = {"log_amplitude": s.log_amplitude, "include_noise": include}
        told = scgp(far, conditional="independent", **options)
        close(told.mean, torch.zeros_like(told.mean))
        close(told.variance, a.square() + noise)
        close(told.variance, told.prior_stddev.square())
        close(told.covariance(), torch.diag(a.square() + noise))
        # as printed, the model is the more certain the less it can know
        close(scgp(far, **options).variance, torch.full_like(a, noise))


def test_at_the_inducing_inputs_both_conditionals_are_one() -> None:
    s = sample(seed=5, queries=5, inducing=(5, 4))
    s = replace(s, q=s.inducing_q)
    one, other = scgp(s), scgp(s, conditional="independent")
    close(other.covariance(), one.covariance())
    draws = (p.sample(3, joint=True, generator=torch.Generator().manual_seed(0)) for p in (one, other))
    close(*draws, rtol=1e-6, atol=1e-6)


def test_another_conditional_is_refused() -> None:
    with pytest.raises(ValueError, match="conditional to be one of deterministic, independent, got 'fitc'"):
        scgp(sample(seed=5), conditional="fitc")


def test_delta_is_the_nugget_of_the_inducing_gram() -> None:
    s, delta = sample(seed=3, queries=5), 0.01
    K_mm, K_ll = (kappa(x, x) + delta * identity(len(x)) for x in (s.inducing_q, s.inducing_k))
    K_qm, K_om = SCALE_Q * kappa(s.q, s.inducing_q), kappa(s.o, s.inducing_q)
    K_ol, K_kl = kappa(s.o, s.inducing_k), SCALE_K * kappa(s.k, s.inducing_k)
    P_m, P_l = (torch.linalg.inv(K + F.T @ F / NOISE) for K, F in ((K_mm, K_om), (K_ll, K_kl)))
    mean = K_qm @ P_m @ K_om.T @ K_ol @ P_l @ K_kl.T @ s.v / NOISE**2
    stage = NOISE * identity(7) + K_ol @ P_l @ K_ol.T
    inner = P_m + P_m @ K_om.T @ stage @ K_om @ P_m / NOISE**2
    close(scgp(s, delta=delta).mean, mean)
    close(scgp(s, delta=delta).covariance(), NOISE * identity(5) + K_qm @ inner @ K_qm.T)


def test_traces_of_the_bound_collapse_under_the_latent_prior_of_the_sparse_model() -> None:
    s = sample(seed=4, queries=5)
    posterior = scgp(s)
    sides = (
        ("query", posterior.mean, s.inducing_q, SCALE_Q * kappa(s.q, s.inducing_q)),
        ("key", s.v, s.inducing_k, SCALE_K * kappa(s.k, s.inducing_k)),
    )
    for term, X, m, K_xm in sides:
        K_mm, K_om = kappa(m, m), kappa(s.o, m)
        P = torch.linalg.inv(K_mm + K_om.T @ K_om / NOISE)
        spread = K_xm @ P @ K_om.T / NOISE  # E[z_x | z_o] = spread z_o
        latent = K_om @ torch.linalg.solve(K_mm, K_om.T) + NOISE * identity(7)
        Q = K_xm @ torch.linalg.solve(K_mm, K_xm.T)
        traces = torch.trace(spread @ latent @ spread.T) + torch.trace(K_xm @ P @ K_xm.T)
        close(traces, torch.trace(Q))
        white = NOISE * identity(len(X))
        bound = log_normal(X, white) - 0.5 * 4 * traces / NOISE
        close(getattr(density(s, "dtc_bound"), term), bound)
        close(getattr(density(s, "dtc"), term), log_normal(X, white + Q))
        plain = torch.trace(spread @ kappa(s.o, s.o) @ spread.T) + torch.trace(K_xm @ P @ K_xm.T)
        close(getattr(density(s, "double_jensen"), term), log_normal(X, white) - 2 * plain / NOISE)


def test_queries_far_from_the_inducing_inputs_get_noise_alone() -> None:
    s = sample(seed=5)
    p = scgp(replace(s, q=s.q + 100.0))
    close(p.mean, torch.zeros_like(s.v), rtol=0.0, atol=0.0)
    close(p.covariance(), NOISE * identity(7), rtol=0.0, atol=0.0)


def test_large_noise_leaves_the_prior_of_the_sparse_model() -> None:
    s = sample(seed=6, queries=5)
    p = scgp(s, noise=1e12, include_noise=False)
    K_qm = SCALE_Q * kappa(s.q, s.inducing_q)
    close(p.covariance(), K_qm @ torch.linalg.solve(kappa(s.inducing_q, s.inducing_q), K_qm.T))
    close(p.mean, torch.zeros_like(p.mean), rtol=0.0, atol=1e-20)  # of order 1 / noise^2


@pytest.mark.parametrize("masked", [False, True])
def test_softmax_with_inducing_inputs_at_the_keys_is_exact(masked: bool) -> None:
    s = sample(seed=7, queries=5, spread=1.5)
    keep = s.mask if masked else torch.ones_like(s.mask)
    exact = gp.softmax_posterior(s.q, s.k, s.v, mask=keep, **SOFTMAX)
    sparse = gp.softmax_posterior(s.q, s.k, s.v, mask=keep, inducing=s.k[keep], delta=0.0, **SOFTMAX)
    close(sparse.mean, exact.mean, rtol=0.0, atol=0.0)
    close(sparse.variance, exact.variance)
    close(sparse.covariance(), exact.covariance())


def test_row_amplitude_with_inducing_inputs_at_the_keys_is_exact() -> None:
    s = sample(seed=8, queries=5, spread=0.7)
    close(
        gp.sparse_row_log_amplitude(s.q, s.k, s.k, delta=0.0),
        gp.row_log_amplitude(s.q, s.k),
        rtol=1e-8,  # the Gram matrix of close keys has a condition number of about 1e5
    )
    far = gp.sparse_row_log_amplitude(s.q + 100.0, s.k, s.inducing_k, scale=2.0, floor=0.1)
    close(far, torch.full((5,), math.log(2.0 / 0.1), dtype=torch.float64))


def one_token() -> tuple[Sample, SimpleNamespace]:
    """One token, one inducing input per stage, and all numbers of the sparse model."""
    s = sample(queries=1, keys=1, inducing=(1, 1), seed=9, spread=0.5)
    n = SimpleNamespace(
        phi_q=SCALE_Q * kappa(s.q, s.inducing_q).item(), phi_o=kappa(s.o, s.inducing_q).item(),
        psi_o=kappa(s.o, s.inducing_k).item(), psi_k=SCALE_K * kappa(s.k, s.inducing_k).item(),
    )  # fmt: skip
    n.B, n.B_l = 1 + n.phi_o**2 / NOISE, 1 + n.psi_k**2 / NOISE
    n.mean = n.phi_q * n.phi_o * n.psi_o * n.psi_k / (NOISE**2 * n.B * n.B_l) * s.v
    latent = NOISE + n.psi_o**2 / n.B_l
    n.signal = n.phi_q**2 * (1 / n.B + n.phi_o**2 * latent / (NOISE * n.B) ** 2)
    return s, n


def test_single_token_of_the_sparse_model() -> None:
    s, n = one_token()
    close(scgp(s).mean, n.mean)
    close(scgp(s, values="dual").mean, NOISE * n.B_l * n.mean)
    close(scgp(s).covariance(), scalar(NOISE + n.signal))
    close(scgp(s, include_noise=False).covariance(), scalar(n.signal))


def test_single_token_densities_of_the_sparse_model() -> None:
    s, n = one_token()
    for term, X, phi, phi_o in (("query", n.mean, n.phi_q, n.phi_o), ("key", s.v, n.psi_k, n.psi_o)):
        B = 1 + phi_o**2 / NOISE
        gain, conditional = phi * phi_o / (NOISE * B), phi**2 / B
        white = log_normal(X, scalar(NOISE))
        expected = {
            "dtc": log_normal(X, scalar(NOISE + phi**2)),
            "dtc_bound": white - 2 * phi**2 / NOISE,  # 4 channels / 2
            "marginal": log_normal(X, scalar(NOISE + conditional + gain**2)),
            "jensen": log_normal(X, scalar(NOISE + conditional)) - 2 * gain**2 / (NOISE + conditional),
            "double_jensen": white - 2 * (conditional + gain**2) / NOISE,
        }
        for objective, value in expected.items():
            close(getattr(density(s, objective), term), value)


def test_single_token_divergence_of_the_sparse_model() -> None:
    s, n = one_token()
    arguments = (s.q, s.k, s.o, s.v, s.inducing_q, s.inducing_k)
    prior, posterior = NOISE + n.phi_q**2, NOISE + n.signal
    fit = n.mean.square().sum() / prior
    spread = 4 * (posterior / prior - 1 - math.log(posterior / prior))
    close(gp.scgp_kl(*arguments, delta=0.0, **MODEL), 0.5 * (fit + spread))


def test_single_token_of_sgpa() -> None:
    s, _ = one_token()
    values, factor = free_parameters(1, 4, torch.float64)  # [1, D], [D, 1, 1]
    jitter, spread = 0.01, factor[:, 0, 0].square()
    r = kappa(s.q, s.inducing_k).item()
    left = 1 - r**2 / (1 + jitter)
    p = gp.sgpa_posterior(s.q, s.v, s.inducing_k, values, factor, jitter=jitter)
    close(p.mean, left * s.v + r * values)
    close(p.variance, (left + r**2 / (1 + jitter) * spread)[None])
    free = (spread - 1 - spread.log()).sum() + values.square().sum() + left * s.v.square().sum()
    close(gp.sgpa_kl(s.q, s.v, s.inducing_k, values, factor, jitter=jitter), 0.5 * free)


def test_sgpa_with_the_prior_factor_has_the_prior_covariance_and_no_divergence() -> None:
    s = sample(seed=10)
    factor = identity(6).expand(4, 6, 6)
    zero = torch.zeros(6, 4, dtype=torch.float64)
    p = gp.sgpa_posterior(s.q, s.v, s.inducing_k, zero, factor)
    close(p.covariance(), kappa(s.q, s.q).expand(4, 7, 7))
    close(p.variance, torch.ones_like(s.v))
    kl = gp.sgpa_kl(s.q, 0 * s.v, s.inducing_k, zero, factor)
    close(kl, torch.zeros_like(kl), rtol=0.0, atol=0.0)


def test_sgpa_with_inducing_keys_at_the_tokens_keeps_its_variational_posterior() -> None:
    s, jitter = sample(seed=11, spread=1.5), 1e-3
    values, factor = free_parameters(7, 4, torch.float64)
    K = kappa(s.q, s.q)
    K_j = K + jitter * identity(7)
    L = torch.linalg.cholesky(K_j)
    left: Tensor = jitter * K @ torch.linalg.inv(K_j)  # K - K K_j^-1 K
    gain = K @ torch.linalg.inv(K_j)
    p = gp.sgpa_posterior(s.q, s.v, s.q, values, factor, jitter=jitter)
    close(p.mean, K @ values + left @ s.v)
    roots = gain @ L @ factor  # [D, N, m]
    close(p.covariance(), left + roots @ roots.mT)
