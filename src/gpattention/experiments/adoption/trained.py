"""Fine-tuned weights: read where they are, else trained and kept."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gpattention.adopt.convert import convert
from gpattention.experiments.adoption.earlier import DATA
from gpattention.experiments.adoption.encoder import Head, build_classifier, encoder_digest
from gpattention.experiments.adoption.finetuning import Finetuning, finetune
from gpattention.experiments.adoption.kept_weights import KeptWeights
from gpattention.experiments.adoption.sentences import Sentences
from gpattention.experiments.adoption.trainings import HOST, Further, Training

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
        remade: where given, kept weights count only if they are in it, by folder and name of their training;
            those trained now are added.
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
    remade: set[Path] | None = None

    def trained(self, training: Training) -> tuple[nn.Module, Epochs]:
        """The model of a training, in evaluation mode, and what its epochs came to."""
        kept, settings = KeptWeights(self.folder), self._settings(training)
        old = self.remade is not None and self.folder / training.name not in self.remade
        before = None if old else kept.record(training.name, settings)
        model = self.start(training, known=before is not None)
        if before is not None:
            model.load_state_dict(kept.tensors(training.name))
            return model.eval(), before["epochs"]
        first = self.finetuning
        rows = finetune(
            model, self.parts["train"], self.parts["validation"],
            self.further.after(first) if training.further else first,
            seed=self.seed, device=self.device, progress=self.progress,
            epochs_before=first.epochs if training.further else 0,
        )  # fmt: skip
        epochs = [asdict(row) for row in rows]
        kept.write(training.name, settings, model, {"epochs": epochs})
        if self.remade is not None:
            self.remade.add(self.folder / training.name)
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

    def _settings(self, training: Training) -> dict[str, Any]:
        started = {"encoder": encoder_digest(self.encoder), "head": self.head}
        seen = {DATA: {name: self.parts[name].digest for name in ("train", "validation")}}
        return {**started, **asdict(self.finetuning), **self.further.described(training), **seen}
