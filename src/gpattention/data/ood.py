"""Out-of-distribution images: the official Textures, LSUN and TinyImageNet sets, folders and .npz files."""

from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gpattention.checks import did_you_mean
from gpattention.data.catalogue import GIGABYTE, SUBSET, Archive, Layout, data_root, register
from gpattention.data.datasets import Images
from gpattention.data.files import Fit, image_files, read_images, read_npz
from gpattention.files import StrPath

OOD_SETS = {
    "textures": Layout("dtd/images", images=5640),
    "lsun-crop": Layout("LSUN/test", images=10_000),
    "lsun-resize": Layout("LSUN_resize/LSUN_resize", images=10_000),
    "tinyimagenet-crop": Layout("Imagenet/test", images=10_000),
    "tinyimagenet-resize": Layout("Imagenet_resize/Imagenet_resize", images=10_000),
}


def load_ood(
    source: str, root: StrPath | None = None, *, size: int = 32, fit: Fit | None = None, subset: bool = False
) -> Images:
    """Out-of-distribution images.

    Args:
        source: a published set (textures, lsun-crop, lsun-resize, tinyimagenet-crop, tinyimagenet-resize); or
            NAME for the folder `ood/NAME` or the file `ood/NAME.npz` under the root; or the path of a folder
            of images or of an .npz file with 8-bit `images` [n, H, W, 3].
        root: folder of the datasets; the environment variable GPATTENTION_DATA if not given.
        size: side of the images.
        fit: how images of other sizes are changed, see `read_images`; if not given, "crop" for published sets
            other than textures and "resize" for all others.
        subset: whether to accept another number of images than published.

    Returns:
        Images, [n, 3, size, size], that belong to no class.

    Raises:
        ValueError: a file is damaged, or the number of images is not that of the published set.
        FileNotFoundError: there is no such set, folder or file.
    """
    known = OOD_SETS.get(source)
    if known is None:
        return Images.unlabelled(_read(_place(source, root), size, fit or "resize"))
    folder = data_root(root) / known.folder
    if not folder.is_dir():
        raise FileNotFoundError(f"expected the images of {source} in {folder}, got no such folder")
    files = image_files(folder)
    if len(files) != known.images and not (subset and files):
        raise ValueError(f"{folder}: expected {known.images} images of {source}, got {len(files)}: {SUBSET}")
    return Images.unlabelled(read_images(files, size, fit or ("resize" if source == "textures" else "crop")))


def ood_name(source: str, images: Images) -> str:
    """The name of the set, ending in "-subset" if it is one; for a path its last part."""
    known = OOD_SETS.get(source)
    if known is None:
        return Path(source).name.removesuffix(".npz")
    return source if len(images) == known.images else f"{source}-subset"


def _place(source: str, root: StrPath | None) -> Path:
    """The folder or file: a path, or a name in the folder `ood` of the root."""
    path = Path(source).expanduser()
    named = len(path.parts) == 1 and not path.is_absolute()  # such as svhn, whatever the current folder has
    tried = [path]
    if named and not (path.suffix == ".npz" and path.exists()):
        below = data_root(root) / "ood"
        tried = [below / source, below / f"{source}.npz"]
    for place in tried:
        if place.exists():
            return place
    raise FileNotFoundError(
        f"expected source to be one of {', '.join(OOD_SETS)}, or a folder or an .npz file, "
        f"got {source!r}; there is no {' or '.join(map(str, tried))}{did_you_mean(source, OOD_SETS)}"
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
        wanted = f"images to be uint8 of shape [n, {size}, {size}, 3]"
        raise ValueError(f"{place}: expected {wanted}, got {images.dtype} of shape {images.shape}")
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()


_FILE, _PAGE = "dtd-r1.0.1.tar.gz", "https://www.robots.ox.ac.uk/~vgg/data/dtd/"
register(
    name="textures",
    kind="ood",
    about="Describable Textures (DTD), 5,640 images of 47 textures",
    licence="for research; cite M. Cimpoi, S. Maji, I. Kokkinos, S. Mohamed and A. Vedaldi, CVPR 2014",
    page=_PAGE,
    load=partial(load_ood, "textures"),
    layouts=(OOD_SETS["textures"],),
    archive=Archive(_FILE, "fff73e5086ae6bdbea199a49dfb8a4c1", f"{_PAGE}download/{_FILE}", 2 * GIGABYTE),
)
for _name, _about, _md5 in (
    ("lsun-crop", "10,000 crops of LSUN scenes", "458a0a0ab8e5f1cb4516d7400568e460"),
    ("lsun-resize", "10,000 LSUN scenes, resized", "278b7b31c8cb7e804a1465a8ce03a2dc"),
    ("tinyimagenet-crop", "10,000 crops of TinyImageNet images", "7c0827e4246c3718a5ee076e999e52e5"),
    ("tinyimagenet-resize", "10,000 TinyImageNet images, resized", "0f9ff11d45babf2eff5fe12281d1ac31"),
):
    register(
        name=_name,
        kind="ood",
        about=_about,
        licence="none stated; cite S. Liang, Y. Li and R. Srikant, ICLR 2018",
        page="https://github.com/facebookresearch/odin",
        load=partial(load_ood, _name),
        layouts=(OOD_SETS[_name],),
        archive=Archive(f"{OOD_SETS[_name].folder.split('/')[0]}.tar.gz", _md5, None, GIGABYTE),
    )
