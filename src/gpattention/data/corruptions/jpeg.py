"""JPEG: the lossy part of the codec without its entropy coding, which loses nothing.

Baseline, YCbCr with halved chrominance (4:2:0), all in integers and rounded where libjpeg rounds.
"""

import torch
from torch import Tensor

from gpattention.data.corruptions.corruption import Constants, Scene
from gpattention.data.corruptions.filters import extend
from gpattention.data.corruptions.jpeg_tables import quantisation_tables
from gpattention.data.corruptions.jpeg_transform import frequencies, from_frequencies
from gpattention.data.corruptions.levels import fractions, nearest_levels

_HALF = 1 << 15  # colours are converted in fixed point with 16 bits


def jpeg_compression(images: Tensor, constants: Constants, scene: Scene) -> Tensor:
    """Encode and decode at the quality c. The images are read as bytes."""
    (quality,) = constants
    height, width = images.shape[-2:]
    luminance_steps, chrominance_steps = (t.to(images.device) for t in quantisation_tables(int(quality)))
    y, cb, cr = to_ycbcr(nearest_levels(images).long())
    y = lose(y, luminance_steps)
    cb, cr = (lose(halve(c), chrominance_steps)[..., : (width + 1) // 2] for c in (cb, cr))
    cb, cr = double(cb), double(cr)
    return fractions(to_rgb(*(channel[:, :height, :width] for channel in (y, cb, cr))))


def to_ycbcr(rgb: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Levels [B, 3, H, W] as luminance and two chrominances, [B, H, W] each; integers."""
    r, g, b = rgb.unbind(1)
    y = (_fix(0.299) * r + _fix(0.587) * g + _fix(0.114) * b + _HALF) >> 16
    offset = (128 << 16) + _HALF - 1
    cb = (-_fix(0.16874) * r - _fix(0.33126) * g + _fix(0.5) * b + offset) >> 16
    cr = (_fix(0.5) * r - _fix(0.41869) * g - _fix(0.08131) * b + offset) >> 16
    return y, cb, cr


def to_rgb(y: Tensor, cb: Tensor, cr: Tensor) -> Tensor:
    """The way back, within 0..255.  [B, 3, H, W]"""
    cb, cr = cb - 128, cr - 128
    r = y + ((_fix(1.402) * cr + _HALF) >> 16)
    g = y + ((-_fix(0.34414) * cb - _fix(0.71414) * cr + _HALF) >> 16)
    b = y + ((_fix(1.772) * cb + _HALF) >> 16)
    return torch.stack([r, g, b], 1).clamp_(0, 255)


def _fix(number: float) -> int:
    return int(number * (1 << 16) + 0.5)


def halve(chrominance: Tensor) -> Tensor:
    """Means of 2 x 2 pixels; halves are rounded up in every second column only, to no side on average.

    To the right, pixels are repeated up to a whole block; below, `lose` repeats means, as in libjpeg.
    """
    even = _padded(chrominance, 2, 16)
    rows = even[:, ::2] + even[:, 1::2]
    sums = rows[..., ::2] + rows[..., 1::2]
    bias = 1 + torch.arange(sums.shape[-1], device=sums.device) % 2
    return (sums + bias) >> 2


def double(chrominance: Tensor) -> Tensor:
    """Twice the size by a triangle filter: 3/4 of the nearer and 1/4 of the farther pixel, on both axes."""
    wide = extend(chrominance, 1, 1, "nearest")
    near = 3 * wide[:, 1:-1]
    rows = torch.stack([near + wide[:, :-2], near + wide[:, 2:]], 2).flatten(1, 2)  # [B, 2h, w + 2]
    near = 3 * rows[..., 1:-1]
    left, right = (near + rows[..., :-2] + 8) >> 4, (near + rows[..., 2:] + 7) >> 4
    return torch.stack([left, right], 3).flatten(2)


def lose(channel: Tensor, steps: Tensor) -> Tensor:
    """What comes back of a channel, [B, H, W] in levels, after its frequencies are rounded to `steps`."""
    whole_blocks = _padded(channel, 8, 8)
    batch, height, width = whole_blocks.shape
    blocks = (whole_blocks - 128).reshape(batch, height // 8, 8, width // 8, 8).transpose(2, 3)
    exact = frequencies(blocks)  # [B, H/8, W/8, 8, 8], times 8
    whole = exact.sign() * ((exact.abs() + 4 * steps) // (8 * steps))  # halves away from zero
    back = from_frequencies(whole * steps) + 128
    joined = back.clamp_(0, 255).transpose(2, 3).reshape(batch, height, width)
    return joined[:, : channel.shape[1], : channel.shape[2]]


def _padded(channel: Tensor, rows: int, columns: int) -> Tensor:
    """Repeat the last row and column until the sides are multiples of `rows` and `columns`."""
    more_rows, more_columns = -channel.shape[-2] % rows, -channel.shape[-1] % columns
    return extend(channel, more_rows, more_columns, "nearest")[..., more_rows:, more_columns:]
