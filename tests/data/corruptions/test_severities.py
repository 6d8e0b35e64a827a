"""How far from the clean image each severity goes, and where the published constants do not grow."""

from itertools import pairwise

import pytest
import torch

from gpattention.data.corruptions import CATEGORIES, CORRUPTIONS, SEVERITIES, corrupt

from .pictures import pictures

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


def test_saturate_takes_colour_away_and_then_adds_it() -> None:
    images = pictures(48).double() / 255
    clean = (images.amax(1) - images.amin(1)).mean()
    chroma = []
    for severity in SEVERITIES:
        changed = corrupt(images, "saturate", severity)
        chroma.append(float((changed.amax(1) - changed.amin(1)).mean()))
        assert torch.allclose(changed.amax(1), images.amax(1))  # the value of HSV stays
    assert chroma[1] < chroma[0] < clean < chroma[2] < chroma[3] < chroma[4]


def test_glass_blur_grows_with_its_passes_alone() -> None:
    d = distances("glass_blur")
    assert max(d[:3]) < 1.05 * min(d[:3])  # one pass; a wider blur before and after makes up for itself
    assert min(d[3:]) > 1.3 * max(d[:3])  # two passes


def test_frost_dims_the_image_at_the_end() -> None:
    d = distances("frost")
    assert d[0] < d[1] < d[2]
    assert d[3] < d[4]
    assert d[3] < d[2]  # 0.9 + 0.4 frost is farther from a picture of medium brightness than 0.85 + 0.4
    shares = [added / kept for kept, added in CORRUPTIONS["frost"].severities]
    assert shares == sorted(shares)


def test_spatter_turns_from_water_to_mud() -> None:
    d = distances("spatter")
    assert d[0] < d[1] < d[2]
    assert d[3] < d[4]
    white = torch.full((8, 3, 32, 32), 255, dtype=torch.uint8)
    for severity in (1, 2, 3):
        assert torch.equal(corrupt(white, "spatter", severity), white)  # water adds light
    for severity in (4, 5):
        assert corrupt(white, "spatter", severity).amin() < 100


def test_elastic_transform_moves_less_and_wrinkles_more() -> None:
    d = distances("elastic_transform")
    assert d == sorted(d, reverse=True)  # the affine shift shrinks from 0.08 to 0.03 of the side
    # straight lines stay straight under the affine map alone: look at second differences of a ramp
    ramp = torch.linspace(0.2, 0.8, 32, dtype=torch.float64).expand(16, 3, 32, 32)
    wrinkles = []
    for severity in SEVERITIES:
        inner = corrupt(ramp, "elastic_transform", severity)[..., 6:-6, 6:-6]
        wrinkles.append(float(inner.diff(n=2, dim=-1).abs().mean()))
    assert wrinkles[0] < 1e-12
    assert wrinkles == sorted(wrinkles)


def test_categories() -> None:
    assert {name: len(members) for name, members in CATEGORIES.items()} == {
        "noise": 4,
        "blur": 5,
        "weather": 5,
        "digital": 5,
    }
    assert sorted(sum(CATEGORIES.values(), ())) == sorted(CORRUPTIONS)
    for category, members in CATEGORIES.items():
        for name in members:
            assert CORRUPTIONS[name].name == name
            assert CORRUPTIONS[name].category == category
            assert len(CORRUPTIONS[name].severities) == 5


def test_some_constants_as_published() -> None:
    constants = {name: corruption.severities for name, corruption in CORRUPTIONS.items()}
    assert [c[0] for c in constants["gaussian_noise"]] == [0.04, 0.06, 0.08, 0.09, 0.10]
    assert [c[0] for c in constants["shot_noise"]] == [500, 250, 100, 75, 50]
    assert [c[0] for c in constants["jpeg_compression"]] == [80, 65, 58, 50, 40]
    assert constants["motion_blur"] == ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5))
    assert constants["fog"] == ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75))
    assert constants["snow"][4] == (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8)
    assert constants["elastic_transform"][1] == (0.05, 0.2, 0.07)


def test_noise_has_the_spread_its_constant_says() -> None:
    grey = torch.full((64, 3, 32, 32), 0.5, dtype=torch.float64)
    for severity, (scale,) in enumerate(CORRUPTIONS["gaussian_noise"].severities, 1):
        change = corrupt(grey, "gaussian_noise", severity) - grey
        assert abs(float(change.std()) / scale - 1) < 0.01
        assert abs(float(change.mean())) < 0.01 * scale
    for severity, (photons,) in enumerate(CORRUPTIONS["shot_noise"].severities, 1):
        change = corrupt(grey, "shot_noise", severity) * photons  # Poisson: variance equals mean
        assert abs(float(change.var() / change.mean()) - 1) < 0.02
    for severity, (share,) in enumerate(CORRUPTIONS["impulse_noise"].severities, 1):
        changed = corrupt(grey, "impulse_noise", severity)
        assert abs(float((changed != grey).double().mean()) / share - 1) < 0.06
        assert abs(float(changed[changed != grey].mean()) - 0.5) < 0.03
