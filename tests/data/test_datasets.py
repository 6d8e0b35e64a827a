"""Parts, whole datasets, normalisation, augmentation, splits, batches and the loader."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gpattention.data import (
    Batch,
    CropAndFlip,
    ImageData,
    Images,
    Normalisation,
    TextData,
    Texts,
    batches,
    loader,
)
from gpattention.data.datasets import keyed, permutation, split
from tests.refusals import refusals


def some_images(n: int = 12, channels: int = 3, side: int = 6) -> Images:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (n, channels, side, side), generator=generator, dtype=torch.uint8)
    return Images(images, torch.arange(n) % 3)


def encoder(sentences: list[list[str]]) -> dict[str, Tensor]:
    lengths = torch.tensor([len(words) for words in sentences])
    return {"length": lengths, "padding_mask": torch.arange(3) >= lengths[:, None]}


TEXTS = Texts(("a b c", "d e", "f"), torch.tensor([0, 1, 1]))
PIXELS, LABELS = torch.zeros(4, 3, 2, 2, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64)
GREY = Normalisation((0.5,), (1.0,), "test")


def image_data(far: Images) -> ImageData:
    one = some_images()
    return ImageData("x", one, one, one, ("a",), Normalisation.of(one.images), 2, 0, {"far": far})


def some_batches(**changed: int) -> Any:
    return batches(**{"n": 10, "batch_size": 5} | changed)


test_refusals = refusals([
    (lambda: Images(PIXELS[0], LABELS[:3]), r"images .* shape \[n, C, H, W\]", r"\(3, 2, 2\)"),
    (lambda: Images(PIXELS.long(), LABELS), "uint8 or floating-point", "torch.int64"),
    (lambda: Images(PIXELS, LABELS[:3]), r"labels .*\[4\]", r"\(3,\)"),
    (lambda: Images(PIXELS, LABELS.to(torch.uint8)), "labels to be int64", "torch.uint8"),
    (lambda: image_data(some_images(side=7)), r"\(3, 6, 6\) as in train", r"\(3, 7, 7\) in ood/far"),
    (lambda: TEXTS.batch(torch.tensor([0])), "encoded", ""),
    (lambda: Texts(TEXTS.sentences, TEXTS.labels, {"tokens": torch.zeros(2, 5)}), "'tokens'", r"\(2, 5\)"),
    (lambda: Normalisation.of(torch.ones(3, 1, 2, 2)), "std > 0", r"\(0.0,\)"),
    (lambda: Normalisation((0.5, 0.5), (1.0,), "test"), "one number per channel", ""),
    (lambda: Normalisation.of(torch.ones(0, 1, 2, 2)), "n >= 1", r"\(0, 1, 2, 2\)"),
    (lambda: GREY(torch.ones(5, 3, 2, 2)), r"\[..., 1, H, W\]", r"\(5, 3, 2, 2\)"),
    (lambda: CropAndFlip()(PIXELS, torch.arange(3), 0), r"items \[B\]", r"\(4, 3, 2, 2\) and \(3,\)"),
    (lambda: CropAndFlip(padding=-1), "padding", "-1"),
    (lambda: split(100, (70, 20), 0), "sizes >= 1 that add up to n = 100", "70, 20"),
    (lambda: split(100, (100, 0), 0), "sizes >= 1 that add up to n = 100", "100, 0"),
    (lambda: some_batches(n=-1), "n .*>= 0", "-1"),
    (lambda: some_batches(batch_size=3, world_size=4), "batch_size .*>= 4", "3"),
    (lambda: some_batches(world_size=0), "world_size .*>= 1", "0"),
    (lambda: some_batches(rank=2, world_size=2), "rank from 0 to 1", "2"),
    (lambda: loader(some_images(), 2, workers=-1), "workers", "-1"),
    (lambda: loader(some_images(), 2, done=-1), "done", "-1"),
])  # fmt: skip


def test_parts_of_images() -> None:
    images = some_images()
    chosen = torch.tensor([5, 2])
    assert images.select(chosen).images.equal(images.images[chosen])
    batch = images.batch(chosen)
    assert batch.items.equal(chosen)
    assert batch.labels.tolist() == [2, 2]
    assert isinstance(batch.inputs, Tensor)
    assert batch.inputs.equal(images.images[chosen])
    assert repr(images) == "Images(12 of 3x6x6, torch.uint8, cpu)"
    assert Images.unlabelled(images.images).labels.tolist() == [-1] * 12


def test_texts() -> None:
    assert TEXTS.words == [["a", "b", "c"], ["d", "e"], ["f"]]
    encoded = TEXTS.encoded(encoder)
    batch = encoded.batch(torch.tensor([2, 0]))
    assert isinstance(batch.inputs, dict)
    assert batch.inputs["length"].tolist() == [1, 3]
    assert batch.labels.tolist() == [1, 0]
    assert encoded.select(torch.tensor([1])).sentences == ("d e",)
    assert encoded.select(torch.tensor([1])).inputs["length"].tolist() == [2]
    assert "3 sentences" in repr(encoded)
    data = TextData("t", TEXTS, TEXTS, TEXTS, ("no", "yes"), 0, {"far": TEXTS}).encoded(encoder)
    assert data.ood["far"].inputs["length"].tolist() == [3, 2, 1]
    moved = data.to("meta")
    tensors = [x for part in moved.parts.values() for x in (part.labels, *part.inputs.values())]
    assert {x.device.type for x in tensors} == {"meta"}
    assert moved.train.sentences == TEXTS.sentences


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float64])
def test_normalisation_is_that_of_the_pixels(dtype: torch.dtype) -> None:
    images = some_images(5000, 3, 2).images  # more than a chunk
    if dtype != torch.uint8:
        images = images.to(dtype) / 255
    found = Normalisation.of(images)
    x = images.double() / (255 if dtype == torch.uint8 else 1)
    assert torch.tensor(found.mean, dtype=torch.float64).allclose(x.mean((0, 2, 3)))
    assert torch.tensor(found.std, dtype=torch.float64).allclose(x.std((0, 2, 3), correction=0))
    expected = (x - x.mean((0, 2, 3), keepdim=True)) / x.std((0, 2, 3), correction=0, keepdim=True)
    assert found(images, torch.float64).allclose(expected)
    assert found(images[0]).dtype == torch.float32


def crop_by_hand(image: Tensor, top: int, left: int, mirrored: bool, padding: int) -> Tensor:
    channels, height, width = image.shape
    wide = torch.zeros(channels, height + 2 * padding, width + 2 * padding, dtype=image.dtype)
    wide[:, padding : padding + height, padding : padding + width] = image
    cut = wide[:, top : top + height, left : left + width]
    return cut.flip(-1) if mirrored else cut


def test_every_image_is_a_crop_and_perhaps_mirrored() -> None:
    images = some_images(60, 2, 5).images
    changed = CropAndFlip(seed=3, padding=2)(images, torch.arange(60), epoch=4)
    assert changed.dtype == images.dtype
    used = []
    for before, after in zip(images, changed, strict=True):
        ways = [(t, left, m) for t in range(5) for left in range(5) for m in (False, True)]
        fits = [way for way in ways if crop_by_hand(before, *way, padding=2).equal(after)]
        assert len(fits) == 1
        used.append(fits[0])
    assert {top for top, _, _ in used} == {left for _, left, _ in used} == set(range(5))
    assert 15 < sum(mirrored for _, _, mirrored in used) < 45


def test_augmentation_belongs_to_the_item() -> None:
    images, items, order = some_images(40).images, torch.arange(40), torch.tensor([7, 3, 21])
    augment = CropAndFlip(seed=1)
    whole = augment(images, items, 2)
    assert augment(images[order], order, 2).equal(whole[order])
    assert not augment(images, items, 3).equal(whole)
    assert not CropAndFlip(seed=2)(images, items, 2).equal(whole)
    assert CropAndFlip(padding=0, flip=False)(images, items, 0).equal(images)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_gives_the_very_batches(workers: int) -> None:
    images = some_images(50)
    settings = {"seed": 1, "epoch": 2, "drop_last": True, "rank": 1, "world_size": 2}
    expected = batches(50, 8, **settings)
    found = list(loader(images, 8, workers=workers, **settings))
    assert [batch.items.tolist() for batch in found] == [items.tolist() for items in expected]
    for batch in found:
        assert isinstance(batch, Batch)
        assert batch.inputs.equal(images.images[batch.items])
        assert batch.labels.equal(images.labels[batch.items])
    rest = list(loader(images, 8, workers=0, done=4, **settings))
    assert [b.items.tolist() for b in rest] == [b.items.tolist() for b in found[4:]]


def test_the_loader_takes_texts_and_keeps_order() -> None:
    found = list(loader(TEXTS.encoded(encoder), 2, shuffle=False, workers=0))
    assert [batch.items.tolist() for batch in found] == [[0, 1], [2]]
    assert found[0].inputs["length"].tolist() == [3, 2]
    moved = found[0].to("meta")
    assert moved.inputs["length"].device.type == moved.labels.device.type == moved.items.device.type == "meta"
    assert loader(some_images(), 5, workers=0).pin_memory == torch.cuda.is_available()
    assert next(iter(loader(some_images(), 5, workers=0))).to("meta").inputs.device.type == "meta"


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


def test_splits_are_parts_of_the_whole() -> None:
    parts = split(100, (70, 20, 10), seed=1)
    assert [len(p) for p in parts] == [70, 20, 10]
    assert torch.cat(parts).sort().values.equal(torch.arange(100))
    assert all(p.equal(p.sort().values) for p in parts)
    again, other, staged = split(100, (70, 30), 1), split(100, (70, 30), 2), split(100, (70, 30), 1, stage=1)
    assert again[0].equal(parts[0])
    assert not other[0].equal(parts[0])
    assert not staged[0].equal(parts[0])


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
    keys = [(seed, epoch) for seed in range(3) for epoch in range(3)]
    first, again = ([tuple(torch.cat(batches(50, 7, *key)).tolist()) for key in keys] for _ in range(2))
    assert first == again
    assert len(set(first)) == 9
