"""A predictor's prediction of one set beside what is known of its items."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gpattention.metrics.checks import check_labels
from gpattention.models.prediction import Prediction


@dataclass(frozen=True, eq=False)
class Predicted:
    """What every suite judges; made by `from_logits`, in float64."""

    prediction: Prediction
    labels: Tensor | None = None  # [B]; None where the items belong to no class
    layer_variance: Tensor | None = None  # [B, L] mean over heads and real tokens, layer by layer
    temperature: float | None = None  # what the logits were divided by

    @classmethod
    def from_logits(
        cls,
        logits: Tensor,  # [S, B, C]
        labels: Tensor | None = None,  # [B]
        layer_variance: Tensor | None = None,  # [B, L]
        temperature: float | None = None,
    ) -> "Predicted":
        """From the untempered logits of S draws."""
        exact = logits.double() if temperature is None else logits.double() / temperature
        prediction = Prediction.from_logits(exact)
        if labels is not None:
            check_labels(labels, len(prediction), prediction.classes)
            labels = labels.to(logits.device, torch.int64)
        return cls(prediction, labels, layer_variance, temperature)

    def tempered(self, temperature: float) -> "Predicted":
        """The same at another temperature, from the same draws."""
        before = 1.0 if self.temperature is None else self.temperature
        logits = self.prediction.logits * before
        return Predicted.from_logits(logits, self.labels, self.layer_variance, temperature)

    def __len__(self) -> int:
        return len(self.prediction)

    @property
    def known_labels(self) -> Tensor:
        """The labels, where a suite cannot do without them.  [B]"""
        if self.labels is None:
            raise ValueError("expected items with labels, got none")
        return self.labels
