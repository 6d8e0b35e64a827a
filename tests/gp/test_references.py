"""Each fast path equals the slow and obvious reference beside it, forward and backward."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gpattention import gp
from gpattention.gp import density, reference
from tests.gp.samples import Sample, sample

Moments = Callable[[Sample], tuple[Tensor, Tensor]]
OPTIONS = {"noise": 0.1, "scale_q": 1.3, "scale_k": 0.7}


def _moments(p: gp.Posterior) -> tuple[Tensor, Tensor]:
    return p.mean, p.covariance()


def _four(s: Sample) -> tuple[Tensor, ...]:
    return s.q, s.k, s.o, s.v


def _six(s: Sample) -> tuple[Tensor, ...]:
    return (*_four(s), s.inducing_q, s.inducing_k)


def _sparse_kl(s: Sample) -> tuple[Tensor, Tensor]:
    """The KL of eq. 24 from dense matrices: the posterior's and the DTC prior's."""
    mean, V = reference.scgp_moments(*_six(s), **OPTIONS)
    K_mm = gp.rbf(s.inducing_q, s.inducing_q) + 1e-6 * torch.eye(5, dtype=s.q.dtype)
    K_qm = 1.3 * gp.rbf(s.q, s.inducing_q)
    prior = K_qm @ torch.linalg.inv(K_mm) @ K_qm.mT + 0.1 * torch.eye(7, dtype=s.q.dtype)
    return reference.gaussian_kl(mean, V, prior), mean


def _exact_kl(s: Sample) -> tuple[Tensor, Tensor]:
    mean, V = reference.cgp_moments(*_four(s), **OPTIONS)
    tau = 0.1 * torch.eye(7, dtype=s.q.dtype)
    return reference.gaussian_kl(mean, V + tau, 1.3**2 * gp.rbf(s.q, s.q) + tau), mean


FAST_AND_SLOW: dict[str, tuple[Moments, Moments]] = {
    "cgp": (
        lambda s: _moments(gp.cgp_posterior(*_four(s), **OPTIONS)),
        lambda s: reference.cgp_moments(*_four(s), **OPTIONS),
    ),
    "causal": (
        lambda s: ((p := gp.causal_cgp_posterior(*_four(s), **OPTIONS)).mean, p.variance),
        lambda s: reference.causal_cgp_rows(*_four(s), **OPTIONS),
    ),
    "scgp": (
        lambda s: _moments(gp.scgp_posterior(*_six(s), **OPTIONS)),
        lambda s: reference.scgp_moments(*_six(s), **OPTIONS),
    ),
    "kl": (
        lambda s: (gp.cgp_kl(*_four(s), **OPTIONS), gp.cgp_posterior(*_four(s), **OPTIONS).mean),
        _exact_kl,
    ),
    "sparse kl": (
        lambda s: (gp.scgp_kl(*_six(s), **OPTIONS), gp.scgp_posterior(*_six(s), **OPTIONS).mean),
        _sparse_kl,
    ),
    "low-rank density": (
        lambda s: (
            density.lowrank_log_density(s.v, s.q, s.q.new_full((1, 1), 0.1), s.q.new_full((), s.q.shape[-2])),
            s.v,
        ),
        lambda s: (reference.lowrank_log_density(s.v, s.q, 0.1), s.v),
    ),
}


@pytest.mark.parametrize("name", FAST_AND_SLOW)
def test_fast_path_equals_its_reference(name: str) -> None:
    fast, slow = FAST_AND_SLOW[name]
    s = sample(2, 2, seed=11)
    for t in _six(s):
        t.requires_grad_()
    for ours, theirs in zip(fast(s), slow(s), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)
        weights = torch.linspace(-1, 1, ours.numel(), dtype=ours.dtype).reshape(ours.shape)
        gradients = [
            torch.autograd.grad((weights * x).sum(), _six(s), allow_unused=True, retain_graph=True)
            for x in (ours, theirs)
        ]
        for a, b in zip(*gradients, strict=True):
            if a is None or b is None:  # what the one does not use the other may use with weight 0
                used = [g for g in (a, b) if isinstance(g, Tensor)]
                assert all(bool((g == 0).all()) for g in used)
                continue
            torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("name", FAST_AND_SLOW)
def test_fast_path_in_float32_is_near_its_float64_reference(name: str) -> None:
    """Sparse features pass a factor of K_mm + 1e-6 I, which costs up to three digits (see sparse.md)."""
    fast, slow = FAST_AND_SLOW[name]
    s = sample(2, 2, seed=11, dtype=torch.float32)
    limit = 1e-3 if name.startswith("s") else 1e-4
    for ours, theirs in zip(fast(s), slow(s.to(torch.float64)), strict=True):
        assert (ours.double() - theirs).abs().max() < limit * max(1.0, float(theirs.abs().max()))
