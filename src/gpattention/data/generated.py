"""Images that are nothing: noise, patterns, and what is left of real images without their meaning.

Every image depends on (seed, its index) alone.
"""

import torch
from torch import Tensor

from gpattention.data.keyed import GENERATED, integers, keyed


def noise(n: int, shape: tuple[int, int, int], seed: int = 0) -> Tensor:
    """Every pixel uniform from 0 to 255, [n, C, H, W] uint8."""
    channels, height, width = shape
    places = torch.arange(n * channels * height * width)
    return integers(places, 256, GENERATED, seed, 0).view(n, channels, height, width).to(torch.uint8)


def patterns(n: int, shape: tuple[int, int, int], seed: int = 0) -> Tensor:
    """Horizontal, vertical and diagonal stripes and checkers in two grey levels, [n, C, H, W] uint8.

    Stripes are 1 to a quarter of the side wide, begin anywhere, and the levels differ by 96 or more.
    """
    channels, height, width = shape
    items = torch.arange(n)

    def draw(bound: int, what: int) -> Tensor:
        return integers(items, bound, GENERATED, seed, 1, what).view(n, 1, 1)

    period = 1 + draw(max(1, min(height, width) // 4), 0)
    y = torch.arange(height).view(1, height, 1) + draw(2 * max(height, width), 1)
    x = torch.arange(width).view(1, 1, width) + draw(2 * max(height, width), 2)
    cells = torch.stack(
        [
            (y // period + 0 * x) % 2,
            (x // period + 0 * y) % 2,
            ((x + y) // period) % 2,
            (y // period + x // period) % 2,
        ]
    )  # [4, n, H, W]
    cell = cells[integers(items, 4, GENERATED, seed, 1, 3), items].bool()  # [n, H, W]
    dark = draw(160, 4)
    light = dark + 96 + keyed(items, GENERATED, seed, 1, 5).view(n, 1, 1) % (160 - dark)
    grey = torch.where(cell, light, dark).to(torch.uint8)
    return grey[:, None].expand(n, channels, height, width).contiguous()


def inverted(images: Tensor) -> Tensor:
    """Black for white, [n, C, H, W] uint8."""
    return 255 - images


def shuffled(images: Tensor, seed: int = 0) -> Tensor:
    """The pixels of each image in an order of its own, [n, C, H, W]; the histogram stays."""
    n, channels, height, width = images.shape
    places = torch.arange(n * height * width)
    order = keyed(places, GENERATED, seed, 2).view(n, 1, height * width).argsort(dim=-1, stable=True)
    return images.flatten(2).gather(-1, order.expand(n, channels, -1)).view_as(images)
