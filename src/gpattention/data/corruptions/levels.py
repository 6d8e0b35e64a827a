"""Between fractions in [0, 1] and the 256 levels of a byte.

The published code multiplies by 255 and cuts off the decimals, where its image libraries round; both are
needed. What is a whole number up to rounding errors becomes that number, on every device.
"""

import torch
from torch import Tensor

_GUARD = 1e-6  # of a level


def fractions(levels: Tensor) -> Tensor:
    """Levels 0..255 as float64 in [0, 1]."""
    return levels.to(torch.float64) / 255


def cut_levels(images: Tensor) -> Tensor:
    """Fractions to whole levels, decimals cut off; still float64."""
    return (images * 255).add_(_GUARD).floor_().clamp_(0, 255)


def nearest_levels(images: Tensor) -> Tensor:
    """Fractions to the nearest whole level, halves up; still float64."""
    return (images * 255).add_(0.5 + _GUARD).floor_().clamp_(0, 255)
