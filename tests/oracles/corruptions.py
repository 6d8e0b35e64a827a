"""The corruptions of one image, as plainly as they can be written.

Images are [H, W, 3] with values in [0, 1]; random numbers are given. Results are not clipped unless the
definition clips.
"""

from __future__ import annotations

import colorsys
import math
from collections.abc import Sequence

import numpy as np

from .kernels import Array

# --- noise -------------------------------------------------------------------------------------------------


def gaussian_noise(image: Array, scale: float, normal: Array) -> Array:
    return image + scale * normal


def speckle_noise(image: Array, scale: float, normal: Array) -> Array:
    return image * (1 + scale * normal)


def impulse_noise(image: Array, share: float, hit: Array, salt: Array) -> Array:
    out = image.copy()
    for place in np.ndindex(image.shape):
        if hit[place] <= share:
            out[place] = 1.0 if salt[place] <= 0.5 else 0.0
    return out


def shot_noise(image: Array, photons: float, uniform: Array) -> Array:
    out = np.zeros_like(image)
    for place in np.ndindex(image.shape):
        mean, count = image[place] * photons, 0
        probability = total = math.exp(-mean)
        while total < uniform[place] and count < photons:
            count += 1
            probability *= mean / count
            total += probability
        out[place] = count / photons
    return out


# --- blur --------------------------------------------------------------------------------------------------


def filtered(image: Array, kernel: Array, mode: str) -> Array:
    """Correlation with an odd kernel; mode is one of np.pad's."""
    up, left = kernel.shape[0] // 2, kernel.shape[1] // 2
    margins = ((up, up), (left, left), *[(0, 0)] * (image.ndim - 2))
    wide = np.pad(image, margins, mode=mode)  # type: ignore[call-overload]
    windows = np.lib.stride_tricks.sliding_window_view(wide, kernel.shape, axis=(0, 1))
    return np.einsum("...ij,ij->...", windows, kernel)


def gaussian_kernel(sigma: float, radius: int) -> Array:
    x = np.arange(-radius, radius + 1)
    weights = np.exp(-(x[:, None] ** 2 + x**2) / (2 * sigma**2))
    return weights / weights.sum()


def gaussian_blur(image: Array, sigma: float, *, mode: str = "edge", truncate: float = 4) -> Array:
    radius = int(truncate * sigma + 0.5)
    return filtered(image, gaussian_kernel(sigma, radius), mode) if radius else image


def defocus_blur(image: Array, radius: float, softness: float) -> Array:
    x = np.arange(-8, 9)
    disk = (x[:, None] ** 2 + x**2 <= radius**2).astype(float)
    disk /= disk.sum()
    return filtered(image, filtered(disk, gaussian_kernel(softness, 1), "constant"), "reflect")


def glass_blur(image: Array, sigma: float, passes: float, uniforms: Sequence[Array]) -> Array:
    """The loop as it was run: `pixels[a], pixels[b] = pixels[b], pixels[a]` on views is no swap."""
    pixels = np.floor(gaussian_blur(image, sigma) * 255 + 1e-6).astype(np.uint8)
    height, width, _ = image.shape
    for number in range(int(passes)):
        for y in range(height - 1, 1, -1):
            for x in range(width - 1, 1, -1):
                up, left = (int(2 * u) - 1 for u in uniforms[number][:, y, x])  # -1 or 0
                here, there = (y, x), (y + up, x + left)
                pixels[here], pixels[there] = pixels[there], pixels[here]
    return gaussian_blur(pixels / 255, sigma)


def smear(image: Array, radius: float, sigma: float, degrees: float) -> Array:
    height, width = image.shape[:2]
    count = 2 * math.ceil(radius) + 1
    weights = np.array([math.exp(-(i**2) / (2 * sigma**2)) for i in range(count)])
    weights /= weights.sum()
    across, down = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    out = np.zeros_like(image)
    for y in range(height):
        for x in range(width):
            for i in range(count):
                at_x, at_y = x + math.ceil(i * across - 0.5), y + math.ceil(i * down - 0.5)
                out[y, x] += weights[i] * image[min(max(at_y, 0), height - 1), min(max(at_x, 0), width - 1)]
    return out


def motion_blur(image: Array, radius: float, sigma: float, uniform: float) -> Array:
    return np.floor(smear(image, radius, sigma, 90 * uniform - 45) * 255 + 0.5) / 255


