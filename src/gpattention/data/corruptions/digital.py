"""Digital corruptions: contrast, elastic transform, pixelate, JPEG, saturation.

Pillow, which the published code calls too, pixelates and encodes: its integers are the same everywhere.
"""

import io
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from gpattention.data.corruptions import core
from gpattention.data.corruptions.core import Scene, corruption
from gpattention.data.files import pillow

if TYPE_CHECKING:
    from PIL.Image import Image


# factor
@corruption("digital", (0.75,), (0.5,), (0.4,), (0.3,), (0.15,))
def contrast(images: Tensor, scene: Scene, factor: float) -> Tensor:
    """Shrink the distance to each channel's mean to the factor c."""
    mean = pixel_mean(images)
    return (images - mean) * factor + mean


def pixel_mean(images: Tensor) -> Tensor:
    """The mean of each channel, [B, C, 1, 1], by halving: torch's order of summing depends on the batch."""
    rest = images.flatten(2)
    while rest.shape[2] > 1:
        half = rest.shape[2] // 2
        odd = rest[..., 2 * half :]
        rest = torch.cat([rest[..., :half] + rest[..., half : 2 * half], odd], 2)
    return rest[..., None] / (images.shape[2] * images.shape[3])


# displacement, its smoothness, affine shift; over the shorter side
@corruption(
    "digital", (0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)
)
def elastic_transform(images: Tensor, scene: Scene, *constants: float) -> Tensor:
    """The constants are in units of the shorter side: displacement, its smoothness, affine shift."""
    height, width = images.shape[-2:]
    strength, smoothness, shift = (c * min(height, width) for c in constants)
    corners = shift * (2 * scene.random.uniform("corners", 3, 2) - 1)  # [B, 3, 2], x and y
    images = core.sample_linearly(images, *places_before(corners, height, width), "mirror")
    field = 2 * scene.random.uniform("displacements", 2, height, width) - 1
    field = strength * core.gaussian_filter(field, smoothness, border="symmetric", truncate=3)
    y, x = _places(images, height, width)
    return core.sample_linearly(images, y + field[:, 1], x + field[:, 0], "symmetric")


def places_before(corners: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Rows and columns, [B, H, W], that an affine map brings to each pixel.

    The map moves three corners of a square around the centre, A = (s, s), B = (s, -s), C = (-s, -s) as
    (x, y), by `corners` [B, 3, 2]. Being affine, it moves (u, v) by the mean of these moves with the
    weights (v + s) / 2s of A, (u - v) / 2s of B and (s - u) / 2s of C.
    """
    side = 2.0 * (min(height, width) // 3)
    a, b, c = corners.unbind(1)  # [B, 2] each
    along_u, along_v, centre = (b - c) / side, (a - b) / side, (a + c) / 2
    xx, yx = 1 + along_u[:, 0], along_u[:, 1]  # the linear part's columns
    xy, yy = along_v[:, 0], 1 + along_v[:, 1]
    determinant = xx * yy - xy * yx
    y, x = _places(corners, height, width)
    u = x - width // 2 - centre[:, 0, None, None]  # [B, H, W]
    v = y - height // 2 - centre[:, 1, None, None]
    xx, yx, xy, yy, determinant = (each[:, None, None] for each in (xx, yx, xy, yy, determinant))
    before_u, before_v = (yy * u - xy * v) / determinant, (xx * v - yx * u) / determinant
    return before_v + height // 2, before_u + width // 2


def _places(beside: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Row [H, 1] and column [W] of every pixel, on the device of a tensor."""
    rows, columns = (torch.arange(side, device=beside.device) for side in (height, width))
    return rows[:, None], columns


# size in between
@corruption("digital", (0.95,), (0.9,), (0.85,), (0.75,), (0.65,))
def pixelate(images: Tensor, scene: Scene, factor: float) -> Tensor:
    """Shrink both sides to the factor c, decimals cut off, and enlarge them again."""
    height, width = images.shape[-2:]
    box = pillow().Resampling.BOX
    smaller = (int(width * factor), int(height * factor))
    return _changed_by_pillow(images, lambda image: image.resize(smaller, box).resize((width, height), box))


# quality
@corruption("digital", (80,), (65,), (58,), (50,), (40,))
def jpeg_compression(images: Tensor, scene: Scene, quality: float) -> Tensor:
    """Encode and decode at the quality c. The images are read as bytes."""

    def encoded(image: "Image") -> "Image":
        file = io.BytesIO()
        image.save(file, "JPEG", quality=int(quality))
        return pillow().open(file)

    return _changed_by_pillow(images, encoded)


def _changed_by_pillow(images: Tensor, change: "Callable[[Image], Image]") -> Tensor:
    """Every image as bytes through a function of Pillow's; fractions again.  [B, 3, H, W]"""
    levels = core.nearest_levels(images).to("cpu", torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()
    changed = np.stack([np.asarray(change(pillow().fromarray(image))) for image in levels])
    return core.fractions(torch.from_numpy(changed).permute(0, 3, 1, 2).to(images.device))


# factor of the saturation of HSV, added to it
@corruption("digital", (0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2))
def saturate(images: Tensor, scene: Scene, factor: float, more: float) -> Tensor:
    """Multiply the saturation S of HSV by c1 and add c2, within [0, 1]; hue and value stay.

    The hue of grey is 0, red, so that c2 > 0 turns grey reddish, as in the published images.
    """
    value = images.amax(1, keepdim=True)
    below = value - images
    range_ = below.amax(1, keepdim=True)
    saturation = torch.where(value > 0, range_ / value, 0)
    red = images.new_tensor([0.0, 1.0, 1.0])[:, None, None]
    direction = torch.where(range_ > 0, below / range_, red)
    return value - value * (saturation * factor + more).clamp(0, 1) * direction
