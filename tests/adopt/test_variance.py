"""The spread of a site against the library's own posteriors in float64, and what it must obey."""

import itertools

import pytest
import torch
from torch import Tensor

from gpattention.adopt.attended import Attended, Form
from gpattention.adopt.frames import ALIGNMENTS, Alignment, Frame, aligning_maps
from gpattention.adopt.variance import Prior, log_stddev, process_mean, thinned
from gpattention.gp import direct_posterior, fused_kernels, row_log_amplitude, softmax_posterior

B, H, N, C, D = 2, 3, 40, 4, 5


def attended(form: Form = "softmax", *, masked: bool = True, keys: int = N, spread: float = 1.0) -> Attended:
    g = torch.Generator().manual_seed(0)
    q, k = (spread * torch.randn(B, H, n, C, generator=g, dtype=torch.float64) for n in (N, keys))
    v = torch.randn(B, H, keys, D, generator=g, dtype=torch.float64)
    mask = torch.arange(keys) < torch.tensor([[[keys]], [[keys - 7]]]) if masked else None
    return Attended(torch.zeros(B, H, N, D, dtype=torch.float64), q, k, v, mask, form)


def prior(scale: float = 1.0, noise: float = 0.1, power: float = 1.0) -> Prior:
    return Prior(*(torch.full((H,), x, dtype=torch.float64) for x in (scale, noise, power)))


def frame(alignment: str = "none", shift: float = 0.0) -> Frame:
    g = torch.Generator().manual_seed(1)
    roots = (torch.randn(H, C, C, generator=g, dtype=torch.float64) for _ in range(2))
    maps = aligning_maps(*(r @ r.mT for r in roots), alignment)  # type: ignore[arg-type]
    q0, k0 = (shift * torch.randn(H, C, generator=g, dtype=torch.float64) for _ in range(2))
    one = torch.ones(H, dtype=torch.float64)
    return Frame(q0, k0, *maps, one, torch.zeros_like(one))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("keys", [N, 33])
def test_power_one_is_the_softmax_posterior(masked: bool, keys: int) -> None:
    told = attended(masked=masked, keys=keys)
    raw = C**0.25
    everyone = torch.ones(B, 1, N, dtype=torch.bool)
    posterior = softmax_posterior(
        told.q * raw, told.k * raw, told.v, noise=0.1, prior_scale=0.7, mask=told.mask,
        query_mask=everyone, centre="none",
    )  # fmt: skip
    torch.testing.assert_close(2 * log_stddev(told, prior(0.7), frame()), posterior.log_variance)


def test_kernel_rows_are_the_direct_posterior() -> None:
    told = attended("rows")
    everyone = torch.ones(B, 1, N, dtype=torch.bool)
    amplitude = row_log_amplitude(told.q, told.k, mask=told.mask, query_mask=everyone)
    posterior = direct_posterior(
        told.q, told.k, told.v, noise=0.1, mask=told.mask, query_mask=everyone, log_amplitude=amplitude
    )
    torch.testing.assert_close((2 * log_stddev(told, prior(), frame())).exp(), posterior.variance)


def test_plain_kernels_have_no_amplitude() -> None:
    told = attended("rbf")
    everyone = torch.ones(B, 1, N, dtype=torch.bool)
    posterior = direct_posterior(told.q, told.k, told.v, noise=0.1, mask=told.mask, query_mask=everyone)
    torch.testing.assert_close((2 * log_stddev(told, prior(), frame())).exp(), posterior.variance)


def _fused_and_plain(told: Attended, device: str) -> list[tuple[Tensor, Tensor]]:
    """log std and the gradients of the three scalars, by fused kernels and by plain operations."""
    single = Attended(
        *(x.float().to(device) for x in (told.mean, told.q, told.k, told.v)),
        None if told.mask is None else told.mask.to(device), told.form,
    )  # fmt: skip
    weights = torch.randn(B, H, N, generator=torch.Generator().manual_seed(2)).to(device)
    found = []
    for mode in ("on", "off"):
        given = [torch.full((H,), x, device=device, requires_grad=True) for x in (0.7, 0.1, 0.5)]
        with fused_kernels(mode):  # type: ignore[arg-type]
            log_std = log_stddev(single, Prior(*given), frame())
        slopes = torch.autograd.grad((weights * log_std).sum(), given, materialize_grads=True)
        found.append((log_std.detach(), *slopes))
    return list(zip(*found, strict=True))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("form", ["softmax", "rows", "rbf"])
