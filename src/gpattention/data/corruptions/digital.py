"""Digital corruptions: contrast, elastic transform, pixelate, JPEG, saturation.

JPEG is the lossy part of the codec without its entropy coding, which loses nothing: baseline, YCbCr with
halved chrominance (4:2:0), all in integers and rounded where libjpeg rounds.  Its cosine transform has
libjpeg's precision ("islow"): the factorisation is that of C. Loeffler, A. Ligtenberg and G. Moschytz, ICASSP
1989; constants have 13 fractional bits, and the numbers between the two passes have 2.
"""

import torch
from torch import Tensor

from gpattention.data.corruptions import core
from gpattention.data.corruptions.core import Scene, corruption


# factor
@corruption("digital", (0.75,), (0.5,), (0.4,), (0.3,), (0.15,))
def contrast(images: Tensor, scene: Scene, factor: float) -> Tensor:
    """Shrink the distance to each channel's mean to the factor c."""
    mean = pixel_mean(images)
    return (images - mean) * factor + mean


def pixel_mean(images: Tensor) -> Tensor:
    """The mean of each channel, [B, C, 1, 1], by halving: torch's order of summing depends on the batch."""
    rest = images.flatten(2)
    while rest.shape[2] > 1:
        half = rest.shape[2] // 2
        odd = rest[..., 2 * half :]
        rest = torch.cat([rest[..., :half] + rest[..., half : 2 * half], odd], 2)
    return rest[..., None] / (images.shape[2] * images.shape[3])


# displacement, its smoothness, affine shift; over the shorter side
@corruption(
    "digital", (0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)
)
def elastic_transform(images: Tensor, scene: Scene, *constants: float) -> Tensor:
    """The constants are in units of the shorter side: displacement, its smoothness, affine shift."""
    height, width = images.shape[-2:]
    strength, smoothness, shift = (c * min(height, width) for c in constants)
    corners = shift * (2 * scene.random.uniform("corners", 3, 2) - 1)  # [B, 3, 2], x and y
    images = core.sample_linearly(images, *places_before(corners, height, width), "mirror")
    field = 2 * scene.random.uniform("displacements", 2, height, width) - 1
    field = strength * core.gaussian_filter(field, smoothness, border="symmetric", truncate=3)
    y, x = _places(images, height, width)
    return core.sample_linearly(images, y + field[:, 1], x + field[:, 0], "symmetric")


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
    y, x = _places(corners, height, width)
    u = x - width // 2 - centre[:, 0, None, None]  # [B, H, W]
    v = y - height // 2 - centre[:, 1, None, None]
    xx, yx, xy, yy, determinant = (each[:, None, None] for each in (xx, yx, xy, yy, determinant))
    before_u, before_v = (yy * u - xy * v) / determinant, (xx * v - yx * u) / determinant
    return before_v + height // 2, before_u + width // 2


