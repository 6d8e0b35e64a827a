"""Data: the paper's datasets in their official layouts, one small one in the package, and batches.

`load("digits")` works everywhere; `known`, `get` and `check` tell of the others and bring them.
"""

from gpattention.data.augmentation import CropAndFlip
from gpattention.data.batch import Batch, Part
from gpattention.data.batching import batches
from gpattention.data.catalogue import Archive, Entry, known
from gpattention.data.checking import Status, check
from gpattention.data.cifar import load_cifar
from gpattention.data.cifar_files import CIFAR10, CIFAR100
from gpattention.data.cola import load_cola
from gpattention.data.corrupted import CorruptedImages, load_corrupted
from gpattention.data.digits import load_digits
from gpattention.data.getting import get
from gpattention.data.images import NO_CLASS, ImageData, Images
from gpattention.data.loading import loader
from gpattention.data.named import load
from gpattention.data.normalisation import Normalisation
from gpattention.data.ood import load_ood
from gpattention.data.places import data_root
from gpattention.data.texts import TextData, Texts

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "NO_CLASS",
    "Archive",
    "Batch",
    "CorruptedImages",
    "CropAndFlip",
    "Entry",
    "ImageData",
    "Images",
    "Normalisation",
    "Part",
    "Status",
    "TextData",
    "Texts",
    "batches",
    "check",
    "data_root",
    "get",
    "known",
    "load",
    "load_cifar",
    "load_cola",
    "load_corrupted",
    "load_digits",
    "load_ood",
    "loader",
]
