"""The slow and obvious references give what the fast paths give; the oracles have the gradients."""

import torch
from torch import Tensor

from gpattention import gp
from gpattention.gp import density, reference
from tests.gp.samples import sample

OPTIONS = {"noise": 0.1, "scale_q": 1.3, "scale_k": 0.7}


def test_references_equal_the_fast_paths() -> None:
    s = sample(2, 2, seed=11)
    four, m, l, eye = (s.q, s.k, s.o, s.v), s.inducing_q, s.inducing_k, torch.eye(7, dtype=torch.float64)  # noqa: E741
    exact, sparse = reference.cgp_moments(*four, **OPTIONS), reference.scgp_moments(*four, m, l, **OPTIONS)
    K_qm, K_mm = 1.3 * gp.rbf(s.q, m), gp.rbf(m, m) + 1e-6 * torch.eye(5, dtype=torch.float64)
    dtc_prior = K_qm @ torch.linalg.inv(K_mm) @ K_qm.mT + 0.1 * eye  # [..., Q, Q]
    prior = 1.3**2 * gp.rbf(s.q, s.q) + 0.1 * eye  # [..., Q, Q]
    n, rows = s.q.new_full((), 7), gp.causal_cgp_posterior(*four, **OPTIONS)
    pairs: list[tuple[Tensor | tuple[Tensor, ...], Tensor | tuple[Tensor, ...]]] = [
        (exact, moments(gp.cgp_posterior(*four, **OPTIONS))),
        (sparse, moments(gp.scgp_posterior(*four, m, l, **OPTIONS))),
        (reference.causal_cgp_rows(*four, **OPTIONS), (rows.mean, rows.variance)),
        (reference.gaussian_kl(exact[0], exact[1] + 0.1 * eye, prior), gp.cgp_kl(*four, **OPTIONS)),
        (reference.gaussian_kl(*sparse, dtc_prior), gp.scgp_kl(*four, m, l, **OPTIONS)),
        (
            reference.lowrank_log_density(s.v, s.q, 0.1),
            density.lowrank_log_density(s.v, s.q, s.q.new_full((1, 1), 0.1), n),
        ),
    ]
    for slow, fast in pairs:
        torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-10)


def moments(p: gp.Posterior) -> tuple[Tensor, Tensor]:
    return p.mean, p.covariance()
