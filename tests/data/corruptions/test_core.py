"""What holds for every corruption: its definition, batches, types, seeds, sizes, severities, chance."""

import hashlib
import io
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.stats import norm

from gpattention.data import corruptions
from gpattention.data.corruptions import CATEGORIES, CORRUPTIONS, SEVERITIES, corrupt
from gpattention.data.corruptions.core import RandomFields
from gpattention.data.corruptions.weather import generated_pictures, plasma_side
from tests.data.corruptions.pictures import pictures
from tests.oracles import corruptions as plain
from tests.oracles.corruption_jpeg import jpeg
from tests.oracles.corruption_spatter import spatter
from tests.refusals import refusals

SEED, ITEM = 3, 11
Array = np.ndarray
every_corruption = pytest.mark.parametrize("name", CORRUPTIONS)
RANDOM = [
    "gaussian_noise", "shot_noise", "impulse_noise", "speckle_noise", "glass_blur", "motion_blur", "snow",
    "frost", "fog", "spatter", "elastic_transform",
]  # fmt: skip


class Numbers:
    """The random numbers of one image as NumPy arrays, colours last."""

    def __init__(self, name: str, severity: int) -> None:
        self.fields = RandomFields(SEED, torch.tensor([ITEM]), name, severity)

    def uniform(self, field: str, *shape: int) -> Array:
        return self.fields.uniform(field, *shape)[0].numpy()

    def colours(self, kind: str, field: str, height: int, width: int) -> Array:
        drawn = getattr(self.fields, kind)(field, 3, height, width)[0]
        return drawn.permute(1, 2, 0).numpy()

    def normal(self, field: str, *shape: int) -> Array:
        return self.fields.normal(field, *shape)[0].numpy()


def _frost(x: Array, c: tuple[float, ...], r: Numbers) -> Array:
    made = generated_pictures(SEED, torch.zeros(1, 3, *x.shape[:2]))
    picture = made[int(len(made) * r.uniform("picture"))].permute(1, 2, 0).numpy()
    return plain.frost(x, *c, picture=picture, place=r.uniform("place", 2))


def _fog(x: Array, c: tuple[float, ...], r: Numbers) -> Array:
    side = plasma_side(*x.shape[:2])
    return plain.fog(x, *c, uniform=r.uniform("clouds", side, side))


def _jpeg(x: Array, c: tuple[float, ...], r: Numbers) -> Array:
    image_module, file, levels = pytest.importorskip("PIL.Image"), io.BytesIO(), np.round(255 * x)
    image_module.fromarray(levels.astype(np.uint8)).save(file, "JPEG", quality=int(c[0]))
    tables = image_module.open(file).quantization  # of the standard, scaled by quality
    return jpeg(levels, *(np.array(tables[i]).reshape(8, 8) for i in (0, 1))) / 255


# x: the image, c: the constants, r: the random numbers
ORACLES: dict[str, Callable[[Array, tuple[float, ...], Numbers], Array]] = {
    "gaussian_noise": lambda x, c, r: plain.gaussian_noise(x, *c, r.colours("normal", "noise", *x.shape[:2])),
    "shot_noise": lambda x, c, r: plain.shot_noise(x, *c, r.colours("uniform", "photons", *x.shape[:2])),
    "impulse_noise": lambda x, c, r: plain.impulse_noise(
        x, *c, r.colours("uniform", "hit", *x.shape[:2]), r.colours("uniform", "salt", *x.shape[:2])
    ),
    "speckle_noise": lambda x, c, r: plain.speckle_noise(x, *c, r.colours("normal", "noise", *x.shape[:2])),
    "defocus_blur": lambda x, c, r: plain.defocus_blur(x, *c),
    "glass_blur": lambda x, c, r: plain.glass_blur(
        x, *c, [r.uniform(f"offsets {i}", 2, *x.shape[:2]) for i in range(2)]
    ),
    "motion_blur": lambda x, c, r: plain.motion_blur(x, *c, uniform=float(r.uniform("angle"))),
    "zoom_blur": lambda x, c, r: plain.zoom_blur(x, *c),
    "gaussian_blur": lambda x, c, r: plain.gaussian_blur(x, *c),
    "snow": lambda x, c, r: plain.snow(x, c, r.normal("flakes", *x.shape[:2]), float(r.uniform("angle"))),
    "frost": _frost,
    "fog": _fog,
    "brightness": lambda x, c, r: plain.in_hsv(x, (1, 0), *c),
    "spatter": lambda x, c, r: spatter(x, c, r.normal("liquid", *x.shape[:2])),
    "contrast": lambda x, c, r: plain.contrast(x, *c),
    "elastic_transform": lambda x, c, r: plain.elastic_transform(
        x, c, r.uniform("corners", 3, 2), r.uniform("displacements", 2, *x.shape[:2])
    ),
    "pixelate": lambda x, c, r: plain.pixelate(x, *c),
    "jpeg_compression": _jpeg,
    "saturate": lambda x, c, r: plain.in_hsv(x, (c[0], c[1]), 0),
}