def _places(beside: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Row [H, 1] and column [W] of every pixel, on the device of a tensor."""
    rows, columns = (torch.arange(side, device=beside.device) for side in (height, width))
    return rows[:, None], columns


# size in between
@corruption("digital", (0.95,), (0.9,), (0.85,), (0.75,), (0.65,))
def pixelate(images: Tensor, scene: Scene, factor: float) -> Tensor:
    """Shrink both sides to the factor c, decimals cut off, and enlarge them again."""
    height, width = images.shape[-2:]
    levels = core.nearest_levels(images)
    levels = box_resize(levels, int(height * factor), int(width * factor))
    return core.fractions(box_resize(levels, height, width))


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


# The quantisation tables of the JPEG standard (Annex K), scaled by quality as libjpeg does.
_LUMINANCE = (
    16, 11, 10, 16, 24, 40, 51, 61,
    12, 12, 14, 19, 26, 58, 60, 55,
    14, 13, 16, 24, 40, 57, 69, 56,
    14, 17, 22, 29, 51, 87, 80, 62,
    18, 22, 37, 56, 68, 109, 103, 77,
    24, 35, 55, 64, 81, 104, 113, 92,
    49, 64, 78, 87, 103, 121, 120, 101,
    72, 92, 95, 98, 112, 100, 103, 99,
)  # fmt: skip
_CHROMINANCE = (
    17, 18, 24, 47, 99, 99, 99, 99,
    18, 21, 26, 66, 99, 99, 99, 99,
    24, 26, 56, 99, 99, 99, 99, 99,
    47, 66, 99, 99, 99, 99, 99, 99,
    *[99] * 32,
)  # fmt: skip


def quantisation_tables(quality: int) -> tuple[Tensor, Tensor]:
    """Step sizes of luminance and chrominance by vertical and horizontal frequency, int64.  [8, 8] each"""
    percent = 5000 // quality if quality < 50 else 200 - 2 * quality
    luminance, chrominance = (
        torch.tensor([min(max((step * percent + 50) // 100, 1), 255) for step in table])
        for table in (_LUMINANCE, _CHROMINANCE)
    )
    return luminance.reshape(8, 8), chrominance.reshape(8, 8)


_BITS, _BETWEEN = 13, 2


def _fix(number: float) -> int:
    return round(number * (1 << _BITS))


# rotations of the even half
_E1, _E2, _E3 = _fix(0.541196100), _fix(0.765366865), _fix(-1.847759065)
# and of the odd half
_O0, _O1, _O2, _O3 = _fix(0.298631336), _fix(2.053119869), _fix(3.072711026), _fix(1.501321110)
_R1, _R2, _R3, _R4 = _fix(-0.899976223), _fix(-2.562915447), _fix(-1.961570560), _fix(-0.390180644)
_R5 = _fix(1.175875602)


def frequencies(blocks: Tensor) -> Tensor:
    """Eight times the orthonormal cosine transform of blocks [..., 8, 8] over both axes; integers."""
    rows = _forward(blocks, -1, even_up=_BETWEEN, down=_BITS - _BETWEEN)
    return _forward(rows, -2, even_up=-_BETWEEN, down=_BITS + _BETWEEN)


def from_frequencies(coefficients: Tensor) -> Tensor:
    """The blocks of orthonormal cosine coefficients [..., 8, 8], to the nearest integer."""
    columns = _backward(coefficients, -2, down=_BITS - _BETWEEN)
    return _backward(columns, -1, down=_BITS + _BETWEEN + 3)


def _forward(blocks: Tensor, axis: int, even_up: int, down: int) -> Tensor:
    x = blocks.unbind(axis)
    sums = [x[i] + x[7 - i] for i in range(4)]
    differences = [x[i] - x[7 - i] for i in range(4)]
    outer, inner = sums[0] + sums[3], sums[1] + sums[2]
    outer_gap, inner_gap = sums[0] - sums[3], sums[1] - sums[2]
    turned = (inner_gap + outer_gap) * _E1
    f0, f4 = _scale(outer + inner, even_up), _scale(outer - inner, even_up)
    f2, f6 = _round_off(turned + outer_gap * _E2, down), _round_off(turned + inner_gap * _E3, down)
    f1, f3, f5, f7 = (_round_off(odd, down) for odd in _rotate_odd(*differences[::-1])[::-1])
    return torch.stack([f0, f1, f2, f3, f4, f5, f6, f7], axis)


def _backward(coefficients: Tensor, axis: int, down: int) -> Tensor:
    f = coefficients.unbind(axis)
    turned = (f[2] + f[6]) * _E1
    low, high = turned + f[2] * _E2, turned + f[6] * _E3
    plus, minus = (f[0] + f[4]) << _BITS, (f[0] - f[4]) << _BITS
    even = [plus + low, minus + high, minus - high, plus - low]
    odd = _rotate_odd(f[7], f[5], f[3], f[1])[::-1]
    first = [_round_off(e + o, down) for e, o in zip(even, odd, strict=True)]
    last = [_round_off(e - o, down) for e, o in zip(even, odd, strict=True)]
    return torch.stack([*first, *last[::-1]], axis)


def _rotate_odd(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The odd half, which is its own transpose: used in both directions."""
    common = (a + c + b + d) * _R5
    ad, bc = (a + d) * _R1, (b + c) * _R2
    ac, bd = (a + c) * _R3 + common, (b + d) * _R4 + common
    return a * _O0 + ad + ac, b * _O1 + bc + bd, c * _O2 + bc + ac, d * _O3 + ad + bd


def _round_off(x: Tensor, bits: int) -> Tensor:
    """Divide by 2^bits, halves up."""
    return (x + (1 << (bits - 1))) >> bits


def _scale(x: Tensor, bits: int) -> Tensor:
    return x << bits if bits >= 0 else _round_off(x, -bits)


_HALF = 1 << 15  # colours are converted in fixed point with 16 bits


# quality
@corruption("digital", (80,), (65,), (58,), (50,), (40,))
def jpeg_compression(images: Tensor, scene: Scene, quality: float) -> Tensor:
    """Encode and decode at the quality c. The images are read as bytes."""
    height, width = images.shape[-2:]
    luminance_steps, chrominance_steps = (t.to(images.device) for t in quantisation_tables(int(quality)))
    y, cb, cr = to_ycbcr(core.nearest_levels(images).long())
    y = lose(y, luminance_steps)
    cb, cr = (lose(halve(c), chrominance_steps)[..., : (width + 1) // 2] for c in (cb, cr))
    cb, cr = double(cb), double(cr)
    return core.fractions(to_rgb(*(channel[:, :height, :width] for channel in (y, cb, cr))))


def to_ycbcr(rgb: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Levels [B, 3, H, W] as luminance and two chrominances, [B, H, W] each; integers."""
    r, g, b = rgb.unbind(1)
    y = (_jpeg_fix(0.299) * r + _jpeg_fix(0.587) * g + _jpeg_fix(0.114) * b + _HALF) >> 16
    offset = (128 << 16) + _HALF - 1
    cb = (-_jpeg_fix(0.16874) * r - _jpeg_fix(0.33126) * g + _jpeg_fix(0.5) * b + offset) >> 16
    cr = (_jpeg_fix(0.5) * r - _jpeg_fix(0.41869) * g - _jpeg_fix(0.08131) * b + offset) >> 16
    return y, cb, cr


def to_rgb(y: Tensor, cb: Tensor, cr: Tensor) -> Tensor:
    """The way back, within 0..255.  [B, 3, H, W]"""
    cb, cr = cb - 128, cr - 128
    r = y + ((_jpeg_fix(1.402) * cr + _HALF) >> 16)
    g = y + ((-_jpeg_fix(0.34414) * cb - _jpeg_fix(0.71414) * cr + _HALF) >> 16)
    b = y + ((_jpeg_fix(1.772) * cb + _HALF) >> 16)
    return torch.stack([r, g, b], 1).clamp_(0, 255)


def _jpeg_fix(number: float) -> int:
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
    wide = core.extend(chrominance, 1, 1, "nearest")
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
    return core.extend(channel, more_rows, more_columns, "nearest")[..., more_rows:, more_columns:]


# factor of the saturation of HSV, added to it
@corruption("digital", (0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2))
def saturate(images: Tensor, scene: Scene, factor: float, more: float) -> Tensor:
    """Multiply the saturation S of HSV by c1 and add c2, within [0, 1]; hue and value stay.

    The hue of grey is 0, red, so that c2 > 0 turns grey reddish, as in the published images.
    """
    value = images.amax(1, keepdim=True)
    below = value - images
    range_ = below.amax(1, keepdim=True)
    saturation = torch.where(value > 0, range_ / value, 0)
    red = images.new_tensor([0.0, 1.0, 1.0])[:, None, None]
    direction = torch.where(range_ > 0, below / range_, red)
    return value - value * (saturation * factor + more).clamp(0, 1) * direction
