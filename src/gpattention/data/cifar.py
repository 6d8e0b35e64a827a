"""CIFAR-10 and CIFAR-100: as their authors publish them and as folders of images, split as in the paper.

The published files are pickles, and a pickle is a program.  Python's own unpickler calls every function that
the file names, and a few hundred bytes can make it build objects that nobody can look through.  Here only the
instructions for numbers, strings, lists, tuples and dictionaries are allowed, and the three names of NumPy
with which these files describe arrays of bytes; everything else is refused.  The time for each instruction is
proportional to its bytes.
"""

import io
import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from gpattention.checks import check_choice, check_count, check_labels
from gpattention.data.catalogue import GIGABYTE, SUBSET, Archive, Layout, data_root, register
from gpattention.data.datasets import CropAndFlip, ImageData, Images, Normalisation, split
from gpattention.data.files import image_files, read_images
from gpattention.data.ood import load_ood, ood_name
from gpattention.files import StrPath, read_text

LARGEST = 1 << 30  # bytes of a file; the largest that was published has 155 MB
CALLS = 64  # most descriptions of arrays and types; the published files have two

_NAMES = {
    ("numpy", "ndarray"): "ndarray",
    ("numpy", "dtype"): "dtype",
    ("numpy.core.multiarray", "_reconstruct"): "_reconstruct",
    ("numpy._core.multiarray", "_reconstruct"): "_reconstruct",
}
# the instructions of pickle that make, remember and join values; those that call are replaced
_INSTRUCTIONS = """
    PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 FLOAT BINFLOAT
    STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8
    BINBYTES SHORT_BINBYTES BINBYTES8 PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET
    EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST LIST APPEND APPENDS EMPTY_DICT GLOBAL STACK_GLOBAL
"""


class _Name(str):
    """One of the three names of NumPy."""

    __slots__ = ()


@dataclass(slots=True, eq=False)
class _Described:
    """The description of an array or a type in the file, from which arrays are made at the end."""

    name: str
    arguments: tuple[Any, ...]
    state: Any = None


def read_pickle(file: Path) -> dict[str, Any]:
    """The dictionary in a CIFAR pickle: arrays of uint8, strings, numbers, lists of strings and numbers."""
    if file.stat().st_size > LARGEST:
        raise ValueError(f"{file}: expected at most {LARGEST} bytes, got {file.stat().st_size}")
    raw = file.read_bytes()
    try:
        content = _Unpickler(io.BytesIO(raw), encoding="bytes").load()
        if isinstance(content, dict):
            checked = _Plain(2 * len(raw))
            return {checked.string(key): checked.value(value) for key, value in content.items()}
    except Exception as error:  # a damaged pickle can raise almost anything
        message = f"{type(error).__name__}: {error}"
        raise ValueError(f"{file}: expected a CIFAR pickle, got {message[:500]}") from None
    raise ValueError(f"{file}: expected a CIFAR pickle of a dictionary, got {type(content).__name__}")


_CODES = [getattr(pickle, instruction)[0] for instruction in _INSTRUCTIONS.split()]


class _Unpickler(pickle._Unpickler):
    """Python's unpickler with fewer instructions, which describes what a file names and calls nothing."""

    stack: list[Any]  # not of the stubs of typing
    pop_mark: Callable[[], list[Any]]
    calls = 0

    def find_class(self, module: str, name: str) -> _Name:
        if (module, name) not in _NAMES:
            raise UnpicklingError(f"expected arrays, lists and strings only, got {module[:80]}.{name[:80]}")
        return _Name(_NAMES[module, name])

    def _call(self) -> None:
        arguments, called = self.stack.pop(), self.stack.pop()
        self.calls += 1
        if self.calls > CALLS:
            raise UnpicklingError(f"more than {CALLS} arrays and types")
        if type(called) is not _Name or called == "ndarray" or type(arguments) is not tuple:
            raise UnpicklingError("the call of something else than an array or a type")
        self.stack.append(_Described(called, arguments))

    def _build(self) -> None:
        state = self.stack.pop()
        if type(self.stack[-1]) is not _Described:
            raise UnpicklingError("no array where one is to be filled")
        self.stack[-1].state = state

    def _dict(self) -> None:
        items = self.pop_mark()
        self.stack.append({})
        self._fill(items)

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._fill([key, value])

    def _set_items(self) -> None:
        self._fill(self.pop_mark())

    def _fill(self, values: list[Any]) -> None:
        # hashing nested tuples could take for ever
        if len(values) % 2 or not all(type(key) in (bytes, str) for key in values[::2]):
            raise UnpicklingError("keys that are no strings")
        if type(self.stack[-1]) is not dict:
            raise UnpicklingError("no dictionary where one is to be filled")
        self.stack[-1].update(zip(values[::2], values[1::2], strict=True))

    dispatch: ClassVar[dict[int, Callable[..., None]]] = {
        **{code: pickle._Unpickler.dispatch[code] for code in _CODES},
        pickle.REDUCE[0]: _call, pickle.BUILD[0]: _build, pickle.DICT[0]: _dict,
        pickle.SETITEM[0]: _set_item, pickle.SETITEMS[0]: _set_items,
    }  # fmt: skip


