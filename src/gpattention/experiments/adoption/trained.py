"""Fine-tuned weights: read where they are, else trained and kept."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import nn

from gpattention.adopt.convert import convert
from gpattention.experiments.adoption.encoder import Head, build_classifier
from gpattention.experiments.adoption.finetuning import Finetuning, finetune
from gpattention.experiments.adoption.sentences import Sentences
from gpattention.models.storage import write_atomically

EXAMPLE = 64  # sentences at whose tokens inducing inputs start
OPTIONS: dict[str, dict[str, Any]] = {"scgp": {"num_inducing": 32}}  # of a kind; the others have their own


def trained_model(
    folder: Path,
    encoder: Path,
    kind: str | None,
    parts: dict[str, Sentences],
    settings: Finetuning,
    *,
    head: Head,
    seed: int,
    device: torch.device,
    progress: Callable[[int, int], object] | None = None,
) -> tuple[nn.Module, list[dict[str, float]]]:
    """The host (`kind` None) or a converted one, in evaluation mode, and what its epochs came to."""
    name = kind or "host"
    model = build_classifier(encoder, head=head, seed=seed).to(device)
    if kind is not None:
        _convert(model, kind, parts["train"], seed, device)
    weights, record = folder / f"{name}.safetensors", folder / f"{name}-training.json"
    told = {"head": head, **asdict(settings)}
    if weights.is_file() and record.is_file():
        before = json.loads(record.read_text())
        if before["settings"] != told:
            raise ValueError(
                f"{weights} was trained with {before['settings']}, not with {told}: choose another folder "
                "for the runs, or delete it"
            )
        model.load_state_dict(load_file(weights))
        return model.eval(), before["epochs"]
    rows = finetune(
        model, parts["train"], parts["validation"], settings, seed=seed, device=device, progress=progress
    )
    epochs = [asdict(row) for row in rows]
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {key: x.detach().cpu().contiguous().clone() for key, x in model.state_dict().items()}
    write_atomically(weights, save(tensors))
    write_atomically(record, (json.dumps({"settings": told, "epochs": epochs}, indent=1) + "\n").encode())
    return model.eval(), epochs


def _convert(model: nn.Module, kind: str, train: Sentences, seed: int, device: torch.device) -> None:
    """In place; sparse kinds are shown sentences of all lengths."""
    options = dict(OPTIONS.get(kind, {}))
    if kind == "scgp":
        spread = torch.linspace(0, len(train) - 1, min(EXAMPLE, len(train))).long().tolist()
        options["example"] = train.inputs(spread, device)
    convert(model, kind, seed=seed, **options)
