"""Small images as PNG inside a page, without a library."""

import struct
import zlib
from base64 import b64encode
from collections.abc import Sequence
from typing import Any


def png_data(image: Sequence[Sequence[Any]]) -> str:
    """A `data:` address of H x W x C numbers from 0 to 255, C 1 or 3; H x W is grey."""
    rows = [[_channels(pixel) for pixel in row] for row in image]
    height, width = len(rows), len(rows[0]) if rows else 0
    channels = len(rows[0][0]) if width else 0
    even = all(len(row) == width and all(len(pixel) == channels for pixel in row) for row in rows)
    if not even or channels not in (1, 3):
        raise ValueError(f"expected image to be H x W x 1 or 3 numbers, got {height} x {width} x {channels}")
    # each line begins with its filter: none
    raw = b"".join(b"\0" + bytes(value for pixel in row for value in pixel) for row in rows)
    header = struct.pack(">IIBBBBB", width, height, 8, 0 if channels == 1 else 2, 0, 0, 0)
    parts = (_chunk(b"IHDR", header), _chunk(b"IDAT", zlib.compress(raw, 9)), _chunk(b"IEND", b""))
    return "data:image/png;base64," + b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(parts)).decode()


def _channels(pixel: Any) -> list[int]:
    values = pixel if isinstance(pixel, list | tuple) else [pixel]
    return [min(255, max(0, round(value))) for value in values]


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
