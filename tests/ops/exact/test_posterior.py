"""The kernels of the exact and the direct model against float64, under Triton's interpreter."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gpattention import gp
from gpattention.attention import build_attention
from tests.gp.samples import sample
from tests.ops.exact.problems import KL_TOLERANCE, TOLERANCE, Problem, check

pytest.importorskip("triton")

MASKED = Problem(5, 7, masked=True, amplified=True, lead=(1, 1))
CROSS = Problem(3, 17, lead=(1, 1))
SHARP = Problem(16, 16, noise=1e-3, spread=0.5, lead=(1, 1))
MOMENTS = [
    Problem(7, 7, masked=True, amplified=True),
    CROSS,
    Problem(17, 1, masked=True, amplified=True, lead=(1, 1)),
    Problem(1, 3, amplified=True, lead=(1,)),
    Problem(5, 5, masked=True, lead=()),
    Problem(16, 16, noise=1e-4, spread=0.5, lead=(1, 1)),
]
LARGE = [
    Problem(64, 64, 32, 32, masked=True, amplified=True, spread=0.3, lead=(1, 1)),
    Problem(65, 40, 5, 40, spread=0.4, lead=(1, 1)),
    Problem(128, 100, 64, 3, masked=True, spread=0.2, noise=1e-2, lead=(1, 1)),
]
S = sample(1, 1, queries=4, keys=4, dtype=torch.float32)
both_models = pytest.mark.parametrize("model", ["cgp", "direct"])


def posterior(model: str, q: Tensor, k: Tensor, o: Tensor, v: Tensor, **options: Any) -> Any:
    return (
        gp.cgp_posterior(q, k, o, v, **options) if model == "cgp" else gp.direct_posterior(q, k, v, **options)
    )


@pytest.mark.parametrize("problem", MOMENTS, ids=str)
@both_models
def test_moments(model: str, problem: Problem) -> None:
    check(f"{model} moments", problem)


@pytest.mark.parametrize("problem", [replace(MOMENTS[0], lead=(1, 1)), CROSS], ids=str)
@pytest.mark.parametrize("call", ["mean", "density", "draw"])
@both_models
def test_mean_alone_densities_and_draws(model: str, call: str, problem: Problem) -> None:
    check(f"{model} {call}", problem)


@pytest.mark.parametrize(("problem", "tolerance"), [(MASKED, KL_TOLERANCE), (SHARP, 1e-4)], ids=str)
@both_models
def test_divergence(model: str, problem: Problem, tolerance: float) -> None:
    check(f"{model} kl", problem, tolerance=tolerance)


@pytest.mark.parametrize("cost", ["marginal", "kl"])
@both_models
def test_announced_costs_share_a_backward_pass_with_the_moments(model: str, cost: str) -> None:
    check(f"{model} announced {cost}", CROSS, tolerance=KL_TOLERANCE if cost == "kl" else TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("problem", LARGE, ids=str)
@pytest.mark.parametrize("call", ["moments", "density", "announced kl"])
@both_models
def test_large(model: str, call: str, problem: Problem) -> None:
    strict = model == "cgp" and call != "announced kl"
    check(f"{model} {call}", problem, tolerance=TOLERANCE if strict else KL_TOLERANCE)


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
        return [
            posterior(
                model, S.q, S.k, S.o, S.v, noise=0.1, **({"with_cost": cost} if early else {})
            ).fused_cost(cost)
            for model in ("cgp", "direct")
            for cost in ("marginal", "kl")
        ]

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
            for model in ("cgp", "direct"):
                p = posterior(model, S.q, S.k, S.o, v, noise=0.1, with_cost="marginal")
                cost = p.fused_cost("marginal")
                cost = -p.log_density().total if cost is None else cost
                total = total + cost.sum() + 0.3 * p.log_density().key.sum()
        found.append(torch.autograd.grad(total, v)[0])
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)


def test_other_views_of_the_direct_posterior() -> None:
    def views(mode: str) -> list[Tensor]:
        with gp.fused_kernels(mode):
            p = gp.direct_posterior(S.q, S.k, S.v, noise=0.1, scale_k=0.7)
            density = p.log_density("joint").total
            other = p.log_density(observation_noise=0.3).total
            return [p.covariance(), p.prior_stddev, p.log_variance, density, other, p.kl(0.3)]

    for fused, plain in zip(views("on"), views("off"), strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-5)


def test_causal_attention_stays_plain() -> None:
    with gp.fused_kernels("on"):
        p = gp.direct_posterior(S.q, S.k, S.v, noise=0.1, causal=True, with_variance=True)
        assert p.why_not_fused() == "causal attention has no kernel"
        assert p.fused() is None
        assert p.variance.shape == (1, 1, 4)


@both_models
def test_the_noise_named_of_keys_is_beside_their_amplitude(model: str) -> None:
    s = sample(1, 1, queries=3, keys=7, spread=3.0, dtype=torch.float32)
    k, options = s.k[..., :1, :].expand_as(s.k), {"noise": 1e-4, "scale_k": 1e3, "with_variance": True}
    message = r"K_k \+ noise I .* smallest noise 1\.0e-10\. "
    with gp.fused_kernels("on"), pytest.raises(gp.NotPositiveDefiniteError, match=message):
        posterior(model, s.q, k, s.o, s.v, **options)


def test_a_failed_factor_is_named_or_counted() -> None:
    s = sample(1, 2, queries=4, keys=4, dtype=torch.float32)
    o, k, same = s.o.clone(), s.k.clone(), S.q[:, :, :1].expand_as(S.q)
    o[0, 1], k[0, 0] = o[0, 1, :1], k[0, 0, :1]  # in one head all coincide, and the noise is below rounding
    with gp.fused_kernels("on"):
        with pytest.raises(gp.NotPositiveDefiniteError) as caught:
            gp.cgp_posterior(s.q, s.k, o, s.v, noise=1e-9)
        assert "1 of 2 matrices K_o + noise I (4 x 4, float32)" in str(caught.value)
        assert "pivot to fail is number 2 of matrix [0, 1]" in str(caught.value)
        with pytest.raises(gp.NotPositiveDefiniteError, match="K_k \\+ noise I"):
            gp.direct_posterior(S.q, same, S.v, noise=1e-9, with_variance=True)
        with pytest.raises(gp.NotPositiveDefiniteError, match="K_q \\+ tau\\^2 I"):
            gp.direct_posterior(same, S.k, S.v, noise=1e-9, with_cost="kl").kl()
        with gp.deferred_checks():
            variance = gp.cgp_posterior(s.q, k, s.o, s.v, noise=1e-9, with_variance=True).variance
    assert variance[0, 0].isnan().all()
    assert variance[0, 1].isfinite().all()
    with pytest.raises(gp.NotPositiveDefiniteError, match="1 on cpu"):
        gp.check_health()
    with gp.fused_kernels("on"), gp.deferred_checks():
        assert bool(gp.direct_posterior(same, S.k, S.v, noise=1e-9, with_cost="kl").kl().isnan().all())
    with pytest.raises(gp.NotPositiveDefiniteError, match="on cpu"):
        gp.check_health()


@both_models
def test_padding_hides_whatever_is_written_there(model: str) -> None:
    s = sample(1, 1, queries=6, keys=6, dtype=torch.float32)
    spoiled = [getattr(s, name).masked_fill(~s.mask[..., None], float("nan")) for name in "kov"]
    options = {"noise": 0.1, "mask": s.mask, "query_mask": s.query_mask, "with_variance": True}
    with gp.fused_kernels("on"):
        clean, spoilt = (posterior(model, s.q, *x, **options) for x in ((s.k, s.o, s.v), spoiled))
    for x, y in ((clean.mean, spoilt.mean), (clean.variance, spoilt.variance)):
        assert torch.equal(x, y)
        assert (x[~s.query_mask] == 0).all()


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
            result = layer(
                x, draw="independent", need=("output", "regularizer"), generator=gp.ItemNoise(0, items, items)
            )
            loss = result.output.square().sum() + result.regularizer
        found[mode] = [loss, *torch.autograd.grad(loss, list(layer.parameters()))]
    for fused, plain in zip(found["on"], found["off"], strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-4, atol=2e-5)


def test_the_fused_divergence_is_that_of_the_other_noise_in_the_limit() -> None:
    with gp.fused_kernels("on"):
        p = gp.cgp_posterior(S.q, S.k, S.o, S.v, noise=0.1)
        torch.testing.assert_close(p.kl(), p.kl(0.1), rtol=1e-4, atol=1e-5)
