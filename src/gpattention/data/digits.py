"""The dataset that comes with the library: 1,797 handwritten digits of 8 x 8 pixels (UCI, CC BY 4.0).

E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository (1998).
There are also images without a digit: noise, patterns, and digits that are inverted or have their pixels
shuffled.  Each of these depends only on the seed and its index.
"""

from importlib.resources import as_file, files

import numpy as np
import torch
from torch import Tensor

from gpattention.data.catalogue import register
from gpattention.data.datasets import (
    GENERATED,
    CropAndFlip,
    ImageData,
    Images,
    Normalisation,
    integers,
    keyed,
    split,
)

CLASSES = 8  # digits 0 to 7; 8 and 9 are held out
VALIDATION, TEST = 200, 400  # of the 1,443 images of digits 0 to 7
PATCH = 2


def bundled_digits() -> tuple[Tensor, Tensor]:
    """All images [1797, 1, 8, 8] uint8 from 0 to 255, and the digits they show, [1797] int64."""
    with (
        as_file(files("gpattention.data") / "bundled" / "digits.npz") as file,
        np.load(file, allow_pickle=False) as arrays,
    ):
        images, labels = torch.from_numpy(arrays["images"]), torch.from_numpy(arrays["labels"])
    # 0 to 16 becomes 0 to 255, as 8-bit images are everywhere else; no two values fall together
    return ((images.long() * 255 + 8) // 16).to(torch.uint8)[:, None], labels.long()


def load_digits(seed: int = 0, *, augment: bool = False) -> ImageData:
    """Digits 0 to 7, 843 to train, 200 to validate and 400 to test, by the seed.

    Out of distribution are `near`, the 354 images of digits 8 and 9, and four generated sets of 400 images:
    uniform `noise`, `patterns` (stripes and checkers), and the test images `inverted` or with `shuffled`
    pixels.

    Args:
        seed: of the split and of the generated images.
        augment: whether training images are shifted by up to one pixel; they are not mirrored.

    Returns:
        The dataset.
    """
    images, labels = bundled_digits()
    known = labels < CLASSES
    inside = Images(images[known], labels[known])
    train, validation, test = split(len(inside), (len(inside) - VALIDATION - TEST, VALIDATION, TEST), seed)
    tested = inside.select(test)
    shape = (1, 8, 8)
    ood = {
        "near": images[~known],
        "noise": noise(TEST, shape, seed),
        "patterns": patterns(TEST, shape, seed),
        "inverted": 255 - tested.images,  # black for white
        "shuffled": shuffled(tested.images, seed),
    }
    return ImageData(
        name="digits",
        train=inside.select(train),
        validation=inside.select(validation),
        test=tested,
        classes=tuple(str(digit) for digit in range(CLASSES)),
        normalisation=Normalisation.of(inside.images[train]),
        patch=PATCH,
        seed=seed,
        ood={name: Images.unlabelled(x) for name, x in ood.items()},
        augmentation=CropAndFlip(seed, padding=1, flip=False) if augment else None,
    )


def noise(n: int, shape: tuple[int, int, int], seed: int = 0) -> Tensor:
    """Every pixel uniform from 0 to 255, [n, C, H, W] uint8."""
    channels, height, width = shape
    places = torch.arange(n * channels * height * width)
    return integers(places, 256, GENERATED, seed, 0).view(n, channels, height, width).to(torch.uint8)


def patterns(n: int, shape: tuple[int, int, int], seed: int = 0) -> Tensor:
    """Horizontal, vertical and diagonal stripes and checkers in two grey levels, [n, C, H, W] uint8.

    Stripes are 1 to a quarter of the side wide, begin anywhere, and the levels differ by 96 or more.
    """
    channels, height, width = shape
    items = torch.arange(n)

    def draw(bound: int, what: int) -> Tensor:
        return integers(items, bound, GENERATED, seed, 1, what).view(n, 1, 1)

    period = 1 + draw(max(1, min(height, width) // 4), 0)
    y = torch.arange(height).view(1, height, 1) + draw(2 * max(height, width), 1)
    x = torch.arange(width).view(1, 1, width) + draw(2 * max(height, width), 2)
    cells = torch.stack(
        [
            (y // period + 0 * x) % 2,
            (x // period + 0 * y) % 2,
            ((x + y) // period) % 2,
            (y // period + x // period) % 2,
        ]
    )  # [4, n, H, W]
    cell = cells[integers(items, 4, GENERATED, seed, 1, 3), items].bool()  # [n, H, W]
    dark = draw(160, 4)
    light = dark + 96 + keyed(items, GENERATED, seed, 1, 5).view(n, 1, 1) % (160 - dark)
    grey = torch.where(cell, light, dark).to(torch.uint8)
    return grey[:, None].expand(n, channels, height, width).contiguous()


def shuffled(images: Tensor, seed: int = 0) -> Tensor:
    """Each image with its pixels in a random order of its own, [n, C, H, W]."""
    n, channels, height, width = images.shape
    places = torch.arange(n * height * width)
    order = keyed(places, GENERATED, seed, 2).view(n, 1, height * width).argsort(dim=-1, stable=True)
    return images.flatten(2).gather(-1, order.expand(n, channels, -1)).view_as(images)


register(
    name="digits",
    kind="images",
    about="1,797 handwritten digits of 8 x 8 pixels; 8 and 9 are held out",
    licence="CC BY 4.0; E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998",
    page="https://doi.org/10.24432/C50P49",
    load=load_digits,
)
