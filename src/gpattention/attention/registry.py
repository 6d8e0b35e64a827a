"""Kinds of attention by name, and their options held against the annotations of their constructors.

A recipe, or `--set model.options.learn_noise=False`, brings text where a truth value belongs, and any text is
true: without a check the option would be the opposite of what was asked, in silence.
"""

import inspect
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

import torch
from torch import Tensor

from gpattention.attention.base import Attention
from gpattention.checks import check_choice, check_count, plain

MAX_PARAMETERS = 10**10  # of a module or a model: more is a slip of the pen, or an attack on the memory
A = TypeVar("A", bound=Attention)
_KINDS: dict[str, type[Attention]] = {}
_EXPECTED = {bool: "true or false", int: "a whole number", float: "a number"}


def register_attention(name: str) -> Callable[[type[Attention]], type[Attention]]:
    """Class decorator: make a kind available to `build_attention` and to the models' configs.

    Args:
        name: of the kind.

    Returns:
        The decorator, which gives the class its `kind`.

    Raises:
        TypeError: if the class is no subclass of `Attention`.
        ValueError: if the name is taken by another class.

    >>> @register_attention("mine")
    ... class MyAttention(Attention): ...
    """

    def register(cls: type[Attention]) -> type[Attention]:
        if not isinstance(cls, type) or not issubclass(cls, Attention):
            raise TypeError(f"expected a subclass of Attention to register as {name!r}, got {cls!r}")
        if _KINDS.get(name, cls) is not cls:
            raise ValueError(f"attention kind {name!r} is taken by {_KINDS[name].__name__}")
        cls.kind = name
        _KINDS[name] = cls
        return cls

    return register


def list_attention() -> tuple[str, ...]:
    """Names of all kinds.

    Returns:
        The names, sorted.
    """
    return tuple(sorted(_KINDS))


def attention_class(kind: str) -> type[Attention]:
    """The class behind a name, whose attributes say what the kind can do.

    Args:
        kind: one of `list_attention()`.

    Returns:
        A subclass of `Attention`.

    Raises:
        ValueError: for a name that nobody registered.
    """
    check_choice("kind", kind, list_attention())
    return _KINDS[kind]


def build_attention(kind: str, *, embed_dim: int, num_heads: int, **options: Any) -> Attention:
    """An attention module by name.

    Args:
        kind: one of `list_attention()`.
        embed_dim: width E of the tokens and of the output.
        num_heads: number H of heads; E must be a multiple.
        **options: keyword arguments of the kind's constructor.

    Returns:
        The module.

    Raises:
        ValueError: for an unknown kind, or options that it does not take.

    >>> attention = build_attention("cgp", embed_dim=128, num_heads=4, dropout=0.1)
    >>> attention(x, need=("output", "variance"))
    """
    return make_attention(attention_class(kind), kind, embed_dim, num_heads, options)


def make_attention(cls: type[A], kind: str, embed_dim: int, num_heads: int, options: Mapping[str, Any]) -> A:
    """Call the constructor; what it does not take is a wrong option, its own mistakes stay as they are."""
    refusal = f"{kind!r} attention does not take these options: "
    try:
        inspect.signature(cls).bind(embed_dim, num_heads, **options)
    except TypeError as error:
        raise ValueError(f"{refusal}{error}") from None
    known = option_annotations(cls)
    _check_option_types(known, options)
    embed_dim, num_heads = check_count("embed_dim", embed_dim), check_count("num_heads", num_heads)
    options = {name: plain(x) for name, x in options.items()}  # NumPy's small integers would overflow below
    if most_parameters(embed_dim, num_heads, options) > MAX_PARAMETERS:
        check_parameters(count_parameters(cls, embed_dim, num_heads, options), f"{kind!r} attention")
    try:
        return cls(embed_dim, num_heads, **options)
    except TypeError as error:
        # a constructor with **options may refuse a name anywhere above it, or have failed by itself
        unknown = sorted(set(options) - set(known))
        if not unknown:
            raise
        named = f"unknown {', '.join(map(repr, unknown))}; known: {', '.join(sorted(known))}"
        raise ValueError(refusal + named) from error


def option_annotations(cls: type) -> dict[str, Any]:
    """Keyword arguments of the constructor and, as far as it hands **options up, of those above it."""
    found: dict[str, Any] = {}
    for owner in cls.__mro__:
        constructor = vars(owner).get("__init__")
        if constructor is None:
            continue
        try:
            signature = inspect.signature(constructor, eval_str=True)
        except Exception:  # a third-party kind may name what exists for type checkers alone
            signature = inspect.signature(constructor)
        _, *parameters = signature.parameters.values()
        for p in parameters:
            if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD):
                found.setdefault(p.name, p.annotation)
        if all(p.kind is not p.VAR_KEYWORD for p in parameters):
            break
    return {name: kind for name, kind in found.items() if name not in ("embed_dim", "num_heads")}


def _check_option_types(annotations: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Raise for a truth value or a number that is none; all else is the constructor's own to check."""
    for name, value in options.items():
        wanted = annotations.get(name)
        kinds = get_args(wanted) if get_origin(wanted) in (Union, UnionType) else (wanted,)
        known = all(kind in (*_EXPECTED, NoneType) for kind in kinds)
        if known and not any(_fits(value, kind) for kind in kinds):
            expected = " or ".join(_EXPECTED[kind] for kind in kinds if kind is not NoneType)
            raise ValueError(f"expected {name} to be {expected}, got {value!r}")


def _fits(value: Any, kind: type) -> bool:
    value = value if isinstance(value, Tensor) and value.is_floating_point() else plain(value)
    if kind is bool or isinstance(value, bool):
        return isinstance(value, kind) and kind in (bool, NoneType)
    if kind is NoneType:
        return value is None
    return isinstance(value, Integral if kind is int else (Real, Tensor))


def most_parameters(embed_dim: int, num_heads: int, options: Mapping[str, Any]) -> int:
    """More than any kind here has: some maps of the width, and the square of the largest option."""
    values = (y for x in options.values() for y in (x if isinstance(x, tuple | list) else (x,)))
    count = max((abs(x) for x in values if isinstance(x, int)), default=1)  # such as inducing points
    return embed_dim * (16 * embed_dim + 2 * (num_heads + 1) * count + count**2)


def count_parameters(cls: type[Attention], embed_dim: int, num_heads: int, options: Mapping[str, Any]) -> int:
    """Of a module that is not made: on the meta device there are shapes and no memory."""
    most = most_parameters(embed_dim, num_heads, options)
    if most > 2**60:  # torch itself cannot count so many bytes
        return most
    given = {**options, **({"device": "meta"} if "device" in options else {})}
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in cls(embed_dim, num_heads, **given).parameters())


def check_parameters(count: int, what: str) -> None:
    """`ValueError` for more than can be meant."""
    if count > MAX_PARAMETERS:
        raise ValueError(f"expected {what} of at most {MAX_PARAMETERS:.0e} parameters, got {count:.1e}")
