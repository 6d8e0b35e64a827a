"""Configs of models, which are frozen and checked when they are created, and the folders of saved models.

A folder holds `config.json` and `model.safetensors`, each complete or not there at all.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from safetensors.torch import load_file, load_model, save
from torch import Tensor, nn

from gpattention.attention import attention_class
from gpattention.attention.base import MAX_PARAMETERS, check_parameters, count_parameters, most_parameters
from gpattention.checks import check_count, check_keys, plain
from gpattention.files import make_folder, read_object, write_atomically

FORMAT_VERSION = 1
MAX_DEPTH = 10_000
CONVERSION_FILE = "conversion.json"  # beside the two, if the attention of the model was converted


def _paired(x: Any) -> Any:
    """Lists as tuples, since JSON has no tuples."""
    return tuple(map(plain, x)) if isinstance(x, list | tuple) else plain(x)


@dataclass(frozen=True)
class AttentionConfig:
    """A kind of attention and the options of its constructor.

    Attributes:
        kind: one of `list_attention()`.
        options: keyword arguments, without those that the model sets itself.
    """

    kind: str = "cgp"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        attention_class(self.kind)  # an unknown kind is refused here
        taken = {"embed_dim", "num_heads", "dropout", "batch_first", "device", "dtype"} & set(self.options)
        if taken:
            raise ValueError(f"the model sets {', '.join(sorted(taken))} itself: leave it out of the options")
        object.__setattr__(self, "options", {name: _paired(x) for name, x in self.options.items()})

    @property
    def regularizer(self) -> str:
        """The regulariser's name, the kind's own when none was chosen."""
        chosen = self.options.get("regularizer")
        return attention_class(self.kind).default_regularizer if chosen is None else str(chosen)


Attentions = AttentionConfig | str | tuple[AttentionConfig | str, ...] | list[AttentionConfig | str]


@dataclass(frozen=True)
class TransformerConfig:
    """What both transformers have.

    Attributes:
        classes: between which the head decides.
        depth: number of blocks.
        width: of the tokens.
        heads: of every attention; the width is a multiple.
        mlp_width: of the feed-forward parts; None is the model's width, as in the paper.
        dropout: probability in [0, 1).
        attention: one kind or config for all layers (of the last, where its kind has another one below it),
            or one for each.
    """

    classes: int = 10
    depth: int = 5
    width: int = 128
    heads: int = 4
    mlp_width: int | None = None
    dropout: float = 0.1
    attention: Attentions = "cgp"

    def __post_init__(self) -> None:
        hidden = () if self.mlp_width is None else ("mlp_width",)
        for name in ("classes", "depth", "width", "heads", *hidden):
            self._count(name, 1)
        if self.width % self.heads:
            raise ValueError(f"expected width to be a multiple of heads={self.heads}, got {self.width}")
        object.__setattr__(self, "dropout", plain(self.dropout))
        if not isinstance(self.dropout, int | float) or not 0 <= self.dropout < 1:
            raise ValueError(f"expected dropout in [0, 1), got {self.dropout!r}")
        if self.depth > MAX_DEPTH:
            raise ValueError(f"expected depth <= {MAX_DEPTH}, got {self.depth}")
        one = not isinstance(self.attention, tuple | list)
        given: Any = self.attention if not one else self._stack(self.attention)  # type: ignore[arg-type]
        if len(given) != self.depth:
            raise ValueError(f"expected attention for {self.depth} layers, got {len(given)}")
        layers = tuple(a if isinstance(a, AttentionConfig) else AttentionConfig(a) for a in given)
        object.__setattr__(self, "attention", layers)
        self._check_size(0, tokens=1)

    def _check_size(self, embedding: int, tokens: int | None = None) -> None:
        """Refuse models with too many parameters, `embedding` of them before the first block.

        Kinds that depend on the number of tokens are built for `tokens`, the model's own if not given.
        """
        width, hidden = self.width, self.width if self.mlp_width is None else self.mlp_width
        block = 2 * width * hidden + hidden + 5 * width  # two LayerNorms and the feed-forward part
        count = embedding + self.depth * block + (self.classes + 2) * width + self.classes
        what = f"{type(self).__name__} of width {width}, depth {self.depth}"
        check_parameters(count, what)
        # exact counts take time, as attention is built for them, and are only made where they may matter
        if count + sum(most_parameters(width, self.heads, a.options) for a in self.layers) > MAX_PARAMETERS:
            sizes = {
                text: count_parameters(attention_class(a.kind), width, self.heads, self.sized(a, tokens))
                for text, a in {repr(a): a for a in self.layers}.items()
            }
            check_parameters(count + sum(sizes[repr(a)] for a in self.layers), what)

    def _stack(self, top: AttentionConfig | str) -> tuple[AttentionConfig, ...]:
        """One kind in all layers; in the last one where it has another kind below."""
        last = top if isinstance(top, AttentionConfig) else AttentionConfig(top)
        below = attention_class(last.kind).below
        return (last if below is None else AttentionConfig(below),) * (self.depth - 1) + (last,)

    def sized(self, layer: AttentionConfig, tokens: int | None = None) -> dict[str, Any]:
        """Options of a layer's attention; with `tokens`, the model's own, for kinds made for a number."""
        wanted = attention_class(layer.kind).sized
        tokens = self.longest if wanted and tokens is None else tokens
        return {**({"tokens": tokens} if wanted and tokens is not None else {}), **layer.options}

    @property
    def longest(self) -> int | None:
        """Tokens of a sequence, or the most that there may be; None where any number may."""
        return None

    def _count(self, name: str, least: int) -> None:
        object.__setattr__(self, name, check_count(name, getattr(self, name), least=least))

    @property
    def layers(self) -> tuple[AttentionConfig, ...]:
        """The attention of each layer."""
        return self.attention  # type: ignore[return-value]  # as the constructor left it

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {name: list(x) if isinstance(x, tuple) else x for name, x in asdict(self).items()}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`; unknown keys are refused."""
        check_keys(cls.__name__, plain, {f.name for f in fields(cls)})
        values = dict(plain)
        if "attention" in values:
            given = values["attention"]
            if not isinstance(given, list | tuple):
                raise ValueError(f"expected attention to be a list of one entry per layer, got {given!r}")
            values["attention"] = tuple(_attention_from(x) for x in given)
        return cls(**values)


