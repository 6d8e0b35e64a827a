"""Datasets in memory, and the batches they are cut into.

Every random number belongs to an item: it is a hash (splitmix64) of the item's index and of keys such as
(purpose, seed, epoch).  Numbers from the generators of torch and NumPy depend on the order of calls and on
the version; here splits, batches and augmentation are the same for every batch size, device, number of ranks
and version.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Generic, NamedTuple, Self, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import DataLoader

from gpattention.checks import check_count, check_labels

# purposes, the first key, so that one seed is enough for all of them
SPLIT, BATCHES, CROP, FLIP, GENERATED = range(1, 6)

# constants of splitmix64 as signed numbers of 64 bits, as int64 tensors need them
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
MIX_2 = 0x94D049BB133111EB - (1 << 64)


def keyed(items: Tensor, *keys: int) -> Tensor:
    """One number from 0 to 2**63 - 1 for each item, [n] int64, on the device of `items`."""
    state = torch.zeros((), dtype=torch.int64)
    for key in keys:
        signed = (key + (1 << 63)) % (1 << 64) - (1 << 63)
        state = mix((state + GOLDEN) ^ signed)
    return mix(mix(items.to(torch.int64) * GOLDEN + int(state))) & ((1 << 63) - 1)


def mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64; int64 products wrap around as unsigned ones do."""
    x = (x ^ shift_right(x, 30)) * MIX_1
    x = (x ^ shift_right(x, 27)) * MIX_2
    return x ^ shift_right(x, 31)


def shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift; the one of int64 copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def integers(items: Tensor, bound: int, *keys: int) -> Tensor:
    """One number from 0 to `bound` - 1 for each item, [n] int64, uniform for bounds far below 2**63."""
    return keyed(items, *keys) % bound


def permutation(n: int, *keys: int) -> Tensor:
    """The numbers 0 to n - 1 in an order that depends on the keys, [n] int64."""
    return keyed(torch.arange(n), *keys).argsort(stable=True)


def split(n: int, sizes: Sequence[int], seed: int, stage: int = 0) -> tuple[Tensor, ...]:
    """Disjoint sorted parts of 0 to n - 1 with the given sizes, whose union is the whole.  [size] int64 each

    `stage` distinguishes a split from a later split of one of its parts with the same seed.
    """
    if any(size < 1 for size in sizes) or sum(sizes) != n:
        raise ValueError(f"expected sizes >= 1 that add up to n = {n}, got {list(sizes)}")
    order = permutation(n, SPLIT, seed, stage)
    return tuple(part.sort().values for part in order.split(list(sizes)))


