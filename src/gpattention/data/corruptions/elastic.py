"""Elastic transform: a random affine map, then small smooth displacements."""

import torch
from torch import Tensor

from gpattention.data.corruptions.corruption import Constants, Scene
from gpattention.data.corruptions.filters import gaussian_filter
from gpattention.data.corruptions.sampling import sample_linearly


def elastic_transform(images: Tensor, constants: Constants, scene: Scene) -> Tensor:
    """The constants are in units of the shorter side: displacement, its smoothness, affine shift."""
    height, width = images.shape[-2:]
    strength, smoothness, shift = (c * min(height, width) for c in constants)
    corners = shift * (2 * scene.random.uniform("corners", 3, 2) - 1)  # [B, 3, 2], x and y
    images = sample_linearly(images, *places_before(corners, height, width), "mirror")
    field = 2 * scene.random.uniform("displacements", 2, height, width) - 1
    field = strength * gaussian_filter(field, smoothness, border="symmetric", truncate=3)
    y, x = torch.meshgrid(
        torch.arange(height, device=images.device), torch.arange(width, device=images.device), indexing="ij"
    )
    return sample_linearly(images, y + field[:, 1], x + field[:, 0], "symmetric")


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
    y, x = torch.meshgrid(
        torch.arange(height, device=corners.device),
        torch.arange(width, device=corners.device),
        indexing="ij",
    )
    u = x - width // 2 - centre[:, 0, None, None]  # [B, H, W]
    v = y - height // 2 - centre[:, 1, None, None]
    xx, yx, xy, yy, determinant = (each[:, None, None] for each in (xx, yx, xy, yy, determinant))
    before_u, before_v = (yy * u - xy * v) / determinant, (xx * v - yx * u) / determinant
    return before_v + height // 2, before_u + width // 2