def magnified(image: Array, factor: float) -> Array:
    """Axis after axis with np.interp."""
    for axis in (0, 1):
        size = image.shape[axis]
        cut = math.ceil(size / factor)
        start = (size - cut) // 2
        middle = np.take(image, range(start, start + cut), axis)
        longer = round(cut * factor)
        at = np.linspace(0, cut - 1, longer)[(longer - size) // 2 :][:size]
        image = np.apply_along_axis(
            lambda line, at=at: np.interp(at, np.arange(len(line)), line), axis, middle
        )
    return image


def zoom_blur(image: Array, stop: float) -> Array:
    factors = np.arange(1, stop, 0.01)
    return (image + sum(magnified(image, float(factor)) for factor in factors)) / (len(factors) + 1)


# --- weather -----------------------------------------------------------------------------------------------


def plasma(uniform: Array, decay: float) -> Array:
    n = len(uniform)
    cloud = np.zeros((n, n))
    step, amplitude = n, 100.0

    def fill(y: int, x: int, neighbours: Sequence[tuple[int, int]]) -> None:
        mean = sum(cloud[(y + dy) % n, (x + dx) % n] for dy, dx in neighbours) / 4
        cloud[y, x] = mean + amplitude**2 * (2 * uniform[y, x] - 1)

    while step >= 2:
        half = step // 2
        for y in range(half, n, step):
            for x in range(half, n, step):
                fill(y, x, [(-half, -half), (-half, half), (half, -half), (half, half)])
        for y in range(0, n, half):
            for x in range(half if y % step == 0 else 0, n, step):
                fill(y, x, [(-half, 0), (half, 0), (0, -half), (0, half)])
        step, amplitude = half, amplitude / decay
    return (cloud - cloud.min()) / np.ptp(cloud)


def fog(image: Array, thickness: float, decay: float, uniform: Array) -> Array:
    height, width, _ = image.shape
    added = image + thickness * plasma(uniform, decay)[:height, :width, None]
    return added * image.max() / (image.max() + thickness)


def frost(image: Array, kept: float, added: float, picture: Array, place: Array) -> Array:
    """The picture is [h, w, 3]; place is two uniform numbers."""
    height, width, _ = image.shape
    top, left = int(place[0] * (len(picture) - height)), int(place[1] * (picture.shape[1] - width))
    return kept * image + added * picture[top : top + height, left : left + width]


def snow(image: Array, constants: Sequence[float], normal: Array, uniform: float) -> Array:
    mean, spread, zoom, threshold, radius, sigma, kept = constants
    flakes = magnified(mean + spread * normal, zoom)
    flakes[flakes < threshold] = 0
    flakes = np.floor(np.clip(flakes, 0, 1) * 255 + 1e-6) / 255
    flakes = np.floor(smear(flakes, radius, sigma, 90 * uniform - 135) * 255 + 0.5) / 255
    grey = (image @ [0.299, 0.587, 0.114])[..., None]
    whitened = kept * image + (1 - kept) * np.maximum(image, 1.5 * grey + 0.5)
    return whitened + (flakes + np.rot90(flakes, 2))[..., None]


# --- colour and geometry -----------------------------------------------------------------------------------


def contrast(image: Array, factor: float) -> Array:
    mean = image.mean((0, 1))
    return mean + factor * (image - mean)


def in_hsv(image: Array, saturation: tuple[float, float], value: float) -> Array:
    """Through the standard library's colour systems, pixel after pixel."""
    out = np.zeros_like(image)
    for place in np.ndindex(image.shape[:2]):
        h, s, v = colorsys.rgb_to_hsv(*image[place])
        s, v = min(s * saturation[0] + saturation[1], 1), min(v + value, 1)
        out[place] = colorsys.hsv_to_rgb(h, s, v)
    return out


def at_place(image: Array, y: float, x: float, margin: int) -> Array:
    """Bilinear interpolation in an image that was padded by `margin`."""
    top, left = math.floor(y), math.floor(x)
    down, right = y - top, x - left
    a, b = image[top + margin, left + margin], image[top + margin, left + 1 + margin]
    c, d = image[top + 1 + margin, left + margin], image[top + 1 + margin, left + 1 + margin]
    return (1 - down) * ((1 - right) * a + right * b) + down * ((1 - right) * c + right * d)


def elastic_transform(image: Array, constants: Sequence[float], corners: Array, fields: Array) -> Array:
    height, width, _ = image.shape
    side = min(height, width)
    strength, smoothness, shift = (c * side for c in constants)
    middle, s = np.array([width // 2, height // 2]), side // 3
    before = middle + np.array([[s, s], [s, -s], [-s, -s]])  # three points (x, y)
    after = before + shift * (2 * corners - 1)
    back = np.linalg.solve(np.column_stack([after, np.ones(3)]), before)  # [x y 1] @ back
    margin = side - 1
    margins = ((margin, margin), (margin, margin), (0, 0))
    wide, moved = np.pad(image, margins, mode="reflect"), np.zeros_like(image)
    for y, x in np.ndindex(height, width):
        at_x, at_y = np.array([x, y, 1]) @ back
        moved[y, x] = at_place(wide, at_y, at_x, margin)
    dx, dy = (
        strength * gaussian_blur(2 * field - 1, smoothness, mode="symmetric", truncate=3) for field in fields
    )
    wide, out = np.pad(moved, margins, mode="symmetric"), np.zeros_like(image)
    for y, x in np.ndindex(height, width):
        out[y, x] = at_place(wide, y + dy[y, x], x + dx[y, x], margin)
    return out


def box_resized(lines: Array, size: int) -> Array:
    """The first axis to `size`: means of the pixels whose centres lie in each window (a, b], rounded."""
    scale = len(lines) / size
    window = max(scale, 1.0)
    centres = np.arange(len(lines)) + 0.5
    out = []
    for i in range(size):
        away = centres - (i + 0.5) * scale
        out.append(lines[(away > -window / 2) & (away <= window / 2)].mean(0))
    return np.floor(np.array(out) + 0.5 + 1e-9)


def pixelate(image: Array, factor: float) -> Array:
    levels = np.round(image * 255)
    height, width, _ = image.shape
    for h, w in ((int(height * factor), int(width * factor)), (height, width)):
        levels = box_resized(box_resized(levels.swapaxes(0, 1), w).swapaxes(0, 1), h)
    return levels / 255