class _Plain:
    """Checks that values are plain."""

    def __init__(self, room: int) -> None:
        self._room = room  # bytes of all strings, as a file can refer to one string many times

    def value(self, value: Any) -> Any:
        """An array, a string, a number, or a list of strings and numbers."""
        if type(value) is _Described:
            return _array(value)
        if type(value) is list:
            return [self._scalar(each) for each in value]
        return self._scalar(value)

    def _scalar(self, value: Any) -> Any:
        if type(value) in (bytes, str):
            return self.string(value)
        if value is None or type(value) in (bool, int, float):
            return value
        raise ValueError(f"expected arrays, and lists of numbers and strings, got {type(value).__name__}")

    def string(self, value: bytes | str) -> str:
        """The string, decoded."""
        self._room -= len(value)
        if self._room < 0:
            raise ValueError("expected strings that are as long as the file, got longer ones")
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _array(described: _Described) -> np.ndarray:
    state = described.state
    if described.name != "_reconstruct" or not (type(state) is tuple and len(state) == 5):
        raise ValueError(f"expected the state of an array, got {type(state).__name__}")
    _, shape, kind, fortran, raw = state
    code = kind.arguments[0] if type(kind) is _Described and kind.name == "dtype" and kind.arguments else None
    if code not in ("u1", "|u1", b"u1", b"|u1") or type(raw) is not bytes:
        raise ValueError("expected an array of type u1 in bytes, got another")
    if type(shape) is not tuple or not all(type(side) is int and 0 <= side <= len(raw) for side in shape):
        raise ValueError("expected the shape of an array, got none")
    # frombuffer copies nothing, and reshape refuses shapes that do not fit
    return np.frombuffer(raw, np.uint8).reshape(shape, order="F" if fortran is True or fortran == 1 else "C")


SIDE = 32
TRAIN, TEST = 50_000, 10_000  # images as published
VALIDATION = 5_000  # of the training images
PATCH = 4
_PIXELS = 3 * SIDE * SIDE

Read = tuple[Images, Images, tuple[str, ...]]  # training images, test images, class names


@dataclass(frozen=True, slots=True)
class Cifar:
    """The names of the files of one of the two sets, and the place of the labels in them."""

    name: str
    classes: int
    python: str  # folder of the pickled version
    binary: str  # folder of the binary version, whose files have the ending .bin
    train: tuple[str, ...]
    test: str
    python_meta: tuple[str, str]  # file and key of the class names
    binary_meta: str
    labels: str  # key of the pickled labels
    label_bytes: int  # before the pixels of an image; the last one is the class
    archive: tuple[str, str]  # file and MD5 of the pickled version
    published: Normalisation  # moments of the 50,000 training images, as commonly published

    @property
    def layouts(self) -> dict[Layout, Any]:
        """The three layouts, each with the function that reads it."""
        least = (TRAIN + TEST) * _PIXELS
        pickled = *self.train, self.test
        binary = tuple(f"{file}.bin" for file in pickled)
        return {
            Layout(self.python, (*pickled, self.python_meta[0]), pickled, least): _read_python,
            Layout(self.binary, (*binary, self.binary_meta), binary, least): _read_binary,
            Layout(self.name, ("train", "test")): _read_folders,
        }