def test_fused_kernels_give_the_same_spread(form: Form, masked: bool) -> None:
    for fused, plain in _fused_and_plain(attended(form, masked=masked), "cpu"):
        torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("keys", [N, 33])
@pytest.mark.parametrize("form", ["softmax", "rows", "rbf"])
def test_fused_kernels_on_a_gpu(form: Form, keys: int) -> None:
    told = attended(form, keys=keys)
    (fused, _), *slopes = _fused_and_plain(told, "cuda")
    exact = log_stddev(told, prior(0.7, 0.1, 0.5), frame())
    torch.testing.assert_close(fused.cpu().double(), exact, rtol=1e-5, atol=1e-4)
    for ours, theirs in slopes:
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_amplitudes_that_underflow_are_summed_in_logarithms() -> None:
    told = attended(spread=12.0)
    near = log_stddev(told, prior(), frame())
    raw = C**0.25
    posterior = softmax_posterior(
        told.q * raw, told.k * raw, told.v, noise=0.1, mask=told.mask, centre="none",
        query_mask=torch.ones(B, 1, N, dtype=torch.bool),
    )  # fmt: skip
    single = Attended(told.mean.float(), told.q.float(), told.k.float(), told.v.float(), told.mask)
    torch.testing.assert_close(2 * near, posterior.log_variance)
    torch.testing.assert_close(log_stddev(single, prior(), frame()).double(), near, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("form", ["softmax", "rows", "rbf", "exp_dot"])
@pytest.mark.parametrize("alignment", ["none", "isotropic", "full"])
def test_the_mean_is_the_hosts_in_every_frame(form: Form, alignment: str) -> None:
    told = attended(form)
    exponent = told.q @ told.k.mT
    if form in ("rows", "rbf"):
        exponent = -0.5 * torch.cdist(told.q, told.k).square()
    exponent = exponent.masked_fill(~told.mask[..., None, :], -torch.inf)
    weights = exponent.softmax(-1) if form in ("softmax", "rows") else exponent.exp()
    torch.testing.assert_close(process_mean(told, frame(alignment, 0.5)), weights @ told.v)
    torch.testing.assert_close(process_mean(told, None), weights @ told.v)


def seen_first(told: Attended, keys: int) -> Tensor:
    some = Attended(told.mean, told.q, told.k[:, :, :keys], told.v[:, :, :keys])
    return log_stddev(some, prior(power=1.0), frame("full", 0.3))


def test_variances_fall_with_every_further_key() -> None:
    told = attended(masked=False)
    spreads = [seen_first(told, keys) for keys in (1, 5, 20, N)]
    for fewer, more in itertools.pairwise(spreads):
        assert bool((more <= fewer + 1e-9).all())
        assert float((fewer - more).mean()) > 0.01


@pytest.mark.parametrize("power", [0.0, 0.4, 1.0])
def test_variances_rise_with_noise_and_scale(power: float) -> None:
    told = attended()
    less, more = (log_stddev(told, prior(noise=x, power=power), frame()) for x in (0.05, 0.5))
    assert bool((more >= less).all())
    doubled = log_stddev(told, prior(2.0, 0.5, power), frame())
    torch.testing.assert_close(doubled, more + torch.tensor(2.0).double().log())


def test_fewer_keys_never_explain_more() -> None:
    told = attended()
    exact, sparse = (log_stddev(told, prior(power=0.3), frame(), max_keys=m) for m in (N, 10))
    assert bool((sparse >= exact - 1e-9).all())
    assert float((sparse - exact).max()) > 1e-3


def test_thinning_takes_real_keys_evenly() -> None:
    mask = torch.tensor([[[True] * 8 + [False] * 4], [[False] * 9 + [True] * 3]])
    y = torch.arange(12.0).expand(2, 1, 12)[..., None]
    chosen, real = thinned(y, mask, 4)
    assert chosen[0, 0, :, 0].tolist() == [0, 2, 4, 6]
    assert chosen[1, 0, :, 0][real[1, 0]].tolist() == [9, 10, 11]
    assert real.tolist() == [[[True] * 4], [[True, True, True, False]]]
    chosen, real = thinned(y, None, 4)
    assert chosen[0, 0, :, 0].tolist() == [0, 3, 6, 9]
    assert real is None


def test_without_power_the_amplitude_is_the_unit_process() -> None:
    told = attended()
    log_std = log_stddev(told, prior(power=0.0), frame())
    assert bool((log_std <= 0).all())  # u <= 1
    count = torch.tensor([N, N - 7])[:, None, None]
    assert bool(((2 * log_std).exp() >= 0.1 / (count + 0.1) - 1e-12).all())


def test_the_amplitude_is_capped() -> None:
    told = attended(spread=3.0)
    free, capped = (log_stddev(told, prior(), None, max_log_amplitude=x) for x in (None, 0.5))
    assert bool((capped <= free).all())
    unit = log_stddev(told, prior(power=0.0), None)
    assert float((capped - unit).max()) == pytest.approx(0.5)


def test_nothing_to_see_has_no_variance() -> None:
    told = attended()
    blind = Attended(told.mean, told.q, told.k, told.v, torch.zeros(B, 1, N, dtype=torch.bool))
    assert bool((log_stddev(blind, prior(power=0.0), frame()) == -torch.inf).all())


def test_half_precision_is_computed_in_single() -> None:
    told = attended()
    half = Attended(told.mean.half(), told.q.half(), told.k.half(), told.v.half(), told.mask)
    found = log_stddev(half, prior(), frame())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), log_stddev(told, prior(), frame()), rtol=0.02, atol=0.02)


