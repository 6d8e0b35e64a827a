"""Pixelate: shrink and enlarge with Pillow's BOX filter, on bytes."""

import torch
from torch import Tensor

from gpattention.data.corruptions.corruption import Constants, Scene
from gpattention.data.corruptions.levels import fractions, nearest_levels


def pixelate(images: Tensor, constants: Constants, scene: Scene) -> Tensor:
    """Shrink both sides to the factor c, decimals cut off, and enlarge them again."""
    (factor,) = constants
    height, width = images.shape[-2:]
    levels = nearest_levels(images)
    levels = box_resize(levels, int(height * factor), int(width * factor))
    return fractions(box_resize(levels, height, width))


def box_resize(levels: Tensor, height: int, width: int) -> Tensor:
    """Columns first, then rows, each rounded to whole levels, halves up."""
    for axis, size in ((-1, width), (-2, height)):
        taps, weights = box_taps(levels.shape[axis], size)
        shape = (-1, 1) if axis == -2 else (-1,)
        total = torch.zeros_like(levels.index_select(axis, taps[0].to(levels.device)))
        for tap, weight in zip(taps, weights, strict=True):
            picked = levels.index_select(axis, tap.to(levels.device))
            total += picked * weight.to(levels.device).reshape(shape)
        levels = (total + (0.5 + 1e-6)).floor()
    return levels


def box_taps(before: int, after: int) -> tuple[Tensor, Tensor]:
    """Which pixels each new pixel averages: indices and weights, [taps, after].

    Pillow gives a pixel whose centre lies in the window of the new one the weight 1 and any other 0; it
    does not weigh by the overlap.
    """
    scale = before / after
    window = max(scale, 1.0)
    windows = []
    for i in range(after):
        centre = (i + 0.5) * scale
        first, last = max(int(centre - window / 2 + 0.5), 0), min(int(centre + window / 2 + 0.5), before)
        windows.append([k for k in range(first, last) if -0.5 < (k - centre + 0.5) / window <= 0.5])
    taps = max(len(each) for each in windows)
    indices = torch.tensor([(each + each[-1:] * taps)[:taps] for each in windows])
    weights = torch.tensor(
        [[1 / len(each)] * len(each) + [0.0] * (taps - len(each)) for each in windows], dtype=torch.float64
    )
    return indices.T.contiguous(), weights.T.contiguous()
