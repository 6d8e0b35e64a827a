"""What was finished earlier: whether it answers what is asked now, or is of other weights or data."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

from gpattention.data.places import NoRootError
from gpattention.experiments.judging.earlier import REDUCING

T = TypeVar("T")
DATA = "data"  # key of settings: what the data hold, by name; None where they are not on this machine
WEIGHTS = ("model", "host", "encoder")  # keys of settings: digests of the weights that all starts from
Standing = Literal["same", "of other weights", "of other items", "with other settings"]


def standing(found: Mapping[str, Any], asked: Mapping[str, Any]) -> Standing:
    """How settings of something finished stand to those asked for.

    Data that are not here cannot be compared; what does not say which data it is of is never the same.
    """
    differing = differing_keys(found, asked)
    if not differing:
        return "same"
    if any(key in WEIGHTS for key in differing):
        return "of other weights"
    return "of other items" if {*differing} <= {DATA, *REDUCING} else "with other settings"


def differing_keys(found: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    """Keys of settings that do not agree, sorted."""
    unknown = asked.get(DATA, {}) is None and found.get(DATA) is not None
    return sorted(
        key for key in {*found, *asked} if found.get(key) != asked.get(key) and not (key == DATA and unknown)
    )


def here(bring: Callable[[], T], *, needed: bool) -> T | None:
    """What data say of themselves; None where they cannot be had here and nothing is to be computed."""
    try:
        return bring()
    except (FileNotFoundError, ImportError, NoRootError):
        if needed:
            raise
        return None
