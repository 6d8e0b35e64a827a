"""Shifts of images: against the oracle, and what holds for each: batches, types, strengths, errors."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from gpattention.data.corruptions import CORRUPTIONS
from gpattention.data.corruptions.core import RandomFields
from gpattention.data.shifts import SEVERITIES, SHIFTS, shift, shifts_of
from tests.data.corruptions.pictures import pictures
from tests.oracles import shifts as oracle
from tests.refusals import refusals

# strength at which nothing happens
IDENTITY = {
    "turned": 0, "sheared": 0, "shrunk": 1, "moved": 0, "recoloured": 360, "posterised": 256,
    "solarised": 1, "waved": 0, "chequered": 0, "ghosted": 0,
}  # fmt: skip


DRAWN = ("turned", "sheared", "moved", "covered", "waved", "striped")
every_shift = pytest.mark.parametrize("name", SHIFTS)


def fields(name: str, severity: int, items: Tensor, seed: int = 0) -> RandomFields:
    return RandomFields(seed, items, f"shift/{name}", severity)


@every_shift
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


@every_shift
def test_seeds_items_and_batches(name: str) -> None:
    images = pictures(9)
    whole = shift(images, name, 2, seed=2, first_item=100)
    parts = [shift(images[a:b], name, 2, seed=2, first_item=100 + a) for a, b in pairwise([0, 1, 4, 9])]
    assert torch.equal(torch.cat(parts), whole)
    alike = pictures(1).expand(16, -1, -1, -1)
    same = shift(alike, name, 2)
    assert torch.equal(same, shift(alike, name, 2))
    assert torch.equal(same, shift(alike, name, 2, seed=1)) == (name not in DRAWN)
    assert (len(same.unique(dim=0)) > 1) == (name in DRAWN)


@every_shift
def test_types_ranges_sizes_and_strengths(name: str) -> None:
    images = pictures(32)
    before, gaps = images.clone(), [0.0]
    for severity in SEVERITIES:
        levels, floats = shift(images, name, severity), shift(images.float() / 255, name, severity)
        assert (levels.dtype, levels.shape, floats.dtype) == (torch.uint8, images.shape, torch.float32)
        assert floats.min() >= 0
        assert floats.max() <= 1
        if name != "solarised":  # jumps where single precision falls on the other side
            assert (floats * 255 - levels).abs().max() <= 0.5 + 1e-3
        gaps.append(float((floats - images.float() / 255).abs().mean()))
    assert all(less < more for less, more in pairwise(gaps))  # stronger is further away
    assert torch.equal(images, before)
    assert shift(images[:0], name, 1).shape == (0, *images.shape[1:])


@pytest.mark.parametrize(("name", "strength"), IDENTITY.items())
def test_no_strength_changes_nothing(name: str, strength: float) -> None:
    images = pictures(3).double() / 255
    found = SHIFTS[name].apply(images, strength, fields(name, 1, torch.arange(3)))
    torch.testing.assert_close(found, images, rtol=0, atol=1e-9)


def test_grey_images_and_other_names() -> None:
    assert shifts_of(3) == tuple(SHIFTS)
    assert shifts_of(1) == tuple(name for name in SHIFTS if name != "recoloured")
    grey = pictures(2)[:, :1]
    assert all(shift(grey, name, 3).shape == grey.shape for name in shifts_of(1))
    assert not set(SHIFTS) & set(CORRUPTIONS)


def turned(images: Tensor | None = None, name: str = "turned", severity: int = 1, **options: int) -> None:
    images = torch.zeros(1, 3, 8, 8) if images is None else images
    shift(images, name, severity, **options)


test_refusals = refusals([
    (lambda: turned(name="fog"), "name to be one of turned", "fog"),
    (lambda: turned(severity=4), "severity: expected 1, 2 or 3", "4"),
    (lambda: turned(severity=2.0), "severity: expected 1, 2 or 3", r"2\.0"),
    (lambda: turned(torch.zeros(3, 8, 8)), r"images: .*\[B, 1 or 3, H, W\]", r"\(3, 8, 8\)"),
    (lambda: turned(torch.zeros(1, 1, 8, 8), "recoloured"), "three channels for recoloured", "1"),
    (lambda: turned(torch.zeros(1, 3, 8, 8).long()), "images: ", "torch.int64"),
    (lambda: turned(torch.full((1, 3, 8, 8), torch.nan)), "images: ", "nan"),
    (lambda: turned(first_item=-1), "first_item", "-1"),
])  # fmt: skip