def test_every_corruption_has_an_oracle_and_a_category() -> None:
    assert set(ORACLES) == set(CORRUPTIONS)
    members = [(name, category) for category, names in CATEGORIES.items() for name in names]
    assert {name: len(names) for name, names in CATEGORIES.items()} == {
        "noise": 4, "blur": 5, "weather": 5, "digital": 5,
    }  # fmt: skip
    assert {(name, c.name, c.category) for name, c in CORRUPTIONS.items()} == {(n, n, c) for n, c in members}
    assert {len(corruption.severities) for corruption in CORRUPTIONS.values()} == {5}


@pytest.mark.parametrize("shape", [(32, 32), (16, 48)], ids=str)
@pytest.mark.parametrize("severity", SEVERITIES)
@every_corruption
def test_agrees_with_the_definition(name: str, severity: int, shape: tuple[int, int]) -> None:
    image = pictures(1, *shape, seed=severity)
    x = image[0].permute(1, 2, 0).numpy() / 255
    constants = CORRUPTIONS[name].severities[severity - 1]
    expected = np.clip(ORACLES[name](x, constants, Numbers(name, severity)), 0, 1)
    floats = corrupt(image.double() / 255, name, severity, seed=SEED, first_item=ITEM)
    away = np.abs(floats[0].permute(1, 2, 0).numpy() - expected) * 255
    levels = corrupt(image, name, severity, seed=SEED, first_item=ITEM)[0].permute(1, 2, 0).numpy()
    if name == "jpeg_compression":  # libjpeg's integers against an exact transform
        assert away.mean() < 1
        assert np.mean(away > 4) < 0.05
    else:
        assert away.max() < 1e-6
        assert np.array_equal(levels, np.floor(expected * 255 + 1e-6))


