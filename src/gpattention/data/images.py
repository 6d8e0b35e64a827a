"""Image datasets in memory: parts, and the whole with its normalisation."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gpattention.data.augmentation import CropAndFlip
from gpattention.data.batch import Batch, check_labels, total_bytes
from gpattention.data.normalisation import Normalisation

NO_CLASS = -1  # the label of an image that belongs to none of the classes


@dataclass(frozen=True, eq=False, repr=False)
class Images:
    """Images with one label each; pixels are 8-bit, or floating-point in [0, 1]."""

    images: Tensor  # [n, C, H, W]
    labels: Tensor  # [n] int64; -1 for no class

    def __post_init__(self) -> None:
        good = self.images.dtype == torch.uint8 or self.images.is_floating_point()
        if self.images.ndim != 4 or not good:
            raise ValueError(
                "expected images to be uint8 or floating-point of shape [n, C, H, W], "
                f"got {self.images.dtype} of shape {tuple(self.images.shape)}"
            )
        check_labels(self.labels, len(self.images))

    @classmethod
    def unlabelled(cls, images: Tensor) -> "Images":
        """Images that belong to no class."""
        return cls(images, torch.full((len(images),), NO_CLASS))

    def __len__(self) -> int:
        return len(self.images)

    def __repr__(self) -> str:
        n, *shape = self.images.shape
        return f"Images({n} of {'x'.join(map(str, shape))}, {self.images.dtype}, {self.images.device})"

    @property
    def nbytes(self) -> int:
        """Bytes that the part takes."""
        return total_bytes({"images": self.images, "labels": self.labels})

    def select(self, items: Tensor) -> "Images":
        """A part of these images, in that order."""
        items = items.to(self.labels.device)
        return Images(self.images[items], self.labels[items])

    def batch(self, items: Tensor) -> Batch:
        """Those items, on the device where the images lie; pixels as they are stored."""
        items = items.to(self.labels.device)
        return Batch(items, self.images[items], self.labels[items])

    def to(self, device: torch.device | str) -> "Images":
        """The same on another device."""
        return Images(self.images.to(device), self.labels.to(device))


@dataclass(frozen=True, eq=False)
class ImageData:
    """An image classification dataset: images as stored, and how they become inputs.

    A small dataset lives on the device (`data = data.to("cuda")`, see `nbytes`) and is cut by `batches`:

    >>> for items in batches(len(data.train), 100, seed=0, epoch=epoch):
    ...     images, labels = data.train.images[items], data.train.labels[items]
    ...     loss = criterion(model(data.training_inputs(images, items, epoch)), labels)

    Otherwise `loader` brings the same batches from the host.
    """

    name: str
    train: Images
    validation: Images
    test: Images
    classes: tuple[str, ...]
    normalisation: Normalisation
    patch: int  # side of a patch that suits these images
    seed: int  # of the split
    ood: Mapping[str, Images] = field(default_factory=dict)
    augmentation: CropAndFlip | None = None

    def __post_init__(self) -> None:
        shape = self.train.images.shape[1:]
        for name, part in self.parts.items():
            if part.images.shape[1:] != shape:
                raise ValueError(
                    f"expected images of shape {tuple(shape)} as in train, "
                    f"got {tuple(part.images.shape[1:])} in {name}"
                )

    @property
    def parts(self) -> dict[str, Images]:
        """All parts by name; out-of-distribution ones as "ood/name"."""
        known = {"train": self.train, "validation": self.validation, "test": self.test}
        return known | {f"ood/{name}": part for name, part in self.ood.items()}

    @property
    def channels(self) -> int:
        """Channels of an image."""
        return self.train.images.shape[1]

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of an image."""
        height, width = self.train.images.shape[2:]
        return height, width

    @property
    def nbytes(self) -> int:
        """Bytes that all parts take."""
        return sum(part.nbytes for part in self.parts.values())

    def inputs(self, images: Tensor) -> Tensor:
        """Model inputs: normalised, on the device of the images.  [B, C, H, W] float32"""
        return self.normalisation(images)

    def training_inputs(self, images: Tensor, items: Tensor, epoch: int) -> Tensor:
        """Model inputs for training: augmented, if the dataset was asked for so, then normalised."""
        if self.augmentation is not None:
            images = self.augmentation(images, items, epoch)
        return self.normalisation(images)

    def to(self, device: torch.device | str) -> "ImageData":
        """The same with all parts on another device."""
        return replace(
            self,
            train=self.train.to(device),
            validation=self.validation.to(device),
            test=self.test.to(device),
            ood={name: part.to(device) for name, part in self.ood.items()},
        )