class Batch(NamedTuple):
    """Some items of a part of a dataset, for a training step.

    Attributes:
        items: [B] int64, indices of the items in their part, on which noise and augmentation depend.
        inputs: one tensor [B, ...], or several by name.
        labels: [B] int64.
    """

    items: Tensor
    inputs: Tensor | Mapping[str, Tensor]
    labels: Tensor

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "Batch":
        """The same on another device."""
        return self.map(lambda x: x.to(device, non_blocking=non_blocking))

    def map(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        """The batch with every tensor changed."""
        named = isinstance(self.inputs, Mapping)
        inputs = {name: change(x) for name, x in self.inputs.items()} if named else change(self.inputs)  # type: ignore[union-attr, arg-type]
        return Batch(change(self.items), inputs, change(self.labels))

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors, those of the inputs in the order of their names."""
        named = isinstance(self.inputs, Mapping)
        inputs = [self.inputs[name] for name in sorted(self.inputs)] if named else [self.inputs]
        return [self.items, *inputs, self.labels]


def batches(
    n: int,
    batch_size: int,
    seed: int = 0,
    epoch: int = 0,
    drop_last: bool = False,
    rank: int = 0,
    world_size: int = 1,
    *,
    shuffle: bool = True,
) -> list[Tensor]:
    """The item indices of every batch of one epoch for one rank.

    Every rank gets the same number of batches and a consecutive share of each.  Together, in the order of
    ranks, the shares are the same batch for every `world_size`.  They differ by at most one item.  Shares of
    a last batch with fewer items than ranks may be empty, so that ranks which average gradients must weight
    them by size or set `drop_last`.  To continue in the middle of an epoch, use
    `batches(...)[done:]`.

    Args:
        n: number of items of the part.
        batch_size: number of items in a batch of all ranks together.
        seed: together with `epoch`, decides the order.
        epoch: number of the pass over the items.
        drop_last: whether to leave out a smaller last batch.
        rank: the rank whose share is returned.
        world_size: number of ranks.
        shuffle: whether to change the order of the items.

    Returns:
        Indices, [size] int64 for each batch.

    Raises:
        ValueError: a number is out of its range.
    """
    n, world_size = check_count("n", n, least=0), check_count("world_size", world_size)
    batch_size = check_count("batch_size of all ranks", batch_size, least=world_size)
    if not 0 <= rank < world_size:
        raise ValueError(f"expected rank from 0 to {world_size - 1}, got {rank}")
    order = permutation(n, BATCHES, seed, epoch) if shuffle else torch.arange(n)
    whole = [order[start : start + batch_size] for start in range(0, n, batch_size)]
    if drop_last and whole and len(whole[-1]) < batch_size:
        whole.pop()
    return [batch.tensor_split(world_size)[rank] for batch in whole]


def loader(
    part: "Images | Texts", batch_size: int, *, workers: int = 2, done: int = 0, **order: Any
) -> "DataLoader[Batch]":
    """One epoch of `Batch`es of a part on the CPU, equal to those of `batches`; pinned for a CUDA device.

    Images keep their stored type.  Move them to the device before `ImageData.inputs`, since 8-bit pixels take
    a quarter of the bytes.

    Args:
        part: `Images` or `Texts`.
        batch_size: number of items of all ranks together.
        workers: number of processes that make batches; 0 makes them in this process.
        done: number of batches to leave out at the beginning, to continue an epoch.
        order: seed, epoch, shuffle, drop_last, rank and world_size as for `batches`; make a new loader for
            each epoch.

    Returns:
        An iterable of `Batch`.

    Raises:
        ValueError: a number is out of its range.
    """
    # indices are chosen here, so that the number of workers changes nothing
    cuts = batches(len(part), batch_size, **order)[check_count("done", done, least=0) :]
    return DataLoader(
        cuts,  # type: ignore[arg-type]
        batch_size=None,  # an element is a whole batch, which is indexed once instead of item by item
        collate_fn=part.batch,  # type: ignore[arg-type]
        num_workers=check_count("workers", workers, least=0),
        pin_memory=torch.cuda.is_available(),
    )


def _check_labels(labels: Tensor, n: int) -> None:
    check_labels(labels, n)
    if labels.dtype != torch.int64:
        raise ValueError(f"expected labels to be int64, got {labels.dtype}")


_CHUNK = 4096  # images with float64 copies at the same time


@dataclass(frozen=True, slots=True)
class Normalisation:
    """Turns pixels into model inputs: each channel minus its mean, divided by its standard deviation.

    Attributes:
        mean: of each channel, for pixels in [0, 1].
        std: standard deviation of each channel.
        source: the origin of the numbers: "training part", "published", ...
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    source: str

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std) or not self.mean:
            raise ValueError(f"expected one number per channel in mean and std, got {self.mean}, {self.std}")
        if not all(s > 0 for s in self.std):
            raise ValueError(f"expected std > 0 in every channel, got {self.std}")

    @classmethod
    def of(cls, images: Tensor, source: str = "training part") -> Self:
        """The normalisation with the moments of these images, [n, C, H, W]."""
        if images.ndim != 4 or len(images) == 0:
            raise ValueError(f"expected images of shape [n, C, H, W], n >= 1, got {tuple(images.shape)}")
        channels = images.shape[1]
        total = torch.zeros(channels, dtype=torch.float64, device=images.device)
        squares = torch.zeros_like(total)
        # sums of 8-bit integers are exact in float64, so that chunks and threads do not change the result
        for chunk in images.split(_CHUNK):
            x = chunk.double().transpose(0, 1).flatten(1)  # [C, n H W]
            total += x.sum(1)
            squares += x.square().sum(1)
        count = images.numel() // channels
        top = 255.0 if images.dtype == torch.uint8 else 1.0
        mean = total / count
        std = (squares / count - mean.square()).clamp_min(0).sqrt()
        return cls(tuple((mean / top).tolist()), tuple((std / top).tolist()), source)

    def __call__(self, images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Model inputs of the same shape, from 8-bit images or from numbers in [0, 1]."""
        channels = len(self.mean)
        if images.ndim < 3 or images.shape[-3] != channels:
            raise ValueError(f"expected images of shape [..., {channels}, H, W], got {tuple(images.shape)}")
        top = 255.0 if images.dtype == torch.uint8 else 1.0
        shift, scale = _constants(self.mean, self.std, top, dtype, images.device)
        return (images.to(dtype) - shift) * scale


@lru_cache(maxsize=32)
def _constants(
    mean: tuple[float, ...], std: tuple[float, ...], top: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Constants that stay on the device, which would wait for a copy from the host in every step."""
    shift = torch.tensor(mean, dtype=torch.float64) * top
    scale = 1 / (torch.tensor(std, dtype=torch.float64) * top)
    return shift.to(device, dtype).view(-1, 1, 1), scale.to(device, dtype).view(-1, 1, 1)  # [C, 1, 1]


@dataclass(frozen=True, slots=True)
class CropAndFlip:
    """Shifts images by up to `padding` pixels, with black borders, and mirrors half of them at random.

    The change of an image depends only on (seed, epoch, item), not on its batch or device.

    Attributes:
        seed: of the shifts and flips.
        padding: pixels of the largest shift.
        flip: whether images are mirrored.
    """

    seed: int = 0
    padding: int = 4
    flip: bool = True

    def __post_init__(self) -> None:
        check_count("padding", self.padding, least=0)

    def __call__(self, images: Tensor, items: Tensor, epoch: int) -> Tensor:
        """New images [B, C, H, W] of the same type; call it before normalisation, where black is 0."""
        if images.ndim != 4 or items.shape != images.shape[:1]:
            shapes = f"{tuple(images.shape)} and {tuple(items.shape)}"
            raise ValueError(f"expected images [B, C, H, W] and items [B], got {shapes}")
        items = items.to(images.device)
        height, width = images.shape[-2:]
        shifts = 2 * self.padding + 1
        top = integers(items, shifts, CROP, self.seed, epoch, 0)
        left = integers(items, shifts, CROP, self.seed, epoch, 1)
        rows = torch.arange(height, device=images.device) + top[:, None]  # [B, H]
        columns = torch.arange(width, device=images.device).expand(len(items), width)  # [B, W]
        if self.flip:
            mirrored = integers(items, 2, FLIP, self.seed, epoch).bool()[:, None]
            columns = torch.where(mirrored, width - 1 - columns, columns)
        columns = columns + left[:, None]
        # one gather from padded images, as a loop over items would wait for a GPU many times
        padded = pad(images, (self.padding,) * 4)
        which = torch.arange(len(items), device=images.device)[:, None, None]
        taken = padded.permute(0, 2, 3, 1)[which, rows[:, :, None], columns[:, None, :]]  # [B, H, W, C]
        return taken.permute(0, 3, 1, 2).contiguous()


NO_CLASS = -1  # the label of images that belong to no class


@dataclass(frozen=True, eq=False, repr=False)
class Images:
    """Images with labels.

    Attributes:
        images: 8-bit, or floating-point in [0, 1], [n, C, H, W].
        labels: [n] int64; -1 for no class.
    """

    images: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        good = self.images.dtype == torch.uint8 or self.images.is_floating_point()
        if self.images.ndim != 4 or not good:
            wanted = "uint8 or floating-point of shape [n, C, H, W]"
            got = f"{self.images.dtype} of shape {tuple(self.images.shape)}"
            raise ValueError(f"expected images to be {wanted}, got {got}")
        _check_labels(self.labels, len(self.images))

    @classmethod
    def unlabelled(cls, images: Tensor) -> "Images":
        """Images that belong to no class."""
        return cls(images, torch.full((len(images),), NO_CLASS))

    def __len__(self) -> int:
        return len(self.images)

    def __repr__(self) -> str:
        n, *shape = self.images.shape
        return f"Images({n} of {'x'.join(map(str, shape))}, {self.images.dtype}, {self.images.device})"

    def select(self, items: Tensor) -> "Images":
        """The images with these indices, in this order."""
        items = items.to(self.labels.device)
        return Images(self.images[items], self.labels[items])

    def batch(self, items: Tensor) -> Batch:
        """The batch of these items, on the device of the images and with their stored pixels."""
        items = items.to(self.labels.device)
        return Batch(items, self.images[items], self.labels[items])

    def to(self, device: torch.device | str) -> "Images":
        """The same on another device."""
        return Images(self.images.to(device), self.labels.to(device))


Encoder = Callable[[list[list[str]]], Mapping[str, Tensor]]  # words of sentences to tensors, a row for each


@dataclass(frozen=True, eq=False, repr=False)
class Texts:
    """Sentences with labels and, after encoding, with tensors.

    Attributes:
        sentences: n sentences.
        labels: [n] int64.
        inputs: tensors by name, each [n, ...].
    """

    sentences: tuple[str, ...]
    labels: Tensor
    inputs: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_labels(self.labels, len(self.sentences))
        for name, tensor in self.inputs.items():
            if tensor.ndim == 0 or len(tensor) != len(self):
                wanted = f"{len(self)} rows, one per sentence"
                raise ValueError(f"expected inputs[{name!r}] to have {wanted}, got {tuple(tensor.shape)}")

    def __len__(self) -> int:
        return len(self.sentences)

    def __repr__(self) -> str:
        inputs = {name: tuple(tensor.shape) for name, tensor in self.inputs.items()}
        return f"Texts({len(self)} sentences, inputs {inputs}, {self.labels.device})"

    @property
    def words(self) -> list[list[str]]:
        """The sentences split at white space, which separates words if they are tokenized."""
        return [sentence.split() for sentence in self.sentences]

    def encoded(self, encoder: Encoder) -> "Texts":
        """The same with the tensors of the encoder as inputs."""
        inputs = {name: tensor.to(self.labels.device) for name, tensor in encoder(self.words).items()}
        return replace(self, inputs=inputs)

    def select(self, items: Tensor) -> "Texts":
        """The sentences with these indices, in this order."""
        items = items.to(self.labels.device)
        sentences = tuple(self.sentences[i] for i in items.tolist())
        return Texts(sentences, self.labels[items], {name: x[items] for name, x in self.inputs.items()})

    def batch(self, items: Tensor) -> Batch:
        """The batch of these items, on the device of the tensors."""
        if not self.inputs:
            raise ValueError("expected encoded texts, got no inputs: call encoded(encoder) first")
        items = items.to(self.labels.device)
        return Batch(items, {name: x[items] for name, x in self.inputs.items()}, self.labels[items])

    def to(self, device: torch.device | str) -> "Texts":
        """The same with all tensors on another device."""
        inputs = {name: tensor.to(device) for name, tensor in self.inputs.items()}
        return Texts(self.sentences, self.labels.to(device), inputs)


P = TypeVar("P", "Images", "Texts")


class _Splits(Generic[P]):
    """Base of datasets of images and of texts: their parts."""

    train: P
    validation: P
    test: P
    ood: Mapping[str, P]

    @property
    def parts(self) -> dict[str, P]:
        """All parts by name, with "ood/name" for out-of-distribution parts."""
        known = {"train": self.train, "validation": self.validation, "test": self.test}
        return known | {f"ood/{name}": part for name, part in self.ood.items()}

    def to(self, device: torch.device | str) -> Self:
        """The same with all tensors on another device."""
        return self.each(lambda part: part.to(device))

    def each(self, change: Callable[[P], P]) -> Self:
        """The same with every part changed."""
        changed = {name: change(getattr(self, name)) for name in ("train", "validation", "test")}
        ood = {name: change(part) for name, part in self.ood.items()}
        return replace(self, **changed, ood=ood)  # type: ignore[type-var]


@dataclass(frozen=True, eq=False)
class ImageData(_Splits[Images]):
    """A dataset for image classification: stored images, and the way from these to inputs.

    A small dataset stays on the device (`data = data.to("cuda")`) and is indexed by `batches`:

    >>> for items in batches(len(data.train), 100, seed=0, epoch=epoch):
    ...     images, labels = data.train.images[items], data.train.labels[items]
    ...     loss = criterion(model(data.training_inputs(images, items, epoch)), labels)

    For large ones, `loader` brings the same batches from the host.

    Attributes:
        name: of the dataset, ending in "-subset" if it is one.
        train: images for training.
        validation: images for choices.
        test: images for evaluation.
        classes: their names.
        normalisation: turns pixels into inputs.
        patch: a suitable side for patches of these images.
        seed: of the split.
        ood: out-of-distribution images by name.
        augmentation: of training images, if any.
    """

    name: str
    train: Images
    validation: Images
    test: Images
    classes: tuple[str, ...]
    normalisation: Normalisation
    patch: int
    seed: int
    ood: Mapping[str, Images] = field(default_factory=dict)
    augmentation: CropAndFlip | None = None

    def __post_init__(self) -> None:
        shape = tuple(self.train.images.shape[1:])
        for name, part in self.parts.items():
            found = tuple(part.images.shape[1:])
            if found != shape:
                raise ValueError(f"expected images of shape {shape} as in train, got {found} in {name}")

    @property
    def channels(self) -> int:
        """Channels of an image."""
        return self.train.images.shape[1]

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of an image."""
        height, width = self.train.images.shape[2:]
        return height, width

    def inputs(self, images: Tensor) -> Tensor:
        """Normalised model inputs, on the device of the images.  [B, C, H, W] float32"""
        return self.normalisation(images)

    def training_inputs(self, images: Tensor, items: Tensor, epoch: int) -> Tensor:
        """Normalised model inputs for training, augmented first if the dataset has an augmentation."""
        if self.augmentation is not None:
            images = self.augmentation(images, items, epoch)
        return self.normalisation(images)


@dataclass(frozen=True, eq=False)
class TextData(_Splits[Texts]):
    """A dataset for text classification.  Out-of-distribution sentences have labels too.

    >>> vocabulary = Vocabulary.from_sentences(data.train.words)
    >>> data = data.encoded(lambda s: dict(zip(("tokens", "padding_mask"), vocabulary.encode(s))))

    Attributes:
        name: of the dataset, ending in "-subset" if it is one.
        train: sentences for training.
        validation: sentences for choices.
        test: sentences for evaluation.
        classes: their names.
        seed: of the split.
        ood: out-of-distribution sentences by name.
        tokenized: whether white space separates the words; else `prepare` of a recipe separates them.
    """

    name: str
    train: Texts
    validation: Texts
    test: Texts
    classes: tuple[str, ...]
    seed: int
    ood: Mapping[str, Texts] = field(default_factory=dict)
    tokenized: bool = True

    def encoded(self, encoder: Encoder) -> "TextData":
        """The same with the tensors of the encoder as inputs of every part."""
        return self.each(lambda part: part.encoded(encoder))
