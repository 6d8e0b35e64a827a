"""Images seen from elsewhere; what comes in at a border is the mirrored image.

Every function takes float64 images in [0, 1], [B, C, H, W], a strength and random numbers that belong to the
items.
"""

import torch
from torch import Tensor

from gpattention.data.corruptions.random_fields import RandomFields
from gpattention.data.corruptions.sampling import sample_linearly


def turned(images: Tensor, degrees: float, random: RandomFields) -> Tensor:
    """To the left or to the right about the middle."""
    angle = _side(random, "side") * torch.pi * degrees / 180  # [B]
    return _mapped(images, angle.cos(), -angle.sin(), angle.sin(), angle.cos())


def sheared(images: Tensor, slope: float, random: RandomFields) -> Tensor:
    """Rows pushed along, the further from the middle the more."""
    one = torch.ones_like(_side(random, "side"))
    return _mapped(images, one, 0 * one, slope * _side(random, "side"), one)


def shrunk(images: Tensor, factor: float, random: RandomFields) -> Tensor:
    """Seen from further away."""
    scale = torch.full_like(_side(random, "side"), 1 / factor)
    return _mapped(images, scale, 0 * scale, 0 * scale, scale)


def moved(images: Tensor, share: float, random: RandomFields) -> Tensor:
    """By a share of the sides along a diagonal."""
    height, width = images.shape[-2:]
    rows, columns = (_side(random, name)[:, None, None] * share for name in ("rows", "columns"))
    y, x = _places(images)
    return sample_linearly(images, y + rows * height, x + columns * width, "symmetric")


def _side(random: RandomFields, field: str) -> Tensor:
    """Minus or plus one.  [B]"""
    return torch.where(random.uniform(field, 1)[:, 0] < 0.5, -1.0, 1.0).to(torch.float64)


def _mapped(images: Tensor, yy: Tensor, yx: Tensor, xy: Tensor, xx: Tensor) -> Tensor:
    """The value at (y, x) from the middle is read at (yy y + yx x, xy y + xx x); each factor is [B]."""
    height, width = images.shape[-2:]
    middle = ((height - 1) / 2, (width - 1) / 2)
    rows, columns = _places(images)
    y, x = rows - middle[0], columns - middle[1]  # [1, H, W]
    yy, yx, xy, xx = (factor[:, None, None] for factor in (yy, yx, xy, xx))
    return sample_linearly(images, yy * y + yx * x + middle[0], xy * y + xx * x + middle[1], "symmetric")


def _places(images: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column of every pixel.  [B, H, W] each"""
    height, width = images.shape[-2:]
    y = torch.arange(height, device=images.device, dtype=torch.float64)[:, None]
    x = torch.arange(width, device=images.device, dtype=torch.float64)
    return y.expand(len(images), height, width), x.expand(len(images), height, width)
