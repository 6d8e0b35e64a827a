"""The dataset that comes with the library: 1,797 handwritten digits of 8 x 8 pixels (UCI, CC BY 4.0).

E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository (1998).
"""

from importlib.resources import as_file, files

import numpy as np
import torch
from torch import Tensor

from gpattention.data import generated
from gpattention.data.augmentation import CropAndFlip
from gpattention.data.images import ImageData, Images
from gpattention.data.normalisation import Normalisation
from gpattention.data.splits import split

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

    Out of distribution are `near`, the 354 images of digits 8 and 9, and far ones made by the seed, 400 each:
    uniform `noise`, `patterns` (stripes and checkers), the test images `inverted`, their pixels `shuffled`.
    `augment` shifts training images by a pixel; digits are not mirrored.
    """
    images, labels = bundled_digits()
    known = labels < CLASSES
    inside = Images(images[known], labels[known])
    train, validation, test = split(len(inside), (len(inside) - VALIDATION - TEST, VALIDATION, TEST), seed)
    tested = inside.select(test)
    shape = (1, 8, 8)
    ood = {
        "near": images[~known],
        "noise": generated.noise(TEST, shape, seed),
        "patterns": generated.patterns(TEST, shape, seed),
        "inverted": generated.inverted(tested.images),
        "shuffled": generated.shuffled(tested.images, seed),
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
