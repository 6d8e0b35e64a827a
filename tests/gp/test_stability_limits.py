"""Where float32 loses digits and nothing raises: the figures of docs/derivations/sparse.md and cgp.md.

Bounded on both sides: a figure that became ten times better or worse has to be written anew there.
"""

import statistics

import pytest
import torch
from torch import Tensor

from gpattention import gp
from tests.gp.test_stability import WIDTH, in_float64

SEEDS, FACTOR = range(5), 10

# (tokens, noise, standard deviation of keys and latent inputs): median relative error of mean and variance
CLOSE_TOGETHER = {
    (1024, 1e-4, 1.0): (3e-6, 2e-6),
    (1024, 1e-2, 0.1): (4e-4, 2e-4),
    (1024, 1e-4, 0.1): (2e-2, 1e-2),
    (16384, 1e-2, 0.05): (7e-3, 2e-3),
    (16384, 1e-4, 0.05): (1e-1, 8e-2),
    (16384, 1e-3, 0.01): (9e-1, 7e-2),
}
# (standard deviation of tokens, noise): median relative error of mean, variance and KL
FAR_APART = {
    (0.25, 1e-4): (2e-7, 1e-2, 5e-5),
    (1.0, 1e-4): (2e-6, 2e-1, 4e-4),
    (3.0, 1e-4): (6e-8, 1e-3, 5e-5),
    (3.0, 1e-2): (6e-8, 6e-6, 2e-7),
    (10.0, 1e-2): (6e-8, 6e-6, 2e-7),
}


def few_dimensions(n: int, spread: float, seed: int) -> tuple[Tensor, ...]:
    """q, k, o, v and 32 inducing inputs in four dimensions; keys and latent inputs close together."""
    g = torch.Generator().manual_seed(seed)
    deviation = torch.full((WIDTH,), 0.04)
    deviation[:4] = 1.0
    q, k, o = (s * deviation * torch.randn(n, WIDTH, generator=g) for s in (1.0, spread, spread))
    return q, k, o, torch.randn(n, 8, generator=g), deviation * torch.randn(32, WIDTH, generator=g)


def four_times(spread: float, seed: int) -> tuple[Tensor, ...]:
    """q = k = o, 16 tokens each four times over, and v."""
    g = torch.Generator().manual_seed(seed)
    x = spread * torch.randn(16, WIDTH, generator=g).repeat(4, 1)
    return x, x, x, torch.randn(64, 8, generator=g)


def errors(single: gp.Posterior, double: gp.Posterior) -> tuple[float, float]:
    """Relative, of the mean as a whole and of the worst variance."""
    mean = (single.mean - double.mean).norm() / double.mean.norm()
    return float(mean), float((single.variance / double.variance - 1).abs().max())


def as_documented(found: list[tuple[float, ...]], figures: tuple[float, ...]) -> None:
    for values, figure in zip(zip(*found, strict=True), figures, strict=True):
        assert figure / FACTOR < statistics.median(values) < figure * FACTOR


@pytest.mark.parametrize("case", CLOSE_TOGETHER, ids=str)
def test_the_sparse_model_with_keys_close_together(case: tuple[int, float, float]) -> None:
    n, noise, spread = case
    found = []
    for seed in SEEDS:
        x = few_dimensions(n, spread, seed)
        single, double = (gp.scgp_posterior(*y, noise=noise) for y in (x, in_float64(x)))
        found.append(errors(single, double))
    as_documented(found, CLOSE_TOGETHER[case])


def test_the_sparse_variance_raises_where_the_identity_is_lost() -> None:
    """In nearly every sample: which pivot fails, and whether the mean passes, is up to rounding."""
    raised = 0
    for seed in SEEDS:
        x = few_dimensions(16384, 0.01, seed)
        assert gp.scgp_posterior(*in_float64(x), noise=1e-4).variance.isfinite().all()
        try:
            _ = gp.scgp_posterior(*x, noise=1e-4).variance
        except gp.NotPositiveDefiniteError:
            raised += 1
    assert raised >= 3


@pytest.mark.parametrize("case", FAR_APART, ids=str)
def test_the_exact_model_with_duplicates_far_from_the_rest(case: tuple[float, float]) -> None:
    spread, noise = case
    found = []
    for seed in SEEDS:
        x = four_times(spread, seed)
        single, double = (gp.cgp_posterior(*y, noise=noise) for y in (x, in_float64(x)))
        kl = gp.cgp_kl(*x, noise=noise) / gp.cgp_kl(*in_float64(x), noise=noise) - 1
        found.append((*errors(single, double), abs(float(kl))))
    as_documented(found, FAR_APART[case])
