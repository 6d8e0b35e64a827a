"""Noise per item: the right distribution, independent streams, and no trace of the chunking."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from gpattention import gp
from tests.gp.samples import sample

CPU = torch.device("cpu")


def noise(items: Tensor, *, seed: int = 0, sample_index: int = 0) -> gp.ItemNoise:
    return gp.ItemNoise(seed, items, torch.full_like(items, sample_index))


def draw(items: Tensor, *, seed: int = 0, sample_index: int = 0, count: int = 512) -> Tensor:
    return noise(items, seed=seed, sample_index=sample_index).normal(
        (1, len(items), count), torch.float64, CPU
    )[0]


def test_moments_are_those_of_a_standard_normal() -> None:
    z = draw(torch.arange(400))
    error = 5 / z.numel() ** 0.5  # five standard errors of a mean of unit variance
    assert abs(float(z.mean())) < error
    assert abs(float(z.square().mean()) - 1) < error * 2**0.5
    assert abs(float(z.pow(3).mean())) < error * 15**0.5
    assert abs(float(z.pow(4).mean()) - 3) < error * 96**0.5


def test_items_samples_seeds_calls_and_places_are_uncorrelated() -> None:
    items = torch.arange(400)
    z = draw(items)
    source = noise(items)
    source.normal((1, 400, 3), torch.float64, CPU)
    others = {
        "next item": draw(items + 1)[:-1],
        "next sample": draw(items, sample_index=1),
        "next seed": draw(items, seed=1),
        "next call": source.normal((1, 400, 512), torch.float64, CPU)[0],
        "next place": z.roll(1, -1),
    }
    for name, other in others.items():
        product = (z[1:] * other) if name == "next item" else z * other
        if name == "next item":  # shifting the items shifts the rows, nothing else
            assert torch.equal(z[1:], other)
            product = z[1:] * z[:-1]
        assert abs(float(product.mean())) < 5 / product.numel() ** 0.5, name


def test_uniform_numbers_fill_the_interval() -> None:
    u = noise(torch.arange(200)).uniform((200, 300), torch.float64, CPU)
    counts = torch.histc(u, bins=20, min=0, max=1)
    expected = u.numel() / 20
    assert float(((counts - expected) ** 2 / expected).sum()) < 50  # chi squared, 19 degrees of freedom
    assert 0 < float(u.min()) < float(u.max()) < 1


def test_draws_of_a_posterior_do_not_depend_on_the_batch() -> None:
    s = sample(6, 2)
    items, zeros = torch.arange(6), torch.zeros(6, dtype=torch.long)

    def posterior(rows: slice) -> gp.Posterior:
        return gp.cgp_posterior(s.q[rows], s.k[rows], s.o[rows], s.v[rows], noise=0.1)

    for joint in (False, True):
        whole = posterior(slice(None)).sample(2, generator=gp.ItemNoise(3, items, zeros), joint=joint)
        for rows in (slice(0, 1), slice(1, 4), slice(4, 6)):
            part = posterior(rows).sample(2, generator=gp.ItemNoise(3, items[rows], zeros[rows]), joint=joint)
            torch.testing.assert_close(part, whole[:, rows], rtol=1e-10, atol=1e-10)


def test_a_batch_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"batch of 3.*got 4"):
        noise(torch.arange(3)).normal((1, 4, 2), torch.float32, CPU)
    with (
        gp.fused_kernels("on"),
        pytest.raises(ValueError, match=r"batch of 4.*got 3"),
    ):
        gp.ItemNoise(0, ITEMS, SAMPLES).normal((1, 3, 2), torch.float32, CPU)
    with pytest.raises(ValueError, match=r"one shape \[batch\]"):
        gp.ItemNoise(0, torch.arange(3), torch.arange(2))


@pytest.mark.parametrize("seed", [None, "0", 1.5])
def test_a_seed_is_a_whole_number(seed: Any) -> None:
    with pytest.raises(ValueError, match=f"expected seed to be a whole number, got {seed!r}"):
        noise(torch.arange(3), seed=seed)


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1, 2**64 - 1])
def test_seeds_of_more_than_64_bits_are_refused(seed: int) -> None:
    one = torch.zeros(1, dtype=torch.long)
    with pytest.raises(ValueError, match=f"seed to fit into 64 bits with a sign, got {seed}"):
        gp.ItemNoise(seed, one, one)
    gp.ItemNoise(-(2**63), one, one)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
@pytest.mark.parametrize("width", [4, 5])
def test_tokens_that_follow_change_nothing(lead: tuple[int, ...], width: int) -> None:
    items = torch.arange(3)
    long = noise(items).normal((2, 3, *lead, 9, width), torch.float64, CPU)
    for tokens in (1, 4, 8):
        short = noise(items).normal((2, 3, *lead, tokens, width), torch.float64, CPU)
        assert short.equal(long[..., :tokens, :])
    assert len(long.unique()) == long.numel()  # every place has a number of its own


needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
ITEMS, SAMPLES = torch.tensor([0, 5, 2**40, -1]), torch.tensor([0, 1, 7, 2**33])


def numbers(mode: str, *shapes: tuple[int, ...], seed: int | Tensor = -9) -> list[Tensor]:
    source = gp.ItemNoise(seed, ITEMS, SAMPLES)
    with gp.fused_kernels(mode):
        return [source.normal(shape, torch.float32, CPU) for shape in shapes]


@needs_triton
@pytest.mark.parametrize("shape", [(1, 4, 1), (2, 4, 5, 3), (3, 4, 8), (1, 4, 3, 401)], ids=str)
def test_numbers_of_the_kernel_are_those_of_the_plain_operations(shape: tuple[int, ...]) -> None:
    for plain, fused in zip(numbers("off", shape, shape), numbers("on", shape, shape), strict=True):
        assert fused.shape == shape
        torch.testing.assert_close(fused, plain, rtol=2e-6, atol=1e-6)  # log, cos and sin of two libraries


@needs_triton
@pytest.mark.parametrize("shape", [(4,), (4, 1), (4, 5, 3), (4, 3, 401), (4, 0)], ids=str)
def test_uniform_numbers_are_those_of_the_plain_operations_to_the_bit(shape: tuple[int, ...]) -> None:
    found = {}
    for mode in ("off", "on"):
        noise = gp.ItemNoise(3, ITEMS, SAMPLES)
        with gp.fused_kernels(mode):
            found[mode] = [noise.uniform(shape, torch.float32, CPU) for _ in range(2)]
    for plain, fused in zip(found["off"], found["on"], strict=True):
        assert fused.shape == shape
        assert torch.equal(fused, plain)


@needs_triton
def test_modes_take_turns_with_one_stream_of_calls() -> None:
    shape = (1, 4, 6)
    first, second = numbers("off", shape, shape)
    noise = gp.ItemNoise(torch.tensor(-9), ITEMS, SAMPLES)
    with gp.fused_kernels("on"):
        torch.testing.assert_close(noise.normal(shape, torch.float32, CPU), first, rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(noise.normal(shape, torch.float32, CPU), second)


@needs_triton
def test_no_numbers_and_another_type() -> None:
    assert numbers("on", (1, 4, 0))[0].shape == (1, 4, 0)
    noise = gp.ItemNoise(-9, ITEMS, SAMPLES)
    with gp.fused_kernels("on"):
        double = noise.normal((1, 4, 2), torch.float64, CPU)
    assert double.dtype == torch.float64
    assert torch.equal(double, numbers("off", (1, 4, 2))[0].double())
