"""The record of a conversion: enough to do it again on the same host."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, get_args

from gpattention.adopt.convert_kinds import KINDS
from gpattention.adopt.convert_layer import TrainingDraw
from gpattention.checks import check_whole

FORMAT_VERSION = 1
_HOSTS = {
    "embed_dim",
    "num_heads",
    "bias",
    "dropout",
    "batch_first",
    "device",
    "dtype",
    "causal",
    "symmetric",
}
RECORD = "gpattention"  # its name in a Hugging Face config
IMPLEMENTATION = "gpattention_converted"  # what such a config then calls its attention
# What it calls it in a folder.  Transformers has no attention of that name and says so: no class builds its
# own softmax attention around weights trained with ours by mistake.
SAVED_IMPLEMENTATION = "that of a converted model, which gpattention.from_pretrained(folder) reads"


@dataclass(frozen=True)
class Conversion:
    """Which layers of a model became which kind of attention, and how."""

    kind: str
    layers: tuple[str, ...] = ()  # paths of the converted modules
    draw: TrainingDraw = "independent"
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    left_alone: tuple[tuple[str, str], ...] = ()  # paths of the others, each with the reason

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"expected kind to be one of {', '.join(KINDS)}, got {self.kind!r}")
        if self.draw not in get_args(TrainingDraw):
            expected = " or ".join(map(repr, get_args(TrainingDraw)))
            raise ValueError(f"expected draw to be {expected}, got {self.draw!r}")
        object.__setattr__(self, "seed", check_whole("seed", self.seed))
        taken = sorted(_HOSTS & set(self.options))
        if taken:
            raise ValueError(f"the host decides {', '.join(taken)}: expected options without, got {taken}")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {
            "format_version": FORMAT_VERSION,
            "kind": self.kind,
            "layers": list(self.layers),
            "draw": self.draw,
            "seed": self.seed,
            "options": {name: list(x) if isinstance(x, tuple) else x for name, x in self.options.items()},
            "left_alone": [list(pair) for pair in self.left_alone],
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "Conversion":
        """The inverse of `to_dict`; what it does not know is refused."""
        values = dict(plain)
        version = values.pop("format_version", None)
        if version != FORMAT_VERSION:
            raise ValueError(f"expected format_version {FORMAT_VERSION} of a conversion, got {version!r}")
        unknown = sorted(set(values) - {f.name for f in fields(cls)})
        if unknown or "kind" not in values:
            raise ValueError(f"expected a conversion with a kind and no other keys, got {unknown or plain!r}")
        options = values.get("options", {})
        for name, kind in (("options", Mapping), ("layers", Sequence), ("left_alone", Sequence)):
            if not isinstance(values.get(name, ()) if kind is Sequence else options, kind):
                raise ValueError(f"expected {name} to be a {kind.__name__.lower()}, got {values[name]!r}")
        values["options"] = {name: tuple(x) if isinstance(x, list) else x for name, x in options.items()}
        values["layers"] = tuple(values.get("layers", ()))
        values["left_alone"] = tuple((name, why) for name, why in values.get("left_alone", ()))
        return cls(**values)

    def __str__(self) -> str:
        told = [f"{len(self.layers)} layers are {self.kind} attention now, {len(self.left_alone)} left alone"]
        told += [f"  {name or '(the model)'}" for name in self.layers]
        told += [f"  {name or '(the model)'}  left alone: {why}" for name, why in self.left_alone]
        return "\n".join(told)
