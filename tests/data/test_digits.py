"""The dataset in the package, and images made to be nothing."""

import subprocess
import sys
from importlib.resources import files

import torch

from gpattention.data import NO_CLASS, load
from gpattention.data import digits as made
from gpattention.data.digits import bundled_digits

SHAPE = (3, 8, 12)


def test_the_bundle_is_small_attributed_and_whole() -> None:
    bundle = files("gpattention.data") / "bundled"
    assert len((bundle / "digits.npz").read_bytes()) < 200_000
    licence = (bundle / "digits-LICENSE.txt").read_text()
    assert [w for w in ("Alpaydin", "Kaynak", "UCI", "CC BY 4.0", "Changes") if w not in licence] == []
    images, labels = bundled_digits()
    assert (images.shape, images.dtype) == ((1797, 1, 8, 8), torch.uint8)
    assert torch.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    levels = images.unique()
    assert (int(levels[0]), int(levels[-1]), len(levels)) == (0, 255, 17)
    assert ((levels.double() * 16 / 255).round() == torch.arange(17)).all()
    # the first image of the published file is a zero
    assert (images[0, 0, 0].double() * 16 / 255).round().tolist() == [0, 0, 5, 13, 9, 1, 0, 0]
    assert int(labels[0]) == 0


def test_split_of_the_digits() -> None:
    data = load("digits")
    assert {name: len(part) for name, part in data.parts.items()} == {
        "train": 843, "validation": 200, "test": 400, "ood/near": 354,
        "ood/noise": 400, "ood/patterns": 400, "ood/inverted": 400, "ood/shuffled": 400,
    }  # fmt: skip
    assert (data.channels, data.image_size, data.patch) == (1, (8, 8), 2)
    assert data.classes == tuple("01234567")
    images, labels = bundled_digits()
    parts = (data.train, data.validation, data.test)
    inside, kept = torch.cat([p.images for p in parts]), images[labels < 8]
    assert sorted(inside.flatten(1).tolist()) == sorted(kept.flatten(1).tolist())
    assert torch.cat([p.labels for p in parts]).bincount().equal(labels[labels < 8].bincount())
    assert data.ood["near"].images.equal(images[labels >= 8])
    assert all((part.labels == NO_CLASS).all() for part in data.ood.values())
    assert all(torch.bincount(part.labels, minlength=8).min() > 10 for part in parts)


def test_the_seed_decides() -> None:
    one, same, other = load("digits", seed=1), load("digits", seed=1), load("digits", seed=2)
    for name, part in one.parts.items():
        assert part.images.equal(same.parts[name].images)
        assert name == "ood/near" or not part.images.equal(other.parts[name].images)
    assert one.normalisation == same.normalisation != other.normalisation


def test_augmentation_is_an_option() -> None:
    plain, augmented = load("digits"), load("digits", augment=True)
    items = torch.arange(20)
    images = plain.train.images[items]
    assert plain.training_inputs(images, items, 0).equal(plain.inputs(images))
    first, second = (augmented.training_inputs(images, items, epoch) for epoch in (0, 1))
    assert not first.equal(plain.inputs(images))
    assert not first.equal(second)


def test_noise_fills_all_levels() -> None:
    noise = made.noise(200, SHAPE, seed=0)
    assert noise.shape == (200, *SHAPE)
    assert len(noise.unique()) == 256
    assert abs(float(noise.double().mean()) - 127.5) < 2
    assert made.noise(50, SHAPE, seed=0).equal(noise[:50])
    assert not made.noise(50, SHAPE, seed=1).equal(noise[:50])


def test_patterns_have_two_levels_and_are_stripes_or_checkers() -> None:
    drawn = made.patterns(300, SHAPE, seed=0)
    assert drawn.shape == (300, *SHAPE)
    for image in drawn:
        levels = image.unique()
        assert len(levels) == 2
        assert int(levels[1]) - int(levels[0]) >= 96
        assert image[0].equal(image[2])
    rows = (drawn == drawn[..., :1]).all(-1).all(-1)[:, 0]
    columns = (drawn == drawn[..., :1, :]).all(-1).all(-1)[:, 0]
    assert 40 < int(rows.sum()) < 120  # a quarter each
    assert 40 < int(columns.sum()) < 120
    assert len(drawn.flatten(1).unique(dim=0)) > 280
    assert made.patterns(10, SHAPE, seed=0).equal(drawn[:10])


def test_shuffling_keeps_the_histogram_and_the_colours() -> None:
    images = torch.arange(4 * 3 * 8 * 12).view(4, *SHAPE).remainder(251).to(torch.uint8)
    mixed = made.shuffled(images, seed=0)
    assert not mixed.equal(images)
    for before, after in zip(images, mixed, strict=True):
        assert before.flatten(1).T.unique(dim=0).equal(after.flatten(1).T.unique(dim=0))
    same = images[:1].expand(4, -1, -1, -1)
    assert len(made.shuffled(same).flatten(1).unique(dim=0)) == 4


def test_digits_need_no_other_package() -> None:
    hidden = "import sys; sys.modules |= dict.fromkeys(['sklearn', 'PIL', 'scipy'])\n"
    subprocess.run(
        [sys.executable, "-c", hidden + "import gpattention.data as d; d.load('digits')"], check=True
    )