def test_gradients_of_the_noise_agree_with_differences() -> None:
    told = attended()
    noise = torch.full((H,), 0.2, dtype=torch.float64, requires_grad=True)

    def total(x: Tensor) -> Tensor:
        return log_stddev(told, Prior(prior().scale, x, prior().power), frame()).sum()

    assert torch.autograd.gradcheck(total, noise)


def covariances() -> list[Tensor]:
    """Of queries and of keys, unlike each other.  [H, C, C]"""
    g = torch.Generator().manual_seed(3)
    roots = [size * torch.randn(H, C, C, generator=g, dtype=torch.float64) for size in (1.0, 3.0)]
    return [r @ r.mT + torch.eye(C) for r in roots]


def aligned(alignment: Alignment, of_q: Tensor, of_k: Tensor, *, measured_on: list[Tensor]) -> list[Tensor]:
    """A Sigma_q A^T and A^-T Sigma_k A^-1 for the map that is measured on these covariances."""
    A, inverse = aligning_maps(*measured_on, alignment)
    close(A @ inverse, torch.eye(C, dtype=torch.float64).expand(H, C, C))
    return [A @ of_q @ A.mT, inverse.mT @ of_k @ inverse]


def test_full_alignment_gives_queries_and_keys_one_covariance() -> None:
    measured = covariances()
    # one percent of the mean variance holds up directions that carry none
    ridged = [x + 0.01 * trace(x)[:, None, None] / C * torch.eye(C, dtype=x.dtype) for x in measured]
    x, y = aligned("full", *ridged, measured_on=measured)
    close(x, y)


def test_isotropic_alignment_gives_queries_and_keys_one_size() -> None:
    measured = covariances()
    x, y = aligned("isotropic", *measured, measured_on=measured)
    close(trace(x), trace(y))
    close(x / trace(x)[:, None, None], measured[0] / trace(measured[0])[:, None, None])


def test_alignments_bring_queries_and_keys_together() -> None:
    """E|A q|^2 + E|A^-T k|^2 falls with every freedom."""
    measured = covariances()
    none, isotropic, full = (
        float(sum(trace(x).sum() for x in aligned(alignment, *measured, measured_on=measured)))
        for alignment in ALIGNMENTS
    )
    assert full < isotropic < none


def trace(x: Tensor) -> Tensor:
    return x.diagonal(dim1=-2, dim2=-1).sum(-1)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
