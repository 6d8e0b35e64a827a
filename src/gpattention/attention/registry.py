"""Kinds of attention by name."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from gpattention.attention.base import Attention
from gpattention.attention.option_types import check_option_types, option_annotations
from gpattention.checks import check_count, plain
from gpattention.gp.checks import check_choice

MAX_PARAMETERS = 10**10  # of a module or a model: more is a slip of the pen, or an attack on the memory

A = TypeVar("A", bound=Attention)
_KINDS: dict[str, type[Attention]] = {}


def register_attention(name: str) -> Callable[[type[Attention]], type[Attention]]:
    """Class decorator: make a kind available to `build_attention` and to the models' configs.

    >>> @register_attention("mine")
    ... class MyAttention(Attention): ...
    """

    def register(cls: type[Attention]) -> type[Attention]:
        if not isinstance(cls, type) or not issubclass(cls, Attention):
            raise TypeError(f"expected a subclass of Attention to register as {name!r}, got {cls!r}")
        if name in _KINDS and _KINDS[name] is not cls:
            raise ValueError(f"attention kind {name!r} is taken by {_KINDS[name].__name__}")
        cls.kind = name
        _KINDS[name] = cls
        return cls

    return register


def list_attention() -> tuple[str, ...]:
    """Names of all kinds, sorted."""
    return tuple(sorted(_KINDS))


def attention_class(kind: str) -> type[Attention]:
    """The class behind a name."""
    check_choice("kind", kind, list_attention())
    return _KINDS[kind]


def build_attention(kind: str, *, embed_dim: int, num_heads: int, **options: Any) -> Attention:
    """An attention module by name; `options` are its constructor's keyword arguments.

    >>> attention = build_attention("cgp", embed_dim=128, num_heads=4, dropout=0.1)
    >>> attention(x, need=("output", "variance"))
    """
    return make_attention(attention_class(kind), kind, embed_dim, num_heads, options)


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


def make_attention(cls: type[A], kind: str, embed_dim: int, num_heads: int, options: Mapping[str, Any]) -> A:
    """Call the constructor; what it does not take is told as a wrong option, its own mistakes as they are."""
    try:
        inspect.signature(cls).bind(embed_dim, num_heads, **options)
    except TypeError as error:
        raise ValueError(f"{kind!r} attention does not take these options: {error}") from None
    known = option_annotations(cls)
    check_option_types(known, options)
    embed_dim, num_heads = check_count("embed_dim", embed_dim), check_count("num_heads", num_heads)
    options = {name: plain(x) for name, x in options.items()}  # bytes of others would overflow below
    if most_parameters(embed_dim, num_heads, options) > MAX_PARAMETERS:
        check_parameters(count_parameters(cls, embed_dim, num_heads, options), f"{kind!r} attention")
    try:
        return cls(embed_dim, num_heads, **options)
    except TypeError as error:
        # a constructor with **options may refuse a name anywhere above it, or have failed by itself
        unknown = sorted(set(options) - set(known))
        if not unknown:
            raise
        raise ValueError(
            f"{kind!r} attention does not take these options: unknown {', '.join(map(repr, unknown))}; "
            f"known: {', '.join(sorted(known))}"
        ) from error
