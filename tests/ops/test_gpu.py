"""The kernels on a CUDA device, compiled: float64 accuracy at odd and large sizes, capture, no waiting."""

from dataclasses import replace

import pytest
import torch

from gpattention import gp
from tests.gp.samples import sample
from tests.gp.test_stability import tokens
from tests.ops.comparison import captured
from tests.ops.exact.problems import KL_TOLERANCE, Problem, check

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROBLEMS = [
    Problem(1, 1, lead=(3, 2)),
    Problem(3, 17, 5, 7, masked=True, amplified=True, lead=(3, 2)),
    Problem(64, 64, 32, 32, amplified=True, noise=1e-4, spread=0.25, lead=(25, 4)),
    Problem(33, 50, 17, 32, masked=True, spread=0.3, lead=(2, 3)),
]
LARGE = [
    Problem(40, 64, 64, 64, masked=True, noise=1e-2, spread=0.2, lead=(2, 2)),
    Problem(65, 65, 32, 33, masked=True, spread=0.3, lead=(2, 3)),
    Problem(128, 100, 64, 64, masked=True, noise=1e-2, spread=0.2, lead=(2, 2)),
]


SLOW = [pytest.param(problem, marks=pytest.mark.slow) for problem in LARGE]
COSTS = [
    "cgp kl",
    *(f"{model} announced {cost}" for model in ("cgp", "direct") for cost in ("marginal", "kl")),
]


@pytest.mark.parametrize("problem", [*PROBLEMS, *SLOW], ids=str)
@pytest.mark.parametrize("call", ["moments", "mean", "density", "draw"])
def test_accuracy(call: str, problem: Problem) -> None:
    check(f"cgp {call}", problem, "cuda")


@pytest.mark.parametrize(
    "problem", [PROBLEMS[1], replace(PROBLEMS[2], noise=1e-2), PROBLEMS[3], *SLOW], ids=str
)
@pytest.mark.parametrize("call", ["direct moments", "direct mean", "direct density", *COSTS])
def test_direct_model_and_regularisers(call: str, problem: Problem) -> None:
    check(call, problem, "cuda", tolerance=KL_TOLERANCE)


@pytest.mark.parametrize("n", [16, 64, pytest.param(128, marks=pytest.mark.slow)])
@pytest.mark.parametrize("regime", ["iid .1", "iid .25", "iid .58", "rank-4", "rank-8", "twice"])
def test_stability_figures_hold(regime: str, n: int) -> None:
    x = tokens(regime, n)
    for noise in (1e-5, 1e-4, 1e-3, 1e-2, 1e-1):
        with gp.fused_kernels("on"):
            single = gp.cgp_posterior(*(t.cuda() for t in x), noise=noise, with_variance=True)
            mean, variance = single.mean.cpu(), single.variance.cpu()
        double = gp.cgp_posterior(*(t.double() for t in x), noise=noise)
        assert (mean - double.mean).norm() / double.mean.norm() < 1.5e-6, f"mean at noise {noise}"
        assert (variance - double.variance).abs().max() < 1e-5, f"variance at noise {noise}"
        assert bool((variance > 0).all())


def test_item_noise_has_the_bits_of_the_plain_operations() -> None:
    items, shape = torch.arange(50, device="cuda"), (3, 50, 4, 64, 32)
    found = []
    for mode in ("off", "on"):
        noise = gp.ItemNoise(3, items, torch.zeros_like(items))
        with gp.fused_kernels(mode):
            found.append(noise.normal(shape, torch.float32, items.device))
    assert torch.equal(*found)


def test_a_captured_step_replays_and_counts() -> None:
    s = sample(4, 2, queries=16, keys=16, dtype=torch.float32)
    leaves = [getattr(s, name).cuda().requires_grad_() for name in ("q", "k", "o", "v")]
    noise = torch.full((2,), 1e-2, device="cuda")

    def step() -> tuple[torch.Tensor, ...]:
        with gp.fused_kernels("on"), gp.deferred_checks():
            p = gp.cgp_posterior(*leaves, noise=noise, with_variance=True)
            loss = p.mean.sum() + p.variance.sum() + p.sample(1).sum()
        return torch.autograd.grad(loss, leaves)

    graph, found = captured(step)
    graph.replay()
    assert all(bool(x.isfinite().all()) for x in found)
    gp.check_health()
    noise.fill_(-1.0)  # no matrix has a factor any more
    graph.replay()
    with pytest.raises(gp.NotPositiveDefiniteError, match="16 on cuda"):
        gp.check_health()


def test_auto_takes_the_kernels_and_off_leaves_them() -> None:
    s = sample(1, 2, dtype=torch.float32)
    x = [getattr(s, name).cuda() for name in ("q", "k", "o", "v")]
    assert gp.cgp_posterior(*x, noise=0.1).fused() is not None
    with gp.fused_kernels("off"):
        assert gp.cgp_posterior(*x, noise=0.1).fused() is None
    assert gp.why_not_fused(x[0].double()) == "they compute in float32, not float64"
