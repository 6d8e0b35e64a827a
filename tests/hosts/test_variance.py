"""The spread of a site against the library's own posteriors in float64, and what it must obey."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gpattention.attention.base import Form
from gpattention.gp import direct_posterior, fused_kernels, row_log_amplitude, softmax_posterior
from gpattention.hosts.families.base import AttentionCall
from gpattention.hosts.variance import (
    ALIGNMENTS,
    Frame,
    Prior,
    aligning_maps,
    log_stddev,
    process_mean,
    thinned,
)

B, H, N, C, D = 2, 3, 40, 4, 5


def attention_call(
    form: Form = "softmax", *, masked: bool = True, keys: int = N, spread: float = 1.0
) -> AttentionCall:
    g = torch.Generator().manual_seed(0)
    q, k = (spread * torch.randn(B, H, n, C, generator=g, dtype=torch.float64) for n in (N, keys))
    v = torch.randn(B, H, keys, D, generator=g, dtype=torch.float64)
    mask = torch.arange(keys) < torch.tensor([[[keys]], [[keys - 7]]]) if masked else None
    return AttentionCall(torch.zeros(B, H, N, D, dtype=torch.float64), q, k, v, mask, form)


def prior(scale: float = 1.0, noise: float = 0.1, power: float = 1.0) -> Prior:
    return Prior(*(torch.full((H,), x, dtype=torch.float64) for x in (scale, noise, power)))


def frame(alignment: str = "none", shift: float = 0.0) -> Frame:
    g = torch.Generator().manual_seed(1)
    roots = (torch.randn(H, C, C, generator=g, dtype=torch.float64) for _ in range(2))
    maps = aligning_maps(*(r @ r.mT for r in roots), alignment)  # type: ignore[arg-type]
    q0, k0 = (shift * torch.randn(H, C, generator=g, dtype=torch.float64) for _ in range(2))
    one = torch.ones(H, dtype=torch.float64)
    return Frame(q0, k0, *maps, one, torch.zeros_like(one))


def cast(call: AttentionCall, dtype: torch.dtype, device: str = "cpu") -> AttentionCall:
    mask = None if call.mask is None else call.mask.to(device)
    tensors = (x.to(device, dtype) for x in (call.mean, call.q, call.k, call.v))
    return AttentionCall(*tensors, mask, call.form)


EVERYONE = torch.ones(B, 1, N, dtype=torch.bool)


def exact_softmax(call: AttentionCall, prior_scale: float = 1.0) -> Tensor:
    """log variances of the library's own posterior."""
    q, k = call.q * C**0.25, call.k * C**0.25
    given = {"noise": 0.1, "prior_scale": prior_scale, "mask": call.mask, "query_mask": EVERYONE}
    return softmax_posterior(q, k, call.v, **given, centre="none").log_variance


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("keys", [N, 33])
def test_power_one_is_the_softmax_posterior(masked: bool, keys: int) -> None:
    call = attention_call(masked=masked, keys=keys)
    torch.testing.assert_close(2 * log_stddev(call, prior(0.7), frame()), exact_softmax(call, 0.7))


@pytest.mark.parametrize("form", ["rows", "rbf"])
def test_kernels_are_the_direct_posterior(form: Form) -> None:
    """Rows have an amplitude, plain kernels none."""
    call = attention_call(form)
    masks = {"mask": call.mask, "query_mask": EVERYONE}
    amplitude = row_log_amplitude(call.q, call.k, **masks) if form == "rows" else None
    posterior = direct_posterior(call.q, call.k, call.v, noise=0.1, **masks, log_amplitude=amplitude)
    torch.testing.assert_close((2 * log_stddev(call, prior(), frame())).exp(), posterior.variance)


def _fused_and_plain(call: AttentionCall, device: str) -> list[tuple[Tensor, Tensor]]:
    """log std and the gradients of the three scalars, by fused kernels and by plain operations."""
    single = cast(call, torch.float32, device)
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
    for fused, plain in _fused_and_plain(attention_call(form, masked=masked), "cpu"):
        torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("keys", [N, 33])
