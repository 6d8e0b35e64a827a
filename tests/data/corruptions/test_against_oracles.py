"""Every corruption at every severity against its plain definition, fed with the same random numbers."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from gpattention.data.corruptions import CORRUPTIONS, SEVERITIES, corrupt
from gpattention.data.corruptions.frost_pictures import generated_pictures
from gpattention.data.corruptions.jpeg_tables import quantisation_tables
from gpattention.data.corruptions.plasma import plasma_side
from gpattention.data.corruptions.random_fields import RandomFields
from tests.oracles import corruptions as plain
from tests.oracles.corruption_jpeg import jpeg
from tests.oracles.corruption_spatter import spatter

from .pictures import pictures

SEED, ITEM = 3, 11
SHAPES = [(32, 32), (16, 48)]
Array = np.ndarray


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
    return jpeg(np.round(255 * x), *(t.numpy() for t in quantisation_tables(int(c[0])))) / 255


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


def test_every_corruption_has_an_oracle() -> None:
    assert set(ORACLES) == set(CORRUPTIONS)
    assert len(CORRUPTIONS) == 19


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("severity", SEVERITIES)
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_agrees_with_the_definition(name: str, severity: int, shape: tuple[int, int]) -> None:
    image = pictures(1, *shape, seed=severity)
    x = image[0].permute(1, 2, 0).numpy() / 255
    expected = np.clip(
        ORACLES[name](x, CORRUPTIONS[name].severities[severity - 1], Numbers(name, severity)), 0, 1
    )
    floats = corrupt(image.double() / 255, name, severity, seed=SEED, first_item=ITEM)
    away = np.abs(floats[0].permute(1, 2, 0).numpy() - expected) * 255
    levels = corrupt(image, name, severity, seed=SEED, first_item=ITEM)[0].permute(1, 2, 0).numpy()
    if name == "jpeg_compression":  # libjpeg's integers against an exact transform: see test_jpeg
        assert away.mean() < 1
        assert np.mean(away > 4) < 0.05
    else:
        assert away.max() < 1e-6
        assert np.array_equal(levels, np.floor(expected * 255 + 1e-6))
