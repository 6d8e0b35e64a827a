"""Twelve shifts of images at three severities, for choices that must not use the corruptions.

None of them is one of the 19 corruptions of CIFAR-10-C.  Beyond its borders an image continues as its mirror
image.

>>> from gpattention.data.shifts import SHIFTS, shift
>>> shift(images, "turned", severity=2)
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpattention.checks import check_choice, check_count, check_whole, plain
from gpattention.data.corruptions import check_images
from gpattention.data.corruptions.core import RandomFields, fractions, nearest_levels, sample_linearly

__all__ = ["SEVERITIES", "SHIFTS", "Shift", "shift", "shifts_of"]

SEVERITIES = (1, 2, 3)


@dataclass(frozen=True)
class Shift:
    """One kind of shift.

    Attributes:
        name: for `shift`.
        strengths: of severities 1 to 3.
        apply: a function of float64 images in [0, 1], [B, C, H, W], a strength and the random numbers of the
            items, which returns such images.
        coloured: whether it needs colour images.
    """

    name: str
    strengths: tuple[float, ...]
    apply: Callable[[Tensor, float, RandomFields], Tensor]
    coloured: bool = False


SHIFTS: dict[str, Shift] = {}


def _register(*strengths: float, coloured: bool = False) -> Callable[[Any], Any]:
    """Decorator that registers a function as the shift with its name."""

    def register(apply: Callable[[Tensor, float, RandomFields], Tensor]) -> Any:
        SHIFTS[apply.__name__] = Shift(apply.__name__, strengths, apply, coloured)
        return apply

    return register


@_register(10, 20, 30)  # degrees
def turned(images: Tensor, degrees: float, random: RandomFields) -> Tensor:
    """To the left or to the right about the middle."""
    angle = _side(random, "side") * torch.pi * degrees / 180  # [B]
    return _mapped(images, angle.cos(), -angle.sin(), angle.sin(), angle.cos())


@_register(0.15, 0.3, 0.45)  # slope
def sheared(images: Tensor, slope: float, random: RandomFields) -> Tensor:
    """Rows pushed along, the further from the middle the more."""
    one = torch.ones_like(_side(random, "side"))
    return _mapped(images, one, 0 * one, slope * _side(random, "side"), one)


@_register(0.85, 0.7, 0.55)  # factor
def shrunk(images: Tensor, factor: float, random: RandomFields) -> Tensor:
    """Seen from further away."""
    scale = torch.full_like(_side(random, "side"), 1 / factor)
    return _mapped(images, scale, 0 * scale, 0 * scale, scale)


@_register(0.1, 0.2, 0.3)  # share of the sides
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
    sides = [torch.arange(side, device=images.device, dtype=torch.float64) for side in images.shape[-2:]]
    y, x = torch.meshgrid(*sides, indexing="ij")
    return y.expand(len(images), -1, -1), x.expand(len(images), -1, -1)


# red, green and blue to brightness and two axes of colour (NTSC)
_TO_YIQ = ((0.299, 0.587, 0.114), (0.596, -0.274, -0.322), (0.211, -0.523, 0.312))


@_register(30, 90, 180, coloured=True)  # degrees
def recoloured(images: Tensor, degrees: float, random: RandomFields) -> Tensor:
    """The circle of colours turned, brightness kept."""
    angle = math.radians(degrees)
    to_yiq = torch.tensor(_TO_YIQ, dtype=torch.float64, device=images.device)
    turn = torch.eye(3, dtype=torch.float64, device=images.device)
    turn[1:, 1:] = torch.tensor(
        [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]], dtype=torch.float64
    )
    mix = torch.linalg.solve(to_yiq, turn @ to_yiq)  # [3, 3]
    # sums in a fixed order, so that a batch may be cut at will
    return torch.stack([sum(mix[i, j] * images[:, j] for j in range(3)) for i in range(3)], 1)


@_register(8, 4, 3)  # tones of each colour
def posterised(images: Tensor, tones: float, random: RandomFields) -> Tensor:
    """So many tones of each colour alone."""
    return (images * (tones - 1)).add(0.5).floor() / (tones - 1)


@_register(0.85, 0.7, 0.55)  # threshold
def solarised(images: Tensor, threshold: float, random: RandomFields) -> Tensor:
    """Values above a threshold reversed."""
    return torch.where(images > threshold, 1 - images, images)


WAVELENGTHS = (2.5, 5.5)  # pixels


@_register(0.25, 0.375, 0.5)  # share of the sides
def covered(images: Tensor, share: float, random: RandomFields) -> Tensor:
    """A grey square, its side a share of the image's."""
    hidden = torch.ones(len(images), *images.shape[-2:], dtype=torch.bool, device=images.device)
    for axis, name in ((-2, "rows"), (-1, "columns")):
        size = images.shape[axis]
        side = max(1, round(share * size))
        first = (random.uniform(name, 1) * (size - side + 1)).floor()  # [B, 1]
        place = torch.arange(size, device=images.device)
        within = (place >= first) & (place < first + side)  # [B, size]
        hidden &= within[:, :, None] if axis == -2 else within[:, None, :]
    return torch.where(hidden[:, None], 0.5, images)


