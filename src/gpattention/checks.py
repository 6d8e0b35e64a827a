"""Checks of arguments: every error names the argument, what was expected and what it got.

Numbers are converted to Python's own types before they are stored.  A loop over `np.arange` or a
configuration may pass NumPy scalars or tensors, which JSON cannot write and whose arithmetic may overflow.
"""

import importlib
import operator
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from types import ModuleType
from typing import TYPE_CHECKING, Any, SupportsIndex

if TYPE_CHECKING:
    from torch import Tensor

MOST = 2**63 - 1  # the largest integer of PyTorch
LONGEST_NAME = 255  # bytes of a file name, the limit of most file systems


def plain(value: Any) -> Any:
    """Convert NumPy scalars, and tensors and arrays without axes, to Python numbers; keep everything else."""
    # checked first, as compilers cannot read attributes of a symbolic int
    if isinstance(value, int) or getattr(value, "ndim", None) != 0:
        return value
    return value.item()


def check_whole(name: str, value: SupportsIndex) -> int:
    """The value as a Python int; a truth value is not a whole number."""
    whole = _whole(value)
    if whole is None:
        raise ValueError(f"expected {name} to be a whole number, got {value!r}")
    return whole


def check_count(name: str, value: SupportsIndex, *, least: int = 1) -> int:
    """The value as a Python int, which is at least `least`."""
    whole = _whole(value)
    if whole is None or whole < least:
        raise ValueError(f"expected {name} to be a whole number >= {least}, got {value!r}")
    if whole > MOST:
        raise ValueError(f"expected {name} to be at most {MOST}, got {value!r}")
    return whole


def _whole(value: Any) -> int | None:
    value = plain(value)
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if hasattr(value, "ndim"):  # a tensor of shape [1] has an index too, but is a list
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def check_fraction(name: str, value: float, *, one: bool = False) -> None:
    """Refuse numbers outside (0, 1), or outside (0, 1] if `one`."""
    if not 0 < value < 1 and not (one and value == 1):
        raise ValueError(f"expected {name} in (0, 1{']' if one else ')'}, got {value}")


def check_choice(name: str, value: str, choices: Collection[str]) -> None:
    """Refuse a value that is not among the choices."""
    if value not in choices:
        hint = did_you_mean(value, choices)
        raise ValueError(f"expected {name} to be one of {', '.join(choices)}, got {value!r}{hint}")


def check_keys(where: str, given: Iterable[str], known: Collection[str]) -> None:
    """Refuse keys that are not known; `where` says in the error what has them."""
    for key in given:
        if key not in known:
            hint = did_you_mean(key, known) or f"; known: {', '.join(sorted(known))}"
            raise ValueError(f"unknown key {key!r} in {where}{hint}")


def did_you_mean(value: object, known: Iterable[object], *, cutoff: float = 0.6) -> str:
    """The end of an error about a name: a hint at the most similar known name, empty if none is similar."""
    near = nearest(str(value), map(str, known), cutoff=cutoff)
    return "" if near is None else f"; did you mean {near!r}?"


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The known name that is most similar, whatever its case; None if none is similar."""
    names = {each.lower(): each for each in known}
    near = get_close_matches(name.lower(), names, n=1, cutoff=cutoff)
    return names[near[0]] if near else None


def check_tensor(name: str, value: object) -> None:
    """Refuse what is not a tensor, such as NumPy arrays and lists of predictions made by other tools."""
    from torch import Tensor  # here, as the command line starts without torch

    if not isinstance(value, Tensor):
        kind = type(value).__name__
        raise ValueError(f"expected {name} to be a tensor, got {kind}: convert it by torch.as_tensor")


def check_labels(labels: "Tensor", items: int, classes: int | None = None) -> None:
    """Refuse labels that are not one class number per item, [items]."""
    check_tensor("labels", labels)
    whole = not (labels.is_floating_point() or labels.is_complex() or str(labels.dtype) == "torch.bool")
    if labels.shape != (items,) or not whole:
        raise ValueError(
            f"expected labels to be whole numbers of shape [{items}], one per item, "
            f"got shape {tuple(labels.shape)} and {labels.dtype}"
        )
    if classes is not None and len(wrong := labels[(labels < 0) | (labels >= classes)]):
        raise ValueError(f"expected labels from 0 to {classes - 1}, got {int(wrong[0])}")


def check_name(field: str, name: object) -> str:
    """The name, if every system can use it for a file or folder and every terminal can show it.

    It must not contain slashes, backslashes or characters that are not printable (control characters, line
    breaks, marks that change the direction of writing, bytes that are not text), must not begin with a dot,
    as our unfinished files do, and must not begin or end with a space or end with a dot, which some systems
    drop.
    """
    if (
        isinstance(name, str)
        and name.isprintable()
        and not set(name) & {"/", "\\"}
        and name == name.strip(" ").rstrip(".")
        and not name.startswith(".")
        and 0 < len(name.encode()) <= LONGEST_NAME
    ):
        return name
    shown = repr(name) if len(repr(name)) <= 100 else f"{repr(name)[:100]}..."
    raise ValueError(
        f"expected {field} to be the name of one file or folder (1 to {LONGEST_NAME} bytes, no slash, "
        f"backslash or control character, no dot or space at an end), got {shown}"
    )


def require(module: str, *, extra: str, user: str) -> ModuleType:
    """Import a module; `ImportError` names the extra of this library that installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise  # the module is there, but not something it needs
        needs = f"{user} needs {module}: pip install 'gpattention[{extra}]'"
        raise ImportError(needs, name=module) from error
