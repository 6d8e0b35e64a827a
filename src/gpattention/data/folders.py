"""Folders of image files, decoded by Pillow (in the extra `train`)."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from gpattention.data.places import StrPath

if TYPE_CHECKING:
    from PIL.Image import Image

Fit = Literal["exact", "crop", "resize"]
# not EPS, which is a program
FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "PPM", "TIFF", "GIF", "AVIF", "JPEG2000", "MPO", "ICO", "TGA", "DIB")
PIXELS = 89_478_485  # a quarter of a gigabyte in colours; Pillow's own limit, above which it only warns
FITS: tuple[Fit, ...] = ("exact", "crop", "resize")
SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp", ".ppm", ".tif", ".tiff"})


def image_files(folder: Path) -> list[Path]:
    """All image files below the folder, sorted by path; hidden ones are passed over."""

    def refuse(error: OSError) -> None:
        raise error  # a folder that cannot be read is not an empty one

    within = (Path(place) / name for place, _, names in os.walk(folder, onerror=refuse) for name in names)
    found = [
        file
        for file in within
        if file.suffix.lower() in SUFFIXES and not file.name.startswith(".") and file.is_file()
    ]
    return sorted(found, key=lambda file: file.relative_to(folder).parts)


def read_images(files: Sequence[Path], size: int = 32, fit: Fit = "exact", channels: int = 3) -> Tensor:
    """Decoded images, [n, channels, size, size] uint8.

    Args:
        files: see `open_image`.
        size: side of the result.
        fit: "exact" refuses images of another size; "crop" cuts out the centre; "resize" brings the shorter
            side to `size` (bilinear, antialiased), then cuts out the centre.
        channels: 3 for colours, 1 for grey.
    """
    if fit not in FITS:
        raise ValueError(f"expected fit to be one of {', '.join(FITS)}, got {fit!r}")
    if channels not in (1, 3):
        raise ValueError(f"expected channels to be 1 or 3, got {channels}")
    _pillow()
    images = np.empty((len(files), size, size, channels), np.uint8)
    for i, file in enumerate(files):
        with open_image(file) as opened:
            image = _fitted(eight_bit(opened, channels), size, fit)
            images[i] = np.asarray(image).reshape(size, size, channels)
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()


@contextmanager
def open_image(file: StrPath) -> "Iterator[Image]":
    """An image file for the body of a `with`, in which decoding and fitting may fail too.

    `ValueError` with the file for what is no image, is damaged, or has more than 89 million pixels, before
    these are decoded; and for formats that Pillow has other programs decode.
    """
    pillow = _pillow()
    pillow.init()
    try:
        with pillow.open(file, formats=[each for each in FORMATS if each in pillow.OPEN]) as opened:
            width, height = opened.size
            if width * height > PIXELS:
                raise ValueError(f"{width} x {height} pixels, more than {PIXELS}")
            yield opened
    except Exception as error:  # decoders of damaged files raise almost anything
        if isinstance(error, OSError) and error.filename is not None:  # a file that cannot be read
            raise
        raise ValueError(
            f"{file}: expected an image file that fits, got {error or type(error).__name__}"
        ) from None


def class_folders(folder: Path) -> tuple[str, ...]:
    """Names of the folders in a folder, sorted: one class each."""
    names = sorted(f.name for f in folder.iterdir() if f.is_dir() and not f.name.startswith("."))
    if not names:
        raise ValueError(f"{folder}: expected a folder for every class, got none")
    return tuple(names)


def read_class_folders(
    folder: Path, classes: Sequence[str], size: int, fit: Fit = "exact"
) -> tuple[Tensor, Tensor]:
    """Images [n, 3, size, size] uint8 and labels [n] int64; label i is the folder `classes[i]`."""
    found = class_folders(folder)
    if set(found) != set(classes):
        odd = sorted(set(found) ^ set(classes))
        raise ValueError(f"{folder}: expected the folders {', '.join(classes)}, got a difference in {odd}")
    files = [(file, label) for label, name in enumerate(classes) for file in image_files(folder / name)]
    images = read_images([file for file, _ in files], size, fit)
    return images, torch.tensor([label for _, label in files], dtype=torch.int64)


def eight_bit(image: "Image", channels: int) -> "Image":
    """Colours (3 channels) or grey (1) of 8 bits.

    Grey of 16 bits keeps its upper half: Pillow would cut it off at 255, which makes nearly all of it white.
    What 32 bits mean is not known, and they are refused.
    """
    if image.mode in ("I", "F"):
        raise ValueError(f"pixels of 32 bits (mode {image.mode}), whose range it does not tell: save 8 or 16")
    if image.mode.startswith("I;16"):
        image = _pillow().fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image.convert("RGB" if channels == 3 else "L")


def _fitted(image: "Image", size: int, fit: Fit) -> "Image":
    width, height = image.size
    if fit == "resize" and min(width, height) != size:
        short = min(width, height)
        width, height = (round(side * size / short) for side in (width, height))
        if width * height > PIXELS:  # of a line of pixels
            raise ValueError(f"sides of {image.size}, which would grow to {width} x {height} pixels")
        image = image.resize((width, height), _pillow().Resampling.BILINEAR)
    if (width, height) == (size, size):
        return image
    if fit == "exact" or min(width, height) < size:
        raise ValueError(f"{width} x {height} pixels for {size} x {size} (fit {fit!r})")
    left, top = (width - size) // 2, (height - size) // 2
    return image.crop((left, top, left + size, top + size))


def _pillow() -> ModuleType:
    """Pillow, once an image file is to be decoded."""
    try:
        from PIL import Image
    except ImportError:
        raise ImportError(
            "expected Pillow to decode image files, got no such package: pip install 'gpattention[train]'"
        ) from None
    return Image
