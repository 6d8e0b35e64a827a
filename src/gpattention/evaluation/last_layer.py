"""Bayesian last layers: a Gaussian over the logits of fixed features, and what it predicts.

The network below stays as trained; only the map from its features to the logits is uncertain.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Generator, Tensor, nn

from gpattention.attention.output import Draw
from gpattention.checks import check_count, check_whole
from gpattention.gp import ItemNoise
from gpattention.models.prediction import Classifier, Prediction
from gpattention.models.rows import (
    Inputs,
    Progress,
    collect,
    device_of,
    evaluating,
    iterate_rows,
    model_device,
)
from gpattention.models.rows_at_once import run_rows


class FeatureClassifier(Classifier, Protocol):
    """A classifier whose logits are a linear map of its features."""

    @property
    def head(self) -> nn.Linear:
        """What turns features into logits."""
        ...

    def features(
        self, inputs: Any, *, draw: Draw = ..., generator: Generator | ItemNoise | None = ...
    ) -> Tensor:
        """What `head` reads.  [B, E]"""
        ...


@dataclass(frozen=True)
class LogitGaussian:
    """Independent Gaussians over the logits of B items, in float64."""

    mean: Tensor  # [B, C]
    root: Tensor  # [B, C, C], covariance = root root^T

    @property
    def covariance(self) -> Tensor:
        """Between the logits of an item.  [B, C, C]"""
        return self.root @ self.root.mT

    @property
    def variance(self) -> Tensor:
        """Of every logit.  [B, C]"""
        return self.root.square().sum(-1)

    def sample(self, normal: Tensor) -> Tensor:
        """Draws from standard normal numbers of the same shape.  [S, B, C]"""
        return self.mean + torch.einsum("bcr,sbr->sbc", self.root, normal)

    def mean_field(self) -> Tensor:
        """Logits of the approximate mean prediction, in closed form.  [B, C]

        E softmax is approximated by 1 / sum_i exp(-(m_k - m_i) / sqrt(1 + pi/8 var(f_k - f_i))), made to
        add up to 1 (Lu et al. 2020).  With two classes it is MacKay's probit approximation.  Only
        differences enter, since adding a number to all logits changes no prediction.
        """
        cov, var = self.covariance, self.variance  # [B, C, C], [B, C]
        spread = (var[:, :, None] + var[:, None] - 2 * cov).clamp(min=0)  # [B, C, C] var(f_k - f_i)
        ahead = (self.mean[:, :, None] - self.mean[:, None]) / (1 + math.pi / 8 * spread).sqrt()  # [B, C, C]
        return (-(-ahead).logsumexp(-1)).log_softmax(-1)


def extract_features(
    model: FeatureClassifier,
    inputs: Inputs,
    *,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> Tensor:
    """What the classifier reads, without draws, where the inputs lie.  [B, E]"""
    device = model_device(model, inputs)
    with evaluating(model):
        return run_rows(
            lambda rows_at_once: collect(
                lambda rows: model.features(rows.inputs, draw="none", generator=None),
                inputs,
                samples=1,
                seed=0,
                batch_size=rows_at_once,
                device=device,
                progress=progress,
            ),
            batch_size,
            device,
        )[0]


class LastLayerPredictor(ABC):
    """What all Bayesian last layers share: features of the mean pass, then draws of logits."""

    def __init__(self, model: FeatureClassifier) -> None:
        if not callable(getattr(model, "features", None)) or not hasattr(model, "head"):
            raise ValueError(
                f"expected model to have a method features(inputs, *, draw, generator) and a linear `head` "
                f"that reads them, as VisionTransformer and TextTransformer do, got {type(model).__name__}"
            )
        if not isinstance(model.head, nn.Linear):
            raise ValueError(f"expected model.head to be nn.Linear, got {type(model.head).__name__}")
        self._model = model

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
        """`samples` draws of every item's logits, or the closed mean-field prediction if 0 (S = 1).

        The network runs once per item, at most `batch_size` at a time, without draws of its own.  The
        draws of an item depend on `seed` and its number alone.
        """
        samples = check_count("samples", samples, least=0)
        seed, first_item = check_whole("seed", seed), check_count("first_item", first_item, least=0)
        model = self._model
        device = model_device(model, inputs)

        def run(rows_at_once: int) -> Tensor:
            parts = []
            for rows in iterate_rows(
                inputs, samples=1, seed=seed, batch_size=rows_at_once, device=device, progress=progress
            ):
                h = model.features(rows.inputs, draw="none", generator=None)  # [b, E]
                told = self.logit_gaussian(h)
                numbers = rows.items + first_item  # [b]
                logits = _draw(told, numbers, samples, seed) if samples else told.mean_field()[None]
                parts.append(logits.to(device_of(inputs), torch.promote_types(h.dtype, torch.float32)))
            return torch.cat(parts, 1)

        with evaluating(model):
            return Prediction.from_logits(run_rows(run, batch_size, device), drawn=samples > 0)

    @property
    @abstractmethod
    def options(self) -> dict[str, Any]:
        """What a fit depends on beside the model and the items."""

    @abstractmethod
    def logit_gaussian(self, features: Tensor) -> LogitGaussian:
        """The distribution of the logits at features [B, E]."""


def _draw(told: LogitGaussian, items: Tensor, samples: int, seed: int) -> Tensor:
    """Draws that belong to items.  [S, b, C]"""
    sample = torch.arange(samples, device=items.device).repeat_interleave(len(items))  # [S b]
    noise = ItemNoise(seed, items.repeat(samples), sample)
    rank = told.root.shape[-1]
    normal = noise.normal((1, len(sample), rank), told.mean.dtype, told.mean.device)  # [1, S b, C]
    return told.sample(normal.reshape(samples, len(items), rank))
