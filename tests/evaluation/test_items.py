"""Sets of items: chunks, parts, and fingerprints that notice every change."""

from dataclasses import replace

import pytest
import torch

from gpattention.evaluation.items import ItemSet, row_digests

CPU = torch.device("cpu")


def halved(stored: torch.Tensor) -> torch.Tensor:
    return stored.float() / 2


def some(**changes: object) -> ItemSet:
    stored = torch.arange(7 * 12, dtype=torch.uint8).view(7, 3, 2, 2)
    return replace(ItemSet("test", stored, torch.arange(7), halved), **changes)


def sentences() -> ItemSet:
    tokens = torch.arange(1, 9).view(4, 2)
    words = tuple((f"a{i}", f"b{i}") for i in range(4))
    return ItemSet("test", {"tokens": tokens, "padding_mask": tokens > 7}, torch.arange(4), words=words)


@pytest.mark.parametrize("size", [1, 3, 7, 100])
def test_chunks_make_up_the_whole(size: int) -> None:
    items = some()
    parts = list(items.chunks(size, CPU))
    assert [start for start, _ in parts] == list(range(0, 7, size))
    assert torch.cat([inputs for _, inputs in parts]).equal(halved(items.stored))
    joined = torch.cat([inputs["tokens"] for _, inputs in sentences().chunks(size, CPU)])
    assert joined.equal(sentences().stored["tokens"])


def test_selection() -> None:
    chosen = some().select(torch.tensor([5, 0]))
    assert chosen.stored.equal(some().stored[[5, 0]])
    assert chosen.labels.tolist() == [5, 0]
    told = sentences().select(torch.tensor([2]))
    assert (told.words, told.stored["tokens"].tolist()) == ((("a2", "b2"),), [[5, 6]])
    assert len(some().first(3)) == 3
    whole = some()
    assert whole.first(None) is whole
    assert whole.first(7) is whole


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 7, 8, 100])
def test_a_limit_is_spread_over_everything(count: int) -> None:
    """Of any number of classes one after the other, of any sizes, each gives its share, to one item."""
    whole = some()
    assert whole.spread(None) is whole
    assert len(whole.spread(count)) == min(count, 7)
    sizes = [1, 40, 3, 17, 39]
    labels = torch.repeat_interleave(torch.arange(5), torch.tensor(sizes))
    chosen = ItemSet("ordered", torch.zeros(100, 1), labels).spread(count)
    assert len(chosen) == count
    assert chosen.labels.equal(labels[[i * 100 // count for i in range(count)]])
    for place, size in enumerate(sizes):
        assert abs(int((chosen.labels == place).sum()) - size * count / 100) <= 1


def test_digests_notice_everything() -> None:
    changed = some().stored.clone()
    changed[6, 0, 0, 0] += 1
    kinds = [
        some(),
        some(stored=changed),
        some(stored=some().stored.flip(0)),
        some(stored=some().stored.view(7, 12, 1, 1)),
        some(labels=torch.arange(7).flip(0)),
        some(labels=None),
        some(prepare=lambda x: x.float() / 3),
        sentences(),
        sentences().first(3),
    ]
    digests = [items.digest for items in kinds]
    assert len(set(digests)) == len(digests)
    assert digests[0] == some(name="other").digest  # a name is not an item


def test_digests_do_not_depend_on_how_items_lie_in_memory() -> None:
    turned = some().stored.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    assert not turned.is_contiguous()
    assert some(stored=turned).digest == some().digest


def test_rows_are_found_again() -> None:
    whole = row_digests(some().stored)
    assert len(set(whole)) == 7
    assert row_digests(some().stored[[4, 1]]) == [whole[4], whole[1]]
    told = row_digests(sentences().stored)
    assert row_digests(sentences().select(torch.tensor([3])).stored) == [told[3]]


@pytest.mark.parametrize("changes", [{"labels": torch.arange(3)}, {"words": (("a",),)}])
def test_one_of_each_per_item(changes: dict) -> None:
    with pytest.raises(ValueError, match="of 7 items in test, got"):
        some(**changes)
