"""What the library knows how to load: descriptions, files, sources and checksums, as data."""

from dataclasses import dataclass
from typing import Literal

from gpattention.data import cola
from gpattention.data.cifar_files import CIFAR10, CIFAR100, Cifar
from gpattention.data.corrupted import CORRUPTIONS, FOLDERS
from gpattention.data.ood import OOD_SETS

GIGABYTE = 1 << 30


@dataclass(frozen=True, slots=True)
class Archive:
    """A published file; without a `url` it must be fetched by hand, as its page says."""

    file: str
    md5: str
    url: str | None
    limit: int  # bytes that it may unpack to


@dataclass(frozen=True, slots=True)
class Layout:
    """Files or folders that make up the dataset; less than the published amount is a subset."""

    folder: str  # relative to the root
    paths: tuple[str, ...] = ()  # inside the folder
    data: tuple[str, ...] = ()  # those of the paths that hold the images, and
    least: int = 0  # how many bytes they have together, at least
    images: int = 0  # how many image files are in the folder


@dataclass(frozen=True, slots=True)
class Entry:
    """One dataset that `load` knows: what it is, where it comes from, what files it has."""

    name: str
    kind: Literal["images", "text", "corrupted", "ood"]
    about: str
    licence: str
    page: str
    layouts: tuple[Layout, ...] = ()  # any one will do; none: it comes with the library
    archive: Archive | None = None


_CIFAR_BYTES = 60_000 * 3 * 32 * 32
_CIFAR_PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
_ODIN_PAGE = "https://github.com/facebookresearch/odin"


def _cifar(kind: Cifar, about: str, file: str, md5: str) -> Entry:
    return Entry(
        kind.name,
        "images",
        about,
        "none stated; cite A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009",
        _CIFAR_PAGE,
        (
            Layout(kind.python, kind.python_files, (*kind.python_train, kind.python_test), _CIFAR_BYTES),
            Layout(kind.binary, kind.binary_files, (*kind.binary_train, kind.binary_test), _CIFAR_BYTES),
            Layout(kind.name, ("train", "test")),
        ),
        Archive(file, md5, f"https://www.cs.toronto.edu/~kriz/{file}", GIGABYTE),
    )


def _corrupted(name: str, of: str, record: int, md5: str) -> Entry:
    file = f"{FOLDERS[name]}.tar"
    arrays = tuple(f"{c}.npy" for c in CORRUPTIONS)
    return Entry(
        name,
        "corrupted",
        f"the {of} test images under {len(CORRUPTIONS)} corruptions of 5 severities",
        "CC BY 4.0; cite D. Hendrycks and T. Dietterich, ICLR 2019",
        f"https://zenodo.org/records/{record}",
        (Layout(FOLDERS[name], (*arrays, "labels.npy"), arrays, len(arrays) * 5 * 10_000 * 3 * 32 * 32),),
        Archive(file, md5, f"https://zenodo.org/records/{record}/files/{file}?download=1", 4 * GIGABYTE),
    )


def _odin(name: str, about: str, md5: str) -> Entry:
    folder = OOD_SETS[name].folder
    return Entry(
        name,
        "ood",
        about,
        "none stated; cite S. Liang, Y. Li and R. Srikant, ICLR 2018",
        _ODIN_PAGE,
        (Layout(folder, images=OOD_SETS[name].images),),
        Archive(f"{folder.split('/')[0]}.tar.gz", md5, None, GIGABYTE),
    )


_ENTRIES = (
    Entry(
        "digits",
        "images",
        "1,797 handwritten digits of 8 x 8 pixels; 8 and 9 are held out",
        "CC BY 4.0; E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998",
        "https://doi.org/10.24432/C50P49",
    ),
    _cifar(
        CIFAR10, "60,000 colour images of 32 x 32 pixels, 10 classes",
        "cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a",
    ),
    _cifar(
        CIFAR100, "60,000 colour images of 32 x 32 pixels, 100 classes",
        "cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85",
    ),
    _corrupted("cifar10-c", "CIFAR-10", 2535967, "56bf5dcef84df0e2308c6dcbcbbd8499"),
    _corrupted("cifar100-c", "CIFAR-100", 3555552, "11f0ed0f1191edbf9fa23466ae6021d3"),
    Entry(
        "cola",
        "text",
        "9,594 English sentences, acceptable or not; 516 of them out of domain",
        "sentences of published works, for research; cite A. Warstadt, A. Singh and S. R. Bowman, TACL 2019",
        "https://nyu-mll.github.io/CoLA/",
        tuple(
            Layout(folder, tuple(f"{form}/{file}" for form in cola.FORMS for file in cola.FILES))
            for folder in cola.FOLDERS
        ),
        Archive(
            "cola_public_1.1.zip", "9f6d88c3558ec424cd9d66ea03589aba",
            "https://nyu-mll.github.io/CoLA/cola_public_1.1.zip", GIGABYTE // 16,
        ),
    ),
    Entry(
        "textures",
        "ood",
        "Describable Textures (DTD), 5,640 images of 47 textures",
        "for research; cite M. Cimpoi, S. Maji, I. Kokkinos, S. Mohamed and A. Vedaldi, CVPR 2014",
        "https://www.robots.ox.ac.uk/~vgg/data/dtd/",
        (Layout(OOD_SETS["textures"].folder, images=OOD_SETS["textures"].images),),
        Archive(
            "dtd-r1.0.1.tar.gz", "fff73e5086ae6bdbea199a49dfb8a4c1",
            "https://www.robots.ox.ac.uk/~vgg/data/dtd/download/dtd-r1.0.1.tar.gz", 2 * GIGABYTE,
        ),
    ),
    _odin("lsun-crop", "10,000 crops of LSUN scenes", "458a0a0ab8e5f1cb4516d7400568e460"),
    _odin("lsun-resize", "10,000 LSUN scenes, resized", "278b7b31c8cb7e804a1465a8ce03a2dc"),
    _odin("tinyimagenet-crop", "10,000 crops of TinyImageNet images", "7c0827e4246c3718a5ee076e999e52e5"),
    _odin("tinyimagenet-resize", "10,000 TinyImageNet images, resized", "0f9ff11d45babf2eff5fe12281d1ac31"),
)  # fmt: skip

CATALOGUE = {entry.name: entry for entry in _ENTRIES}


def known() -> tuple[Entry, ...]:
    """Every dataset that `load` knows by name."""
    return tuple(CATALOGUE.values())


def entry_of(name: str) -> Entry:
    """The dataset of that name."""
    if name not in CATALOGUE:
        raise ValueError(f"expected name to be one of {', '.join(CATALOGUE)}, got {name!r}")
    return CATALOGUE[name]
