"""What holds for every corruption: batches, types, ranges, seeds, sizes, errors."""

from itertools import pairwise

import pytest
import torch

from gpattention.data.corruptions import CATEGORIES, CORRUPTIONS, SEVERITIES, corrupt
from gpattention.data.corruptions import corrupt as corrupt_function

from .pictures import pictures

NAMES = list(CORRUPTIONS)
RANDOM = [
    "gaussian_noise", "shot_noise", "impulse_noise", "speckle_noise", "glass_blur", "motion_blur", "snow",
    "frost", "fog", "spatter", "elastic_transform",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_batches_may_be_cut_at_will(name: str) -> None:
    images = pictures(16)
    for severity in (1, 3, 4, 5):
        whole = corrupt(images, name, severity, seed=2, first_item=100)
        cuts = [0, 1, 4, 11, 16]
        parts = [corrupt(images[a:b], name, severity, seed=2, first_item=100 + a) for a, b in pairwise(cuts)]
        assert torch.equal(torch.cat(parts), whole)
        exact = corrupt(images.double() / 255, name, severity, seed=2, first_item=100)
        alone = corrupt(images[5:6].double() / 255, name, severity, seed=2, first_item=105)
        assert torch.allclose(alone, exact[5:6], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_more_images_than_a_chunk(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    images = pictures(7, 16, 16)
    whole = corrupt(images, name, 4)
    monkeypatch.setitem(corrupt_function.__globals__["_AT_ONCE"], "cpu", 2 * 3 * 16 * 16)
    assert torch.equal(corrupt(images, name, 4), whole)


@pytest.mark.parametrize("name", NAMES)
def test_types_and_ranges(name: str) -> None:
    images = pictures(4)
    before = images.clone()
    for severity in SEVERITIES:
        levels = corrupt(images, name, severity)
        assert levels.dtype == torch.uint8
        assert levels.shape == images.shape
        for dtype in (torch.float32, torch.float64):
            given = images.to(dtype) / 255
            floats = corrupt(given, name, severity)
            assert floats.dtype == dtype
            assert floats.min() >= 0
            assert floats.max() <= 1
            assert torch.equal(given, images.to(dtype) / 255)  # not changed in place
            # bytes are floats with their decimals cut off; single precision may fall off a whole number
            cut = (floats.double() * 255 + 1e-6).floor()
            assert (cut - levels).abs().max() <= (0 if dtype == torch.float64 else 1)
    assert torch.equal(images, before)


@pytest.mark.parametrize("name", NAMES)
def test_the_seed_alone_decides(name: str) -> None:
    images = pictures(4)
    first = corrupt(images, name, 3, seed=5)
    torch.manual_seed(99)  # torch's own generator has no part in it
    assert torch.equal(corrupt(images, name, 3, seed=5), first)
    other = corrupt(images, name, 3, seed=6)
    assert torch.equal(other, first) == (name not in RANDOM)
    same_image = images[:1].expand(4, -1, -1, -1)
    changed = corrupt(same_image, name, 3)
    for number in range(1, 4):  # every item has its own random numbers
        assert torch.equal(changed[number], changed[0]) == (name not in RANDOM)


@pytest.mark.parametrize("size", [(8, 8), (9, 21), (40, 17), (64, 64)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_any_size(name: str, size: tuple[int, int]) -> None:
    images = pictures(2, *size)
    for severity in SEVERITIES:
        changed = corrupt(images, name, severity)
        assert changed.shape == images.shape
    assert not torch.equal(changed, images)


@pytest.mark.parametrize("level", [0, 128, 255])
@pytest.mark.parametrize("name", NAMES)
def test_flat_images_give_no_nan(name: str, level: int) -> None:
    flat = torch.full((2, 3, 32, 32), level / 255, dtype=torch.float64)
    for severity in SEVERITIES:
        assert corrupt(flat, name, severity).isfinite().all()


@pytest.mark.parametrize("name", [*CATEGORIES["blur"], "contrast", "elastic_transform", "pixelate"])
def test_averages_leave_flat_images_alone(name: str) -> None:
    flat = torch.tensor([10, 130, 250], dtype=torch.uint8)[None, :, None, None].expand(2, 3, 32, 32)
    for severity in SEVERITIES:
        assert torch.equal(corrupt(flat, name, severity), flat)


def test_greys_turn_reddish_when_saturation_is_added() -> None:
    grey = torch.full((1, 3, 8, 8), 100, dtype=torch.uint8)
    red, green, blue = corrupt(grey, "saturate", 5)[0, :, 0, 0].tolist()
    assert (red, green, blue) == (100, 80, 80)


def test_no_images() -> None:
    empty = torch.zeros(0, 3, 32, 32)
    assert corrupt(empty, "fog", 1).shape == empty.shape


@pytest.mark.parametrize("name", ["fogg", "", "Fog"])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"name: expected one of gaussian_noise, .*, got '{name}'"):
        corrupt(pictures(1), name, 1)


@pytest.mark.parametrize("severity", [0, 6, -1, 2.5, True])
def test_unknown_severities_are_refused(severity: int) -> None:
    with pytest.raises(ValueError, match=f"severity: expected 1, 2, 3, 4 or 5, got {severity}"):
        corrupt(pictures(1), "fog", severity)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.zeros(2, 3, 32, 32).numpy(), "images: expected a tensor, got ndarray: torch.as_tensor makes"),
        (torch.zeros(3, 32, 32), r"images: expected shape \[B, 3, H, W\].*got \(3, 32, 32\)"),
        (torch.zeros(2, 1, 32, 32), r"images: expected shape .*got \(2, 1, 32, 32\)"),
        (torch.zeros(2, 3, 32, 7), r"at least 8, got \(2, 3, 32, 7\)"),
        (
            torch.zeros(2, 3, 32, 32, dtype=torch.int64),
            r"expected uint8 or floats in \[0, 1\], got torch.int64",
        ),
        (torch.full((1, 3, 8, 8), 255.0), r"expected floats in \[0, 1\], got 255 to 255"),
        (torch.full((1, 3, 8, 8), -0.5), r"expected floats in \[0, 1\], got -0.5 to -0.5"),
        (torch.full((1, 3, 8, 8), torch.nan), r"expected floats in \[0, 1\], got nan to nan"),
    ],
)
def test_other_images_are_refused(images: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        corrupt(images, "fog", 1)


def test_a_negative_item_is_refused() -> None:
    with pytest.raises(ValueError, match="first_item: expected an index of at least 0, got -3"):
        corrupt(pictures(1), "fog", 1, first_item=-3)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_gives_the_same_levels(name: str) -> None:
    images = pictures(64)
    for severity in SEVERITIES:
        on_cpu = corrupt(images, name, severity)
        on_gpu = corrupt(images.cuda(), name, severity)
        assert on_gpu.device.type == "cuda"
        assert (on_gpu.cpu() != on_cpu).double().mean() < 1e-4
