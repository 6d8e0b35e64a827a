"""`load`: any known dataset by its name."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, overload

from gpattention.data.catalogue import entry_of
from gpattention.data.cifar import load_cifar
from gpattention.data.cifar_files import CIFAR10, CIFAR100
from gpattention.data.cola import load_cola
from gpattention.data.corrupted import CorruptedImages, load_corrupted
from gpattention.data.digits import load_digits
from gpattention.data.images import ImageData, Images
from gpattention.data.ood import load_ood
from gpattention.data.places import StrPath
from gpattention.data.texts import TextData

_SPLIT: dict[str, Callable[..., ImageData | TextData]] = {
    "cifar10": partial(load_cifar, CIFAR10),
    "cifar100": partial(load_cifar, CIFAR100),
    "cola": load_cola,
}


@overload
def load(
    name: Literal["digits", "cifar10", "cifar100"],
    root: StrPath | None = ...,
    seed: int = ...,
    **options: Any,
) -> ImageData: ...
@overload
def load(name: Literal["cola"], root: StrPath | None = ..., seed: int = ..., **options: Any) -> TextData: ...
@overload
def load(
    name: Literal["cifar10-c", "cifar100-c"], root: StrPath | None = ..., seed: int = ..., **options: Any
) -> CorruptedImages: ...
@overload
def load(
    name: Literal["textures", "lsun-crop", "lsun-resize", "tinyimagenet-crop", "tinyimagenet-resize"],
    root: StrPath | None = ...,
    seed: int = ...,
    **options: Any,
) -> Images: ...
@overload
def load(name: str, root: StrPath | None = ..., seed: int = ..., **options: Any) -> Any: ...


def load(name: str, root: StrPath | None = None, seed: int = 0, **options: Any) -> Any:
    """A dataset by name: `ImageData`, `TextData`, `CorruptedImages` (cifar10-c) or `Images` (textures).

    Args:
        name: one of `known()`; digits comes with the library.
        root: folder of the datasets; the environment variable GPATTENTION_DATA if not given.
        seed: decides the split, where there is one.
        options: of the dataset: see `load_digits`, `load_cifar`, `load_cola`, `load_corrupted`, `load_ood`.
    """
    entry = entry_of(name)
    reader: Callable[..., Any]
    if name == "digits":
        reader = partial(load_digits, seed)
    elif entry.kind == "corrupted":
        reader = partial(load_corrupted, name, root)
    elif entry.kind == "ood":
        reader = partial(load_ood, name, root)
    else:
        reader = partial(_SPLIT[name], root, seed)
    parameters = inspect.signature(reader).parameters.values()
    allowed = {p.name: p.annotation for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
    for option, value in options.items():
        if option not in allowed:
            raise ValueError(f"expected options of {name} among {', '.join(allowed)}, got {option!r}")
        if allowed[option] is bool and not isinstance(value, bool):  # a recipe's text 'False' would be true
            raise ValueError(f"expected option {option} of {name} to be true or false, got {value!r}")
    return reader(**options)