CIFAR10 = Cifar(
    name="cifar10", classes=10, python="cifar-10-batches-py", binary="cifar-10-batches-bin",
    train=tuple(f"data_batch_{i}" for i in range(1, 6)), test="test_batch",
    python_meta=("batches.meta", "label_names"), binary_meta="batches.meta.txt",
    labels="labels", label_bytes=1,
    archive=("cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a"),
    published=Normalisation((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), "published"),
)  # fmt: skip
CIFAR100 = Cifar(
    name="cifar100", classes=100, python="cifar-100-python", binary="cifar-100-binary",
    train=("train",), test="test",
    python_meta=("meta", "fine_label_names"), binary_meta="fine_label_names.txt",
    labels="fine_labels", label_bytes=2,
    archive=("cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85"),
    published=Normalisation((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), "published"),
)  # fmt: skip


def read_cifar(kind: Cifar, root: Path) -> Read:
    """Training images, test images and class names, from the first of the three layouts that is complete."""
    begun = [(layout, read) for layout, read in kind.layouts.items() if (root / layout.folder).is_dir()]
    if not begun:
        raise FileNotFoundError(
            f"expected {kind.python}, {kind.binary} or {kind.name}/train in {root}, got none of them: "
            f"see get({kind.name!r}, root)"
        )
    lost = [[root / each.folder / p for p in each.paths] for each, _ in begun]
    lost = [[path for path in paths if not path.exists()] for paths in lost]
    if [] not in lost:
        raise FileNotFoundError(f"expected {lost[0][0]}, got nothing: is the dataset complete?")
    layout, read = begun[lost.index([])]
    return read(kind, root / layout.folder)


def _read_python(kind: Cifar, folder: Path) -> Read:
    file, key = kind.python_meta
    names = _class_names(folder / file, read_pickle(folder / file).get(key), kind)
    return *_joined([_pickled(folder / name, kind) for name in (*kind.train, kind.test)]), names


def _read_binary(kind: Cifar, folder: Path) -> Read:
    meta = folder / kind.binary_meta
    names = _class_names(meta, read_text(meta).split(), kind)
    return *_joined([_binary(folder / f"{name}.bin", kind) for name in (*kind.train, kind.test)]), names


def _joined(parts: list[Images]) -> tuple[Images, Images]:
    """All parts but the last joined, and the last, the test images."""
    *train, test = parts
    labels = torch.cat([part.labels for part in train])
    return Images(torch.cat([part.images for part in train]), labels), test


def _read_folders(kind: Cifar, folder: Path) -> Read:
    parts: list[Images] = []
    classes: tuple[str, ...] = ()
    for part in (folder / "train", folder / "test"):
        names = sorted(f.name for f in part.iterdir() if f.is_dir() and not f.name.startswith("."))
        classes = classes or _class_names(part, names, kind)
        if odd := set(names) ^ set(classes):
            raise ValueError(
                f"{part}: expected the folders {', '.join(classes)}, got a difference in {sorted(odd)}"
            )
        files = [(file, label) for label, name in enumerate(classes) for file in image_files(part / name)]
        labels = torch.tensor([label for _, label in files], dtype=torch.int64)
        parts.append(Images(read_images([file for file, _ in files], SIDE), labels))
    train, test = parts
    return train, test.select(_taking_turns(test.labels)), classes


def _taking_turns(labels: Tensor) -> Tensor:
    """Items in an order in which classes take turns, so that the first items are of all classes."""
    turns = one_hot(labels).cumsum(0).gather(1, labels[:, None])[:, 0]  # [n] number within its class
    return torch.from_numpy(np.lexsort((labels.numpy(), turns.numpy())))


def _pickled(file: Path, kind: Cifar) -> Images:
    content = read_pickle(file)
    pixels, labels = content.get("data"), content.get(kind.labels)
    if not isinstance(pixels, np.ndarray) or pixels.ndim != 2 or pixels.shape[1] != _PIXELS:
        shown = pixels.shape if isinstance(pixels, np.ndarray) else sorted(content)
        raise ValueError(f"{file}: expected 'data' to be an array of shape [n, {_PIXELS}], got {shown}")
    if not isinstance(labels, list) or not all(isinstance(label, int) for label in labels):
        raise ValueError(f"{file}: expected {kind.labels!r} to be a list of whole numbers")
    return _images(file, torch.tensor(pixels), torch.tensor(labels, dtype=torch.int64), kind)