@dataclass(frozen=True)
class VisionConfig(TransformerConfig):
    """The paper's CIFAR transformer by default: 64 patches of 4 x 4 pixels, depth 5, width 128, 4 heads.

    Attributes:
        image_size: pixels of a side, or height and width; multiples of `patch`.
        channels: of the images.
        patch: pixels of a patch's side.
    """

    image_size: int | tuple[int, int] = 32
    channels: int = 3
    patch: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("channels", "patch"):
            self._count(name, 1)
        object.__setattr__(self, "image_size", _paired(self.image_size))
        if len(self.sides) != 2 or not all(type(side) is int for side in self.sides):
            raise ValueError(f"expected image_size to be one whole number or two, got {self.image_size!r}")
        if any(side < 1 or side % self.patch for side in self.sides):
            wanted = f"multiples of patch={self.patch}"
            raise ValueError(f"expected image_size to be {wanted}, got {self.image_size}")
        self._check_size(self.width * (self.channels * self.patch**2 + self.tokens + 2))

    @property
    def sides(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.image_size if isinstance(self.image_size, tuple) else (self.image_size, self.image_size)

    @property
    def tokens(self) -> int:
        """Number of patches."""
        return (self.sides[0] // self.patch) * (self.sides[1] // self.patch)

    @property
    def longest(self) -> int:
        """All of them."""
        return self.tokens


@dataclass(frozen=True)
class TextConfig(TransformerConfig):
    """The paper's CoLA transformer by default: depth 2, width 256, 4 heads of 64, embeddings of 128.

    Attributes:
        vocabulary: number of word indices, padding and unknown included.
        embedding_width: of the learned embeddings.
        contextual_width: of the frozen embeddings beside them; 0 is none.
        max_length: words of a sentence at most.
    """

    classes: int = 2
    depth: int = 2
    width: int = 256
    vocabulary: int = 10_000
    embedding_width: int = 128
    contextual_width: int = 0
    max_length: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        least = {"vocabulary": 2, "embedding_width": 1, "contextual_width": 0, "max_length": 1}
        for name, count in least.items():
            self._count(name, count)
        inputs = self.embedding_width + self.contextual_width
        self._check_size(self.vocabulary * self.embedding_width + self.width * (inputs + 1 + self.max_length))

    @property
    def longest(self) -> int:
        """Words of a sentence at most."""
        return self.max_length


def _attention_from(plain: Any) -> AttentionConfig:
    options = plain.get("options", {}) if isinstance(plain, Mapping) else None
    if not isinstance(options, Mapping) or set(plain) - {"kind", "options"} or "kind" not in plain:
        raise ValueError(f"expected attention entries with 'kind' and 'options', got {plain!r}")
    return AttentionConfig(plain["kind"], options)


def save_folder(folder: Path, model: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write both files, each atomically; the weights first, so that a config implies weights.

    The record of a conversion of an earlier model is removed, as it would be repeated on this one.
    """
    make_folder(folder)
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    described = {"format_version": FORMAT_VERSION, "model": model, "config": config}
    text = json.dumps(described, indent=2) + "\n"  # raises before anything is written
    write_atomically(folder / "model.safetensors", save(plain))
    write_atomically(folder / "config.json", text.encode())
    (folder / CONVERSION_FILE).unlink(missing_ok=True)


def load_config(folder: Path, model: str) -> dict[str, Any]:
    """The config of a model of the class `model`; errors name file and field."""
    file = folder / "config.json"
    described = read_object(file)
    for key, expected in {"format_version": FORMAT_VERSION, "model": model}.items():
        if described.get(key) != expected:
            raise ValueError(f"{file}: expected {key} {expected!r}, got {described.get(key)!r}")
    unknown = sorted(set(described) - {"format_version", "model", "config"})
    if unknown or not isinstance(described.get("config"), dict):
        raise ValueError(f"{file}: expected a 'config' and no {unknown or 'other keys'}")
    config: dict[str, Any] = described["config"]
    return config


def load_weights(model: nn.Module, path: Path) -> None:
    """Load every weight in the type it was saved in; missing, unexpected and misshapen ones are errors."""
    tensors = load_tensors(path)
    # many models of other libraries have a mask of minus infinity as a buffer
    check_finite(path, tensors, infinite={name for name, _ in model.named_buffers()})
    for name, own in (*model.named_parameters(), *model.named_buffers()):
        kind = tensors.get(name, own).dtype
        if own.is_floating_point() and not kind.is_floating_point:
            raise ValueError(f"{path}: expected {name} of floating-point numbers, got {kind}")
        own.data = own.data.to(kind)
    try:
        load_model(model, path, strict=True)
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit the model: {error}") from error


def load_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file."""
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    try:
        return load_file(path)
    except Exception as error:  # its header is JSON and names types: it can be wrong in many ways
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error


def check_finite(where: str | Path, tensors: Mapping[str, Tensor], infinite: Collection[str] = ()) -> None:
    """`ValueError` with the first tensor that is NaN somewhere, or infinite unless it is named as one."""
    for name, x in tensors.items():
        if x.is_meta or not (x.is_floating_point() or x.is_complex()):
            continue
        x = x.float() if x.itemsize == 1 else x  # of 8 bits: nothing is known of them but their values
        bad = x.isnan() if name in infinite else ~x.isfinite()
        if bool(bad.any()):
            many = f"({int(bad.sum())} of {x.numel()} numbers)"
            raise ValueError(f"{where}: expected finite numbers, got {x[bad][0].item()} in {name} {many}")
