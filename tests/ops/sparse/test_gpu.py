"""The sparse model's kernels on a CUDA device, compiled: float64 accuracy at real sizes, capture, length."""

import pytest
import torch

from gpattention import gp
from gpattention.gp.sparse import FusedSCGPPosterior
from tests.gp.test_stability import in_float64, spaced, tokens
from tests.ops.comparison import captured
from tests.ops.sparse.problems import Sparse, check

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROBLEMS = [
    Sparse(64, 64, 16, None, 32, 32, (25, 4), spread=0.25, noise=1e-2),
    Sparse(33, 50, 16, 9, 17, 32, (3, 2), masked=True, amplified=True, spread=0.3),
    Sparse(1, 1, 1, 2, lead=(3, 2)),
    Sparse(
        65, 40, 16, None, 32, 32, (3, 2), masked=True, amplified=True, spread=0.25, conditional="independent"
    ),
    Sparse(130, 65, 8, None, 32, 20, (5, 2), masked=True, pooled=True, values="dual", spread=0.3),
]
LARGE = [
    Sparse(300, 200, 32, None, 32, 32, (2, 4), masked=True, amplified=True, spread=0.25),
    Sparse(100, 150, 64, 40, 64, 64, (2, 2), pooled=True, spread=0.2, include_noise=False),
    Sparse(16_384, 16_384, 16, None, 32, 32, (1, 4), spread=0.25, noise=1e-2),
    Sparse(5_000, 16_001, 16, 20, 32, 32, (1, 2), masked=True, spread=0.25),
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_accuracy(problem: Sparse) -> None:
    check(problem, "cuda")


@pytest.mark.slow
@pytest.mark.parametrize("problem", LARGE, ids=str)
def test_accuracy_of_large_problems(problem: Sparse) -> None:
    check(problem, "cuda")


@pytest.mark.parametrize("regime", ["iid .1", "iid .25", "iid .58", "rank-4", "rank-8", "twice"])
def test_accurate_in_every_regime(regime: str) -> None:
    x = (*tokens(regime, 64), spaced(16, 1), spaced(12, 2))
    for noise in (1e-4, 1e-2, 1e-1):
        with gp.fused_kernels("on"):
            single = gp.scgp_posterior(*(t.cuda() for t in x), noise=noise, objectives=())
            mean, variance = single.mean.cpu(), single.variance.cpu()
        double = gp.scgp_posterior(*in_float64(x), noise=noise)
        assert (mean - double.mean).norm() / double.mean.norm() < 1e-3, noise
        assert (variance / double.variance - 1).abs().max() < 1e-3, noise


def test_a_captured_step_replays_and_counts() -> None:
    g = torch.Generator(device="cuda").manual_seed(0)
    leaves = [(0.3 * torch.randn(4, 2, 64, 8, device="cuda", generator=g)).requires_grad_() for _ in range(4)]
    leaves.append((0.3 * torch.randn(2, 6, 8, device="cuda", generator=g)).requires_grad_())
    noise = torch.full((2,), 1e-2, device="cuda")

    def step() -> tuple[torch.Tensor, ...]:
        with gp.fused_kernels("on"), gp.deferred_checks():
            p = gp.scgp_posterior(*leaves, noise=noise, objectives=("dtc",))
            loss = p.sample(1).square().sum() - 0.01 * p.log_density().total.sum()
        return torch.autograd.grad(loss, leaves)

    graph, found = captured(step)
    graph.replay()
    assert all(bool(x.isfinite().all()) for x in found)
    gp.check_health()
    noise.fill_(-1e-9)  # no matrix has a factor any more
    graph.replay()
    with pytest.raises(gp.NotPositiveDefiniteError, match="on cuda"):
        gp.check_health()


@pytest.mark.slow
def test_a_million_tokens() -> None:
    """No index overflows: the last tokens of a long sequence are those of a short one of the same sums."""
    n = 2**20
    g = torch.Generator(device="cuda").manual_seed(0)
    q, k, o, v = (
        0.3 * torch.randn(1, n, 4, 32, device="cuda", generator=g).transpose(1, 2) for _ in range(4)
    )
    m = 0.3 * torch.randn(4, 16, 32, device="cuda", generator=g)
    with torch.no_grad(), gp.fused_kernels("on"):
        p = gp.scgp_posterior(q, k, o, v, m, noise=1e-2, objectives=())
        last = gp.scgp_posterior(q[..., -100:, :], k, o, v, m, noise=1e-2, objectives=())
        draws = p.sample(
            1, generator=gp.ItemNoise(0, torch.zeros(1, device="cuda"), torch.zeros(1, device="cuda"))
        )
    assert isinstance(p, FusedSCGPPosterior)
    assert torch.allclose(p.mean[..., -100:, :], last.mean, atol=1e-6)
    assert torch.allclose(p.variance[..., -100:], last.variance, atol=1e-6)
    standard = (draws[0] - p.mean) / p.stddev[..., None]
    assert abs(float(standard.mean())) < 1e-3
    assert abs(float(standard.std()) - 1) < 1e-3
