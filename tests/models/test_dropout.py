"""Dropout by a hash of seed, site and place: what it keeps, and that both paths keep the same."""

import pytest
import torch
from torch import nn

from gpattention.ops.layers import EMBEDDING_SITE, SITES, drop, first_site, keep_mask, rate_of, seeded_dropout

SHAPE = torch.Size([200, 500])


def seed(value: int) -> torch.Tensor:
    return torch.tensor(value)


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_the_share_of_dropped_entries_is_the_rate(rate: float) -> None:
    kept = keep_mask(SHAPE, rate, seed(3), 5).double()
    deviation = (rate * (1 - rate) / SHAPE.numel()) ** 0.5
    assert abs(float(kept.mean()) - (1 - rate)) < 4 * deviation
    for axis, length in ((0, 200), (1, 500)):  # no stripes: means along an axis spread as they should
        spread = float(kept.mean(axis).std())
        assert spread == pytest.approx((rate * (1 - rate) / length) ** 0.5, rel=0.15)


@pytest.mark.parametrize(
    ("value", "site", "bits"),
    [(3, 5, 0xBB3BC058), (-3, 5, 0x68EE1FD3), (2**62 + 1, 0, 0xFF0E4250), (0, 10**12, 0x7016B1AB)],
)
def test_masks_stay_what_they_were(value: int, site: int, bits: int) -> None:
    """Runs that go on from a checkpoint drop what they would have dropped; entry i is bit i."""
    kept = keep_mask(torch.Size([32]), 0.5, seed(value), site).tolist()
    assert sum(keep << place for place, keep in enumerate(kept)) == bits


def test_masks_of_other_seeds_and_sites_and_of_neighbours_are_unrelated() -> None:
    one = keep_mask(SHAPE, 0.5, seed(3), 5)
    others = [(4, 5), (3, 6), (3 + 2**32, 5), (-3, 5), (2**62, 5)]
    shares = [(one == keep_mask(SHAPE, 0.5, seed(value), site)).double().mean() for value, site in others]
    flat = one.flatten()
    shares += [(flat[lag:] == flat[:-lag]).double().mean() for lag in (1, 2, 3, 16, 128, 500)]
    assert max(abs(float(share) - 0.5) for share in shares) < 4 * 0.5 / SHAPE.numel() ** 0.5


def test_what_is_kept_is_scaled() -> None:
    x = torch.randn(20, 30, generator=torch.Generator().manual_seed(0))
    kept = keep_mask(x.shape, 0.2, seed(1), 1)
    torch.testing.assert_close(seeded_dropout(x, 0.2, seed(1), 1), torch.where(kept, x / 0.8, 0.0))
    assert seeded_dropout(x, 0.0, seed(1), 1) is x
    assert not bool(seeded_dropout(x, 1.0, seed(1), 1).any())
    # a mask does not depend on the shape but on the place
    assert torch.equal(keep_mask(torch.Size([5, 4, 30]), 0.2, seed(1), 1).view(20, 30), kept)
    assert torch.equal(keep_mask(torch.Size([7]), 0.2, seed(1), 1), kept[0, :7])


def test_modules_drop_by_themselves_without_a_seed_and_where_somebody_watches() -> None:
    x, module = torch.ones(50, 50), nn.Dropout(0.5)
    seeded = drop(module, x, seed(1), 1)
    assert torch.equal(seeded, drop(module, x, seed(1), 1))
    torch.manual_seed(0)
    own = drop(module, x, None, 1)
    torch.manual_seed(0)
    assert torch.equal(own, module(x))
    seen = []
    handle = module.register_forward_hook(lambda m, args, out: seen.append(out))
    drop(module, x, seed(1), 1)
    assert len(seen) == 1
    handle.remove()
    assert drop(module.eval(), x, seed(1), 1) is x
    assert rate_of(module) == 0


def test_sites_of_blocks_do_not_meet() -> None:
    sites = [EMBEDDING_SITE, *(first_site(block) + i for block in range(4) for i in range(SITES))]
    assert len(set(sites)) == len(sites)
