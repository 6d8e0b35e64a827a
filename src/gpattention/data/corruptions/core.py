"""What the corruptions are made of: their registry, levels, random numbers, filters, interpolation.

Levels: the published code multiplies by 255 and cuts off the decimals, where its image libraries round; both
are needed.  What is a whole number up to rounding errors becomes that number, on every device.

Filters are sums of shifted images: a convolution of torch's may take another algorithm for another batch
size; these sums add up the same numbers in the same order for every batch.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from gpattention.data.datasets import GOLDEN, MIX_2, mix, shift_right

_GUARD = 1e-6  # of a level


def check_pixels(name: str, images: Tensor) -> None:
    """Raise unless these are bytes, or floats in [0, 1]."""
    if images.dtype == torch.uint8:
        return
    if not images.is_floating_point():
        raise ValueError(f"{name}: expected uint8 or floats in [0, 1], got {images.dtype}")
    if images.numel() > 0:
        low, high = (float(bound) for bound in images.aminmax())
        if not (low >= 0 and high <= 1):  # also false for NaN
            raise ValueError(f"{name}: expected floats in [0, 1], got {low:.4g} to {high:.4g}")


def fractions(levels: Tensor) -> Tensor:
    """Levels 0..255 as float64 in [0, 1]."""
    return levels.to(torch.float64) / 255


def cut_levels(images: Tensor) -> Tensor:
    """Fractions to whole levels, decimals cut off; still float64."""
    return (images * 255).add_(_GUARD).floor_().clamp_(0, 255)


def nearest_levels(images: Tensor) -> Tensor:
    """Fractions to the nearest whole level, halves up; still float64."""
    return (images * 255).add_(0.5 + _GUARD).floor_().clamp_(0, 255)


class RandomFields:
    """Random numbers of one corruption at one severity; row b belongs to the item `items[b]`.

    Each number is a hash of (seed, corruption, severity, field, item, place): the same on every device and
    for every way of cutting the test set into batches.  A field is asked for by name, so that the order of
    the calls does not matter.

    >>> fields = RandomFields(seed=0, items=torch.arange(8), corruption="snow", severity=3)
    >>> fields.normal("flakes", 32, 32).shape
    torch.Size([8, 32, 32])
    """

    def __init__(self, seed: int, items: Tensor, corruption: str, severity: int) -> None:
        self._recipe = f"{seed}/{corruption}/{severity}"
        self._items = items.to(torch.int64)  # [B]

    def uniform(self, field: str, *shape: int) -> Tensor:
        """Uniform numbers in (0, 1), never 0 or 1, float64.  [B, *shape]"""
        digest = hashlib.blake2b(f"{self._recipe}/{field}".encode(), digest_size=8).digest()
        start = int.from_bytes(digest, "little", signed=True)
        keys = mix(self._items * MIX_2 + start)  # [B]
        places = torch.arange(math.prod(shape), device=keys.device) * GOLDEN
        bits = mix(keys[:, None] + places)  # [B, places]
        unit = shift_right(bits, 12).to(torch.float64).add_(0.5).mul_(2.0**-52)  # 1 - 2^-53 is a double
        return unit.reshape(len(keys), *shape)

    def normal(self, field: str, *shape: int) -> Tensor:
        """Standard normal numbers by the inverse of the distribution function, float64.  [B, *shape]"""
        return self.uniform(field, *shape).mul_(2).sub_(1).erfinv_().mul_(math.sqrt(2))


@dataclass(frozen=True)
class Scene:
    """What a corruption may use besides the images and its constants."""

    random: RandomFields
    frost: tuple[Tensor, ...] = ()  # pictures of frost, fractions, [3, h, w] each; only frost looks at them


@dataclass(frozen=True)
class Corruption:
    """One of the 19.

    Attributes:
        name: as `corrupt` takes it.
        category: "noise", "blur", "weather" or "digital".
        severities: the published constants of severity 1 to 5.
        apply: takes float64 images in [0, 1], [B, 3, H, W], a scene and the constants; returns such images.
    """

    name: str
    category: str
    severities: tuple[tuple[float, ...], ...]
    apply: Callable[..., Tensor]


REGISTERED: list[Corruption] = []


def corruption(category: str, *severities: tuple[float, ...]) -> Callable[[Any], Any]:
    """Decorator: the function is the corruption of its name, with these constants of severity 1 to 5."""

    def register(apply: Callable[..., Tensor]) -> Callable[..., Tensor]:
        REGISTERED.append(Corruption(apply.__name__, category, severities, apply))
        return apply

    return register


Border = Literal["nearest", "mirror", "symmetric"]


def inside(positions: Tensor, size: int, border: Border) -> Tensor:
    """Where a position beyond the border is read from, of `size` pixels in a row.

    nearest: a a a [a b c d] d d d; mirror: d c b [a b c d] c b a; symmetric: c b a [a b c d] d c b.
    """
    if border == "nearest" or size == 1:
        return positions.clamp(0, size - 1)
    if border == "mirror":
        period = 2 * size - 2
        folded = positions.remainder(period)
        return torch.minimum(folded, period - folded)
    folded = positions.remainder(2 * size)
    return torch.minimum(folded, 2 * size - 1 - folded)


def extend(images: Tensor, rows: int, columns: int, border: Border) -> Tensor:
    """Images with a margin on every side.  [..., H + 2 rows, W + 2 columns]"""
    height, width = images.shape[-2:]
    if rows:
        y = torch.arange(-rows, height + rows, device=images.device)
        images = images.index_select(-2, inside(y, height, border))
    if columns:
        x = torch.arange(-columns, width + columns, device=images.device)
        images = images.index_select(-1, inside(x, width, border))
    return images


def correlate(images: Tensor, kernel: Sequence[Sequence[float]], border: Border) -> Tensor:
    """Out(y, x) = sum over the kernel's (i, j) of kernel[i][j] in(y + i - centre, x + j - centre)."""
    height, width = images.shape[-2:]
    wide = extend(images, len(kernel) // 2, len(kernel[0]) // 2, border)
    total = torch.zeros_like(images)
    for i, row in enumerate(kernel):
        for j, weight in enumerate(row):
            if weight != 0:
                total.add_(wide[..., i : i + height, j : j + width], alpha=weight)
    return total


def gaussian_weights(sigma: float, radius: int) -> list[float]:
    """Samples of a Gaussian at -radius..radius, of sum 1."""
    weights = [math.exp(-0.5 * (i / sigma) ** 2) for i in range(-radius, radius + 1)]
    return [weight / sum(weights) for weight in weights]


def gaussian_filter(
    images: Tensor, sigma: float, *, border: Border = "nearest", truncate: float = 4.0
) -> Tensor:
    """A Gaussian blur cut off at `truncate` standard deviations, rounded to whole pixels."""
    radius = int(truncate * sigma + 0.5)
    if radius == 0:
        return images.clone()
    weights = gaussian_weights(sigma, radius)
    return correlate(correlate(images, [[w] for w in weights], border), [weights], border)


def box_filter(images: Tensor) -> Tensor:
    """The mean over 3 x 3 pixels, mirrored at the border."""
    ones = [1.0, 1.0, 1.0]
    return correlate(correlate(images, [[w] for w in ones], "mirror"), [ones], "mirror") / 9


def sample_linearly(images: Tensor, y: Tensor, x: Tensor, border: Border) -> Tensor:
    """Values of images [B, C, H, W] at the places y, x [B, H', W'], by the four pixels around each."""
    height, width = images.shape[-2:]
    top, left = y.floor(), x.floor()
    down, right = (y - top)[:, None], (x - left)[:, None]  # [B, 1, H', W'], weights
    rows = [inside(top.long() + i, height, border) for i in (0, 1)]
    columns = [inside(left.long() + i, width, border) for i in (0, 1)]
    upper = _pick(images, rows[0], columns[0]) * (1 - right) + _pick(images, rows[0], columns[1]) * right
    lower = _pick(images, rows[1], columns[0]) * (1 - right) + _pick(images, rows[1], columns[1]) * right
    return upper * (1 - down) + lower * down


def _pick(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Pixels of images [B, C, H, W] at rows, columns [B, H', W'].  [B, C, H', W']"""
    batch, channels, _, width = images.shape
    place = (rows * width + columns).flatten(1)[:, None].expand(-1, channels, -1)
    return images.flatten(2).gather(2, place).reshape(batch, channels, *rows.shape[1:])


def magnify_centre(images: Tensor, factor: float) -> Tensor:
    """The middle of the images, magnified by `factor` to their own size.

    As the published `clipped_zoom`: cut out ceil(size / factor) pixels, stretch them linearly to
    round(cut * factor) with the corner pixels at the corners, keep the middle `size` of these.
    """
    for axis in (-2, -1):
        size = images.shape[axis]
        cut = math.ceil(size / factor)
        stretched = round(cut * factor)
        first = (stretched - size) // 2
        at = torch.arange(first, first + size, device=images.device, dtype=torch.float64)
        at = at * (cut - 1) / max(stretched - 1, 1)
        low = at.floor().clamp_(max=max(cut - 2, 0))
        share = at - low
        left = low.long() + (size - cut) // 2
        right = (left + 1).clamp_(max=size - 1)
        if axis == -2:
            share = share[:, None]
        images = images.index_select(axis, left) * (1 - share) + images.index_select(axis, right) * share
    return images
