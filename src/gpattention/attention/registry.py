"""Kinds of attention by name."""

from collections.abc import Callable
from typing import Any

from gpattention.attention.base import Attention
from gpattention.gp.checks import check_choice

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
    cls = attention_class(kind)
    try:
        return cls(embed_dim, num_heads, **options)
    except TypeError as error:
        raise ValueError(f"{kind!r} attention does not take these options: {error}") from None