def _binary(file: Path, kind: Cifar) -> Images:
    raw = np.fromfile(file, np.uint8)
    row = kind.label_bytes + _PIXELS
    if len(raw) == 0 or len(raw) % row:
        raise ValueError(f"{file}: expected rows of {row} bytes, got {len(raw)} bytes: truncated?")
    rows = torch.from_numpy(raw).view(-1, row)
    return _images(file, rows[:, kind.label_bytes :], rows[:, kind.label_bytes - 1].long(), kind)


def _images(file: Path, pixels: Tensor, labels: Tensor, kind: Cifar) -> Images:
    try:
        check_labels(labels, len(pixels), kind.classes)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    return Images(pixels.reshape(-1, 3, SIDE, SIDE), labels)


def _class_names(file: Path, names: object, kind: Cifar) -> tuple[str, ...]:
    if not isinstance(names, list) or len(names) != kind.classes:
        raise ValueError(f"{file}: expected {kind.classes} class names, got {names}")
    return tuple(str(name) for name in names)


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
        seed: of the split and of the augmentation.
        validation: number of training images for validation; 5,000, or a tenth of a subset, if not given.
        normalisation: with the moments of the training part, or with the published constants.
        augment: whether `ImageData.training_inputs` makes random crops with padding 4, and flips.
        ood: names or paths of out-of-distribution images to add, see `load_ood`.
        subset: whether to accept fewer images than published; the name then ends in "-subset".

    Returns:
        The dataset.

    Raises:
        ValueError: an option is out of its range, a file is damaged, or there are fewer images than
            published.
        FileNotFoundError: no layout of the dataset is in the folder.
    """
    check_choice("normalisation", normalisation, ("train", "published"))
    if isinstance(ood, str):
        raise ValueError(f"expected ood to be several names, got one string {ood!r}")
    folder = data_root(root)
    train, test, classes = read_cifar(kind, folder)
    whole = (len(train), len(test)) == (TRAIN, TEST)
    if not whole and not subset:
        wanted = f"{TRAIN} training and {TEST} test images of {kind.name}"
        raise ValueError(f"expected {wanted}, got {len(train)} and {len(test)}: {SUBSET}")
    usual = VALIDATION if whole else max(1, len(train) // 10)
    validation = usual if validation is None else check_count("validation", validation)
    if validation >= len(train):
        raise ValueError(f"expected validation to be at most {len(train) - 1}, got {validation}")
    parts = split(len(train), (len(train) - validation, validation), seed)
    fitted, validated = (train.select(items) for items in parts)
    outside: dict[str, Images] = {}
    for source in ood:
        part = load_ood(source, folder, size=SIDE, subset=subset)
        name = ood_name(source, part)
        if name in outside:
            raise ValueError(f"expected ood to have sets of different names, got {name!r} twice")
        outside[name] = part
    return ImageData(
        name=kind.name if whole else f"{kind.name}-subset",
        train=fitted,
        validation=validated,
        test=test,
        classes=classes,
        normalisation=kind.published if normalisation == "published" else Normalisation.of(fitted.images),
        patch=PATCH,
        seed=seed,
        ood=outside,
        augmentation=CropAndFlip(seed) if augment else None,
    )


for _kind in (CIFAR10, CIFAR100):
    _file, _md5 = _kind.archive
    register(
        name=_kind.name,
        kind="images",
        about=f"60,000 colour images of 32 x 32 pixels, {_kind.classes} classes",
        licence="none stated; "
        "cite A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009",
        page="https://www.cs.toronto.edu/~kriz/cifar.html",
        load=partial(load_cifar, _kind),
        layouts=tuple(_kind.layouts),
        archive=Archive(_file, _md5, f"https://www.cs.toronto.edu/~kriz/{_file}", GIGABYTE),
    )