@_register(0.06, 0.12, 0.2)  # strength
def waved(images: Tensor, strength: float, random: RandomFields) -> Tensor:
    """A grating of some direction and wavelength on top."""
    angle, phase = (random.uniform(name, 1, 1) * 2 * torch.pi for name in ("angle", "phase"))
    shortest, longest = WAVELENGTHS
    wavelength = shortest + (longest - shortest) * random.uniform("wavelength", 1, 1)
    y, x = _places(images)
    along = angle.cos() * y + angle.sin() * x  # [B, H, W]
    return images + strength * torch.sin(2 * torch.pi * along / wavelength + phase)[:, None]


@_register(0.2, 0.4, 0.6)  # how much darker
def chequered(images: Tensor, strength: float, random: RandomFields) -> Tensor:
    """Every other field of eight by eight darker."""
    height, width = images.shape[-2:]
    y = torch.arange(height, device=images.device)[:, None] * 8 // height
    x = torch.arange(width, device=images.device) * 8 // width
    return images * (1 - strength * ((y + x) % 2).to(images.dtype))


@_register(1 / 16, 1 / 8, 1 / 4)  # share of the rows
def striped(images: Tensor, share: float, random: RandomFields) -> Tensor:
    """A share of the rows lost, each in a colour of its own."""
    height = images.shape[-2]
    order = random.uniform("rows", height).argsort(-1).argsort(-1)  # [B, H]
    lost = order < max(1, round(share * height))
    colours = random.uniform("colours", images.shape[1], height)  # [B, C, H]
    return torch.where(lost[:, None, :, None], colours[..., None], images)


@_register(0.15, 0.25, 0.35)  # share
def ghosted(images: Tensor, share: float, random: RandomFields) -> Tensor:
    """Its own picture upside down shines through."""
    return (1 - share) * images + share * images.flip(-2)


def shifts_of(channels: int) -> tuple[str, ...]:
    """Names of the shifts that images can have.

    Args:
        channels: of the images, 1 or 3.

    Returns:
        Names of `SHIFTS`.
    """
    return tuple(each.name for each in SHIFTS.values() if channels == 3 or not each.coloured)


def check_severity(severity: object) -> int:
    """The severity of a shift, of images or of texts."""
    severity = plain(severity)
    if not isinstance(severity, int) or isinstance(severity, bool) or severity not in SEVERITIES:
        raise ValueError(f"severity: expected 1, 2 or 3, got {severity!r}")
    return severity


def shift(images: Tensor, name: str, severity: int, *, seed: int = 0, first_item: int = 0) -> Tensor:
    """Images [B, 1 or 3, H, W] under the shift `name` of `SHIFTS` at severity 1 to 3.

    Bytes remain bytes, and floats in [0, 1] remain floats of their type, on the same device.  Image b is item
    `first_item + b`; its random numbers depend only on the seed, the item, the shift and the severity, so
    that the choice of batches does not matter.

    Args:
        images: uint8, or floats in [0, 1].
        name: such as "turned".
        severity: 1, 2 or 3.
        seed: of all random numbers.
        first_item: the index of the first image in its set.

    Returns:
        New images of the same shape, type and device.

    Raises:
        ValueError: the shift or severity is unknown, or the images have another form.

    >>> shift(torch.zeros(4, 3, 32, 32, dtype=torch.uint8), "turned", 2).shape
    torch.Size([4, 3, 32, 32])
    """
    check_choice("name", name, SHIFTS)
    severity = check_severity(severity)
    seed, first_item = check_whole("seed", seed), check_count("first_item", first_item, least=0)
    check_images(images, (1, 3), 1)
    chosen = SHIFTS[name]
    if chosen.coloured and images.shape[1] != 3:
        raise ValueError(f"images: expected three channels for {name}, got {images.shape[1]}")
    whole = images.dtype == torch.uint8
    values = fractions(images) if whole else images.to(torch.float64)
    items = torch.arange(first_item, first_item + len(images), device=images.device)
    random = RandomFields(seed, items, f"shift/{name}", severity)
    changed = chosen.apply(values, chosen.strengths[severity - 1], random)
    return (nearest_levels(changed) if whole else changed.clamp(0, 1)).to(images.dtype)
