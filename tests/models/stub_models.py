"""A small model with the interface of the transformers, whose every number can be checked by hand."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gpattention.gp import ItemNoise
from gpattention.ops import standard_normal
from tests.models.small_models import seeded


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=dtype)


@dataclass(frozen=True)
class StubLayer:
    variance: Tensor | None


@dataclass(frozen=True)
class StubOutput:
    logits: Tensor  # [B, C]
    layers: list[StubLayer]


class StubModel(nn.Module):
    """features = second(first(x)), each drawn with its own spread; logits = head(features)."""

    def __init__(
        self, *, width=5, hidden=6, classes=3, spread=0.5, p=0.0, seed=0, draws=True, variances=True,
        bias=True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.first = nn.Linear(width, hidden)
        self.dropout = nn.Dropout(p)
        self.second = nn.Linear(hidden, hidden)
        self.head = nn.Linear(hidden, classes, bias=bias)
        for number, parameter in enumerate(self.parameters()):
            parameter.data = normal(*parameter.shape, seed=100 * seed + number)
        self.spread, self.draws, self.variances = spread, draws, variances
        self.calls: list[dict] = []

    def features(self, inputs, *, draw="none", generator=None) -> Tensor:
        x = inputs["x"] * inputs["scale"][:, None] if isinstance(inputs, Mapping) else inputs
        hidden = self._drawn(self.first(x), draw, generator)
        return self._drawn(self.second(torch.tanh(self.dropout(hidden))), draw, generator)

    def forward(self, inputs, *, draw="none", generator=None, need=("logits",)) -> StubOutput:
        features = self.features(inputs, draw=draw, generator=generator)
        noise = isinstance(generator, ItemNoise)
        self.calls.append({"rows": len(features), "draw": draw, "need": need, "noise": noise})
        asked = "variance" in need and self.variances
        variance = features.square()[:, None, :3].expand(-1, 2, 3) if asked else None
        return StubOutput(self.head(features), [StubLayer(None), StubLayer(variance)])

    def _drawn(self, mean: Tensor, draw: str, generator) -> Tensor:
        if draw == "none":
            return mean
        assert self.draws
        noise = standard_normal((1, *mean.shape), mean.dtype, mean.device, generator)[0]
        return mean + self.spread * noise
