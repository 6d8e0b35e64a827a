"""Shifts of images: against the oracle, and what holds for each: batches, types, strengths, errors."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from gpattention.data.corruptions import CORRUPTIONS
from gpattention.data.corruptions.random_fields import RandomFields
from gpattention.data.shifts import SEVERITIES, SHIFTS, shift, shifts_of
from tests.data.corruptions.pictures import pictures
from tests.oracles import shifts as oracle

NAMES = list(SHIFTS)
# strength at which nothing happens
IDENTITY = {
    "turned": 0, "sheared": 0, "shrunk": 1, "moved": 0, "recoloured": 360, "posterised": 256,
    "solarised": 1, "waved": 0, "chequered": 0, "ghosted": 0,
}  # fmt: skip
DRAWN = ("turned", "sheared", "moved", "covered", "waved", "striped")


def fields(name: str, severity: int, items: Tensor, seed: int = 0) -> RandomFields:
    return RandomFields(seed, items, f"shift/{name}", severity)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [(32, 32), (9, 14)], ids=str)
def test_against_the_oracle(name: str, size: tuple[int, int]) -> None:
    images = pictures(3, *size).double() / 255
    for severity in SEVERITIES:
        found = shift(images, name, severity, seed=3, first_item=7)
        for b, image in enumerate(images):
            random = fields(name, severity, torch.tensor([7 + b]), seed=3)

            def draw(field: str, *shape: int, random: RandomFields = random) -> np.ndarray:
                return random.uniform(field, *shape)[0].numpy()

            strength = SHIFTS[name].strengths[severity - 1]
            expected = getattr(oracle, name)(image.numpy(), strength, draw).clip(0, 1)
            np.testing.assert_allclose(found[b].numpy(), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_batches_may_be_cut_at_will(name: str) -> None:
    images = pictures(9)
    whole = shift(images, name, 2, seed=2, first_item=100)
    parts = [shift(images[a:b], name, 2, seed=2, first_item=100 + a) for a, b in pairwise([0, 1, 4, 9])]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("name", NAMES)
def test_types_ranges_and_sizes(name: str) -> None:
    images = pictures(4)
    before = images.clone()
    for severity in SEVERITIES:
        levels = shift(images, name, severity)
        assert (levels.dtype, levels.shape) == (torch.uint8, images.shape)
        floats = shift(images.float() / 255, name, severity)
        assert floats.dtype == torch.float32
        assert floats.min() >= 0
        assert floats.max() <= 1
        if name != "solarised":  # jumps where single precision falls on the other side
            assert (floats * 255 - levels).abs().max() <= 0.5 + 1e-3
    assert torch.equal(images, before)
    assert shift(images[:0], name, 1).shape == (0, *images.shape[1:])


@pytest.mark.parametrize("name", NAMES)
def test_stronger_is_further_away(name: str) -> None:
    images = pictures(32).float() / 255
    gaps = [float((shift(images, name, s) - images).abs().mean()) for s in SEVERITIES]
    assert 0 < gaps[0] < gaps[1] < gaps[2]


@pytest.mark.parametrize(("name", "strength"), IDENTITY.items())
def test_no_strength_changes_nothing(name: str, strength: float) -> None:
    images = pictures(3).double() / 255
    found = SHIFTS[name].apply(images, strength, fields(name, 1, torch.arange(3)))
    torch.testing.assert_close(found, images, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_seeds_and_items(name: str) -> None:
    images = pictures(1).expand(16, -1, -1, -1)
    same = shift(images, name, 2)
    assert torch.equal(same, shift(images, name, 2))
    assert torch.equal(same, shift(images, name, 2, seed=1)) == (name not in DRAWN)
    assert (len(same.unique(dim=0)) > 1) == (name in DRAWN)


def test_grey_images() -> None:
    assert shifts_of(3) == tuple(SHIFTS)
    assert shifts_of(1) == tuple(name for name in SHIFTS if name != "recoloured")
    grey = pictures(2)[:, :1]
    assert all(shift(grey, name, 3).shape == grey.shape for name in shifts_of(1))


def test_they_are_no_corruptions() -> None:
    assert not set(SHIFTS) & set(CORRUPTIONS)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"name": "fog"}, r"name: expected one of turned, .* got 'fog'"),
        ({"severity": 4}, r"severity: expected 1, 2 or 3, got 4"),
        ({"severity": True}, r"severity: expected 1, 2 or 3, got True"),
        ({"severity": 2.0}, r"severity: expected 1, 2 or 3, got 2\.0"),
        ({"images": torch.zeros(3, 8, 8)}, r"images: expected \[B, 1 or 3, H, W\], got \(3, 8, 8\)"),
        ({"images": torch.zeros(1, 1, 8, 8), "name": "recoloured"}, r"three channels for recoloured, got 1"),
        (
            {"images": torch.zeros(1, 3, 8, 8, dtype=torch.int64)},
            r"expected bytes or floats, got torch.int64",
        ),
        ({"images": torch.full((1, 3, 8, 8), 1.5)}, r"expected floats in \[0, 1\], got others"),
        ({"images": torch.full((1, 3, 8, 8), torch.nan)}, r"expected floats in \[0, 1\], got others"),
        ({"first_item": -1}, r"first_item: expected an index of at least 0, got -1"),
    ],
)
def test_mistakes(change: dict, told: str) -> None:
    given = {"images": torch.zeros(1, 3, 8, 8), "name": "turned", "severity": 1, **change}
    with pytest.raises(ValueError, match=told):
        shift(**given)