@pytest.mark.parametrize("form", ["softmax", "rows", "rbf"])
def test_fused_kernels_on_a_gpu(form: Form, keys: int) -> None:
    call = attention_call(form, keys=keys)
    (fused, _), *slopes = _fused_and_plain(call, "cuda")
    exact = log_stddev(call, prior(0.7, 0.1, 0.5), frame())
    torch.testing.assert_close(fused.cpu().double(), exact, rtol=1e-5, atol=1e-4)
    for ours, theirs in slopes:
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_amplitudes_that_underflow_are_summed_in_logarithms() -> None:
    call = attention_call(spread=12.0)
    near = log_stddev(call, prior(), frame())
    torch.testing.assert_close(2 * near, exact_softmax(call))
    single = log_stddev(cast(call, torch.float32), prior(), frame())
    torch.testing.assert_close(single.double(), near, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("form", ["softmax", "rows", "rbf", "exp_dot"])
@pytest.mark.parametrize("alignment", ALIGNMENTS)
def test_the_mean_is_the_hosts_in_every_frame(form: Form, alignment: str) -> None:
    call = attention_call(form)
    exponent = call.q @ call.k.mT
    if form in ("rows", "rbf"):
        exponent = -0.5 * torch.cdist(call.q, call.k).square()
    exponent = exponent.masked_fill(~call.mask[..., None, :], -torch.inf)
    weights = exponent.softmax(-1) if form in ("softmax", "rows") else exponent.exp()
    torch.testing.assert_close(process_mean(call, frame(alignment, 0.5)), weights @ call.v)
    torch.testing.assert_close(process_mean(call, None), weights @ call.v)


@pytest.mark.parametrize("power", [0.0, 0.4, 1.0])
def test_variances_rise_with_noise_and_scale_and_fall_with_every_further_key(power: float) -> None:
    call = attention_call(masked=False)
    seen = [replace(call, k=call.k[:, :, :keys], v=call.v[:, :, :keys]) for keys in (1, 5, 20, N)]
    if power == 1:  # where the amplitude of a query falls too
        spreads = [log_stddev(some, prior(), frame("full", 0.3)) for some in seen]
        for fewer, more in itertools.pairwise(spreads):
            assert bool((more <= fewer + 1e-9).all())
            assert float((fewer - more).mean()) > 0.01
    call = attention_call()
    less, more = (log_stddev(call, prior(noise=x, power=power), frame()) for x in (0.05, 0.5))
    assert bool((more >= less).all())
    doubled = log_stddev(call, prior(2.0, 0.5, power), frame())
    torch.testing.assert_close(doubled, more + torch.tensor(2.0).double().log())


def test_fewer_keys_never_explain_more() -> None:
    call = attention_call()
    exact, sparse = (log_stddev(call, prior(power=0.3), frame(), max_keys=m) for m in (N, 10))
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


def test_the_amplitude_is_capped() -> None:
    call = attention_call(spread=3.0)
    free, capped = (log_stddev(call, prior(), None, max_log_amplitude=x) for x in (None, 0.5))
    assert bool((capped <= free).all())
    unit = log_stddev(call, prior(power=0.0), None)
    assert float((capped - unit).max()) == pytest.approx(0.5)


def test_nothing_to_see_has_no_variance() -> None:
    blind = replace(attention_call(), mask=torch.zeros(B, 1, N, dtype=torch.bool))
    assert bool((log_stddev(blind, prior(power=0.0), frame()) == -torch.inf).all())


def test_alignment_gives_queries_and_keys_one_covariance_and_brings_them_together() -> None:
    g = torch.Generator().manual_seed(3)
    roots = [size * torch.randn(H, C, C, generator=g, dtype=torch.float64) for size in (1.0, 3.0)]
    of_q, of_k = (r @ r.mT + torch.eye(C) for r in roots)  # [H, C, C] unlike each other
    A, inverse = aligning_maps(of_q, of_k, "full")
    assert_near(A @ inverse, torch.eye(C, dtype=torch.float64).expand(H, C, C))
    # one percent of the mean variance holds up directions that carry none
    ridged = [x + 0.01 * trace(x)[:, None, None] / C * torch.eye(C, dtype=x.dtype) for x in (of_q, of_k)]
    x, y = A @ ridged[0] @ A.mT, inverse.mT @ ridged[1] @ inverse
    assert_near(x, y)
    assert float((trace(x) + trace(y)).sum()) < float(sum(trace(each).sum() for each in ridged))


def trace(x: Tensor) -> Tensor:
    return x.diagonal(dim1=-2, dim2=-1).sum(-1)


def assert_near(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
