"""Converted models in folders: the host's own files, and the record of the conversion beside them."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model, save_model
from torch import nn

from gpattention.adopt.conversion import Conversion
from gpattention.models import TextTransformer, Transformer, VisionTransformer
from gpattention.models.storage import (
    CONVERSION_FILE,
    check_finite,
    load_folder,
    load_tensors,
    make_folder,
    replaced,
    write_atomically,
)
from gpattention.reading import read_object

WEIGHTS_FILE = "model.safetensors"


def add_saving(model: nn.Module, record: Conversion) -> None:
    """Give a model `save_pretrained`, or have its own write the record of the conversion too."""
    model.__dict__["save_pretrained"] = partial(save_converted, model, record)


def save_converted(model: nn.Module, record: Conversion, folder: str | Path, **options: Any) -> None:
    """The host's own files, or `model.safetensors` where it writes none, and `conversion.json`."""
    folder = Path(folder)
    make_folder(folder)
    host_saves = getattr(type(model), "save_pretrained", None)
    if host_saves is not None:
        host_saves(model, folder, **options)
    else:
        _save_weights(model, folder / WEIGHTS_FILE)
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


def own_class(config: dict[str, Any]) -> type[Transformer] | None:
    """Which of our transformers a folder holds."""
    known: dict[str, type[Transformer]] = {c.__name__: c for c in (VisionTransformer, TextTransformer)}
    name = config.get("model")
    return known.get(name) if isinstance(name, str) else None


def own_host(folder: Path, cls: type[Transformer]) -> Transformer:
    """A transformer of ours as it was before the conversion, its weights not loaded."""
    config, _ = load_folder(folder, cls.__name__)
    return cls(cls.config_class.from_dict(config))


def load_weights(model: nn.Module, path: Path) -> None:
    """Every weight, in the type it was saved in; missing, unexpected and misshapen ones are errors."""
    tensors = load_tensors(path)
    # a mask of minus infinity is a buffer of many hosts
    check_finite(path, tensors, infinite={name for name, _ in model.named_buffers()})
    types = {name: tensor.dtype for name, tensor in tensors.items()}
    try:
        for name, own in (*model.named_parameters(), *model.named_buffers()):
            if name in types:
                own.data = own.data.to(types[name])
        load_model(model, path, strict=True)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit the model: {error}") from error


def _save_weights(model: nn.Module, path: Path) -> None:
    with replaced(path) as file, torch.no_grad():
        save_model(model, file.name)
