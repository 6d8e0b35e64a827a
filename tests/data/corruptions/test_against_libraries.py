"""The building blocks against the libraries that the published code calls, where these are installed."""

import numpy as np
import pytest
import torch
from scipy import ndimage

from gpattention.data.corruptions import CORRUPTIONS, corrupt
from gpattention.data.corruptions.blur import disk
from gpattention.data.corruptions.core import correlate, gaussian_filter, magnify_centre, sample_linearly
from gpattention.data.corruptions.digital import places_before
from gpattention.data.corruptions.weather import canny, distance, equalize, shrunk_pictures

from .pictures import pictures

GREYS = pictures(12, 24, 40)[:, 0].double()  # [12, 24, 40], levels
close = torch.testing.assert_close


@pytest.mark.parametrize("sigma", [0.05, 0.25, 0.4, 1.0, 2.5, 6.4])
@pytest.mark.parametrize(
    ("border", "mode"), [("nearest", "nearest"), ("symmetric", "reflect"), ("mirror", "mirror")]
)
def test_gaussian_filter_is_scipys(sigma: float, border: str, mode: str) -> None:
    for truncate in (3.0, 4.0):
        ours = gaussian_filter(GREYS, sigma, border=border, truncate=truncate)
        theirs = ndimage.gaussian_filter(GREYS.numpy(), sigma, mode=mode, truncate=truncate, axes=(1, 2))
        close(ours, torch.from_numpy(theirs), rtol=0, atol=1e-10)


@pytest.mark.parametrize("factor", [1.0, 1.01, 1.06, 1.11, 1.25, 1.75, 2.25])
@pytest.mark.parametrize("side", [17, 32, 40])
def test_magnified_centre_is_scipys(factor: float, side: int) -> None:
    images = pictures(2, side, side).double()
    cut = int(np.ceil(side / factor))
    start = (side - cut) // 2
    middle = images.numpy()[..., start : start + cut, start : start + cut]
    stretched = ndimage.zoom(middle, (1, 1, factor, factor), order=1)
    trim = (stretched.shape[-1] - side) // 2
    theirs = stretched[..., trim : trim + side, trim : trim + side]
    close(magnify_centre(images, factor), torch.from_numpy(theirs), rtol=0, atol=1e-9)


def test_sampling_is_scipys() -> None:
    generator = torch.Generator().manual_seed(0)
    y, x = 60 * torch.rand(2, 12, 9, 9, generator=generator, dtype=torch.float64) - 20
    for border, mode in (("symmetric", "reflect"), ("mirror", "mirror"), ("nearest", "nearest")):
        ours = sample_linearly(GREYS[:, None], y, x, border)[:, 0]
        for number in range(12):
            at = np.stack([y[number].numpy(), x[number].numpy()])
            theirs = ndimage.map_coordinates(GREYS[number].numpy(), at, order=1, mode=mode)
            close(ours[number], torch.from_numpy(theirs), rtol=0, atol=1e-9)


def test_edges_distances_and_histograms_are_opencvs() -> None:
    cv2 = pytest.importorskip("cv2")
    blobs = gaussian_filter(torch.randn(40, 32, 32, generator=torch.Generator().manual_seed(2)).double(), 1.0)
    blobs = torch.where(blobs > 0.1, (178 + 150 * blobs).clamp(max=255).floor(), 0)
    for levels in (*blobs, *GREYS):
        edges = canny(levels[None], 50, 150)[0]
        picture = levels.numpy().astype(np.uint8)
        theirs = cv2.Canny(picture, 50, 150)
        assert np.array_equal(edges.numpy(), theirs > 0)
        far = np.minimum(cv2.distanceTransform(255 - theirs, cv2.DIST_L2, 5), 20)
        close(distance(edges[None], 20)[0], torch.from_numpy(far).double(), rtol=0, atol=1e-4)
        small = (levels / 13).floor().long()
        spread = cv2.equalizeHist(small.numpy().astype(np.uint8)).astype(int)
        assert np.abs(equalize(small[None], 20)[0].numpy() - spread).max() <= 1  # single precision there
        assert np.mean(equalize(small[None], 20)[0].numpy() != spread) < 0.01


@pytest.mark.parametrize(("radius", "softness"), CORRUPTIONS["defocus_blur"].severities)
def test_defocus_is_opencvs(radius: float, softness: float) -> None:
    cv2 = pytest.importorskip("cv2")
    steps = np.arange(-8, 9)
    hard = (steps[:, None] ** 2 + steps**2 <= radius**2).astype(np.float32)
    soft = cv2.GaussianBlur(hard / hard.sum(), ksize=(3, 3), sigmaX=softness)
    ours = correlate(GREYS, disk(radius, softness), "mirror")
    for number, grey in enumerate(GREYS.numpy()):
        close(ours[number], torch.from_numpy(cv2.filter2D(grey, -1, soft)), rtol=0, atol=1e-3)


def test_affine_map_is_opencvs() -> None:
    cv2 = pytest.importorskip("cv2")
    moves = 3 * torch.rand(12, 3, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    ours = sample_linearly(GREYS[:, None], *places_before(moves, 24, 40), "mirror")[:, 0]
    before = np.array([[20 + 8, 12 + 8], [20 + 8, 12 - 8], [20 - 8, 12 - 8]], dtype=np.float32)
    for number, grey in enumerate(GREYS.numpy()):
        matrix = cv2.getAffineTransform(before, (before + moves[number].numpy()).astype(np.float32))
        theirs = cv2.warpAffine(grey, matrix, (40, 24), borderMode=cv2.BORDER_REFLECT_101)
        away = np.abs(ours[number].numpy() - theirs)
        assert away.mean() < 1  # OpenCV before 5 rounds places to 1/32 of a pixel
        assert np.quantile(away, 0.99) < 6


def test_shrunk_frost_is_opencvs() -> None:
    cv2 = pytest.importorskip("cv2")
    for height, width in ((315, 560), (323, 485), (350, 527), (496, 663)):
        picture = pictures(1, height, width)[0]
        theirs = cv2.resize(picture.permute(1, 2, 0).numpy(), (0, 0), fx=0.2, fy=0.2)
        (ours,) = shrunk_pictures([picture], torch.zeros(1, 3, 32, 32))
        assert np.array_equal((ours * 255).round().permute(1, 2, 0).numpy(), theirs)


@pytest.mark.parametrize("name", ["brightness", "saturate"])
def test_colours_are_scikit_images(name: str) -> None:
    color = pytest.importorskip("skimage.color")
    images = pictures(6).double() / 255
    for severity, constants in enumerate(CORRUPTIONS[name].severities, 1):
        hsv = color.rgb2hsv(images.numpy(), channel_axis=1)
        if name == "brightness":
            hsv[:, 2] = np.clip(hsv[:, 2] + constants[0], 0, 1)
        else:
            hsv[:, 1] = np.clip(hsv[:, 1] * constants[0] + constants[1], 0, 1)
        theirs = torch.from_numpy(color.hsv2rgb(hsv, channel_axis=1))
        close(corrupt(images, name, severity), theirs, rtol=0, atol=1e-9)
