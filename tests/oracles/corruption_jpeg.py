"""JPEG's loss with an exact cosine transform in floating point, for sides that are multiples of 16."""

from __future__ import annotations

import numpy as np

from .kernels import Array

TO_YCBCR = np.array([[0.299, 0.587, 0.114], [-0.168736, -0.331264, 0.5], [0.5, -0.418688, -0.081312]])


def cosines() -> Array:
    """The orthonormal cosine transform, [frequency, place]."""
    u, x = np.arange(8)[:, None], np.arange(8)
    matrix = np.cos((2 * x + 1) * u * np.pi / 16) / 2
    matrix[0] /= np.sqrt(2)
    return matrix


def lossy(channel: Array, steps: Array) -> Array:
    transform, out = cosines(), np.zeros(channel.shape)
    for y in range(0, channel.shape[0], 8):
        for x in range(0, channel.shape[1], 8):
            block = channel[y : y + 8, x : x + 8] - 128
            exact = transform @ block @ transform.T / steps
            whole = np.sign(exact) * np.floor(np.abs(exact) + 0.5 + 1e-9)
            out[y : y + 8, x : x + 8] = transform.T @ (whole * steps) @ transform + 128
    return np.clip(np.round(out), 0, 255)


def doubled(lines: Array) -> Array:
    """The first axis twice as long, by linear interpolation between pixel centres."""
    at = (np.arange(2 * len(lines)) + 0.5) / 2 - 0.5
    return np.apply_along_axis(lambda line: np.interp(at, np.arange(len(line)), line), 0, lines)


def jpeg(levels: Array, luminance_steps: Array, chrominance_steps: Array) -> Array:
    """Levels [H, W, 3] in and out."""
    y, cb, cr = np.round(np.moveaxis(levels @ TO_YCBCR.T + [0, 128, 128], -1, 0))
    y = lossy(y, luminance_steps)
    height, width = y.shape
    colours = []
    for channel in (cb, cr):
        half = channel.reshape(height // 2, 2, width // 2, 2).mean((1, 3))
        half[:, ::2] = np.floor(half[:, ::2] + 0.25)  # halves down in even columns,
        half[:, 1::2] = np.floor(half[:, 1::2] + 0.5)  # up in odd ones
        small = lossy(half, chrominance_steps)
        colours.append(doubled(doubled(small).T).T)
    ycc = np.stack([y, *colours], -1) - [0, 128, 128]
    return np.clip(np.round(ycc @ np.linalg.inv(TO_YCBCR).T), 0, 255)
