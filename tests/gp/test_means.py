"""Kernel attention as a function: what padding may not cost.  Its numbers are those of tests/attention."""

import pytest
import torch

from gpattention.gp import kernel_attention


@pytest.mark.parametrize("normalised", [True, False])
def test_padding_costs_no_digits_far_from_the_origin(normalised: bool) -> None:
    """Tokens are moved about the mean of the real ones, not about one that padding draws to the origin."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (0.3 * torch.randn(8, 16, generator=g, dtype=torch.float64) for _ in range(3))
    exact = kernel_attention(q, k, v, normalised=normalised)
    far = [(x + offset).float() for x, offset in ((q, 30), (k, 30), (v, 0))]
    padded = [torch.cat([x, torch.zeros(56, 16)]) for x in far]
    mask = torch.arange(64) < 8
    found = kernel_attention(*padded, normalised=normalised, mask=mask, query_mask=mask)[:8]
    alone = kernel_attention(*far, normalised=normalised)
    errors = [(x.double() - exact).norm() / exact.norm() for x in (found, alone)]
    assert errors[0] < 1e-5
    assert errors[0] < 2 * errors[1]
