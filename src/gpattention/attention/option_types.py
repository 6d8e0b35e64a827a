"""Options of a kind held against the annotations of its constructor.

A recipe, or `--set model.options.learn_noise=False`, brings text where a truth value belongs, and any text is
true: without this the option would be the opposite of what was asked, in silence.
"""

import inspect
from collections.abc import Mapping
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from torch import Tensor

from gpattention.checks import plain

_EXPECTED = {bool: "true or false", int: "a whole number", float: "a number"}


def check_option_types(annotations: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Raise for a truth value or a number that is none; all else is the constructor's own to check."""
    for name, value in options.items():
        kinds = _alternatives(annotations.get(name))
        known = all(kind in (*_EXPECTED, NoneType) for kind in kinds)
        if known and not any(_fits(value, kind) for kind in kinds):
            wanted = " or ".join(_EXPECTED[kind] for kind in kinds if kind is not NoneType)
            raise ValueError(f"expected {name} to be {wanted}, got {value!r}")


def option_annotations(cls: type) -> dict[str, Any]:
    """Keyword arguments of the constructor and, as far as it hands **options up, of those above it."""
    found: dict[str, Any] = {}
    for owner in cls.__mro__:
        constructor = vars(owner).get("__init__")
        if constructor is None:
            continue
        _, *parameters = _signature(constructor).parameters.values()
        for p in parameters:
            if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD):
                found.setdefault(p.name, p.annotation)
        if all(p.kind is not p.VAR_KEYWORD for p in parameters):
            break
    return {name: kind for name, kind in found.items() if name not in ("embed_dim", "num_heads")}


def _signature(constructor: Any) -> inspect.Signature:
    try:
        return inspect.signature(constructor, eval_str=True)
    except Exception:  # a kind of somebody else's may name what exists for type checkers alone
        return inspect.signature(constructor)


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _fits(value: Any, kind: type) -> bool:
    value = value if isinstance(value, Tensor) and value.is_floating_point() else plain(value)
    if kind is bool or isinstance(value, bool):
        return isinstance(value, kind) and kind in (bool, NoneType)
    if kind is NoneType:
        return value is None
    return isinstance(value, Integral if kind is int else (Real, Tensor))
