"""Hosts, attached and converted models as predictors of one kind."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from gpattention.adopt.convert_predict import predict as predict_converted
from gpattention.adopt.handle import Handle
from gpattention.adopt.settings import Settings
from gpattention.evaluation.predictor import ModelPredictor, Predictor
from gpattention.experiments.adoption.sentences import Sentences
from gpattention.models.prediction import Prediction
from gpattention.models.rows import Inputs, Progress

BLOCK = 64  # sentences of about one length that are predicted together


class Answering(nn.Module):
    """Any classifier that is called with names, in the words of this library's transformers."""

    draws = False

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Mapping[str, Tensor], **_: Any) -> SimpleNamespace:
        """Logits and nothing of the layers; it cannot draw."""
        return SimpleNamespace(logits=self.logits_of(self.model(**inputs)), layers=())

    @staticmethod
    def logits_of(output: Any) -> Tensor:
        """Of a tensor, or of what transformers returns.  [B, C]"""
        logits: Tensor = output if isinstance(output, Tensor) else output.logits
        return logits

    @classmethod
    def predictor(cls, model: nn.Module) -> ModelPredictor:
        """The model as it is."""
        return ModelPredictor(cls(model))


@dataclass(frozen=True, eq=False)
class AttachedPredictor:
    """A handle under certain settings; without draws one pass is enough."""

    handle: Handle
    settings: Settings

    @property
    def draws(self) -> bool:
        """Whether any site does."""
        return any(self.settings.drawn(place) for place in range(len(self.settings.draws)))

    def predict(
        self,
        inputs: Inputs,
        *,
        samples: int = 10,
        seed: int = 0,
        batch_size: int | None = None,
        first_item: int = 0,
        progress: Progress | None = None,
    ) -> Prediction:
        """As `Handle.predict`; the logits are divided by the temperature of the settings."""
        self.handle.settings = self.settings
        told = self.handle.predict(
            inputs, samples if self.draws else min(samples, 1), seed, batch_size=batch_size,
            first_item=first_item, progress=progress,
        )  # fmt: skip
        assert isinstance(told, Prediction)
        return told


@dataclass(frozen=True, eq=False)
class ConvertedPredictor:
    """A converted model, which draws."""

    model: nn.Module

    def predict(
        self,
        inputs: Inputs,
        *,
        samples: int = 10,
        seed: int = 0,
        batch_size: int | None = None,
        first_item: int = 0,
        progress: Progress | None = None,
    ) -> Prediction:
        """As `gpattention.predict`."""
        told = predict_converted(
            self.model, inputs, samples, seed, batch_size=batch_size, first_item=first_item,
            progress=progress,
        )  # fmt: skip
        assert isinstance(told, Prediction)
        return told


def predict_sentences(
    predictor: Predictor,
    part: Sentences,
    *,
    samples: int,
    seed: int,
    device: torch.device,
    progress: Callable[[int, int], object] | None = None,
) -> Tensor:
    """Logits of all draws, [S, n, C], on the CPU; a sentence's draws belong to its number alone."""
    found = []
    for start, inputs in part.blocks(BLOCK, device):
        told = predictor.predict(inputs, samples=samples, seed=seed, first_item=start)
        found.append(told.logits.float().cpu())
        if progress is not None:
            progress(min(start + BLOCK, len(part)), len(part))
    return torch.cat(found, 1)
