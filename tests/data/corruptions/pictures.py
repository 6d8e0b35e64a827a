"""Images to corrupt: random, smooth at every scale, with black, white and grey in them."""

import torch
from torch import Tensor
from torch.nn.functional import interpolate


def pictures(count: int, height: int = 32, width: int = 32, seed: int = 0) -> Tensor:
    """[count, 3, height, width], uint8."""
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros(count, 3, height, width, dtype=torch.float64)
    for cells in (2, 4, 8, 16, 32):
        coarse = torch.randn(count, 3, cells, cells, generator=generator, dtype=torch.float64)
        total += interpolate(coarse, (height, width), mode="bicubic") / cells**0.7
    low, high = total.amin((1, 2, 3), keepdim=True), total.amax((1, 2, 3), keepdim=True)
    levels = (255 * (total - low) / (high - low)).round()
    for number, image in enumerate(levels):
        top, left = 5 * number % (height - 6), 7 * number % (width - 4)
        patch = image[:, top : top + 6, left : left + 4]
        patch[:, :2], patch[:, 2:4], patch[:, 4:] = 0, 255, patch[:1, 4:].clone()
    return levels.to(torch.uint8)
