"""Kinds of attention by name."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from gpattention.attention.base import Attention
from gpattention.attention.option_types import check_option_types, option_annotations
from gpattention.gp.checks import check_choice

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


def make_attention(cls: type[A], kind: str, embed_dim: int, num_heads: int, options: Mapping[str, Any]) -> A:
    """Call the constructor; what it does not take is told as a wrong option, its own mistakes as they are."""
    try:
        inspect.signature(cls).bind(embed_dim, num_heads, **options)
    except TypeError as error:
        raise ValueError(f"{kind!r} attention does not take these options: {error}") from None
    known = option_annotations(cls)
    check_option_types(known, options)
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
