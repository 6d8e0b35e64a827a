"""The direct model's kernels and the KL divergence's against float64, under Triton's interpreter."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gpattention import gp
from gpattention.attention import build_attention
from gpattention.gp.correlated_density import cgp_density_of
from gpattention.gp.direct_density import direct_density_of
from gpattention.gp.divergence import cgp_kl_of, direct_kl_of
from tests.gp.fused.exact.problems import (
    KL_TOLERANCE,
    TOLERANCE,
    Problem,
    announced,
    check,
    direct,
    direct_announced,
    direct_density,
    direct_kl,
    direct_mean,
    kl,
)
from tests.gp.samples import sample

pytest.importorskip("triton")

MASKED = Problem(5, 7, masked=True, amplified=True, lead=(1, 1))
CROSS = Problem(3, 17, lead=(1, 1))
ALONE = Problem(5, 5, lead=())
SHARP = Problem(16, 16, noise=1e-3, spread=0.5, lead=(1, 1))
LARGE = [
    Problem(64, 64, 32, 32, masked=True, amplified=True, spread=0.3, lead=(1, 1)),
    Problem(65, 40, 5, 40, spread=0.4, lead=(1, 1)),
]
S = sample(1, 1, queries=4, keys=4, dtype=torch.float32)


@pytest.mark.parametrize("problem", [MASKED, CROSS, ALONE, replace(MASKED, queries=17, keys=1)], ids=str)
@pytest.mark.parametrize("call", [direct, direct_mean, direct_density])
def test_direct(call: Callable, problem: Problem) -> None:
    check(call, problem)


@pytest.mark.parametrize(("problem", "tolerance"), [(MASKED, KL_TOLERANCE), (SHARP, 1e-4)], ids=str)
@pytest.mark.parametrize("call", [kl, direct_kl])
def test_divergence(call: Callable, problem: Problem, tolerance: float) -> None:
    check(call, problem, tolerance=tolerance)


@pytest.mark.parametrize("cost", ["marginal", "kl"])
@pytest.mark.parametrize("make", [announced, direct_announced])
def test_announced_costs_share_a_backward_pass_with_the_moments(make: Callable, cost: str) -> None:
    check(make(cost), CROSS, tolerance=KL_TOLERANCE if cost == "kl" else TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("problem", LARGE, ids=str)
@pytest.mark.parametrize("call", [direct, direct_density, direct_announced("kl"), announced("kl")])
def test_large(call: Callable, problem: Problem) -> None:
    check(call, problem, tolerance=KL_TOLERANCE)


def test_amplitudes_beyond_float32_where_kernel_values_are_nothing() -> None:
    far = (S.q + 12).requires_grad_()  # kernel values underflow, amplitudes overflow, their products are 1
    options = {"noise": 0.1, "log_amplitude": gp.row_log_amplitude(far.detach(), S.k)}
    assert float(options["log_amplitude"].min()) > 90
    found = {}
    for mode in ("off", "on"):
        with gp.fused_kernels(mode):
            mean = gp.direct_posterior(far, S.k, S.v, **options).mean
            found[mode] = mean.detach(), *torch.autograd.grad(mean.square().sum(), far)
    for fused, plain in zip(found["on"], found["off"], strict=True):
        assert bool(fused.isfinite().all())
        torch.testing.assert_close(fused, plain, rtol=2e-4, atol=2e-5)  # exponents of 200 have 5 digits


def test_the_variance_stays_above_its_floor() -> None:
    same = S.k[..., :1, :].expand_as(S.k)  # all keys and queries in one place: the floor itself
    for mode in ("off", "on"):
        leaves = [torch.tensor(x, requires_grad=True) for x in (0.1, 0.7)]
        with gp.fused_kernels(mode):
            p = gp.direct_posterior(same, same, S.v, noise=leaves[0], scale_k=leaves[1])
            variance = p.variance
        grads = torch.autograd.grad(variance.sum(), leaves)
        floor = 0.1 / (4 * 0.49 + 0.1)
        torch.testing.assert_close(variance, torch.full_like(variance, floor), rtol=1e-5, atol=0)
        torch.testing.assert_close(grads[0], torch.tensor(4 * 4 * 0.49 / 2.06**2), rtol=1e-4, atol=0)


def test_costs_that_were_not_announced_are_the_same() -> None:
    def costs(early: bool) -> list[Tensor]:
        found = []
        for make in (lambda **o: gp.cgp_posterior(S.q, S.k, S.o, S.v, noise=0.1, **o),
                     lambda **o: gp.direct_posterior(S.q, S.k, S.v, noise=0.1, **o)):  # fmt: skip
            for cost in ("marginal", "kl"):
                found.append(make(**({"with_cost": cost} if early else {})).fused_cost(cost))
        return found

    with gp.fused_kernels("on"):
        for a, b in zip(costs(True), costs(False), strict=True):
            assert torch.equal(a, b)
    with gp.fused_kernels("off"):
        assert costs(True) == [None] * 4


def test_a_cost_and_the_key_density_of_one_posterior_add_their_gradients() -> None:
    found = []
    for mode in ("off", "on"):
        v = S.v.clone().requires_grad_()
        with gp.fused_kernels(mode):
            total = torch.zeros(())
            for p, density in (
                (gp.cgp_posterior(S.q, S.k, S.o, v, noise=0.1, with_cost="marginal"), cgp_density_of),
                (gp.direct_posterior(S.q, S.k, v, noise=0.1, with_cost="marginal"), direct_density_of),
            ):
                cost = p.fused_cost("marginal")
                cost = -density(p).total if cost is None else cost
                total = total + cost.sum() + 0.3 * density(p).key.sum()
        found.append(torch.autograd.grad(total, v)[0])
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)


def test_other_views_of_the_direct_posterior() -> None:
    def views(mode: str) -> list[Tensor]:
        with gp.fused_kernels(mode):
            p = gp.direct_posterior(S.q, S.k, S.v, noise=0.1, scale_k=0.7)
            density = direct_density_of(p, "joint").total
            other = direct_density_of(p, observation_noise=0.3).total
            return [p.covariance(), p.prior_stddev, p.log_variance, density, other, direct_kl_of(p, 0.3)]

    for fused, plain in zip(views("on"), views("off"), strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-5)


def test_causal_attention_stays_plain() -> None:
    with gp.fused_kernels("on"):
        p = gp.direct_posterior(S.q, S.k, S.v, noise=0.1, causal=True, with_variance=True)
        assert p.why_not_fused() == "causal attention has no kernel"
        assert p.fused() is None
        assert p.variance.shape == (1, 1, 4)


@pytest.mark.parametrize("kind", ["direct", "cgp"])
def test_the_noise_told_of_keys_is_beside_their_amplitude(kind: str) -> None:
    s = sample(1, 1, queries=3, keys=7, spread=3.0, dtype=torch.float32)
    k, options = s.k[..., :1, :].expand_as(s.k), {"noise": 1e-4, "scale_k": 1e3, "with_variance": True}
    expected = pytest.raises(
        gp.NotPositiveDefiniteError, match=r"K_k \+ noise I .* smallest noise 1\.0e-10\. "
    )
    with gp.fused_kernels("on"), expected:
        if kind == "direct":
            gp.direct_posterior(s.q, k, s.v, **options)
        else:
            gp.cgp_posterior(s.q, k, s.o, s.v, **options)


def test_a_failed_factor_is_named_or_counted() -> None:
    same = S.q[:, :, :1].expand_as(S.q)
    with gp.fused_kernels("on"):
        with pytest.raises(gp.NotPositiveDefiniteError, match="K_k \\+ noise I"):
            gp.direct_posterior(S.q, same, S.v, noise=1e-9, with_variance=True)
        with pytest.raises(gp.NotPositiveDefiniteError, match="K_q \\+ tau\\^2 I"):
            gp.direct_kl(same, S.k, S.v, noise=1e-9)
        with gp.deferred_checks():
            assert bool(gp.direct_kl(same, S.k, S.v, noise=1e-9).isnan().all())
    with pytest.raises(gp.NotPositiveDefiniteError, match="on cpu"):
        gp.check_health()


@pytest.mark.parametrize("kind", ["cgp", "direct"])
@pytest.mark.parametrize("options", [{"regularizer": "kl"}, {"regularizer": "marginal", "normalize": "none"}])
def test_a_training_step_of_the_module(kind: str, options: dict[str, str]) -> None:
    found = {}
    for mode in ("off", "on"):
        torch.manual_seed(0)
        layer = build_attention(kind, embed_dim=4, num_heads=2, **options).train()
        x = torch.randn(1, 5, 4, generator=torch.Generator().manual_seed(1))
        items = torch.zeros(1, dtype=torch.long)
        with gp.fused_kernels(mode):
            told = layer(
                x, draw="independent", need=("output", "regularizer"), generator=gp.ItemNoise(0, items, items)
            )
            loss = told.output.square().sum() + told.regularizer
        found[mode] = [loss, *torch.autograd.grad(loss, list(layer.parameters()))]
    for fused, plain in zip(found["on"], found["off"], strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-4, atol=2e-5)


def test_the_fused_divergence_is_that_of_the_other_noise_in_the_limit() -> None:
    with gp.fused_kernels("on"):
        p = gp.cgp_posterior(S.q, S.k, S.o, S.v, noise=0.1)
        torch.testing.assert_close(cgp_kl_of(p), cgp_kl_of(p, 0.1), rtol=1e-4, atol=1e-5)
