"""The exact model's kernels against float64, outputs and every gradient, under Triton's interpreter."""

from dataclasses import replace

import pytest
import torch

from gpattention import gp
from tests.gp.fused.exact.problems import Problem, check, density, draw, mean, moments
from tests.gp.samples import sample

pytest.importorskip("triton")

QUICK = [
    Problem(7, 7, masked=True, amplified=True),
    Problem(3, 17, lead=(1, 1)),
    Problem(17, 1, masked=True, lead=(1, 1)),
    Problem(1, 3, amplified=True, lead=(1,)),
    Problem(5, 5, masked=True, lead=()),
    Problem(16, 16, noise=1e-4, spread=0.5, lead=(1, 1)),
]
LARGE = [
    Problem(64, 64, 32, 32, masked=True, amplified=True, spread=0.3, lead=(1, 1)),
    Problem(65, 65, 5, 40, spread=0.7, lead=(1, 1)),
    Problem(128, 100, 64, 3, masked=True, spread=0.2, noise=1e-2, lead=(1, 1)),
]


@pytest.mark.parametrize("problem", QUICK, ids=str)
def test_moments(problem: Problem) -> None:
    check(moments, problem)


@pytest.mark.parametrize("problem", [replace(QUICK[0], lead=(1, 1)), QUICK[1]], ids=str)
@pytest.mark.parametrize("call", [mean, density, draw])
def test_mean_alone_densities_and_draws(call, problem: Problem) -> None:
    check(call, problem)


@pytest.mark.slow
@pytest.mark.parametrize("problem", LARGE, ids=str)
@pytest.mark.parametrize("call", [moments, density])
def test_large(call, problem: Problem) -> None:
    check(call, problem)


def test_a_failed_factor_raises_with_its_place() -> None:
    s = sample(1, 2, queries=4, keys=4, dtype=torch.float32)
    o = s.o.clone()
    o[0, 1] = o[0, 1, :1]  # all latent inputs of one head coincide, and the noise is below rounding
    with gp.fused_kernels("on"), pytest.raises(gp.NotPositiveDefiniteError) as caught:
        gp.cgp_posterior(s.q, s.k, o, s.v, noise=1e-9)
    assert "1 of 2 matrices K_o + noise I (4 x 4, float32)" in str(caught.value)
    assert "pivot to fail is number 2 of matrix [0, 1]" in str(caught.value)


def test_a_deferred_failure_is_nan_and_counted() -> None:
    s = sample(1, 2, queries=4, keys=4, dtype=torch.float32)
    k = s.k.clone()
    k[0, 0] = k[0, 0, :1]
    with gp.fused_kernels("on"), gp.deferred_checks():
        p = gp.cgp_posterior(s.q, k, s.o, s.v, noise=1e-9, with_variance=True)
        variance = p.variance
    assert variance[0, 0].isnan().all()
    assert variance[0, 1].isfinite().all()
    with pytest.raises(gp.NotPositiveDefiniteError, match="1 on cpu"):
        gp.check_health()


def test_padding_hides_whatever_is_written_there() -> None:
    s = sample(1, 1, queries=6, keys=6, dtype=torch.float32)
    hidden = ~s.mask
    spoiled = {name: getattr(s, name).masked_fill(hidden[..., None], float("nan")) for name in "kov"}
    options = {"noise": 0.1, "mask": s.mask, "query_mask": s.query_mask, "with_variance": True}
    with gp.fused_kernels("on"):
        clean = gp.cgp_posterior(s.q, s.k, s.o, s.v, **options)
        spoilt = gp.cgp_posterior(s.q, **spoiled, **options)
    assert torch.equal(clean.mean, spoilt.mean)
    assert torch.equal(clean.variance, spoilt.variance)
    assert (clean.mean[~s.query_mask] == 0).all()
    assert (clean.variance[~s.query_mask] == 0).all()
