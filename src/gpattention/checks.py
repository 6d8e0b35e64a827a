"""Checks of arguments, in one place: every error names the argument, what was expected and what came.

Numbers are made Python's own before they are stored.  NumPy and tensors have numbers too, which a loop over
`np.arange` or a configuration brings along.  JSON writes none of them, and arithmetic of theirs may overflow.
"""

import operator
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, SupportsIndex

if TYPE_CHECKING:
    from torch import Tensor

MOST = 2**63 - 1  # what PyTorch can count
LONGEST_NAME = 255  # bytes of a file's name, as file systems have it


def plain(value: Any) -> Any:
    """NumPy's scalars, and tensors and arrays without axes, as Python's own; everything else as it is."""
    # an int also where it is symbolic: the compiler cannot ask it for attributes
    if isinstance(value, int) or getattr(value, "ndim", None) != 0:
        return value
    return value.item()


def check_whole(name: str, value: SupportsIndex) -> int:
    """A whole number, as Python's own; truth values are none."""
    whole = _whole(value)
    if whole is None:
        raise ValueError(f"expected {name} to be a whole number, got {value!r}")
    return whole


def check_count(name: str, value: SupportsIndex, *, least: int = 1) -> int:
    """A whole number of at least `least`, as Python's own."""
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
    if hasattr(value, "ndim"):  # a tensor of one number has an index too, but it is a list of one
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def check_fraction(name: str, value: float, *, one: bool = False) -> None:
    """A number in (0, 1), or in (0, 1] if `one`."""
    if not 0 < value < 1 and not (one and value == 1):
        raise ValueError(f"expected {name} in (0, 1{']' if one else ')'}, got {value}")


def check_choice(name: str, value: str, choices: Collection[str]) -> None:
    """One of the names."""
    if value not in choices:
        hint = did_you_mean(value, choices)
        raise ValueError(f"expected {name} to be one of {', '.join(choices)}, got {value!r}{hint}")


def check_keys(where: str, given: Iterable[str], known: Collection[str]) -> None:
    """No key but the known ones; errors call one by its name in `where`."""
    for key in given:
        if key not in known:
            hint = did_you_mean(key, known) or f"; known: {', '.join(sorted(known))}"
            raise ValueError(f"unknown key {key!r} in {where}{hint}")


def did_you_mean(value: object, known: Iterable[object], *, cutoff: float = 0.6) -> str:
    """What an error about a name ends with: the known one that is nearest, nothing where none is near."""
    near = nearest(str(value), map(str, known), cutoff=cutoff)
    return "" if near is None else f"; did you mean {near!r}?"


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The known name that one was meant to be; None where none is near."""
    names = {each.lower(): each for each in known}
    near = get_close_matches(name.lower(), names, n=1, cutoff=cutoff)
    return names[near[0]] if near else None


def check_tensor(name: str, value: object) -> None:
    """A tensor: arrays of NumPy and lists are what predictions of other tools come in."""
    from torch import Tensor  # here, as the command line starts without torch

    if not isinstance(value, Tensor):
        raise ValueError(
            f"expected {name} to be a tensor, got {type(value).__name__}: torch.as_tensor makes one of it"
        )


def check_labels(labels: "Tensor", items: int, classes: int | None = None) -> None:
    """One class number for every item, [items]; a single label would be compared with all of them."""
    check_tensor("labels", labels)
    whole = not (labels.is_floating_point() or labels.is_complex() or str(labels.dtype) == "torch.bool")
    if labels.shape != (items,) or not whole:
        raise ValueError(
            f"expected labels to be whole numbers of shape [{items}], one per item, "
            f"got shape {tuple(labels.shape)} and {labels.dtype}"
        )
    if classes is not None:
        wrong = (labels < 0) | (labels >= classes)
        if bool(wrong.any()):
            raise ValueError(f"expected labels from 0 to {classes - 1}, got {int(labels[wrong][0])}")


def check_name(field: str, name: object) -> str:
    """The name, if it can be that of one file or folder, on every system, and can be shown as it is.

    It has no separator (slash or backslash), no sign that is not printed (control characters, line breaks,
    marks that turn the direction of writing, bytes that are no text), no dot at its beginning, as our files
    that are not whole yet have, and no space around it nor dot at its end, which some systems drop.
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
