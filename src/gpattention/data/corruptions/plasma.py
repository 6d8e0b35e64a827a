"""Plasma: clouds by the diamond-square algorithm on a torus."""

import torch
from torch import Tensor


def plasma_side(height: int, width: int) -> int:
    """The side of the smallest plasma that covers an image: a power of two."""
    side = 2
    while side < max(height, width):
        side *= 2
    return side


def plasma(uniform: Tensor, decay: float) -> Tensor:
    """Clouds with values from 0 to 1, one for each of the random fields [B, side, side].

    Midpoints of squares, then of diamonds, get the mean of their four neighbours and a random number; its
    range falls by decay^2 from one step to the next. Every point but the first takes the random number
    of its own place.
    """
    noise = 2 * uniform - 1
    cloud = torch.zeros_like(uniform)
    step, amplitude = uniform.shape[-1], 100.0
    while step >= 2:
        half, wobble = step // 2, amplitude * amplitude
        corners = cloud[:, ::step, ::step]
        pairs = corners + corners.roll(-1, 1)
        centres = (pairs + pairs.roll(-1, 2)) / 4 + wobble * noise[:, half::step, half::step]
        cloud[:, half::step, half::step] = centres
        above = centres + centres.roll(1, 1) + corners + corners.roll(-1, 2)
        beside = centres + centres.roll(1, 2) + corners + corners.roll(-1, 1)
        cloud[:, ::step, half::step] = above / 4 + wobble * noise[:, ::step, half::step]
        cloud[:, half::step, ::step] = beside / 4 + wobble * noise[:, half::step, ::step]
        step, amplitude = half, amplitude / decay
    cloud = cloud - cloud.amin((1, 2), keepdim=True)
    return cloud / cloud.amax((1, 2), keepdim=True)
