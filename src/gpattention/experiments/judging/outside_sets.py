"""Images of other kinds than a run was trained on, as far as they are on this machine."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from torch import Tensor

from gpattention.data import CIFAR10, CIFAR100, ImageData, data_root, load_cifar, load_ood
from gpattention.data.catalogue import entry_of
from gpattention.data.checking import status_of
from gpattention.data.cifar import TEST
from gpattention.data.cifar_files import Cifar
from gpattention.data.folders import image_files
from gpattention.data.ood import OOD_SETS
from gpattention.data.places import StrPath, check_name

SIBLINGS = {"cifar10": CIFAR100, "cifar100": CIFAR10}  # no class in common


@dataclass(frozen=True, eq=False)
class OutsideSets:
    """Names without "ood/", what brings the images of each, and what is to be said."""

    images: dict[str, Callable[[], Tensor]]  # [n, C, H, W] uint8
    notes: tuple[str, ...] = ()
    files: dict[str, list[Path]] = field(default_factory=dict)  # or folders, of those that are read from some


def find_outside(data: ImageData, root: StrPath | None = None) -> OutsideSets:
    """What the data brings itself; for coloured square images also the known sets and those in ROOT/ood.

    Against CIFAR-10 also the test images of CIFAR-100, and the other way round.
    """
    images: dict[str, Callable[[], Tensor]] = {
        name: partial(_given, part.images) for name, part in data.ood.items()
    }
    height, width = data.image_size
    if data.channels != 3 or height != width or data.name == "digits":
        return OutsideSets(images)
    folder = data_root(root)
    notes = []
    files: dict[str, list[Path]] = {}
    for name, known in OOD_SETS.items():
        status = status_of(entry_of(name), folder)
        if status.where is None or status.state == "incomplete":
            notes.append(f"ood/{name} is missing: {status.how}")
            continue
        count = len(image_files(status.where))
        called = name if count == known.images else f"{name}-subset"
        if called != name:
            notes.append(f"ood/{called}: {count} of {known.images} images")
        images[called] = partial(_read, name, folder, height)
        files[called] = [status.where]
    sibling = _sibling(data, folder)
    images |= sibling.images
    files |= sibling.files
    notes += sibling.notes
    for place in _own_sets(folder / "ood"):
        name = place.name.removesuffix(".npz")
        try:
            check_name(f"{str(place)!r}", f"{name}.safetensors")  # as its predictions are called
        except ValueError as error:
            notes.append(f"ood/{name!a} is left out: {error}")
            continue
        if name in files:  # whose numbers would stand under the other's name
            notes.append(f"ood/{name}: {place} is left out, as another set has this name")
            continue
        about = "a stand-in, not a published set" if "standin" in name else "a set of your own"
        notes.append(f"ood/{name} is {about}")
        images[name] = partial(_read, str(place.resolve()), folder, height)
        files[name] = [place]
    return OutsideSets(images, tuple(notes), files)


def _sibling(data: ImageData, folder: Path) -> OutsideSets:
    """Test images of the other CIFAR: read when they are asked for, of a subset at once, to count them."""
    kind = SIBLINGS.get(data.name.removesuffix("-subset"))
    if kind is None:
        return OutsideSets({})
    status = status_of(entry_of(kind.name), folder)
    if status.where is None or status.state == "incomplete":
        return OutsideSets({}, (f"ood/{kind.name} is missing: {status.how}",))
    files = sorted(status.where.glob("test*"))  # a file, or a folder of classes
    if status.state != "subset":
        return OutsideSets({kind.name: partial(_test_images, kind, folder)}, (), {kind.name: files})
    test, called = _test_images(kind, folder), f"{kind.name}-subset"
    note = f"ood/{called}: {len(test)} of {TEST} test images"
    return OutsideSets({called: partial(_given, test)}, (note,), {called: files})


def _test_images(kind: Cifar, folder: Path) -> Tensor:
    return load_cifar(kind, folder, subset=True).test.images


def _own_sets(folder: Path) -> list[Path]:
    """Folders and .npz files of images."""
    if not folder.is_dir():
        return []
    return sorted(
        place
        for place in folder.iterdir()
        if not place.name.startswith(".") and (place.is_dir() or place.suffix == ".npz")
    )


def _given(images: Tensor) -> Tensor:
    return images


def _read(source: str, root: Path, size: int) -> Tensor:
    return load_ood(source, root, size=size, subset=True).images
