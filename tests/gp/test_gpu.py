"""On a CUDA device: same numbers as on the CPU, no synchronisation where none is allowed, graph capture."""

from dataclasses import fields

import pytest
import torch

from gpattention import gp
from tests.gp.calls import cgp_kl, cgp_log_density, scgp_log_density
from tests.gp.oracle_pairs import OPTIONAL, PAIRS
from tests.gp.samples import Sample, sample
from tests.ops.comparison import captured

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on_gpu(s: Sample) -> Sample:
    return Sample(**{f.name: getattr(s, f.name).cuda() for f in fields(s)})


@pytest.mark.parametrize("name", PAIRS)
def test_gpu_equals_cpu(name: str) -> None:
    s = sample(2, 2)
    pair = PAIRS[name]
    cpu = pair.torch(s, {n: getattr(s, n) for n in OPTIONAL if n in pair.optional}, 0.05)
    moved = on_gpu(s)
    gpu = pair.torch(moved, {n: getattr(moved, n) for n in OPTIONAL if n in pair.optional}, 0.05)
    for ours, theirs in zip(gpu, cpu, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-9, atol=1e-9)


def test_tf32_does_not_reach_the_forward_pass() -> None:
    s = on_gpu(sample(4, 4, queries=64, keys=64, width=32, spread=0.25, dtype=torch.float32))
    exact = gp.cgp_posterior(s.q, s.k, s.o, s.v, noise=1e-3)
    wanted = exact.mean, exact.variance
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        rough = gp.cgp_posterior(s.q, s.k, s.o, s.v, noise=1e-3)
        assert torch.equal(rough.mean, wanted[0])
        assert torch.equal(rough.variance, wanted[1])
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("model", ["cgp", "scgp", "kl", "density", "softmax", "direct"])
def test_deferred_checks_do_not_synchronise(model: str) -> None:
    s = on_gpu(sample(2, 4, queries=16, keys=16, dtype=torch.float32))
    noise = torch.full((4,), 0.1, device="cuda", requires_grad=True)

    def step() -> torch.Tensor:
        if model == "cgp":
            p = gp.cgp_posterior(s.q, s.k, s.o, s.v, noise=noise, mask=s.mask)
        elif model == "scgp":
            p = gp.scgp_posterior(s.q, s.k, s.o, s.v, s.inducing_q, noise=noise, mask=s.mask)
        elif model == "softmax":
            p = gp.softmax_posterior(s.q, s.k, s.v, noise=noise, mask=s.mask)
        elif model == "direct":
            p = gp.direct_posterior(s.q, s.k, s.v, noise=noise, mask=s.mask)
        elif model == "kl":
            return cgp_kl(s.q, s.k, s.o, s.v, noise=noise, mask=s.mask).sum()
        else:
            return scgp_log_density(s.q, s.k, s.o, s.v, s.inducing_q, noise=noise, mask=s.mask).total.sum()
        return p.mean.sum() + p.variance.sum() + p.sample(2).sum()

    step().backward()  # warm up, outside
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with gp.deferred_checks():
            step().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    gp.check_health()


def test_a_captured_graph_counts_its_failures() -> None:
    s = on_gpu(sample(2, 2, queries=8, keys=8, dtype=torch.float32))
    q, noise = s.q.clone(), torch.tensor([0.1, 0.1], device="cuda")

    def forward() -> torch.Tensor:
        return cgp_log_density(q, s.k, s.o, s.v, noise=noise, observation_noise=0.0).query

    eager = forward()
    graph, result = captured(forward)
    graph.replay()
    torch.testing.assert_close(result, eager)
    gp.check_health()

    q[0, 1] = q[0, 1, :1]  # equal queries without observation noise: a singular matrix
    graph.replay()
    assert bool(result[0, 1].isnan())
    assert bool(result[1].isfinite().all())
    assert sum(gp.health().values()) == 1
    with pytest.raises(gp.NotPositiveDefiniteError, match="1 on cuda"):
        gp.check_health()
    gp.check_health()


def test_a_failed_matrix_raises_at_once_outside_capture() -> None:
    s = on_gpu(sample(2, 2, dtype=torch.float32))
    same = s.q[..., :1, :].expand_as(s.q)
    with pytest.raises(gp.NotPositiveDefiniteError, match="4 of 4"):
        cgp_log_density(same, s.k, s.o, s.v, noise=0.1, observation_noise=0.0)
