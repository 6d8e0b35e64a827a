"""Numbers that callers pass, whoever's they are: checked, and made Python's own before they are stored.

NumPy and tensors have numbers too, which a loop over `np.arange` or a configuration brings along.  JSON
writes none of them, and arithmetic of theirs may overflow; so nothing keeps them.
"""

import operator
from typing import Any, SupportsIndex

MOST = 2**63 - 1  # what PyTorch can count


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
