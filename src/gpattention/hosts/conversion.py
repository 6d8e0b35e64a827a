"""The record of a conversion, enough to do it again on the same host, and the folders that hold converted
models.

A folder has the host's own files, or `model.safetensors` where it writes none, and the record beside them or
in the host's config.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_model, save_model
from torch import nn

from gpattention.checks import check_choice, check_whole
from gpattention.files import make_folder, read_object, replaced, write_atomically
from gpattention.models.config import CONVERSION_FILE, check_finite, load_tensors
from gpattention.models.converted import ATTRIBUTE, TrainingDraw
from gpattention.models.projected import KINDS

FORMAT_VERSION = 1
WEIGHTS_FILE = "model.safetensors"
RECORD = "gpattention"  # name of the record in a host's own config
_HOST_OPTIONS = {
    "embed_dim", "num_heads", "bias", "dropout", "batch_first", "device", "dtype", "causal", "symmetric",
}  # fmt: skip


@dataclass(frozen=True)
class Conversion:
    """Which layers of a model became which kind of attention, and how; print it to see what was left alone.

    Attributes:
        kind: of the new attention.
        layers: paths of the converted modules.
        draw: what they do in training.
        seed: of the start of inducing inputs.
        options: of the kind.
        left_alone: paths of the other attention modules, each with the reason.
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
        """Plain values, ready for JSON."""
        return {"format_version": FORMAT_VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "Conversion":
        """The inverse of `to_dict`; what it does not know is refused."""
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
            names.setdefault(why, []).append(name or "(the model)")
        for why, (first, *others) in names.items():
            lines.append(f"  {first}{f' and {len(others)} more' if others else ''}  left alone: {why}")
        return "\n".join(lines)


def add_saving(model: nn.Module, record: Conversion) -> None:
    """Give a model `save_pretrained`, or have its own write the record of the conversion too."""
    model.__dict__["save_pretrained"] = partial(_save_converted, model, record)


def _save_converted(model: nn.Module, record: Conversion, folder: str | Path, **options: Any) -> None:
    """The host's own files, or `model.safetensors` where it writes none, and `conversion.json`."""
    folder = Path(folder)
    make_folder(folder)
    host_saves = getattr(type(model), "save_pretrained", None)  # that of the instance is this very function
    if host_saves is not None:
        host_saves(model, folder, **options)
    else:
        with replaced(folder / WEIGHTS_FILE) as file, torch.no_grad():
            save_model(model, file.name)
    text = json.dumps(record.to_dict(), indent=2) + "\n"
    write_atomically(folder / CONVERSION_FILE, text.encode())


def read_record(folder: Path) -> Conversion | None:
    """The record beside the host's files; None where there is none."""
    path = folder / CONVERSION_FILE
    if not path.is_file():
        return None
    plain = read_object(path)
    try:
        return Conversion.from_dict(plain)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def read_config(folder: Path) -> dict[str, Any]:
    """The host's `config.json`; empty where there is none."""
    path = folder / "config.json"
    return read_object(path, nonfinite=True) if path.is_file() else {}  # transformers writes Infinity too


def load_weights(model: nn.Module, path: Path) -> None:
    """Every weight, in the type it was saved in; missing, unexpected and misshapen ones are errors."""
    tensors = load_tensors(path)
    # a mask of minus infinity is a buffer of many hosts
    check_finite(path, tensors, infinite={name for name, _ in model.named_buffers()})
    try:
        for name, own in (*model.named_parameters(), *model.named_buffers()):
            if name in tensors:
                own.data = own.data.to(tensors[name].dtype)
        load_model(model, path, strict=True)
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit the model: {error}") from error


def plain_weights(folder: Path, record: Conversion) -> str:
    """What happened where a record stands beside a plain model's weights, and what helps; else nothing."""
    names: list[str] = []
    try:
        for file in folder.glob("model*.safetensors"):
            with safe_open(file, framework="pt") as weights:
                names += weights.keys()
    except (OSError, SafetensorError):
        return ""  # whoever loads them says what is wrong
    if not names or any(f".{ATTRIBUTE}." in name for name in names):
        return ""
    happened = "Its weights are the weights of a plain model, saved over the converted one"
    helps = f"load it by its own class and call gpattention.convert(model, {record.kind!r})"
    return f". {happened}: {helps}, or save the converted one again"
