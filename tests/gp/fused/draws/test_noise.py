"""Item-keyed noise from one kernel: the numbers of `ItemNoise`, in any shape and order of calls."""

import pytest
import torch

from gpattention import gp

pytest.importorskip("triton")
CPU = torch.device("cpu")
ITEMS, SAMPLES = torch.tensor([0, 5, 2**40, -1]), torch.tensor([0, 1, 7, 2**33])


def numbers(mode: str, *shapes: tuple[int, ...], seed: int | torch.Tensor = -9) -> list[torch.Tensor]:
    noise = gp.ItemNoise(seed, ITEMS, SAMPLES)
    with gp.fused_kernels(mode):
        return [noise.normal(shape, torch.float32, CPU) for shape in shapes]


@pytest.mark.parametrize("shape", [(1, 4, 1), (2, 4, 5, 3), (3, 4, 8), (1, 4, 3, 401)], ids=str)
def test_numbers_are_those_of_the_plain_operations(shape: tuple[int, ...]) -> None:
    for plain, fused in zip(numbers("off", shape, shape), numbers("on", shape, shape), strict=True):
        assert fused.shape == shape
        torch.testing.assert_close(fused, plain, rtol=2e-6, atol=1e-6)  # log, cos and sin of two libraries


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


def test_modes_take_turns_with_one_stream_of_calls() -> None:
    shape = (1, 4, 6)
    first, second = numbers("off", shape, shape)
    noise = gp.ItemNoise(torch.tensor(-9), ITEMS, SAMPLES)
    with gp.fused_kernels("on"):
        torch.testing.assert_close(noise.normal(shape, torch.float32, CPU), first, rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(noise.normal(shape, torch.float32, CPU), second)


def test_no_numbers_and_another_type() -> None:
    assert numbers("on", (1, 4, 0))[0].shape == (1, 4, 0)
    noise = gp.ItemNoise(-9, ITEMS, SAMPLES)
    with gp.fused_kernels("on"):
        double = noise.normal((1, 4, 2), torch.float64, CPU)
    assert double.dtype == torch.float64
    assert torch.equal(double, numbers("off", (1, 4, 2))[0].double())


def test_another_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a batch of 4 as the noise was made for, got 3"):
        numbers("on", (1, 3, 2))
