"""Parts, whole datasets, normalisation, augmentation and the loader."""

import pytest
import torch
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
    load,
    loader,
)


def some_images(n: int = 12, channels: int = 3, side: int = 6) -> Images:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (n, channels, side, side), generator=generator, dtype=torch.uint8)
    return Images(images, torch.arange(n) % 3)


def some_texts() -> Texts:
    return Texts(("a b c", "d e", "f"), torch.tensor([0, 1, 1]))


def encoder(sentences: list[list[str]]) -> dict[str, Tensor]:
    lengths = torch.tensor([len(words) for words in sentences])
    return {"length": lengths, "padding_mask": torch.arange(3) >= lengths[:, None]}


def test_images_are_checked() -> None:
    good = torch.zeros(4, 3, 2, 2, dtype=torch.uint8)
    Images(good.float(), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(
        ValueError, match=r"images .* shape \[n, C, H, W\], got torch.uint8 of shape \(3, 2, 2\)"
    ):
        Images(good[0], torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"uint8 or floating-point .* got torch.int64"):
        Images(good.long(), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(
        ValueError, match=r"labels to be int64 of shape \[4\].* got torch.int64 of shape \(3,\)"
    ):
        Images(good, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"labels to be int64 .* got torch.uint8"):
        Images(good, torch.zeros(4, dtype=torch.uint8))


def test_parts_of_images() -> None:
    images = some_images()
    chosen = torch.tensor([5, 2])
    assert images.select(chosen).images.equal(images.images[chosen])
    batch = images.batch(chosen)
    assert batch.items.equal(chosen)
    assert batch.labels.tolist() == [2, 2]
    assert isinstance(batch.inputs, Tensor)
    assert batch.inputs.equal(images.images[chosen])
    assert images.nbytes == 12 * 3 * 36 + 12 * 8
    assert repr(images) == "Images(12 of 3x6x6, torch.uint8, cpu)"
    assert Images.unlabelled(images.images).labels.tolist() == [-1] * 12


def test_all_parts_move_together() -> None:
    data = load("digits").to("meta")
    assert {part.images.device.type for part in data.parts.values()} == {"meta"}
    assert {part.labels.device.type for part in data.parts.values()} == {"meta"}
    assert data.normalisation == load("digits").normalisation
    texts = some_texts().encoded(encoder)
    text_data = TextData("t", texts, texts, texts, ("no", "yes"), 0, {"far": texts}).to("meta")
    tensors = [x for part in text_data.parts.values() for x in (part.labels, *part.inputs.values())]
    assert {x.device.type for x in tensors} == {"meta"}
    assert text_data.train.sentences == texts.sentences


def test_parts_have_one_shape() -> None:
    one, other = some_images(), some_images(side=7)
    normalisation = Normalisation.of(one.images)
    with pytest.raises(ValueError, match=r"shape \(3, 6, 6\) as in train, got \(3, 7, 7\) in ood/far"):
        ImageData("x", one, one, one, ("a",), normalisation, 2, 0, {"far": other})


def test_texts() -> None:
    texts = some_texts()
    assert texts.words == [["a", "b", "c"], ["d", "e"], ["f"]]
    with pytest.raises(ValueError, match="call encoded"):
        texts.batch(torch.tensor([0]))
    encoded = texts.encoded(encoder)
    batch = encoded.batch(torch.tensor([2, 0]))
    assert isinstance(batch.inputs, dict)
    assert batch.inputs["length"].tolist() == [1, 3]
    assert batch.labels.tolist() == [1, 0]
    assert encoded.select(torch.tensor([1])).sentences == ("d e",)
    assert encoded.select(torch.tensor([1])).inputs["length"].tolist() == [2]
    assert encoded.nbytes == 3 * 8 + 3 * 8 + 9
    assert "3 sentences" in repr(encoded)
    with pytest.raises(ValueError, match=r"inputs\['tokens'\] to have 3 rows.*got shape \(2, 5\)"):
        Texts(texts.sentences, texts.labels, {"tokens": torch.zeros(2, 5)})
    data = TextData("t", texts, texts, texts, ("no", "yes"), 0, {"far": texts})
    assert data.encoded(encoder).ood["far"].inputs["length"].tolist() == [3, 2, 1]
    assert data.encoded(encoder).nbytes == 4 * encoded.nbytes


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


def test_normalisation_says_what_is_wrong() -> None:
    with pytest.raises(ValueError, match=r"std > 0 in every channel, got \(0.0,\)"):
        Normalisation.of(torch.ones(3, 1, 2, 2))
    with pytest.raises(ValueError, match="one number per channel"):
        Normalisation((0.5, 0.5), (1.0,), "test")
    with pytest.raises(ValueError, match=r"\[n, C, H, W\], n >= 1, got \(0, 1, 2, 2\)"):
        Normalisation.of(torch.ones(0, 1, 2, 2))
    with pytest.raises(ValueError, match=r"\[..., 1, H, W\], got \(5, 3, 2, 2\)"):
        Normalisation((0.5,), (1.0,), "test")(torch.ones(5, 3, 2, 2))


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
    images, items = some_images(40).images, torch.arange(40)
    augment = CropAndFlip(seed=1)
    whole = augment(images, items, 2)
    order = torch.tensor([7, 3, 21])
    assert augment(images[order], order, 2).equal(whole[order])
    assert not augment(images, items, 3).equal(whole)
    assert not CropAndFlip(seed=2)(images, items, 2).equal(whole)
    assert CropAndFlip(padding=0, flip=False)(images, items, 0).equal(images)
    with pytest.raises(ValueError, match=r"items \[B\], got \(40, 3, 6, 6\) and \(3,\)"):
        augment(images, order, 0)
    with pytest.raises(ValueError, match="padding >= 0, got -1"):
        CropAndFlip(padding=-1)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_gives_the_very_batches(workers: int) -> None:
    images = some_images(50)
    settings = {"seed": 1, "epoch": 2, "drop_last": True, "rank": 1, "world_size": 2}
    expected = batches(50, 8, **settings)
    found = list(loader(images, 8, workers=workers, pin_memory=False, **settings))
    assert [batch.items.tolist() for batch in found] == [items.tolist() for items in expected]
    for batch in found:
        assert isinstance(batch, Batch)
        assert batch.inputs.equal(images.images[batch.items])
        assert batch.labels.equal(images.labels[batch.items])
    rest = list(loader(images, 8, workers=0, done=4, **settings))
    assert [b.items.tolist() for b in rest] == [b.items.tolist() for b in found[4:]]


def test_the_loader_takes_texts_and_keeps_order() -> None:
    texts = some_texts().encoded(encoder)
    found = list(loader(texts, 2, shuffle=False, workers=0))
    assert [batch.items.tolist() for batch in found] == [[0, 1], [2]]
    assert found[0].inputs["length"].tolist() == [3, 2]
    moved = found[0].to("meta")
    assert moved.inputs["length"].device.type == moved.labels.device.type == moved.items.device.type == "meta"
    assert loader(some_images(), 5, workers=0).pin_memory == torch.cuda.is_available()
    assert next(iter(loader(some_images(), 5, workers=0))).to("meta").inputs.device.type == "meta"
    with pytest.raises(ValueError, match="workers >= 0, got -1"):
        loader(texts, 2, workers=-1)
    with pytest.raises(ValueError, match="done >= 0, got -1"):
        loader(texts, 2, done=-1)
