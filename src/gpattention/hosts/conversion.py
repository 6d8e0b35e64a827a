"""The record of a conversion, which can be repeated on the same host, and folders of converted models.

A folder holds the files that the host itself writes, or `model.safetensors` if it writes none, and the record
in `conversion.json` or in the host's config.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_model
from torch import nn

from gpattention.checks import check_choice, check_whole
from gpattention.files import make_folder, read_object, replaced, write_atomically
from gpattention.models.config import CONVERSION_FILE
from gpattention.models.converted import ATTRIBUTE, TrainingDraw
from gpattention.models.projected import KINDS

FORMAT_VERSION = 1
WEIGHTS_FILE = "model.safetensors"
RECORD = "gpattention"  # key of the record in a host's own config
_HOST_OPTIONS = {
    "embed_dim", "num_heads", "bias", "dropout", "batch_first", "device", "dtype", "causal", "symmetric",
}  # fmt: skip


@dataclass(frozen=True)
class Conversion:
    """What was converted, and how; prints with what was left alone.

    Attributes:
        kind: the new kind of attention.
        layers: paths of the converted modules.
        draw: whether they draw in training.
        seed: of the initial inducing inputs.
        options: of the kind.
        left_alone: paths of the other attention modules, with reasons.
    """

    kind: str
    layers: tuple[str, ...] = ()
    draw: TrainingDraw = "independent"
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    left_alone: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, tuple(KINDS))
        check_choice("draw", self.draw, get_args(TrainingDraw))
        object.__setattr__(self, "seed", check_whole("seed", self.seed))
        if taken := sorted(_HOST_OPTIONS & set(self.options)):
            raise ValueError(f"the host decides {', '.join(taken)}: expected options without, got {taken}")

    def to_dict(self) -> dict[str, Any]:
        """The record as plain values for JSON."""
        return {"format_version": FORMAT_VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "Conversion":
        """The inverse of `to_dict`; unknown keys are refused."""
        values = {"options": {}, "layers": (), "left_alone": (), **plain}
        if (version := values.pop("format_version", None)) != FORMAT_VERSION:
            raise ValueError(f"expected format_version {FORMAT_VERSION} of a conversion, got {version!r}")
        unknown = sorted(set(values) - {f.name for f in fields(cls)})
        if unknown or "kind" not in values:
            raise ValueError(f"expected a conversion with a kind and no other keys, got {unknown or plain!r}")
        for name, kind in (("options", Mapping), ("layers", Sequence), ("left_alone", Sequence)):
            if not isinstance(values[name], kind):
                raise ValueError(f"expected {name} to be a {kind.__name__.lower()}, got {values[name]!r}")
        # JSON knows lists only
        options = {name: tuple(x) if isinstance(x, list) else x for name, x in values["options"].items()}
        alone = tuple((name, why) for name, why in values["left_alone"])
        return cls(**{**values, "options": options, "layers": tuple(values["layers"]), "left_alone": alone})

    def __str__(self) -> str:
        alone = len(self.left_alone)
        lines = [f"{len(self.layers)} layers are {self.kind} attention now, {alone} left alone"]
        lines += [f"  {name or '(the model)'}" for name in self.layers]
        names: dict[str, list[str]] = {}
        for name, why in self.left_alone:
            names.setdefault(why, []).append(name)
        return "\n".join([*lines, *(f"  {summary(own)}  left alone: {why}" for why, own in names.items())])


def summary(names: Sequence[str]) -> str:
    """The first of several paths, and how many more there are."""
    first = names[0] or "(the model)"
    return f"{first} and {len(names) - 1} more" if len(names) > 1 else first


def save_converted(model: nn.Module, record: Conversion, folder: str | Path, **options: Any) -> None:
    """Write the host's own files, or `model.safetensors` if it writes none, and `conversion.json`."""
    folder = make_folder(Path(folder))
    host_saves = getattr(type(model), "save_pretrained", None)  # the instance's own is this function
    if host_saves is not None:
        host_saves(model, folder, **options)
    else:
        with replaced(folder / WEIGHTS_FILE) as file, torch.no_grad():
            save_model(model, file.name)
    text = json.dumps(record.to_dict(), indent=2) + "\n"
    write_atomically(folder / CONVERSION_FILE, text.encode())


def read_record(folder: Path) -> Conversion | None:
    """The record beside the host's files, if there is one."""
    path = folder / CONVERSION_FILE
    if not path.is_file():
        return None
    plain = read_object(path)
    try:
        return Conversion.from_dict(plain)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def read_config(folder: Path) -> dict[str, Any]:
    """The host's `config.json`; empty if it has none."""
    path = folder / "config.json"
    return read_object(path, nonfinite=True) if path.is_file() else {}  # transformers writes Infinity too


def plain_weights(folder: Path, record: Conversion) -> str:
    """An explanation for an error if the weights beside a record are those of a plain model; else nothing."""
    names: list[str] = []
    try:
        for file in folder.glob("model*.safetensors"):
            with safe_open(file, framework="pt") as weights:
                names += weights.keys()
    except (OSError, SafetensorError):
        return ""  # the loader reports what is wrong with them
    if not names or any(f".{ATTRIBUTE}." in name for name in names):
        return ""
    helps = f"load it by its own class and call gpattention.convert(model, {record.kind!r})"
    return f". Its weights are the weights of a plain model, saved over the converted one: {helps}"