@every_corruption
def test_batches_may_be_cut_at_will(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    images = pictures(16)
    for severity in (1, 3, 4, 5):
        whole = corrupt(images, name, severity, seed=2, first_item=100)
        cuts = [0, 1, 4, 11, 16]
        parts = [corrupt(images[a:b], name, severity, seed=2, first_item=100 + a) for a, b in pairwise(cuts)]
        assert torch.equal(torch.cat(parts), whole)
        exact = corrupt(images.double() / 255, name, severity, seed=2, first_item=100)
        alone = corrupt(images[5:6].double() / 255, name, severity, seed=2, first_item=105)
        assert torch.allclose(alone, exact[5:6], rtol=0, atol=1e-12)
    monkeypatch.setitem(corruptions._AT_ONCE, "cpu", 3 * 3 * 32 * 32)  # chunks of three images
    assert torch.equal(corrupt(images, name, 5, seed=2, first_item=100), whole)


@every_corruption
def test_types_and_ranges(name: str) -> None:
    images = pictures(4)
    before = images.clone()
    for severity in SEVERITIES:
        levels = corrupt(images, name, severity)
        assert (levels.dtype, levels.shape) == (torch.uint8, images.shape)
        for dtype in (torch.float32, torch.float64):
            given = images.to(dtype) / 255
            floats = corrupt(given, name, severity)
            assert floats.dtype == dtype
            assert floats.min() >= 0
            assert floats.max() <= 1
            assert torch.equal(given, images.to(dtype) / 255)  # not changed in place
            # bytes are floats with their decimals cut off; single precision may fall off a whole number
            cut = (floats.double() * 255 + 1e-6).floor()
            assert (cut - levels).abs().max() <= (0 if dtype == torch.float64 else 1)
    assert torch.equal(images, before)
    assert corrupt(images[:0], name, 1).shape == (0, 3, 32, 32)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_the_seed_alone_decides(name: str) -> None:
    images = pictures(4)
    first = corrupt(images, name, 3, seed=5)
    torch.manual_seed(99)  # torch's own generator has no part in it
    assert torch.equal(corrupt(images, name, 3, seed=5), first)
    other = corrupt(images, name, 3, seed=6)
    assert torch.equal(other, first) == (name not in RANDOM)
    same_image = images[:1].expand(4, -1, -1, -1)
    changed = corrupt(same_image, name, 3)
    for number in range(1, 4):  # every item has its own random numbers
        assert torch.equal(changed[number], changed[0]) == (name not in RANDOM)


@pytest.mark.parametrize("size", [(8, 8), (9, 21), (40, 17), (64, 64)], ids=str)
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_any_size(name: str, size: tuple[int, int]) -> None:
    images = pictures(2, *size)
    for severity in SEVERITIES:
        changed = corrupt(images, name, severity)
        assert changed.shape == images.shape
    assert not torch.equal(changed, images)


@every_corruption
def test_flat_images(name: str) -> None:
    """No NaN; and averages leave them alone."""
    flat = torch.tensor([0, 10, 128, 130, 250, 255], dtype=torch.uint8)[:, None, None, None].expand(
        6, 3, 32, 32
    )
    averages = name in (*CATEGORIES["blur"], "contrast", "elastic_transform", "pixelate")
    for severity in SEVERITIES:
        assert corrupt(flat.double() / 255, name, severity).isfinite().all()
        assert not averages or torch.equal(corrupt(flat, name, severity), flat)


def changed(images: object = None, name: str = "fog", severity: int = 1, **options: int) -> None:
    corrupt(pictures(1) if images is None else images, name, severity, **options)


NAMES, RANGE = "name to be one of gaussian_noise", r"expected floats in \[0, 1\]"
test_refusals = refusals([
    (lambda: changed(name="fogg"), NAMES, "'fogg'"),
    (lambda: changed(severity=6), "severity: expected 1, 2, 3, 4 or 5", "6"),
    (lambda: changed(severity=2.5), "severity: expected 1, 2, 3, 4 or 5", "2.5"),
    (lambda: changed(severity=True), "severity: expected 1, 2, 3, 4 or 5", "True"),
    (lambda: changed(torch.zeros(2, 3, 32, 32).numpy()), "images to be a tensor", "ndarray"),
    (lambda: changed(torch.zeros(3, 32, 32)), r"images: expected shape \[B, 3, H, W\]", r"\(3, 32, 32\)"),
    (lambda: changed(torch.zeros(2, 1, 32, 32)), "images: expected shape", r"\(2, 1, 32, 32\)"),
    (lambda: changed(torch.zeros(2, 3, 32, 7)), "at least 8", r"\(2, 3, 32, 7\)"),
    (lambda: changed(torch.zeros(2, 3, 32, 32).long()), "uint8 or floats", "torch.int64"),
    (lambda: changed(torch.full((1, 3, 8, 8), 255.0)), RANGE, "255 to 255"),
    (lambda: changed(torch.full((1, 3, 8, 8), torch.nan)), RANGE, "nan to nan"),
    (lambda: changed(first_item=-3), "first_item .* >= 0", "-3"),
])  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_gpu_gives_the_same_levels(name: str) -> None:
    images = pictures(64)
    for severity in SEVERITIES:
        on_cpu = corrupt(images, name, severity)
        on_gpu = corrupt(images.cuda(), name, severity)
        assert on_gpu.device.type == "cuda"
        assert (on_gpu.cpu() != on_cpu).double().mean() < 1e-4


# --- severities ---------------------------------------------------------------------------------------------

NOT_GROWING = {"glass_blur", "frost", "spatter", "elastic_transform", "saturate"}


def distances(name: str) -> list[float]:
    """Mean absolute change in levels at severities 1 to 5."""
    images = pictures(48)
    return [float((corrupt(images, name, s).double() - images).abs().mean()) for s in SEVERITIES]


@pytest.mark.parametrize("name", sorted(set(CORRUPTIONS) - NOT_GROWING))
def test_distance_grows_with_severity(name: str) -> None:
    d = distances(name)
    assert d[0] > 0.5
    assert all(less < more for less, more in pairwise(d))


def test_some_constants_as_published() -> None:
    constants = {name: corruption.severities for name, corruption in CORRUPTIONS.items()}
    assert [c[0] for c in constants["gaussian_noise"]] == [0.04, 0.06, 0.08, 0.09, 0.10]
    assert [c[0] for c in constants["shot_noise"]] == [500, 250, 100, 75, 50]
    assert [c[0] for c in constants["jpeg_compression"]] == [80, 65, 58, 50, 40]
    assert constants["motion_blur"] == ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5))
    assert constants["fog"] == ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75))
    assert constants["snow"][4] == (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8)
    assert constants["elastic_transform"][1] == (0.05, 0.2, 0.07)


# --- random numbers -----------------------------------------------------------------------------------------

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


def test_normal_numbers_are_quantiles_of_uniform_ones() -> None:
    fields = RandomFields(0, torch.arange(1000), "x", 1)
    uniform, normal = fields.uniform("y", 100), fields.normal("y", 100)
    np.testing.assert_allclose(normal, norm.ppf(uniform), rtol=1e-9, atol=1e-12)
    assert 0 < uniform.min() < 1e-4
    assert 1 - 1e-4 < uniform.max() < 1
    assert fields.uniform("angle").shape == (1000,)  # one for each item
