"""Fine-tuned weights: read where they are, else trained and kept."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import nn

from gpattention.adopt.convert import convert
from gpattention.experiments.adoption.encoder import Head, build_classifier
from gpattention.experiments.adoption.finetuning import Finetuning, finetune
from gpattention.experiments.adoption.sentences import Sentences
from gpattention.experiments.adoption.trainings import HOST, Further, Training
from gpattention.models.storage import write_atomically

EXAMPLE = 64  # sentences at whose tokens inducing inputs start
OPTIONS: dict[str, dict[str, Any]] = {"scgp": {"num_inducing": 32}}  # of a kind; the others have their own
Epochs = list[dict[str, float]]


@dataclass(frozen=True)
class Weights:
    """Those of one seed, in a folder.

    Args:
        folder: where they are kept.
        encoder: folder of the pretrained ones.
        parts: sentences by name.
        finetuning: from the pretrained weights.
        further: from the fine-tuned host.
        head: what is classified.
        seed: of head, order, dropout and draws.
        device: where all of it happens.
        progress: is told how many steps of how many are done.
    """

    folder: Path
    encoder: Path
    parts: dict[str, Sentences]
    finetuning: Finetuning
    further: Further = field(default_factory=Further)
    head: Head = "mean"
    seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    progress: Callable[[int, int], object] | None = None

    def trained(self, training: Training) -> tuple[nn.Module, Epochs]:
        """The model of a training, in evaluation mode, and what its epochs came to."""
        before = self._read(training)
        model = self.start(training, known=before is not None)
        if before is not None:
            model.load_state_dict(load_file(self._file(training)))
            return model.eval(), before
        first = self.finetuning
        rows = finetune(
            model, self.parts["train"], self.parts["validation"],
            self.further.after(first) if training.further else first,
            seed=self.seed, device=self.device, progress=self.progress,
            epochs_before=first.epochs if training.further else 0,
        )  # fmt: skip
        epochs = [asdict(row) for row in rows]
        self._write(training, model, epochs)
        return model.eval(), epochs

    def start(self, training: Training, *, known: bool = False) -> nn.Module:
        """The model before its own training; where its end is known, with any weights."""
        if training.further and not known:
            model, _ = self.trained(HOST)
        else:
            model = build_classifier(self.encoder, head=self.head, seed=self.seed).to(self.device)
        if training.kind is not None:
            self._convert(model, training)
        return model

    def _convert(self, model: nn.Module, training: Training) -> None:
        """In place; sparse kinds are shown sentences of all lengths."""
        kind, train = training.kind or "", self.parts["train"]
        options = dict(OPTIONS.get(kind, {}))
        if training.further:
            options["prior_scale"] = self.further.prior_scale
        if kind == "scgp":
            spread = torch.linspace(0, len(train) - 1, min(EXAMPLE, len(train))).long().tolist()
            options["example"] = train.inputs(spread, self.device)
        convert(model, kind, seed=self.seed, **options)

    def _read(self, training: Training) -> Epochs | None:
        """What the epochs came to, where there are finished weights; those of other settings are an error."""
        weights, record = self._file(training), self._record(training)
        if not (weights.is_file() and record.is_file()):
            return None
        before, told = json.loads(record.read_text()), self._settings(training)
        if before["settings"] != told:
            raise ValueError(
                f"{weights} was trained with {before['settings']}, not with {told}: choose another folder "
                "for the runs, or delete it"
            )
        epochs: Epochs = before["epochs"]
        return epochs

    def _write(self, training: Training, model: nn.Module, epochs: Epochs) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        tensors = {key: x.detach().cpu().contiguous().clone() for key, x in model.state_dict().items()}
        write_atomically(self._file(training), save(tensors))
        told = {"settings": self._settings(training), "epochs": epochs}
        write_atomically(self._record(training), (json.dumps(told, indent=1) + "\n").encode())

    def _settings(self, training: Training) -> dict[str, Any]:
        return {"head": self.head, **asdict(self.finetuning), **self.further.described(training)}

    def _file(self, training: Training) -> Path:
        return self.folder / f"{training.name}.safetensors"

    def _record(self, training: Training) -> Path:
        return self.folder / f"{training.name}-training.json"
