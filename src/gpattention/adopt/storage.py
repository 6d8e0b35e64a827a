"""Converted models in folders: the host's own files, and the record of the conversion beside them."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_model, save_model
from torch import nn

from gpattention.adopt.conversion import RECORD, Conversion
from gpattention.adopt.convert_layer import ATTRIBUTE
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


def weight_names(folder: Path) -> list[str]:
    """Of every weight in a folder; empty where it holds none that can be read."""
    index, file = folder / f"{WEIGHTS_FILE}.index.json", folder / WEIGHTS_FILE
    try:
        if index.is_file():
            return list(read_object(index)["weight_map"])
        with safe_open(file, framework="pt") as weights:
            return list(weights.keys())
    except (OSError, SafetensorError, ValueError, KeyError, TypeError):
        return []  # whoever loads them says what is wrong


def plain_weights(folder: Path, record: Conversion) -> str:
    """What happened where a record stands beside a plain model's weights, and what helps; else nothing."""
    names = weight_names(folder)
    if not names or any(f".{ATTRIBUTE}." in name for name in names):
        return ""
    return (
        f". The folder holds the record of a conversion to {record.kind}, but the weights of a plain model, "
        f"none under .{ATTRIBUTE}: a model that its own class had loaded was saved over the converted one. "
        "Save the converted model there again; or load the plain one by its own class, which reads it, "
        f"and convert it anew: gpattention.convert(model, {record.kind!r})"
    )


def no_record(folder: Path, config: dict[str, Any]) -> str:
    """What a folder without a record of a conversion holds, and what helps."""
    files = ", ".join(sorted(path.name for path in folder.iterdir())[:10]) or "no files"
    found = f"neither {CONVERSION_FILE} nor {RECORD!r} in config.json, among {files}"
    names = config.get("architectures")
    if any(f".{ATTRIBUTE}." in name for name in weight_names(folder)):
        helps = (
            "its weights are those of a converted model, and the file with its record was written over: "
            "save the converted model there again"
        )
    elif isinstance(names, list) and names:
        helps = (
            f"it holds a plain model, which {names[0]}.from_pretrained(folder) reads "
            "and gpattention.convert converts"
        )
    else:
        helps = "save_pretrained of a converted model writes one"
    return f"expected {folder} to hold a converted model, got no record of a conversion ({found}): {helps}"


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
