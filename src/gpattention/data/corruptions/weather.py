"""Weather: snow, frost, fog, brightness and spatter (water at severities 1 to 3, mud at 4 and 5).

Clouds are plasma, by the diamond-square algorithm on a torus.  Frost lays a crop of a picture of frost over
the image.  For those who do not have the published pictures there are generated ones, needles of ice over
slow clouds: each has the mean colour and the contrast of one of the five pictures that the published code
draws from (its second and third are the same picture), so that the severities mean about the same.  Edges and
distances of the drops are those that OpenCV finds.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from gpattention.data.corruptions import core
from gpattention.data.corruptions.blur import smear
from gpattention.data.corruptions.core import Scene, corruption


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


_GREY = (0.299, 0.587, 0.114)


# mean and spread of the flakes' field, its magnification, threshold; smear's radius and sigma; image kept
@corruption(
    "weather",
    (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
    (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
    (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
    (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
    (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
)
def snow(images: Tensor, scene: Scene, *constants: float) -> Tensor:
    """Whiten the image and add a layer of flakes, smeared by their fall, and the same layer upside down."""
    mean, spread, zoom, threshold, radius, sigma, kept = constants
    flakes = mean + spread * scene.random.normal("flakes", 1, *images.shape[2:])  # [B, 1, H, W]
    flakes = core.magnify_centre(flakes, zoom)
    flakes = torch.where(flakes < threshold, 0, flakes)
    angle = 90 * scene.random.uniform("angle") - 135
    flakes = smear(core.fractions(core.cut_levels(flakes)), radius, sigma, angle)
    flakes = core.fractions(core.nearest_levels(flakes))
    red, green, blue = images.unbind(1)
    grey = (_GREY[0] * red + _GREY[1] * green + _GREY[2] * blue)[:, None]
    whitened = kept * images + (1 - kept) * torch.maximum(images, 1.5 * grey + 0.5)
    return whitened + flakes + flakes.flip(2, 3)


# The published code shrinks its pictures to a fifth by linear interpolation at the centres of the new pixels,
# which is at the centre of every fifth old one.
_KEPT = slice(2, None, 5)


# image kept, frost added
@corruption("weather", (1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))
def frost(images: Tensor, scene: Scene, kept: float, added: float) -> Tensor:
    """Dim the image by c1 and add c2 times a random crop of a random picture."""
    height, width = images.shape[-2:]
    count = len(images)
    which = (scene.random.uniform("picture") * len(scene.frost)).long()  # [B]
    place = scene.random.uniform("place", 2)  # [B, 2]
    crops = torch.empty_like(images)
    for number, picture in enumerate(scene.frost):
        _, tall, wide = picture.shape
        top = (place[:, 0] * (tall - height)).long()
        left = (place[:, 1] * (wide - width)).long()
        rows = top[:, None] + torch.arange(height, device=images.device)  # [B, H]
        columns = left[:, None] + torch.arange(width, device=images.device)
        index = (rows[:, :, None] * wide + columns[:, None, :]).flatten(1)  # [B, H W]
        crop = picture.flatten(1)[:, index].movedim(0, 1).reshape(count, 3, height, width)
        crops = torch.where((which == number)[:, None, None, None], crop, crops)
    return kept * images + added * crops


def shrunk_pictures(pictures: Sequence[Tensor], images: Tensor) -> tuple[Tensor, ...]:
    """Pictures as published, RGB [3, h, w], to fractions of a fifth of their size, where `images` are."""
    if len(pictures) == 0:
        raise ValueError("frost: expected at least one picture, got none")
    shrunk = []
    for number, picture in enumerate(pictures):
        if picture.ndim != 3 or len(picture) != 3:
            raise ValueError(f"frost[{number}]: expected shape [3, h, w], got {tuple(picture.shape)}")
        core.check_pixels(f"frost[{number}]", picture)
        whole = core.fractions(picture) if picture.dtype == torch.uint8 else picture.to(torch.float64)
        small = whole[:, _KEPT, _KEPT].to(images.device)
        if small.shape[1] <= images.shape[2] or small.shape[2] <= images.shape[3]:
            sides = f"{tuple(whole.shape[1:])} must be larger than the images, {tuple(images.shape[2:])}"
            raise ValueError(f"frost[{number}]: a fifth of {sides}")
        shrunk.append(small)
    return tuple(shrunk)


# mean red, green and blue, and standard deviation of the grey, in levels, at a fifth of the size
_LOOKS = (
    (78, 149, 166, 18),
    (201, 205, 214, 22),
    (201, 205, 214, 22),
    (138, 153, 166, 29),
    (112, 123, 135, 43),
)
_SLOW_SHARE = 0.45  # of the variance: neighbours then correlate as in the published pictures, about 0.6
_NEEDLE_ANGLES = (0.0, 36.0, 72.0, 108.0, 144.0)  # degrees


def generated_pictures(seed: int, images: Tensor) -> tuple[Tensor, ...]:
    """Five pictures of frost as fractions, [3, side, side] each, at least four times as large as `images`."""
    side = plasma_side(4 * images.shape[2], 4 * images.shape[3])
    numbers = torch.arange(len(_LOOKS), device=images.device)
    random = core.RandomFields(seed, numbers, "pictures of frost", 0)
    clouds = plasma(random.uniform("clouds", side, side), decay=1.6)
    specks = random.normal("specks", 1, side, side)  # [5, 1, side, side]
    angles = torch.tensor(_NEEDLE_ANGLES, device=images.device, dtype=torch.float64)
    smeared = [smear(specks, 3, 1.5, angle.expand(len(numbers))) for angle in angles]
    needles = torch.stack(smeared).amax(0)[:, 0]
    texture = _SLOW_SHARE**0.5 * _standard(clouds) + (1 - _SLOW_SHARE) ** 0.5 * _standard(needles)
    looks = images.new_tensor(_LOOKS, dtype=torch.float64)
    pictures = looks[:, :3, None, None] + looks[:, 3:, None, None] * texture[:, None]
    return tuple((pictures / 255).clamp(0, 1).unbind())


def _standard(fields: Tensor) -> Tensor:
    """Mean 0 and variance 1 over each picture."""
    centred = fields - fields.mean((1, 2), keepdim=True)
    return centred / centred.square().mean((1, 2), keepdim=True).sqrt()


_UNIT = 1 << 16  # OpenCV's fixed point
_STRAIGHT, _DIAGONAL, _KNIGHT = _UNIT, round(1.4 * _UNIT), round(2.1969 * _UNIT)
_MOVES = (
    [(y, x, _STRAIGHT) for y, x in ((0, 1), (1, 0))]
    + [(y, x, _DIAGONAL) for y, x in ((1, 1), (1, -1))]
    + [(y, x, _KNIGHT) for y, x in ((1, 2), (2, 1), (1, -2), (2, -1))]
)


def distance(marked: Tensor, most: int) -> Tensor:
    """Length of the shortest way to a marked pixel, at most `most`, float64; marked [B, H, W], bool.

    A way is made of straight steps of length 1, diagonal ones of 1.4 and knight's moves of 2.1969.
    """
    far = most * _UNIT
    height, width = marked.shape[-2:]
    length = torch.where(marked, 0, far)
    while True:
        wide = pad(length, (2, 2, 2, 2), value=far)
        shorter = length
        for y, x, step in _MOVES:
            for side in (1, -1):
                top, left = 2 + side * y, 2 + side * x
                shorter = torch.minimum(shorter, wide[:, top : top + height, left : left + width] + step)
        if torch.equal(shorter, length):
            return length.to(torch.float64) / _UNIT
        length = shorter


_SHIFT = 15
_TAN_22 = int(0.4142135623730950488016887242097 * (1 << _SHIFT) + 0.5)  # OpenCV's fixed point


def canny(levels: Tensor, low: int, high: int) -> Tensor:
    """Edge pixels of levels [B, H, W], bool: local maxima of |dx| + |dy| above `low` that hang together
    with one above `high`.
    """
    dx = core.correlate(levels, [[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]], "nearest").long()
    dy = core.correlate(levels, [[-1.0, -2.0, -1.0], [0.0, 0.0, 0.0], [1.0, 2.0, 1.0]], "nearest").long()
    strength = dx.abs() + dy.abs()
    candidates = (strength > low) & _is_ridge(strength, dx, dy)
    return grow(candidates & (strength > high), candidates)


def _is_ridge(strength: Tensor, dx: Tensor, dy: Tensor) -> Tensor:
    """Whether a pixel is the largest of the three across the edge; of equals, the first one counts."""
    height, width = strength.shape[-2:]
    wide = pad(strength, (1, 1, 1, 1))

    def neighbour(y: int, x: int) -> Tensor:
        return wide[:, 1 + y : 1 + y + height, 1 + x : 1 + x + width]

    def above(y: int, x: int) -> Tensor:
        return strength > neighbour(y, x)

    flat = dx.abs() * _TAN_22
    steep = flat + (dx.abs() << (_SHIFT + 1))  # tan 67.5 = tan 22.5 + 2
    rise = dy.abs() << _SHIFT
    horizontal = above(0, -1) & (strength >= neighbour(0, 1))
    vertical = above(-1, 0) & (strength >= neighbour(1, 0))
    opposed = (dx < 0) != (dy < 0)
    diagonal = torch.where(opposed, above(-1, 1) & above(1, -1), above(-1, -1) & above(1, 1))
    return torch.where(rise < flat, horizontal, torch.where(rise > steep, vertical, diagonal))


def grow(seeds: Tensor, candidates: Tensor) -> Tensor:
    """All candidates that neighbouring candidates, diagonals too, connect with a seed."""
    while True:
        wide = core.extend(seeds, 1, 1, "nearest")
        rows = wide[:, :-2] | wide[:, 1:-1] | wide[:, 2:]
        grown = (rows[..., :-2] | rows[..., 1:-1] | rows[..., 2:]) & candidates
        if torch.equal(grown, seeds):
            return grown
        seeds = grown


# thickness, decay of the clouds
@corruption("weather", (0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75))
def fog(images: Tensor, scene: Scene, thickness: float, decay: float) -> Tensor:
    """Clouds are added and the sum is scaled so that the brightest value stays what it was, at most."""
    height, width = images.shape[-2:]
    side = plasma_side(height, width)
    clouds = plasma(scene.random.uniform("clouds", side, side), decay)[:, None, :height, :width]
    brightest = images.amax((1, 2, 3), keepdim=True)
    return (images + thickness * clouds) * brightest / (brightest + thickness)


# added to the value of HSV
@corruption("weather", (0.05,), (0.1,), (0.15,), (0.2,), (0.3,))
def brightness(images: Tensor, scene: Scene, more: float) -> Tensor:
    """Add c to the value V of HSV, at most up to 1; hue and saturation stay.

    With H kept, the way to HSV and back is a straight line from each pixel to the grey of its brightest
    channel, so no hue need be computed.
    """
    value = images.amax(1, keepdim=True)
    relative = torch.where(value > 0, images / value, 1)  # black has no saturation and becomes grey
    return relative * (value + more).clamp(max=1)


_WATER = (175 / 255, 238 / 255, 238 / 255)  # pale turquoise
_MUD = (63 / 255, 42 / 255, 20 / 255)
_EMBOSS = ((-2.0, -1.0, 0.0), (-1.0, 1.0, 1.0), (0.0, 1.0, 2.0))
_FARTHEST = 20  # pixels


# mean and spread of the liquid's field, its smoothness, threshold; strength (mud: smoothness); is it mud?
@corruption(
    "weather",
    (0.62, 0.1, 0.7, 0.7, 0.5, 0),
    (0.65, 0.1, 0.8, 0.7, 0.5, 0),
    (0.65, 0.3, 1, 0.69, 0.5, 0),
    (0.65, 0.1, 0.7, 0.69, 0.6, 1),
    (0.65, 0.1, 0.5, 0.68, 0.6, 1),
)
def spatter(images: Tensor, scene: Scene, *constants: float) -> Tensor:
    """A smooth random field is liquid where it is above a threshold."""
    mean, spread, smoothness, threshold, strength, is_mud = constants
    liquid = mean + spread * scene.random.normal("liquid", *images.shape[2:])  # [B, H, W]
    liquid = core.gaussian_filter(liquid, smoothness)
    liquid = torch.where(liquid < threshold, 0, liquid)
    if is_mud:
        cover = core.gaussian_filter((liquid > threshold).to(images.dtype), strength)
        cover = torch.where(cover < 0.8, 0, cover)[:, None]
        return images * (1 - cover) + _colour(_MUD, images) * cover
    return images + strength * water_thickness(core.cut_levels(liquid))[:, None] * _colour(_WATER, images)


def water_thickness(liquid: Tensor) -> Tensor:
    """How much light each drop adds, at most 1: embossed by the distance to the drops' edges.

    Levels in, [B, H, W]; all steps but the last work on bytes.
    """
    away = core.box_filter(distance(canny(liquid, 50, 150), _FARTHEST))
    relief = equalize((away + 1e-6).floor().long(), _FARTHEST).to(torch.float64)
    relief = core.correlate(relief, _EMBOSS, "mirror").clamp(0, 255)
    relief = (core.box_filter(relief) + 0.5).floor()
    thickness = liquid * relief
    thickest = thickness.amax((1, 2), keepdim=True)
    return torch.where(thickest > 0, thickness / thickest, 0)


def equalize(levels: Tensor, most: int) -> Tensor:
    """Levels 0..most of [B, H, W] spread over 0..255 by their ranks: OpenCV's equalizeHist."""
    counts = torch.stack([(levels == level).sum((1, 2)) for level in range(most + 1)], 1)  # [B, most + 1]
    total = levels.shape[1] * levels.shape[2]
    up_to = counts.cumsum(1)
    lowest = torch.where(up_to > 0, up_to, total + 1).amin(1, keepdim=True)  # how many have the lowest level
    ranks = (up_to - lowest).clamp(min=0) * 255 / (total - lowest).clamp(min=1)
    table = torch.where(lowest == total, torch.arange(most + 1, device=levels.device), ranks.round())
    return table.gather(1, levels.flatten(1)).reshape(levels.shape)


def _colour(rgb: tuple[float, float, float], images: Tensor) -> Tensor:
    return images.new_tensor(rgb)[:, None, None]
