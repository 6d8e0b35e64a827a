"""Tokens many length scales apart: float32 against the oracles, forward and backward, on every path.

Two tokens may be near one another and far from the centre of all, where the expanded form of their
distance has no digits left.  docs/how-to/numerical-failures.md has the range; softmax attention, whose
amplitudes are exponentials of dot products, is not of it.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gpattention import gp
from gpattention.attention import build_attention
from gpattention.gp import kernel_attention
from gpattention.numerics import FARTHEST
from tests.attention.variants import VARIANTS, Variant, every
from tests.gp.calls import cgp_kl, cgp_log_density, change, scgp_log_density
from tests.gp.oracle_pairs import PAIRS
from tests.gp.samples import Sample, sample
from tests.gp.test_against_oracles import LEAD, assert_equal_to_oracle, float32_tolerance
from tests.oracles import kernels

REGIMES = ("clusters", "outlier", "offset", "scattered")
DISTANCES = (30.0, 1e3, 1e4)
NAMES = [
    "direct", "direct causal", "cgp", "cgp causal", "sgpa", "sgpa kl", "row amplitude",
    "row amplitude sparse", "cgp kl", "direct kl", "scgp paper", "scgp dual independent", "scgp kl paper",
    "scgp dtc paper", "scgp jensen dual", "cgp marginal noisy None", "cgp jensen noisy None",
    "cgp joint noisy 0.3", "direct marginal None",
]  # fmt: skip
MASKS = ("mask", "query_mask")
NOISE = 0.05


def far_apart(s: Sample, regime: str, distance: float) -> Sample:
    """The sample with its tokens moved: every second one, the first, all, or each third its own way."""
    g = torch.Generator().manual_seed(7)
    width = s.q.shape[-1]
    ways = torch.randn(3, width, generator=g, dtype=torch.float64)
    ways = distance * ways / ways.norm(dim=-1, keepdim=True)  # [3, C]

    def moved(x: Tensor) -> Tensor:
        n = torch.arange(x.shape[-2])
        alike = {"clusters": n % 2, "outlier": n == 0, "offset": torch.ones_like(n)}
        shift = alike[regime][:, None] * ways[:1] if regime in alike else ways[n % 3]
        return (x.double() + shift).to(x.dtype)

    return change(s, ("q", "k", "o", "inducing_q", "inducing_k"), moved)


def problem(regime: str, distance: float, *, seed: int = 0, width: int = 3) -> Sample:
    return far_apart(sample(*LEAD, seed=seed, width=width, spread=0.8, dtype=torch.float32), regime, distance)


def one(s: Sample) -> Sample:
    """Its first sequence and head: the interpreter is slow."""
    return change(s, ("q", "k", "o", "v", "mask", "query_mask"), lambda x: x[:1, :1])


@pytest.fixture
def fused() -> Iterator[None]:
    """Kernels in the interpreter; `tests/conftest.py` has switched it on where Triton is installed."""
    pytest.importorskip("triton")
    with gp.fused_kernels("on"):
        yield


@pytest.fixture(autouse=True)
def healthy() -> Iterator[None]:
    """Nothing that another test counted, and nothing left for the next."""
    for leave in (False, True):
        try:
            gp.check_health()
        except gp.NotPositiveDefiniteError:
            assert not leave, "the test left failures uncounted"
        if not leave:
            yield


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("name", NAMES)
def test_float32_equals_the_oracle(name: str, regime: str, distance: float) -> None:
    """As near to it as with tokens that lie together."""
    for seed in range(2):
        s = problem(regime, distance, seed=seed)
        tolerance = max(1e-5, float32_tolerance(name))
        assert_equal_to_oracle(PAIRS[name], s, MASKS, NOISE, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["direct", "cgp", "scgp paper", "sgpa", "row amplitude"])
def test_an_offset_is_no_spread(name: str, dtype: torch.dtype) -> None:
    """However large: kernels do not see where the centre is."""
    s = far_apart(sample(*LEAD, spread=0.8, dtype=dtype), "offset", 1e6)
    tolerance = 1e-8 if dtype == torch.float64 else max(1e-5, float32_tolerance(name))
    assert_equal_to_oracle(PAIRS[name], s, MASKS, NOISE, rtol=tolerance)


@pytest.mark.parametrize("distance", [1e3, 1e4])
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("noise", [1e-4, 1e-2, 1.0])
def test_the_mean_is_right_at_every_noise(noise: float, regime: str, distance: float) -> None:
    for name in ("direct", "cgp", "cgp causal", "scgp paper", "scgp dual"):
        s = problem(regime, distance, seed=3, width=16)
        found = PAIRS[name].torch(s, {}, noise)[0].double().numpy()
        for index in itertools.product(*map(range, LEAD)):
            wanted = PAIRS[name].numpy(s.at(*index), {}, noise)[0]
            assert np.abs(found[index] - wanted).max() < 1e-4 * max(1.0, np.abs(wanted).max()), name


Function = Callable[..., list[Tensor]]  # of q, k, o, v, m and the mask


def made(function: Callable[..., Any], names: str, **options: Any) -> Function:
    """A function of some of the tokens as one of all, with its results as a list."""

    def call(*given: Tensor) -> list[Tensor]:
        x = dict(zip(("q", "k", "o", "v", "m", "mask"), given, strict=True))
        found = function(*(x[name] for name in names.split()), mask=x["mask"], **options)
        if isinstance(found, gp.Posterior):
            return [found.mean, found.variance]
        return [found.total if isinstance(found, gp.LogDensity) else found]

    return call


def sgpa(k: Tensor, v: Tensor, m: Tensor, **options: Any) -> gp.Posterior:
    eye = torch.eye(m.shape[0], dtype=v.dtype, device=v.device).expand(v.shape[-1], -1, -1)
    return gp.sgpa_posterior(k, v, m, v[0, 0, :1].expand(m.shape[0], -1).detach(), eye, **options)


def attention(*tokens: Tensor, mask: Tensor, **options: Any) -> Tensor:
    return kernel_attention(*tokens, mask=mask, query_mask=mask, **options)


CALLS = {
    "cgp": made(gp.cgp_posterior, "q k o v", noise=NOISE, with_variance=True),
    "direct": made(gp.direct_posterior, "q k v", noise=NOISE, with_variance=True),
    "scgp": made(gp.scgp_posterior, "q k o v m", noise=NOISE),
    "sgpa": made(sgpa, "k v m"),
    "density": made(cgp_log_density, "q k o v", noise=NOISE),
    "kl": made(cgp_kl, "q k o v", noise=NOISE),
    "amplitude": made(gp.row_log_amplitude, "q k"),
    "sparse amplitude": made(gp.sparse_row_log_amplitude, "q k m"),
    "rows": made(attention, "q k v", normalised=True),
    "kernel": made(attention, "q k v", normalised=False),
}
PLAIN_ONLY = {
    "jensen": made(scgp_log_density, "q k o v m", noise=NOISE, objective="jensen"),
    "causal": made(gp.causal_cgp_posterior, "q k o v", noise=NOISE),
}
EVERY = CALLS | PLAIN_ONLY


def given(s: Sample) -> tuple[Tensor, ...]:
    return s.q, s.k, s.o, s.v, s.inducing_q, s.mask


def outputs_and_gradients(
    call: Function, s: Sample, dtype: torch.dtype, device: str
) -> tuple[list[Tensor], list[Tensor]]:
    """The results, and the gradients of a fixed combination of them to all tokens that they depend on."""
    leaves = [x.to(device, dtype).requires_grad_() for x in (s.q, s.k, s.o, s.v, s.inducing_q)]
    found = call(*leaves, s.mask.to(device))
    g = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=g, dtype=torch.float64).to(x) for x in found]
    loss = sum(((w * x).sum() for w, x in zip(weights, found, strict=True)), torch.zeros((), device=device))
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    return (
        [x.detach().cpu() for x in found],
        [torch.zeros(()) if x is None else x.cpu() for x in gradients],
    )


def compare(call: Function, s: Sample, *, gradient: float = 1e-3, device: str = "cpu") -> None:
    """Outputs within 1e-4 of float64, gradients within `gradient` of the largest one."""
    ours = outputs_and_gradients(call, s, torch.float32, device)
    with gp.fused_kernels("off"):
        theirs = outputs_and_gradients(call, s, torch.float64, device)
    for found, wanted, limit in zip(ours, theirs, (1e-4, gradient), strict=True):
        for x, y in zip(found, wanted, strict=True):
            assert (x - y).abs().max() <= limit * max(1e-3, float(y.abs().max()))


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("name", EVERY)
def test_gradients(name: str, regime: str, distance: float) -> None:
    compare(EVERY[name], problem(regime, distance))


def fused_gradient(distance: float) -> float:
    """What a gradient by products of float32 loses to the spread."""
    return max(1e-3, 1e-6 * distance)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize(("regime", "distance"), [("clusters", 1e4), ("outlier", 1e3), ("scattered", 1e3)])
@pytest.mark.parametrize("name", CALLS)
def test_fused_kernels(name: str, regime: str, distance: float) -> None:
    s = problem(regime, distance)
    compare(CALLS[name], one(s), gradient=fused_gradient(distance))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", ["on", "off"])
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("name", CALLS)
def test_on_a_gpu(name: str, regime: str, mode: str) -> None:
    large = sample(*LEAD, queries=100, keys=100, width=32, channels=32, spread=0.3, dtype=torch.float32)
    for distance in DISTANCES:
        limit = fused_gradient(distance)
        for s in (problem(regime, distance), far_apart(large, regime, distance)):
            with gp.fused_kernels(mode):
                compare(CALLS[name], s, gradient=limit, device="cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", ["on", "off"])
def test_a_captured_graph_counts_tokens_out_of_range(mode: str) -> None:
    s = problem("clusters", 1e3)
    q, k, o, v = (x.cuda() for x in (s.q, s.k, s.o, s.v))
    wanted = gp.cgp_posterior(*(x.double() for x in (q, k, o, v)), noise=NOISE).mean
    with gp.fused_kernels(mode), gp.deferred_checks():
        for _ in range(2):
            gp.cgp_posterior(q, k, o, v, noise=NOISE)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            mean = gp.cgp_posterior(q, k, o, v, noise=NOISE).mean
    graph.replay()
    assert (mean - wanted).abs().max() < 1e-4
    assert not gp.health()["cuda:0"]
    o[..., 1:, :] *= 1e3
    graph.replay()
    assert mean.isnan().any()
    with pytest.raises(gp.NotPositiveDefiniteError, match="too far apart"):
        gp.check_health()


@pytest.mark.parametrize("lengthscale", [0.01, 0.03, 0.1, 1.0, 10.0])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_kernels_of_short_length_scales_keep_near_duplicates(lengthscale: float, offset: float) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(12, 5, generator=g, dtype=torch.float64) + offset
    y = x + 0.3 * lengthscale * torch.randn(12, 5, generator=g, dtype=torch.float64)
    x, y = x.float(), y.float()
    wanted = kernels.ard_rbf(x.double().numpy(), y.double().numpy(), lengthscale, 1.7)
    found = gp.ard_rbf(x, y, lengthscale, 1.7).numpy()
    # what is left is the rounding of x / lengthscale: some 1e-7 of 300
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-4)
    both = torch.cat([x, y])
    wanted = kernels.ard_rbf(both.double().numpy(), both.double().numpy(), lengthscale, 1.7)
    np.testing.assert_allclose(gp.ard_rbf(both, both, lengthscale, 1.7).numpy(), wanted, rtol=0, atol=2e-4)


def spoiled(s: Sample, padding: float) -> tuple[Tensor, ...]:
    tokens = (torch.where(s.mask[..., None], getattr(s, n), padding) for n in ("q", "k", "o", "v"))
    return *tokens, s.inducing_q, s.mask


@pytest.mark.parametrize("padding", [float("nan"), float("inf"), 1e30, -7e4, 0.0])
@pytest.mark.parametrize("name", EVERY)
def test_padding_has_no_spread(name: str, padding: float) -> None:
    """Whatever is written at padded tokens, also where the real ones are at an offset from 0."""
    s = problem("offset", 3e4)
    for x, y in zip(EVERY[name](*spoiled(s, padding)), EVERY[name](*given(s)), strict=True):
        assert x.isfinite().all()
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("name", CALLS)
def test_padding_has_no_spread_in_fused_kernels(name: str) -> None:
    s = one(problem("offset", 3e4))
    for x, y in zip(CALLS[name](*spoiled(s, 0.0)), CALLS[name](*given(s)), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


def test_padding_of_a_causal_state_has_no_spread() -> None:
    s = problem("offset", 3e4)
    mask = s.mask.clone()
    mask[0, :, :2] = False  # one sequence starts late
    state, rows = gp.CausalCGPState(noise=NOISE), []
    for i in range(s.q.shape[-2]):
        q, k, o, v = (torch.where(mask[..., i, None], x[..., i, :], 1e6) for x in (s.q, s.k, s.o, s.v))
        rows.append(state.append(q, k, o, v, mask=mask[..., i]).mean)
    wanted = gp.causal_cgp_posterior(*(x.double() for x in (s.q, s.k, s.o, s.v)), noise=NOISE, mask=mask).mean
    assert (torch.stack(rows, -2) - wanted).abs().max() < 1e-5


OUT_OF_RANGE = 4 * FARTHEST


@pytest.mark.parametrize("name", EVERY)
def test_tokens_out_of_range_are_refused(name: str) -> None:
    s = problem("clusters", OUT_OF_RANGE)
    with pytest.raises(gp.TooFarApartError, match=r"within 16384 length scales .* got one at [3-7].*e\+04"):
        EVERY[name](*given(s))


def test_the_refusal_names_spread_and_noise() -> None:
    s = problem("outlier", 1e6)
    noise = torch.tensor([0.3, 2e-3])
    with pytest.raises(gp.TooFarApartError, match=r"got one at 8.57e\+05 \(smallest noise 2.0e-03\)"):
        gp.cgp_posterior(s.q, s.k, s.o, s.v, noise=noise)
    gp.cgp_posterior(*(x.double() for x in (s.q, s.k, s.o, s.v)), noise=noise.double())  # float64 can


def test_kernels_refuse_tokens_out_of_range() -> None:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    for call in (lambda y: gp.rbf(x, y), lambda y: gp.rbf(y, y), lambda y: gp.ard_rbf(x, y, 0.01)):
        with pytest.raises(gp.TooFarApartError, match="length scales of their centre"):
            call(torch.cat([x, x + 1e5]))


FACTORED = ["cgp", "direct", "scgp", "sgpa", "density", "kl"]  # those that fused kernels can count


@pytest.mark.parametrize("name", CALLS)
def test_deferred_checks_count_and_give_nan(name: str) -> None:
    s = problem("scattered", OUT_OF_RANGE)
    with gp.deferred_checks():
        found = CALLS[name](*given(s))
    assert all(x.isnan().any() for x in found)
    assert gp.health()["cpu"] > 0
    with pytest.raises(gp.NotPositiveDefiniteError, match="too far apart"):
        gp.check_health()


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("name", FACTORED)
def test_fused_kernels_refuse_or_count_and_give_nan(name: str) -> None:
    s = one(problem("scattered", OUT_OF_RANGE))
    with pytest.raises(gp.NumericalError):
        CALLS[name](*given(s))
    with gp.deferred_checks():
        found = CALLS[name](*given(s))
    assert found[-1].isnan().any()  # the mean of the direct model needs no factor and is right
    with pytest.raises(gp.NotPositiveDefiniteError, match="too far apart"):
        gp.check_health()


@pytest.mark.parametrize(
    "name", ["kernel", *(pytest.param(x, marks=pytest.mark.slow) for x in ("amplitude", "cgp", "scgp"))]
)
def test_compiled_calls(name: str) -> None:
    """Right within the range, NaN and counted beyond."""
    torch._dynamo.reset()  # all calls are one function's closures, of which it compiles so many
    compiled = torch.compile(CALLS[name], backend="aot_eager", fullgraph=True)
    compare(compiled, problem("clusters", 1e4))
    s = problem("scattered", OUT_OF_RANGE)
    assert all(x.isnan().any() for x in compiled(*given(s)))
    with pytest.raises(gp.NotPositiveDefiniteError, match="too far apart"):
        gp.check_health()


def test_mapped_calls() -> None:
    s = problem("clusters", 1e4)
    mean = torch.func.vmap(lambda q, k, o, v: gp.cgp_posterior(q, k, o, v, noise=NOISE).mean)
    wanted = gp.cgp_posterior(*(x.double() for x in (s.q, s.k, s.o, s.v)), noise=NOISE).mean
    assert (mean(s.q, s.k, s.o, s.v) - wanted).abs().max() < 1e-5
    s = problem("clusters", OUT_OF_RANGE)
    assert mean(s.q, s.k, s.o, s.v).isnan().any()
    with pytest.raises(gp.NotPositiveDefiniteError, match="too far apart"):
        gp.check_health()


MODULES = [
    v
    for v in VARIANTS
    if v.any_length and "exp_dot" not in v.name and v.kind not in ("softmax", "softmax-gp")
]


@every(MODULES)
def test_attention_modules_with_an_outlier(variant: Variant) -> None:
    """A token a thousand times too large, whose projections are as wrong as it is large, spoils no other."""
    torch.manual_seed(0)
    layer = build_attention(variant.kind, embed_dim=16, num_heads=2, **variant.options).eval()
    x = torch.randn(2, 9, 16)
    x[1, 3] *= 1000
    single, double = layer(x).output, layer.double()(x.double()).output
    others = torch.ones(2, 9, dtype=torch.bool)
    others[1, 3] = False
    assert ((single - double).abs().amax(-1)[others] < 1e-4 * double[others].abs().max()).all()
