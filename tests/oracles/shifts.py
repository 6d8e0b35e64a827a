"""Shifts of images pixel by pixel, in NumPy float64, from the same random numbers.

Images are [C, H, W]; `draw(name, *shape)` gives the uniform numbers of one image.
"""

import math
from collections.abc import Callable

import numpy as np

Array = np.ndarray
Draw = Callable[..., Array]


def fold(place: int, size: int) -> int:
    """Beyond a border the image goes on mirrored, border pixels twice."""
    while not 0 <= place < size:
        place = -1 - place if place < 0 else 2 * size - 1 - place
    return place


def read(image: Array, y: float, x: float) -> Array:
    """Between pixels, by the four around.  [C]"""
    _, height, width = image.shape
    top, left = math.floor(y), math.floor(x)
    total = np.zeros(len(image))
    for i in (0, 1):
        for j in (0, 1):
            weight = (1 - abs(y - top - i)) * (1 - abs(x - left - j))
            total += weight * image[:, fold(top + i, height), fold(left + j, width)]
    return total


def seen_from(image: Array, place: Callable[[float, float], tuple[float, float]]) -> Array:
    """What stands at `place(y, x)`, both from the middle."""
    _, height, width = image.shape
    out = np.empty_like(image)
    for i in range(height):
        for j in range(width):
            y, x = place(i - (height - 1) / 2, j - (width - 1) / 2)
            out[:, i, j] = read(image, y + (height - 1) / 2, x + (width - 1) / 2)
    return out


def side(draw: Draw, name: str) -> float:
    return -1.0 if draw(name, 1)[0] < 0.5 else 1.0


def turned(image: Array, degrees: float, draw: Draw) -> Array:
    a = math.radians(degrees) * side(draw, "side")
    return seen_from(
        image, lambda y, x: (math.cos(a) * y - math.sin(a) * x, math.sin(a) * y + math.cos(a) * x)
    )


def sheared(image: Array, slope: float, draw: Draw) -> Array:
    return seen_from(image, lambda y, x: (y, x + slope * side(draw, "side") * y))


def shrunk(image: Array, factor: float, draw: Draw) -> Array:
    return seen_from(image, lambda y, x: (y / factor, x / factor))


def moved(image: Array, share: float, draw: Draw) -> Array:
    _, height, width = image.shape
    down, right = side(draw, "rows") * share * height, side(draw, "columns") * share * width
    return seen_from(image, lambda y, x: (y + down, x + right))


def recoloured(image: Array, degrees: float, draw: Draw) -> Array:
    a = math.radians(degrees)
    forth = np.array([[0.299, 0.587, 0.114], [0.596, -0.274, -0.322], [0.211, -0.523, 0.312]])
    out = np.empty_like(image)
    for i in range(image.shape[1]):
        for j in range(image.shape[2]):
            luma, p, q = forth @ image[:, i, j]
            turned_back = [luma, math.cos(a) * p - math.sin(a) * q, math.sin(a) * p + math.cos(a) * q]
            out[:, i, j] = np.linalg.inv(forth) @ turned_back
    return out


def posterised(image: Array, tones: float, draw: Draw) -> Array:
    levels = np.arange(tones) / (tones - 1)
    nearest = np.abs(image[..., None] - levels)  # of two as near the brighter one
    return levels[len(levels) - 1 - nearest[..., ::-1].argmin(-1)]


def solarised(image: Array, threshold: float, draw: Draw) -> Array:
    return np.array([v if v <= threshold else 1 - v for v in image.ravel()]).reshape(image.shape)


def covered(image: Array, share: float, draw: Draw) -> Array:
    _, height, width = image.shape
    out = image.copy()
    tall, wide = max(1, round(share * height)), max(1, round(share * width))
    top = int(draw("rows", 1)[0] * (height - tall + 1))
    left = int(draw("columns", 1)[0] * (width - wide + 1))
    out[:, top : top + tall, left : left + wide] = 0.5
    return out


def waved(image: Array, strength: float, draw: Draw) -> Array:
    angle, phase = (2 * math.pi * draw(name, 1, 1)[0, 0] for name in ("angle", "phase"))
    wavelength = 2.5 + 3 * draw("wavelength", 1, 1)[0, 0]
    out = image.copy()
    for i in range(image.shape[1]):
        for j in range(image.shape[2]):
            along = math.cos(angle) * i + math.sin(angle) * j
            out[:, i, j] += strength * math.sin(2 * math.pi * along / wavelength + phase)
    return out


def chequered(image: Array, strength: float, draw: Draw) -> Array:
    _, height, width = image.shape
    out = image.copy()
    for i in range(height):
        for j in range(width):
            if (int(8 * i / height) + int(8 * j / width)) % 2:
                out[:, i, j] *= 1 - strength
    return out


def striped(image: Array, share: float, draw: Draw) -> Array:
    channels, height, _ = image.shape
    out = image.copy()
    for row in np.argsort(draw("rows", height))[: max(1, round(share * height))]:
        out[:, row, :] = draw("colours", channels, height)[:, row, None]
    return out


def ghosted(image: Array, share: float, draw: Draw) -> Array:
    return (1 - share) * image + share * image[:, ::-1]
