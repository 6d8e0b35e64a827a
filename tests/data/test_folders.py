"""Folders of images: damaged files, bombs, and what is no folder."""

import os
import random
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gpattention.data import load_ood
from gpattention.data.folders import PIXELS, image_files, open_image, read_images
from gpattention.experiments.judging.corrupting import read_pictures


def png(width: int, height: int, rows: bytes = b"") -> bytes:
    """A grey image whose header says that size."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


EPS = b"""%!PS-Adobe-3.0 EPSF-3.0
%%BoundingBox: 0 0 32 32
%%EndComments
showpage
%%EOF
"""
BOMBS = {
    "more than Pillow takes": png(100_000, 100_000),
    "more than Pillow warns of": png(10_000, 10_000),
    "a line": png(80_000_000, 1, bytes(100)),
    "no pixels": png(0, 32),
    "cut off": png(32, 32, bytes(33 * 32))[:50],
    "few rows": png(32, 32, bytes(100)),
    "text": b"not an image",
    "nothing": b"",
    "a program": EPS,
}


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("name", BOMBS)
@pytest.mark.parametrize("fit", ["crop", "resize"])
def test_bad_images_are_told_with_their_file(name: str, fit: str, tmp_path: Path) -> None:
    Image.fromarray(np.zeros((32, 32, 3), np.uint8)).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(BOMBS[name])
    with pytest.raises(ValueError, match=r"b\.png: expected an image file that fits, got ."):
        read_images(image_files(tmp_path), fit=fit)
    with pytest.raises(ValueError, match=r"b\.png: expected an image file that fits, got ."):
        load_ood(str(tmp_path), fit=fit)
    if name != "a line":  # which is one, for pictures of any size
        with pytest.raises(ValueError, match=r"b\.png: expected an image"):
            read_pictures(tmp_path)


def test_a_line_of_pixels_does_not_grow(tmp_path: Path) -> None:
    """100,000 x 1 pixels to a shorter side of 3,000: 900 gigabytes."""
    Image.fromarray(np.zeros((1, 100_000), np.uint8)).save(tmp_path / "x.png")
    with pytest.raises(ValueError, match=r"x\.png: .* would grow to 300000000 x 3000 pixels"):
        read_images([tmp_path / "x.png"], 3000, "resize")


@pytest.mark.parametrize("form", ["PNG", "JPEG", "BMP", "WEBP", "PPM", "TIFF", "GIF"])
def test_damaged_images_are_told(form: str, tmp_path: Path) -> None:
    chance, file = random.Random(0), tmp_path / "x.png"
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    Image.fromarray(pixels).save(file, form)
    whole = file.read_bytes()
    assert read_images([file]).shape == (1, 3, 32, 32)  # whatever the file is called
    for turn in range(60):
        changed = bytearray(whole[: chance.randrange(len(whole))] if turn % 3 == 0 else whole)
        for _ in range(3 if changed else 0):
            changed[chance.randrange(min(len(changed), 200))] = chance.randrange(256)
        file.write_bytes(changed)
        try:
            assert read_images([file]).shape == (1, 3, 32, 32)
        except ValueError as error:
            assert str(error).startswith(f"{file}: expected an image file that fits, got ")  # noqa: PT017


def test_what_is_no_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(NotADirectoryError, match=str(tmp_path / "file")):
        image_files(tmp_path / "file")
    with pytest.raises(ValueError, match=rf"a folder or an \.npz file, got {tmp_path}/file"):
        load_ood(str(tmp_path / "file"))
    with pytest.raises(FileNotFoundError, match="none"), open_image(tmp_path / "none.png"):
        pass
    assert PIXELS == Image.MAX_IMAGE_PIXELS


def test_folders_that_cannot_be_read_are_not_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    Image.fromarray(np.zeros((32, 32, 3), np.uint8)).save(tmp_path / "b" / "x.png")
    scan = os.scandir

    def refusing(path: object = ".") -> object:  # as the superuser, who runs many tests, never sees it
        if str(path).endswith("a"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(PermissionError, match=str(tmp_path / "a")):
        image_files(tmp_path)
