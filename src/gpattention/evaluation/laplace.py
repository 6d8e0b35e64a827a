"""The Laplace approximation of a trained last layer (MacKay 1992; Daxberger et al. 2021).

The weights of the head get a Gaussian around what training found.  Its precision is the curvature of
the training loss, which for a linear layer under softmax is sum_n Lambda_n (x) phi_n phi_n^T with
Lambda = diag(p) - p p^T, plus the prior precision.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gpattention.evaluation.checks import not_fitted
from gpattention.evaluation.last_layer import (
    FeatureClassifier,
    LastLayerPredictor,
    LogitGaussian,
    extract_features,
)
from gpattention.gp import NumericalError
from gpattention.gp.cholesky import cholesky
from gpattention.metrics.checks import check_choice, check_labels
from gpattention.models.rows import Inputs, Progress

FULL_LIMIT = 5000  # weights whose full curvature is still factored in reasonable time
_CHUNK = 1024  # items whose curvature is added at once


@dataclass(frozen=True)
class FullCurvature:
    """The whole matrix by its eigenvectors; weight (c, e) of the head is row c E + e."""

    values: Tensor  # [P] eigenvalues, P = C E
    vectors: Tensor  # [P, P]

    @classmethod
    def of(cls, phi: Tensor, probs: Tensor) -> "FullCurvature":
        """Of items with features phi [n, E] and predictions probs [n, C]."""
        C, E = probs.shape[1], phi.shape[1]  # noqa: N806
        total = torch.zeros(C, C, E, E, dtype=phi.dtype, device=phi.device)
        for f, p in zip(phi.split(_CHUNK), probs.split(_CHUNK), strict=True):
            for c in range(C):
                weight = -p[:, c, None] * p  # [n, C] row c of Lambda
                weight[:, c] += p[:, c]
                total[c] += torch.einsum("nd,ne,nf->def", weight, f, f)
        whole = total.permute(0, 2, 1, 3).reshape(C * E, C * E)  # [P, P]
        values, vectors = torch.linalg.eigh((whole + whole.mT) / 2)
        return cls(values.clamp(min=0), vectors)  # negative only by rounding

    @property
    def eigenvalues(self) -> Tensor:
        """All of them.  [P]"""
        return self.values

    def logit_root(self, phi: Tensor, prior_precision: float) -> Tensor:
        """Root of the logits' covariance phi^T (curvature + prior)^-1 phi.  [B, C, C]"""
        P, E = len(self.values), phi.shape[1]  # noqa: N806
        half = self.vectors / (self.values + prior_precision).sqrt()  # [P, P]
        moved = torch.einsum("be,cep->bcp", phi, half.reshape(P // E, E, P))  # [B, C, P]
        return cholesky(moved @ moved.mT, name="logit covariance", noise=prior_precision)


@dataclass(frozen=True)
class KronCurvature:
    """One Kronecker product, mean Lambda (x) sum phi phi^T (Ritter et al. 2018), by its eigenvectors."""

    output_values: Tensor  # [C]
    output_vectors: Tensor  # [C, C]
    input_values: Tensor  # [E]
    input_vectors: Tensor  # [E, E]

    @classmethod
    def of(cls, phi: Tensor, probs: Tensor) -> "KronCurvature":
        """Of items with features phi [n, E] and predictions probs [n, C]."""
        outputs = (probs.sum(0).diag() - probs.mT @ probs) / len(probs)  # [C, C]
        a, U = torch.linalg.eigh(outputs)  # noqa: N806
        b, V = torch.linalg.eigh(phi.mT @ phi)  # noqa: N806
        return cls(a.clamp(min=0), U, b.clamp(min=0), V)  # negative only by rounding

    @property
    def eigenvalues(self) -> Tensor:
        """All products.  [C E]"""
        return (self.output_values[:, None] * self.input_values).flatten()

    def logit_root(self, phi: Tensor, prior_precision: float) -> Tensor:
        """Root of the logits' covariance phi^T (curvature + prior)^-1 phi.  [B, C, C]"""
        precision = self.output_values[:, None] * self.input_values + prior_precision  # [C, E]
        variance = (phi @ self.input_vectors).square() @ (1 / precision).mT  # [B, C]
        return self.output_vectors * variance.sqrt()[:, None]


class LaplaceLastLayer(LastLayerPredictor):
    """A trained model whose head is uncertain as much as its training data leave it.

    `hessian="full"` is exact for the head and takes memory (C E)^2; `"kron"` takes C^2 + E^2.  The
    prior precision maximises the marginal likelihood unless it is given.  Draws vary the head's weights
    around the trained ones; `samples=0` is the closed mean-field prediction.

    >>> LaplaceLastLayer(model).fit(train_images, train_labels).predict(images, samples=10)
    """

    def __init__(
        self,
        model: FeatureClassifier,
        *,
        hessian: Literal["full", "kron"] = "full",
        prior_precision: float | None = None,
    ) -> None:
        super().__init__(model)
        check_choice("hessian", hessian, ("full", "kron"))
        if prior_precision is not None and not 0 < prior_precision < math.inf:
            raise ValueError(f"expected prior_precision to be positive and finite, got {prior_precision}")
        size = model.head.out_features * (model.head.in_features + (model.head.bias is not None))
        if hessian == "full" and size > FULL_LIMIT:
            raise ValueError(
                f"expected at most {FULL_LIMIT} weights for hessian='full', got {size}: take 'kron'"
            )
        self._hessian, self._wanted = hessian, prior_precision
        self._curvature: FullCurvature | KronCurvature | None = None
        self._weight = torch.empty(0)  # [C, E], the bias as last column
        self._prior_precision = self._evidence = math.nan

    def fit(
        self,
        inputs: Inputs,
        labels: Tensor,  # [B]
        *,
        batch_size: int | None = None,
        progress: Progress | None = None,
    ) -> "LaplaceLastLayer":
        """On the training items."""
        features = extract_features(self._model, inputs, batch_size=batch_size, progress=progress)
        check_labels(labels, len(features), self._model.head.out_features)
        self._weight = _whole_weight(self._model.head)
        phi = self._phi(features)  # [n, E]
        log_probs = (phi @ self._weight.mT).log_softmax(-1)  # [n, C]
        made = FullCurvature if self._hessian == "full" else KronCurvature
        curvature = made.of(phi, log_probs.exp())
        values, square = curvature.eigenvalues, float(self._weight.square().sum())
        delta = _best_prior_precision(values, square) if self._wanted is None else self._wanted
        right = labels.to(log_probs.device, torch.int64)[:, None]
        fitted = float(log_probs.gather(1, right).sum())
        self._evidence = fitted - 0.5 * (delta * square + float((values / delta).log1p().sum()))
        self._curvature, self._prior_precision = curvature, delta
        return self

    @property
    def options(self) -> dict[str, Any]:
        """What a fit depends on beside the model and the items."""
        return {"hessian": self._hessian, "prior_precision": self._wanted}

    @property
    def prior_precision(self) -> float:
        """Of every weight of the head."""
        self._fitted()
        return self._prior_precision

    @property
    def log_marginal_likelihood(self) -> float:
        """Laplace's approximation of it at that prior precision, by which models may be compared."""
        self._fitted()
        return self._evidence

    def logit_gaussian(self, features: Tensor) -> LogitGaussian:
        """Mean of the trained head, covariance of its weights.  features [B, E]"""
        curvature, phi = self._fitted(), self._phi(features)
        return LogitGaussian(phi @ self._weight.mT, curvature.logit_root(phi, self._prior_precision))

    def _fitted(self) -> FullCurvature | KronCurvature:
        if self._curvature is None:
            raise not_fitted(self)
        return self._curvature

    def _phi(self, features: Tensor) -> Tensor:
        """In float64 where the head lies, with a 1 for the bias.  [B, E]"""
        phi = features.to(self._weight.device, torch.float64)
        return torch.cat([phi, torch.ones_like(phi[:, :1])], 1) if self._model.head.bias is not None else phi


def _whole_weight(head: nn.Linear) -> Tensor:
    """Weights with the bias as last column.  [C, E]"""
    weight = head.weight.detach().double()
    return weight if head.bias is None else torch.cat([weight, head.bias.detach().double()[:, None]], 1)


def _best_prior_precision(values: Tensor, square: float) -> float:
    """Where the marginal likelihood has its only maximum: delta |w|^2 = sum_i l_i / (l_i + delta).

    The left side grows with delta and the right side falls, so bisection of log delta finds it.
    """
    low, high = math.log(1e-12), math.log(1e12)

    def excess(log_delta: float) -> float:
        delta = math.exp(log_delta)
        return delta * square - float((values / (values + delta)).sum())

    if excess(low) > 0 or excess(high) < 0:
        raise NumericalError(
            f"the marginal likelihood has no best prior precision for a head of squared norm {square:.3g} "
            f"and largest curvature {float(values.max()):.3g}: is the model trained? Or give prior_precision"
        )
    for _ in range(100):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if excess(middle) > 0 else (middle, high)
    return math.exp(0.5 * (low + high))
