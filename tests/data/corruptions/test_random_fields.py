"""Random numbers that belong to an image: their definition, their distribution, their independence."""

import hashlib

import numpy as np
import pytest
import torch
from scipy.stats import poisson

from gpattention.data.corruptions.noise import poisson_counts
from gpattention.data.corruptions.random_fields import RandomFields

WORD = (1 << 64) - 1


def mixed(x: int) -> int:
    """The finaliser of splitmix64 in Python's integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
    return x ^ (x >> 31)


def by_hand(seed: int, corruption: str, severity: int, field: str, item: int, place: int) -> float:
    recipe = f"{seed}/{corruption}/{severity}/{field}".encode()
    start = int.from_bytes(hashlib.blake2b(recipe, digest_size=8).digest(), "little")
    key = mixed((item * 0x94D049BB133111EB + start) & WORD)
    bits = mixed((key + place * 0x9E3779B97F4A7C15) & WORD)
    return ((bits >> 12) + 0.5) / 2**52


def test_the_definition() -> None:
    items = torch.tensor([0, 7, 9_999])
    drawn = RandomFields(4, items, "snow", 2).uniform("flakes", 3, 5)
    for row, item in enumerate(items.tolist()):
        for place in range(15):
            expected = by_hand(4, "snow", 2, "flakes", item, place)
            assert drawn[row].flatten()[place].item() == expected


def test_uniform_numbers_are_uniform_and_inside() -> None:
    drawn = RandomFields(0, torch.arange(1000), "x", 1).uniform("y", 100)
    assert 0 < drawn.min() < 1e-4
    assert 1 - 1e-4 < drawn.max() < 1
    counts = torch.histc(drawn, 50, 0, 1)
    assert float(((counts - 2000) ** 2 / 2000).sum()) < 90  # chi-squared of 49 degrees: 85.4 at 0.1 %


def test_normal_numbers_are_normal() -> None:
    drawn = RandomFields(0, torch.arange(1000), "x", 1).normal("y", 100)
    assert abs(float(drawn.mean())) < 0.013  # 4 standard errors
    assert abs(float(drawn.var()) - 1) < 0.02
    assert abs(float((drawn**4).mean()) - 3) < 0.15
    assert drawn.isfinite().all()


def test_items_fields_severities_and_seeds_are_independent() -> None:
    base = RandomFields(0, torch.arange(200), "fog", 1).uniform("clouds", 50)
    others = [
        RandomFields(1, torch.arange(200), "fog", 1).uniform("clouds", 50),
        RandomFields(0, torch.arange(200), "fogs", 1).uniform("clouds", 50),
        RandomFields(0, torch.arange(200), "fog", 2).uniform("clouds", 50),
        RandomFields(0, torch.arange(200), "fog", 1).uniform("angle", 50),
        RandomFields(0, torch.arange(1, 201), "fog", 1).uniform("clouds", 50),
        base.roll(1, 1),
    ]
    for other in others:
        together = torch.stack([base.flatten(), other.flatten()])
        assert abs(float(torch.corrcoef(together)[0, 1])) < 0.04  # 4 standard errors


def test_one_number_for_each_item() -> None:
    assert RandomFields(0, torch.arange(5), "fog", 1).uniform("angle").shape == (5,)


@pytest.mark.parametrize("photons", [50, 75, 100, 250, 500])
def test_poisson_counts_are_quantiles(photons: float) -> None:
    levels = torch.arange(256)[:, None].expand(256, 300)
    uniform = RandomFields(0, torch.arange(256), "x", 1).uniform("photons", 300)
    counts = poisson_counts(levels, photons, uniform)
    expected = poisson.ppf(uniform.numpy(), photons * levels.numpy() / 255).clip(max=photons)
    assert np.array_equal(counts.numpy(), expected)


def test_poisson_counts_at_the_ends() -> None:
    levels = torch.tensor([0, 3, 255, 255])
    # the smallest number drawn is below the resolution of the table's last rows: it must not leave its row
    uniform = torch.tensor([0.9, 2.0**-53, 2.0**-53, 1 - 2.0**-53], dtype=torch.float64)
    assert poisson_counts(levels, 50, uniform).tolist() == [0, 0, 0, 50]
