"""Values of a frozen dataclass held against the annotations of their fields."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from gpattention.checks import plain

_WORDS = {int: "a whole number", bool: "true or false", str: "text"}


def field_types(cls: type[Any]) -> dict[str, Any]:
    """The fields of a dataclass, in order, with their annotations."""
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls)}


def check_types(data: Any, section: str = "") -> None:
    """For `__post_init__`: raise for a value that is not of its field's type, told as section.field.

    A whole number where a fraction is allowed becomes one; a table is copied, so that nobody changes it.
    """
    for name, kind in field_types(type(data)).items():
        where = f"{section}.{name}" if section else name
        object.__setattr__(data, name, typed(getattr(data, name), kind, where))


def typed(value: Any, kind: Any, where: str) -> Any:
    """The value, if it is of the kind; TypeError for an annotation that nobody has said how to check."""
    value = plain(value)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        others = [argument for argument in arguments if argument is not NoneType]
        if len(others) == 1 and NoneType in arguments:
            return None if value is None else typed(value, others[0], where)
    elif origin is Literal:
        if value in arguments:
            return value
        raise ValueError(f"expected {where} to be one of {', '.join(map(str, arguments))}, got {value!r}")
    elif origin is Mapping:
        if isinstance(value, Mapping):
            return {key: plain(x) for key, x in value.items()}
        raise ValueError(f"expected {where} to be a table, got {value!r}")
    elif kind is float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        raise ValueError(f"expected {where} to be a number, got {value!r}")
    elif kind in _WORDS:
        if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
            return value
        raise ValueError(f"expected {where} to be {_WORDS[kind]}, got {value!r}")
    elif isinstance(kind, type) and is_dataclass(kind):
        if isinstance(value, kind):
            return value
        raise ValueError(f"expected {where} to be a {kind.__name__}, got {value!r}")
    raise TypeError(f"expected {where} to have an annotation that can be checked, got {kind}")
