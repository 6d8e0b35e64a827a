"""What the streaming metrics have in common."""

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from gpattention.metrics.checks import read_items


class ItemMetric(Metric):
    """A metric whose states can be updated batch by batch; batches may be empty, the whole may not."""

    is_differentiable = False
    full_state_update = False  # forward() adds the batch's own states to the whole

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # the type of what a process without items sends in place of its scores
        self.set_dtype(torch.float64)

    def items(self, probs: Tensor, labels: Tensor, classes: int | None = None) -> tuple[Tensor, Tensor]:
        """Checked, and on the metric's device.  [B, C], [B]"""
        probs, labels = read_items(probs, labels, least=0)
        if classes is not None and probs.shape[1] != classes:
            raise ValueError(f"expected probs of {classes} classes, got {probs.shape[1]}")
        return probs.to(self.device), labels.to(self.device)

    def scalar(self, value: float) -> Tensor:
        """A result as torchmetrics wants it."""
        return torch.tensor(value, dtype=torch.float64, device=self.device)


def check_items(count: int) -> None:
    """There is something to compute from."""
    if count == 0:
        raise ValueError("expected at least one item before compute(), got 0")
