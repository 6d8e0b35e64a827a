"""Numbers that belong to items, and the splits and batches made of them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpattention.data import batches
from gpattention.data.keyed import integers, keyed, permutation
from gpattention.data.splits import split

MASK = (1 << 64) - 1


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def by_hand(item: int, *keys: int) -> int:
    state = 0
    for key in keys:
        state = mix(((state + 0x9E3779B97F4A7C15) ^ (key & MASK)) & MASK)
    return mix(mix((item * 0x9E3779B97F4A7C15 + state) & MASK)) & ((1 << 63) - 1)


@given(st.integers(0, 2**40), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4))
def test_the_hash_is_splitmix64_on_unlimited_integers(item: int, keys: list[int]) -> None:
    assert int(keyed(torch.tensor([item]), *keys)[0]) == by_hand(item, *keys)


def test_these_numbers_never_change() -> None:
    """Splits of finished experiments hang on them."""
    assert keyed(torch.arange(2), 1, 0, 0).tolist() == [by_hand(0, 1, 0, 0), by_hand(1, 1, 0, 0)]
    assert permutation(8, 1, 0, 0).tolist() == [0, 4, 5, 7, 1, 3, 2, 6]
    assert [b.tolist() for b in batches(5, 2, seed=3, epoch=7)] == [[2, 4], [0, 1], [3]]


def test_integers_are_even_and_independent() -> None:
    drawn = integers(torch.arange(90_000), 9, 1, 2)
    counts = torch.bincount(drawn, minlength=9).double()
    assert ((counts - 10_000).square() / 10_000).sum() < 30  # chi square, 8 degrees of freedom
    other = integers(torch.arange(90_000), 9, 1, 3)
    assert abs(float(torch.corrcoef(torch.stack([drawn, other]).double())[0, 1])) < 0.015


def test_splits_are_parts_of_the_whole() -> None:
    parts = split(100, (70, 20, 10), seed=1)
    assert [len(p) for p in parts] == [70, 20, 10]
    assert torch.cat(parts).sort().values.equal(torch.arange(100))
    assert all(p.equal(p.sort().values) for p in parts)
    again, other, staged = split(100, (70, 30), 1), split(100, (70, 30), 2), split(100, (70, 30), 1, stage=1)
    assert again[0].equal(parts[0])
    assert not other[0].equal(parts[0])
    assert not staged[0].equal(parts[0])


@pytest.mark.parametrize("sizes", [(70, 20), (100, 0), (-1, 101)])
def test_sizes_must_add_up(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"sizes >= 1 that add up to n = 100"):
        split(100, sizes, 0)


@given(st.integers(0, 60), st.integers(1, 20), st.integers(1, 6), st.booleans(), st.booleans())
def test_batches_do_not_depend_on_the_number_of_ranks(n, size, world, drop, shuffle) -> None:
    size = max(size, world)
    whole = batches(n, size, 1, 2, drop, shuffle=shuffle)
    shares = [batches(n, size, 1, 2, drop, rank, world, shuffle=shuffle) for rank in range(world)]
    assert {len(share) for share in shares} == {len(whole)}
    for i, batch in enumerate(whole):
        assert torch.cat([share[i] for share in shares]).equal(batch)
        sizes = [len(share[i]) for share in shares]
        assert max(sizes) - min(sizes) <= 1
    seen = torch.cat([*whole, torch.empty(0, dtype=torch.int64)])
    assert len(seen.unique()) == len(seen) == (n // size * size if drop else n)
    if not shuffle:
        assert seen.equal(torch.arange(len(seen)))


def test_batches_depend_on_seed_and_epoch() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return torch.cat(batches(50, 7, seed, epoch)).tolist()

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": -1}, "n >= 0, got -1"),
        ({"batch_size": 0}, "batch_size >= world_size, 1, got 0"),
        ({"batch_size": 3, "world_size": 4}, "batch_size >= world_size, 4, got 3"),
        ({"world_size": 0}, "world_size >= 1, got 0"),
        ({"rank": 2, "world_size": 2}, "rank from 0 to 1, got 2"),
        ({"rank": -1}, "rank from 0 to 0, got -1"),
    ],
)
def test_batches_say_what_is_wrong(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        batches(**{"n": 10, "batch_size": 5} | arguments)
