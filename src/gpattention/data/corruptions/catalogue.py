"""The 19 corruptions of CIFAR-10-C with the constants published for 32 x 32 images.

D. Hendrycks and T. Dietterich, "Benchmarking Neural Network Robustness to Common Corruptions and
Perturbations", ICLR 2019. Lengths are in pixels except those of the elastic transform.
"""

from gpattention.data.corruptions.blur import defocus_blur, gaussian_blur, zoom_blur
from gpattention.data.corruptions.colour import brightness, contrast, saturate
from gpattention.data.corruptions.corruption import Corruption
from gpattention.data.corruptions.elastic import elastic_transform
from gpattention.data.corruptions.frost import frost
from gpattention.data.corruptions.glass import glass_blur
from gpattention.data.corruptions.jpeg import jpeg_compression
from gpattention.data.corruptions.motion import motion_blur
from gpattention.data.corruptions.noise import gaussian_noise, impulse_noise, shot_noise, speckle_noise
from gpattention.data.corruptions.pixelate import pixelate
from gpattention.data.corruptions.spatter import spatter
from gpattention.data.corruptions.weather import fog, snow

SEVERITIES = (1, 2, 3, 4, 5)

_ALL = (
    # standard deviation
    Corruption("gaussian_noise", "noise", ((0.04,), (0.06,), (0.08,), (0.09,), (0.10,)), gaussian_noise),
    # photons at white
    Corruption("shot_noise", "noise", ((500,), (250,), (100,), (75,), (50,)), shot_noise),
    # share of the values hit
    Corruption("impulse_noise", "noise", ((0.01,), (0.02,), (0.03,), (0.05,), (0.07,)), impulse_noise),
    # standard deviation over brightness
    Corruption("speckle_noise", "noise", ((0.06,), (0.1,), (0.12,), (0.16,), (0.2,)), speckle_noise),
    # radius, softness of its edge
    Corruption(
        "defocus_blur", "blur", ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)), defocus_blur
    ),
    # standard deviation, passes
    Corruption("glass_blur", "blur", ((0.05, 1), (0.25, 1), (0.4, 1), (0.25, 2), (0.4, 2)), glass_blur),
    # radius, standard deviation
    Corruption("motion_blur", "blur", ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)), motion_blur),
    # end of the magnifications
    Corruption("zoom_blur", "blur", ((1.06,), (1.11,), (1.16,), (1.21,), (1.26,)), zoom_blur),
    # standard deviation
    Corruption("gaussian_blur", "blur", ((0.4,), (0.6,), (0.7,), (0.8,), (1,)), gaussian_blur),
    # mean and spread of the flakes' field, its magnification, threshold; smear's radius and sigma; image kept
    Corruption(
        "snow",
        "weather",
        (
            (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
        ),
        snow,
    ),
    # image kept, frost added
    Corruption("frost", "weather", ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)), frost),
    # thickness, decay of the clouds
    Corruption("fog", "weather", ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)), fog),
    # added to the value of HSV
    Corruption("brightness", "weather", ((0.05,), (0.1,), (0.15,), (0.2,), (0.3,)), brightness),
    # mean and spread of the liquid's field, its smoothness, threshold; strength (mud: smoothness); is it mud?
    Corruption(
        "spatter",
        "weather",
        (
            (0.62, 0.1, 0.7, 0.7, 0.5, 0),
            (0.65, 0.1, 0.8, 0.7, 0.5, 0),
            (0.65, 0.3, 1, 0.69, 0.5, 0),
            (0.65, 0.1, 0.7, 0.69, 0.6, 1),
            (0.65, 0.1, 0.5, 0.68, 0.6, 1),
        ),
        spatter,
    ),
    # factor
    Corruption("contrast", "digital", ((0.75,), (0.5,), (0.4,), (0.3,), (0.15,)), contrast),
    # displacement, its smoothness, affine shift; over the shorter side
    Corruption(
        "elastic_transform",
        "digital",
        ((0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)),
        elastic_transform,
    ),
    # size in between
    Corruption("pixelate", "digital", ((0.95,), (0.9,), (0.85,), (0.75,), (0.65,)), pixelate),
    # quality
    Corruption("jpeg_compression", "digital", ((80,), (65,), (58,), (50,), (40,)), jpeg_compression),
    # factor of the saturation of HSV, added to it
    Corruption("saturate", "digital", ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2)), saturate),
)

CORRUPTIONS = {corruption.name: corruption for corruption in _ALL}
CATEGORIES = {
    category: tuple(c.name for c in _ALL if c.category == category)
    for category in ("noise", "blur", "weather", "digital")
}
