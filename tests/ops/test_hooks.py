"""Where the kernels meet the rest: the same posterior, densities and draws with the switch on and off."""

from functools import partial

import pytest
import torch
from torch import Tensor

from gpattention import gp
from gpattention.ops.draws import draws_fit, fused_draw
from tests.gp.samples import sample
from tests.ops import comparison

pytest.importorskip("triton")

S = sample(1, 1, queries=5, keys=4, dtype=torch.float32)
MASKED = {"mask": S.mask, "query_mask": S.query_mask, "log_amplitude": S.log_amplitude}


def cgp(q: Tensor, **options: object) -> gp.Posterior:
    return gp.cgp_posterior(q, S.k, S.o, S.v, noise=0.1, **{**MASKED, **options})


def noise(batch: int = 1) -> gp.ItemNoise:
    return gp.ItemNoise(0, torch.arange(batch), torch.zeros(batch))


both = partial(comparison.both, x=S.q)


@pytest.mark.parametrize("objective", ["marginal", "jensen", "joint", "monte_carlo"])
def test_every_density_of_a_fused_posterior(objective: str) -> None:
    both(lambda q: cgp(q).log_density(objective, generator=noise()).total)


def test_other_observation_noise_latent_prior_and_kl() -> None:
    both(lambda q: cgp(q).log_density(observation_noise=0.3).total)
    both(lambda q: cgp(q).log_density(latent_prior="latent").total)
    both(lambda q: cgp(q).kl())


def test_other_views_of_a_fused_posterior() -> None:
    both(lambda q: cgp(q).covariance())
    both(lambda q: cgp(q).stddev)
    both(lambda q: cgp(q).prior_stddev + cgp(q).mean.sum(-1))
    both(lambda q: cgp(q).sample(2, joint=True, generator=noise()))


def test_a_variance_asked_for_later_is_the_same() -> None:
    with gp.fused_kernels("on"):
        early, late = cgp(S.q, with_variance=True), cgp(S.q)
        assert torch.equal(early.variance, late.variance)
        assert torch.equal(early.mean, late.mean)


def test_inputs_of_any_stride() -> None:
    spread_out = S.q.mT.contiguous().mT
    assert spread_out.stride(-1) != 1
    both(lambda q: cgp(q.mT.contiguous().mT).mean, x=spread_out)


@pytest.mark.parametrize("options", [{}, {"mask": S.mask}, MASKED | {"log_amplitude": None}], ids=len)
def test_row_amplitudes(options: dict[str, Tensor]) -> None:
    options = {name: x for name, x in options.items() if x is not None}
    scale = torch.tensor([1.5])
    both(lambda q: gp.row_log_amplitude(q, S.k, scale=scale, **options))
    both(lambda q: gp.row_log_amplitude(S.q, q, scale=scale, **options), x=S.k)
    both(lambda q: gp.row_log_amplitude(q, S.k, max_log_amplitude=0.1, **options))


def test_row_amplitudes_far_away_without_keys_and_causal() -> None:
    none = torch.zeros_like(S.mask)
    with gp.fused_kernels("on"):
        assert (gp.row_log_amplitude(S.q, S.k, mask=none) == 0).all()
        far = gp.row_log_amplitude(S.q + 1e3, S.k)
    assert bool((far > 1e6).all())  # half a squared distance, no overflow
    square = S.q[..., :4, :]
    both(lambda q: gp.row_log_amplitude(q, S.k, causal=True), x=square)


@pytest.mark.parametrize("draws", [1, 3])
def test_draws_of_the_direct_model_and_of_long_sequences(draws: int) -> None:
    t = sample(2, 1, queries=70, keys=3, channels=3, dtype=torch.float32)
    query = torch.arange(70) % 5 != 0  # [Q]
    both(lambda q: gp.direct_posterior(q, t.k, t.v, noise=0.1).sample(draws, generator=noise(2)), x=t.q)
    both(
        lambda q: gp.direct_posterior(q, t.k, t.v, noise=0.1, query_mask=query).sample(
            draws, generator=noise(2)
        ),
        x=t.q,
    )


def test_draws_too_large_for_a_launch_stay_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    assert draws_fit(torch.Size([10, 100, 4, 64, 32]))
    assert draws_fit(torch.Size([1, 1, 4, 1_048_576, 32]))
    assert not draws_fit(torch.Size([65_536, 1, 1, 1, 1]))
    assert not draws_fit(torch.Size([1, 1, 1, 32 * 65_536, 1]))
    assert not draws_fit(torch.Size([16, 4, 32, 1024, 1024]))
    monkeypatch.setattr("gpattention.gp.posterior.draws_fit", lambda shape: False)
    monkeypatch.setattr("gpattention.gp.posterior.fused_draw", None)
    both(lambda q: gp.direct_posterior(q, S.k, S.v, noise=0.1).sample(generator=noise()))


def test_draws_of_the_sparse_model() -> None:
    inducing = S.inducing_q, S.inducing_k
    both(lambda q: gp.scgp_posterior(q, S.k, S.o, S.v, *inducing, noise=0.1).sample(2, generator=noise()))


def test_draws_with_one_variance_per_channel_stay_plain() -> None:
    m = S.inducing_q.shape[-2]
    values, root = torch.ones(m, 4), 0.5 * torch.eye(m).expand(4, m, m)
    both(
        lambda q: gp.sgpa_posterior(q, S.v[..., :1, :].expand(1, 1, 5, 4), S.inducing_q, values, root).sample(
            2, generator=noise()
        )
    )


def test_draws_of_a_fixed_spread_pass_the_mean_its_gradient() -> None:
    mean, spread = S.q.clone().requires_grad_(), torch.ones(1, 1, 5)
    normal = torch.randn(2, *S.q.shape, generator=torch.Generator().manual_seed(0))
    draws = fused_draw(mean, spread, normal, squared=False)
    (g,) = torch.autograd.grad(draws.sum(), mean)
    assert torch.equal(g, torch.full_like(g, 2.0))


def test_a_deferred_failure_of_the_density_is_counted() -> None:
    same = S.q[:, :, :1].expand_as(S.q)
    options = {"mask": None, "query_mask": None, "log_amplitude": None}
    with gp.fused_kernels("on"), gp.deferred_checks():
        density = cgp(same, **options).log_density(observation_noise=1e-12)
        assert density.query.isnan().all()
    with pytest.raises(gp.NotPositiveDefiniteError):
        gp.check_health()
    with (
        gp.fused_kernels("on"),
        pytest.raises(gp.NotPositiveDefiniteError, match="covariance of the queries"),
    ):
        cgp(same, **options).log_density(observation_noise=1e-12)
