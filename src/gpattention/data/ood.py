"""Out-of-distribution images: the official Textures, LSUN and TinyImageNet sets, folders and .npz files."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gpattention.data.arrays import read_npz
from gpattention.data.folders import Fit, image_files, read_images
from gpattention.data.images import Images
from gpattention.data.places import StrPath, data_root


@dataclass(frozen=True, slots=True)
class OodSet:
    """A published set: where its images lie, how many there are, how they come to the size of the model's."""

    name: str
    folder: str
    images: int
    fit: Fit


OOD_SETS = {
    made.name: made
    for made in (
        OodSet("textures", "dtd/images", 5640, "resize"),
        OodSet("lsun-crop", "LSUN/test", 10_000, "crop"),
        OodSet("lsun-resize", "LSUN_resize/LSUN_resize", 10_000, "crop"),
        OodSet("tinyimagenet-crop", "Imagenet/test", 10_000, "crop"),
        OodSet("tinyimagenet-resize", "Imagenet_resize/Imagenet_resize", 10_000, "crop"),
    )
}


def load_ood(
    source: str, root: StrPath | None = None, *, size: int = 32, fit: Fit | None = None, subset: bool = False
) -> Images:
    """Images without classes, [n, 3, size, size].

    Args:
        source: a published set (textures, lsun-crop, lsun-resize, tinyimagenet-crop, tinyimagenet-resize); or
            NAME for the folder `ood/NAME` or the file `ood/NAME.npz` under the root; or the path of a folder
            of images or of an .npz file with 8-bit `images` [n, H, W, 3].
        root: folder of the datasets; the environment variable GPATTENTION_DATA if not given.
        size: side of the images.
        fit: how images of other sizes are treated, see `read_images`; "resize" unless the set says otherwise.
        subset: whether a published set may hold another number of images than published.
    """
    known = OOD_SETS.get(source)
    if known is None:
        return Images.unlabelled(_read(_place(source, root), size, fit or "resize"))
    folder = data_root(root) / known.folder
    if not folder.is_dir():
        raise FileNotFoundError(f"expected the images of {source} in {folder}, got no such folder")
    files = image_files(folder)
    if len(files) != known.images and not (subset and files):
        raise ValueError(
            f"{folder}: expected {known.images} images of {source}, got {len(files)}: "
            "pass subset=True if that is meant"
        )
    return Images.unlabelled(read_images(files, size, fit or known.fit))


def ood_name(source: str, images: Images) -> str:
    """What to call them: a set that is not whole says so, a path goes by its last part."""
    known = OOD_SETS.get(source)
    if known is None:
        return Path(source).name.removesuffix(".npz")
    return source if len(images) == known.images else f"{source}-subset"


def _place(source: str, root: StrPath | None) -> Path:
    """The folder or file that is meant: a path, or a name in the root's folder `ood`."""
    path = Path(source).expanduser()
    if path.exists() and (path.is_absolute() or len(path.parts) > 1 or path.suffix == ".npz"):
        return path
    tried = [path]
    if len(path.parts) == 1:
        below = data_root(root) / "ood"
        tried = [below / source, below / f"{source}.npz"]
    for place in tried:
        if place.exists():
            return place
    raise FileNotFoundError(
        f"expected source to be one of {', '.join(OOD_SETS)}, or a folder or an .npz file, "
        f"got {source!r}; there is no {' or '.join(map(str, tried))}"
    )


def _read(place: Path, size: int, fit: Fit) -> Tensor:
    if place.is_dir():
        files = image_files(place)
        if not files:
            raise ValueError(f"{place}: expected images, got none")
        return read_images(files, size, fit)
    if place.suffix != ".npz":
        raise ValueError(f"expected source to be a folder or an .npz file, got {place}")
    images = read_npz(place, "images")
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1:] != (size, size, 3):
        raise ValueError(
            f"{place}: expected images to be uint8 of shape [n, {size}, {size}, 3], "
            f"got {images.dtype} of shape {images.shape}"
        )
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()
