"""The numbers a run judges its model by, against sums written by hand."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from gpattention import models
from gpattention.models import Prediction
from gpattention.training import TrainingData
from gpattention.training.single import SingleProcess
from gpattention.training.validation import validate


class Echo(nn.Module):
    """Its logits are its inputs."""

    draws = False

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(()))

    def forward(self, inputs: Tensor, **_: object) -> SimpleNamespace:
        return SimpleNamespace(logits=inputs, layers=())

    def predict(self, inputs: Tensor, **options: int) -> Prediction:
        return models.predict(self, inputs, **options)


def judged(logits: list[list[float]], labels: list[int]):
    inputs, right = torch.tensor(logits), torch.tensor(labels)
    data = TrainingData(inputs, right, inputs, right, {})
    return validate(SingleProcess(torch.device("cpu")), Echo(), data)


def test_a_sure_error_costs_its_whole_log_likelihood() -> None:
    """exp(-60) is no zero: with probabilities cut at 1e-12 the first item would cost 27.6."""
    found = judged([[0.0, 60.0], [math.log(3), 0.0], [0.0, 0.0]], [0, 0, 1])
    assert found.nll == pytest.approx((60 + math.log(4 / 3) + math.log(2)) / 3, rel=1e-6)
    assert found.accuracy == pytest.approx(1 / 3)


def test_it_is_that_of_the_prediction() -> None:
    logits, labels = [[250.0, 0.0, -3.0], [0.5, -0.5, 1.0]], [2, 1]
    told = Prediction.from_logits(torch.tensor(logits)[None]).log_probs
    assert judged(logits, labels).nll == pytest.approx(float(-(told[0, 2] + told[1, 1]) / 2))
