"""Frozen descriptions of models, checked when they are made, written to JSON and read back."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self, TypeVar

from gpattention.attention import attention_class
from gpattention.attention.registry import (
    MAX_PARAMETERS,
    check_parameters,
    count_parameters,
    most_parameters,
)
from gpattention.checks import check_count, plain

FORMAT_VERSION = 1
MAX_DEPTH = 10_000

T = TypeVar("T")


@dataclass(frozen=True)
class AttentionConfig:
    """A kind of attention and the options of its constructor."""

    kind: str = "cgp"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        attention_class(self.kind)  # an unknown kind is refused here
        taken = {"embed_dim", "num_heads", "dropout", "batch_first", "device", "dtype"} & set(self.options)
        if taken:
            raise ValueError(f"the model sets {', '.join(sorted(taken))} itself: leave it out of the options")
        # JSON knows no tuples: a pair is a pair however it was written
        options = {
            name: tuple(map(plain, x)) if isinstance(x, list | tuple) else plain(x)
            for name, x in self.options.items()
        }
        object.__setattr__(self, "options", options)

    @property
    def regularizer(self) -> str:
        """The regulariser's name, the kind's own when none was chosen."""
        chosen = self.options.get("regularizer")
        return attention_class(self.kind).default_regularizer if chosen is None else str(chosen)


Attentions = AttentionConfig | str | tuple[AttentionConfig | str, ...] | list[AttentionConfig | str]


def per_layer(attention: Attentions, depth: int) -> tuple[AttentionConfig, ...]:
    """One config for each layer, from one for all or one each."""
    given = tuple(attention) if isinstance(attention, tuple | list) else (attention,) * depth
    if len(given) != depth:
        raise ValueError(f"expected attention for {depth} layers, got {len(given)}")
    return tuple(a if isinstance(a, AttentionConfig) else AttentionConfig(a) for a in given)


@dataclass(frozen=True)
class TransformerConfig:
    """What both transformers have."""

    classes: int = 10
    depth: int = 5
    width: int = 128
    heads: int = 4
    mlp_width: int | None = None  # None is the model's width, as in the paper
    dropout: float = 0.1
    attention: Attentions = "cgp"

    def __post_init__(self) -> None:
        for name in ("classes", "depth", "width", "heads"):
            self._count(name, 1)
        if self.width % self.heads:
            raise ValueError(f"expected width to be a multiple of heads={self.heads}, got {self.width}")
        if self.mlp_width is not None:
            self._count("mlp_width", 1)
        object.__setattr__(self, "dropout", plain(self.dropout))
        if not isinstance(self.dropout, int | float) or not 0 <= self.dropout < 1:
            raise ValueError(f"expected dropout in [0, 1), got {self.dropout!r}")
        if self.depth > MAX_DEPTH:
            raise ValueError(f"expected depth <= {MAX_DEPTH}, got {self.depth}")
        object.__setattr__(self, "attention", per_layer(self.attention, self.depth))
        self._check_size(0)

    def _check_size(self, embedding: int) -> None:
        """Refuse what has too many parameters, `embedding` before the first block, before any is made."""
        width, hidden = self.width, self.width if self.mlp_width is None else self.mlp_width
        block = 2 * width * hidden + hidden + 5 * width  # two LayerNorms and the feed-forward part
        count = embedding + self.depth * block + (self.classes + 2) * width + self.classes
        what = f"{type(self).__name__} of width {width}, depth {self.depth}"
        check_parameters(count, what)
        if count + sum(most_parameters(width, self.heads, a.options) for a in self.layers) > MAX_PARAMETERS:
            check_parameters(count + sum(self._attention_sizes()), what)

    def _attention_sizes(self) -> list[int]:
        """Parameters of each layer's attention."""
        known: dict[str, int] = {}
        for layer in self.layers:
            if repr(layer) not in known:
                known[repr(layer)] = count_parameters(
                    attention_class(layer.kind), self.width, self.heads, layer.options
                )
        return [known[repr(layer)] for layer in self.layers]

    def _count(self, name: str, least: int) -> None:
        object.__setattr__(self, name, check_count(name, getattr(self, name), least=least))

    @property
    def layers(self) -> tuple[AttentionConfig, ...]:
        """The attention of each layer."""
        return per_layer(self.attention, self.depth)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        plain["attention"] = [{"kind": a.kind, "options": dict(a.options)} for a in self.layers]
        return {name: list(x) if isinstance(x, tuple) else x for name, x in plain.items()}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`; unknown keys are refused."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(plain) - known)
        if unknown:
            raise ValueError(
                f"unknown keys in {cls.__name__}: {', '.join(unknown)}; known: {', '.join(sorted(known))}"
            )
        values = dict(plain)
        if "attention" in values:
            given = values["attention"]
            if not isinstance(given, list | tuple):
                raise ValueError(f"expected attention to be a list of one entry per layer, got {given!r}")
            values["attention"] = tuple(_attention_from(x) for x in given)
        if isinstance(values.get("image_size"), list):
            values["image_size"] = tuple(values["image_size"])
        return cls(**values)


@dataclass(frozen=True)
class VisionConfig(TransformerConfig):
    """The paper's CIFAR transformer by default: 64 patches of 4 x 4 pixels, depth 5, width 128, 4 heads."""

    image_size: int | tuple[int, int] = 32
    channels: int = 3
    patch: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("channels", "patch"):
            self._count(name, 1)
        sides = self.image_size
        whole = tuple(map(plain, sides)) if isinstance(sides, tuple) else plain(sides)
        object.__setattr__(self, "image_size", whole)
        if len(self.sides) != 2 or not all(type(side) is int for side in self.sides):
            raise ValueError(f"expected image_size to be one whole number or two, got {self.image_size!r}")
        if any(side < 1 or side % self.patch for side in self.sides):
            raise ValueError(
                f"expected image_size to be multiples of patch={self.patch}, got {self.image_size}"
            )
        self._check_size(self.width * (self.channels * self.patch**2 + self.tokens + 2))

    @property
    def sides(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.image_size if isinstance(self.image_size, tuple) else (self.image_size, self.image_size)

    @property
    def tokens(self) -> int:
        """Number of patches."""
        return (self.sides[0] // self.patch) * (self.sides[1] // self.patch)


@dataclass(frozen=True)
class TextConfig(TransformerConfig):
    """The paper's CoLA transformer by default: depth 2, width 256, 4 heads of 64, embeddings of 128."""

    classes: int = 2
    depth: int = 2
    width: int = 256
    vocabulary: int = 10_000
    embedding_width: int = 128
    contextual_width: int = 0
    max_length: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (
            ("vocabulary", 2),
            ("embedding_width", 1),
            ("contextual_width", 0),
            ("max_length", 1),
        ):
            self._count(name, least)
        inputs = self.embedding_width + self.contextual_width
        self._check_size(self.vocabulary * self.embedding_width + self.width * (inputs + 1 + self.max_length))


def _attention_from(plain: Any) -> AttentionConfig:
    if not isinstance(plain, Mapping) or set(plain) - {"kind", "options"} or "kind" not in plain:
        raise ValueError(f"expected attention entries with 'kind' and 'options', got {plain!r}")
    options = plain.get("options", {})
    if not isinstance(options, Mapping):
        raise ValueError(f"expected attention entries with 'kind' and 'options', got {plain!r}")
    return AttentionConfig(plain["kind"], options)
