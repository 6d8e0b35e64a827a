"""CIFAR-10 and CIFAR-100, split as in the paper."""

from collections.abc import Iterable
from typing import Literal

from gpattention.checks import plain
from gpattention.data.augmentation import CropAndFlip
from gpattention.data.cifar_files import SIDE, Cifar, read_cifar
from gpattention.data.images import ImageData, Images
from gpattention.data.normalisation import PUBLISHED, Normalisation
from gpattention.data.ood import load_ood, ood_name
from gpattention.data.places import StrPath, data_root
from gpattention.data.splits import split

TRAIN, TEST = 50_000, 10_000  # images as published
VALIDATION = 5_000  # of the training images
PATCH = 4


def load_cifar(
    kind: Cifar,
    root: StrPath | None = None,
    seed: int = 0,
    *,
    validation: int | None = None,
    normalisation: Literal["train", "published"] = "train",
    augment: bool = False,
    ood: Iterable[str] = (),
    subset: bool = False,
) -> ImageData:
    """45,000 training and 5,000 validation images by the seed, and the 10,000 test images.

    Args:
        kind: `CIFAR10` or `CIFAR100`.
        root: folder of the datasets; the environment variable GPATTENTION_DATA if not given.
        seed: of the split, and of the augmentation.
        validation: training images to validate with; 5,000, or a tenth of a subset.
        normalisation: by the moments of the training part, or by the published constants.
        augment: random crops with padding 4 and flips in `ImageData.training_inputs`.
        ood: names or paths of out-of-distribution images to go with it, see `load_ood`.
        subset: whether files with fewer images than published are taken; the name will say so.
    """
    if normalisation not in ("train", "published"):
        raise ValueError(f"expected normalisation to be 'train' or 'published', got {normalisation!r}")
    if isinstance(ood, str):
        raise ValueError(f"expected ood to be several names, got one string {ood!r}")
    folder = data_root(root)
    train, test, classes = read_cifar(kind, folder)
    whole = (len(train), len(test)) == (TRAIN, TEST)
    if not whole and not subset:
        raise ValueError(
            f"expected {TRAIN} training and {TEST} test images of {kind.name}, got {len(train)} "
            f"and {len(test)}: pass subset=True (data.options.subset=true in a recipe) if that is meant"
        )
    if validation is None:
        validation = VALIDATION if whole else max(1, len(train) // 10)
    validation = plain(validation)
    if not isinstance(validation, int) or not 0 < validation < len(train):
        raise ValueError(
            f"expected validation to be a whole number from 1 to {len(train) - 1}, got {validation!r}"
        )
    fitted, validated = (
        train.select(items) for items in split(len(train), (len(train) - validation, validation), seed)
    )
    outside: dict[str, Images] = {}
    for source in ood:
        part = load_ood(source, folder, size=SIDE, subset=subset)
        name = ood_name(source, part)
        if name in outside:  # one would be judged under the name of both
            raise ValueError(f"expected ood to have sets of different names, got {name!r} twice")
        outside[name] = part
    return ImageData(
        name=kind.name if whole else f"{kind.name}-subset",
        train=fitted,
        validation=validated,
        test=test,
        classes=classes,
        normalisation=(
            PUBLISHED[kind.name] if normalisation == "published" else Normalisation.of(fitted.images)
        ),
        patch=PATCH,
        seed=seed,
        ood=outside,
        augmentation=CropAndFlip(seed) if augment else None,
    )
