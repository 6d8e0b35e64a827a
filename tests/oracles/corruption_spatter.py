"""Spatter of one image: edges, distances and histograms by loops."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .corruptions import filtered, gaussian_blur
from .kernels import Array


def spatter(image: Array, constants: Sequence[float], normal: Array) -> Array:
    mean, spread, smoothness, threshold, strength, mud = constants
    liquid = gaussian_blur(mean + spread * normal, smoothness)
    liquid[liquid < threshold] = 0
    if mud:
        cover = gaussian_blur((liquid > threshold).astype(float), strength)
        cover[cover < 0.8] = 0
        return image * (1 - cover[..., None]) + cover[..., None] * np.array([63, 42, 20]) / 255
    thickness = water(np.minimum(np.floor(liquid * 255 + 1e-6), 255).astype(int))
    return image + strength * thickness[..., None] * np.array([175, 238, 238]) / 255


def water(liquid: Array) -> Array:
    box = np.full((3, 3), 1 / 9)
    away = np.minimum(chamfer(canny(liquid, 50, 150)), 20)
    relief = equalized(np.floor(filtered(away, box, "reflect") + 1e-6).astype(int))
    emboss = np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]])
    relief = np.clip(filtered(relief, emboss, "reflect"), 0, 255)
    thickness = liquid * np.floor(filtered(relief, box, "reflect") + 0.5)
    return thickness / thickness.max() if thickness.max() > 0 else thickness * 0.0


def canny(levels: Array, low: int, high: int) -> Array:
    """Edge pixels, bool, by the direction in tan 22.5 degrees and a flood from the strong ones."""
    height, width = levels.shape
    wide = np.pad(levels, 1, mode="edge").astype(int)
    dx, dy = np.zeros((2, height, width), int)
    for y, x in np.ndindex(height, width):
        window = wide[y : y + 3, x : x + 3]
        dx[y, x] = (window[:, 2] - window[:, 0]) @ [1, 2, 1]
        dy[y, x] = [1, 2, 1] @ (window[2] - window[0])
    size = np.abs(dx) + np.abs(dy)
    around = np.pad(size, 1)
    ridge = np.zeros((height, width), bool)
    for y, x in np.ndindex(height, width):
        here, tangent = size[y, x], np.tan(np.pi / 8)
        if here <= low:
            continue
        before_equal = True  # of two equal neighbours on a straight line the first one counts
        if abs(dy[y, x]) < abs(dx[y, x]) * tangent:
            step = (0, 1)
        elif abs(dy[y, x]) > abs(dx[y, x]) / tangent:
            step = (1, 0)
        else:
            step, before_equal = (1, 1 if (dx[y, x] < 0) == (dy[y, x] < 0) else -1), False
        before = around[1 + y - step[0], 1 + x - step[1]]
        after = around[1 + y + step[0], 1 + x + step[1]]
        ridge[y, x] = here > before and (here >= after if before_equal else here > after)
    edges = ridge & (size > high)
    todo = [(int(y), int(x)) for y, x in np.argwhere(edges)]
    while todo:
        y, x = todo.pop()
        for v in range(max(y - 1, 0), min(y + 2, height)):
            for u in range(max(x - 1, 0), min(x + 2, width)):
                if ridge[v, u] and not edges[v, u]:
                    edges[v, u] = True
                    todo.append((v, u))
    return edges


def chamfer(edges: Array) -> Array:
    """Distance to every edge pixel in closed form, then the least of them."""
    straight, diagonal, knight = 1.0, round(1.4 * 65536) / 65536, round(2.1969 * 65536) / 65536
    least = np.full(edges.shape, np.inf)
    y, x = np.indices(edges.shape)
    for v, u in np.argwhere(edges):
        far, near = np.maximum(abs(y - v), abs(x - u)), np.minimum(abs(y - v), abs(x - u))
        shallow = near * knight + (far - 2 * near) * straight
        steep = (far - near) * knight + (2 * near - far) * diagonal
        least = np.minimum(least, np.where(far >= 2 * near, shallow, steep))
    return least


def equalized(levels: Array) -> Array:
    first = levels.min()
    rest = levels.size - np.sum(levels == first)
    if rest == 0:
        return levels
    out = np.zeros(levels.shape)
    for place, level in np.ndenumerate(levels):
        if level > first:
            out[place] = np.round(np.sum((levels > first) & (levels <= level)) * 255 / rest)
    return out
