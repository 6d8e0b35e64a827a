"""The paper's datasets in their official layouts, a small one in the package, and batches.

`load("digits")` works everywhere; `known` and `check` list the other datasets, and `get` downloads them.
Each dataset is a file of this package that registers itself, so that every module here is imported.
"""

import importlib
import pkgutil

from gpattention.data.catalogue import (
    VARIABLE,
    Archive,
    Entry,
    NoRootError,
    Status,
    check,
    data_root,
    entry_of,
    get,
    known,
    load,
    status_of,
)
from gpattention.data.cifar import CIFAR10, CIFAR100, Cifar, load_cifar
from gpattention.data.cola import load_cola
from gpattention.data.corrupted import CorruptedImages, Regenerated, load_corrupted, regenerate
from gpattention.data.datasets import (
    NO_CLASS,
    Batch,
    CropAndFlip,
    ImageData,
    Images,
    Normalisation,
    TextData,
    Texts,
    batches,
    loader,
)
from gpattention.data.digits import load_digits
from gpattention.data.files import image_files, open_image, unpack
from gpattention.data.imdb import load_imdb
from gpattention.data.ood import OOD_SETS, load_ood
from gpattention.data.text_shifts import TEXT_SHIFTS, TextShift, shift_texts

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = [
    "CIFAR10", "CIFAR100", "NO_CLASS", "OOD_SETS", "TEXT_SHIFTS", "VARIABLE", "Archive", "Batch", "Cifar",
    "CorruptedImages", "CropAndFlip", "Entry", "ImageData", "Images", "NoRootError", "Normalisation",
    "Regenerated", "Status", "TextData", "TextShift", "Texts", "batches", "check",
    "data_root", "entry_of", "get", "image_files", "known", "load", "load_cifar", "load_cola",
    "load_corrupted", "load_digits", "load_imdb", "load_ood", "loader", "open_image", "regenerate",
    "shift_texts", "status_of", "unpack",
]  # fmt: skip
