"""Noise: Poisson counts are quantiles, and every noise has the spread that its constant says."""

import numpy as np
import pytest
import torch
from scipy.stats import poisson

from gpattention.data.corruptions.core import RandomFields
from gpattention.data.corruptions.noise import poisson_counts


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
