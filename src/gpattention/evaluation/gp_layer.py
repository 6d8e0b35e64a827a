"""A Gaussian process in place of the last layer, by random Fourier features (SNGP; Liu et al. 2020).

phi(h) = sqrt(2 / M) cos(h Omega / lengthscale + shift) has phi(h)^T phi(h') near the RBF kernel, so that
logits phi(h)^T beta with beta ~ N(0, prior variance) are near a GP: far from the training features the
weights are as uncertain as before training.  Each class has the Laplace precision of its weights.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpattention.checks import check_count, check_whole
from gpattention.evaluation.checks import not_fitted
from gpattention.evaluation.last_layer import (
    FeatureClassifier,
    LastLayerPredictor,
    LogitGaussian,
    extract_features,
)
from gpattention.gp import NumericalError
from gpattention.gp.cholesky import cholesky
from gpattention.metrics.checks import check_labels
from gpattention.models.rows import Inputs, Progress

PRIOR_VARIANCES = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)  # of a logit; held-out items choose
_HELD_OUT = 5  # one in so many
_PAIRS_FROM = 1000  # items whose distances give the lengthscale


@dataclass(frozen=True)
class RandomFeatures:
    """Random Fourier features of an RBF kernel of amplitude 1."""

    frequency: Tensor  # [E, M] already divided by the lengthscale
    shift: Tensor  # [M]

    @classmethod
    def draw(cls, width: int, count: int, lengthscale: float, seed: int) -> "RandomFeatures":
        """From their own generator, the same on every device."""
        generator = torch.Generator().manual_seed(seed)
        frequency = torch.randn(width, count, dtype=torch.float64, generator=generator)
        shift = 2 * math.pi * torch.rand(count, dtype=torch.float64, generator=generator)
        return cls(frequency / lengthscale, shift)

    def to(self, device: torch.device) -> "RandomFeatures":
        """The same elsewhere."""
        return RandomFeatures(self.frequency.to(device), self.shift.to(device))

    def __call__(self, h: Tensor) -> Tensor:
        """[B, E] to [B, M]."""
        return math.sqrt(2 / len(self.shift)) * torch.cos(h @ self.frequency + self.shift)


@dataclass(frozen=True)
class WeightPosterior:
    """Gaussians over the weights of every class."""

    mean: Tensor  # [M, C]
    root: Tensor  # [C, M, M] lower Cholesky factor of each class's precision
    prior_variance: float
    evidence: float  # Laplace's log marginal likelihood

    def logits(self, phi: Tensor) -> LogitGaussian:
        """At random features phi [B, M]."""
        moved = torch.linalg.solve_triangular(self.root, phi.mT[None], upper=False)  # [C, M, B]
        return LogitGaussian(phi @ self.mean, torch.diag_embed(moved.square().sum(1).mT.sqrt()))


class GPLastLayer(LastLayerPredictor):
    """A random-feature GP classifier on the features of a trained model; its head is not used.

    Unless they are given, the lengthscale is the median distance between training features, and the prior
    variance of the logits the one that predicts a drawn fifth of the training items best from the others.
    (Laplace's marginal likelihood would choose too large ones: items classified with certainty have no
    curvature, so it thinks that they say nothing.)  `seed` draws the random features.  Fitting holds [n, M]
    numbers of n training items, and [C, M, M] for the weights.

    >>> GPLastLayer(model).fit(train_images, train_labels).predict(images, samples=10)
    """

    def __init__(
        self,
        model: FeatureClassifier,
        *,
        features: int = 512,
        lengthscale: float | None = None,
        prior_variance: float | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(model)
        features = check_count("features", features, least=1)
        for name, value in {"lengthscale": lengthscale, "prior_variance": prior_variance}.items():
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"expected {name} to be positive and finite, got {value}")
        self._count, self._seed = features, check_whole("seed", seed)
        self._lengthscale, self._prior_variance = lengthscale, prior_variance
        self._random: RandomFeatures | None = None
        self._posterior: WeightPosterior | None = None

    def fit(
        self,
        inputs: Inputs,
        labels: Tensor,  # [B]
        *,
        batch_size: int | None = None,
        progress: Progress | None = None,
    ) -> "GPLastLayer":
        """On the training items."""
        h = extract_features(self._model, inputs, batch_size=batch_size, progress=progress)  # [n, E]
        check_labels(labels, len(h), self._model.head.out_features)
        device = self._model.head.weight.device
        with torch.inference_mode(False):  # copies made here can be differentiated, whatever mode made them
            h = h.to(device, torch.float64, copy=True)
            self._fit(h, labels.to(device, torch.int64, copy=True))
        return self

    def _fit(self, h: Tensor, labels: Tensor) -> None:
        lengthscale = median_distance(h) if self._lengthscale is None else self._lengthscale
        random = RandomFeatures.draw(h.shape[1], self._count, lengthscale, self._seed).to(h.device)
        phi, start = random(h), self._zeros(h.device)  # [n, M], [M, C]
        prior_variance = self._prior_variance
        if prior_variance is None:
            prior_variance = _best_prior_variance(phi, labels, start, self._seed)
        self._random, self._posterior = random, _posterior(phi, labels, prior_variance, start)

    @property
    def options(self) -> dict[str, Any]:
        """What a fit depends on beside the model and the items."""
        return {
            "features": self._count,
            "lengthscale": self._lengthscale,
            "prior_variance": self._prior_variance,
            "seed": self._seed,
        }

    @property
    def prior_variance(self) -> float:
        """Of a logit, far from all training items."""
        return self._fitted()[1].prior_variance

    @property
    def log_marginal_likelihood(self) -> float:
        """Laplace's approximation of it, with classes as if independent."""
        return self._fitted()[1].evidence

    def logit_gaussian(self, features: Tensor) -> LogitGaussian:
        """Mean and variance of every logit, independent between classes.  features [B, E]"""
        random, told = self._fitted()
        return told.logits(random(features.to(told.mean.device, torch.float64)))

    def _zeros(self, device: torch.device) -> Tensor:
        """Weights to start from.  [M, C]"""
        classes = self._model.head.out_features
        return torch.zeros(self._count, classes, dtype=torch.float64, device=device)

    def _fitted(self) -> tuple[RandomFeatures, WeightPosterior]:
        if self._random is None or self._posterior is None:
            raise not_fitted(self)
        return self._random, self._posterior


def median_distance(h: Tensor) -> float:
    """Median distance between items, of at most a thousand spread evenly.  h [n, E]"""
    some = h[torch.linspace(0, len(h) - 1, min(len(h), _PAIRS_FROM), device=h.device).long()]
    distance = float(torch.nn.functional.pdist(some).median()) if len(some) > 1 else 0.0
    if not 0 < distance < math.inf:
        raise NumericalError(
            f"the median distance between {len(some)} training features is {distance}: give a lengthscale"
        )
    return distance


def _best_prior_variance(phi: Tensor, labels: Tensor, start: Tensor, seed: int) -> float:
    """Of least negative log-likelihood on held-out items, with the mean-field prediction."""
    order = torch.randperm(len(phi), generator=torch.Generator().manual_seed(seed)).to(phi.device)
    held, kept = order[::_HELD_OUT], order[torch.arange(len(phi), device=phi.device) % _HELD_OUT != 0]
    if len(kept) == 0:
        raise ValueError(f"expected at least 2 items to choose a prior_variance from, got {len(phi)}")
    losses: dict[float, float] = {}
    for prior_variance in PRIOR_VARIANCES:
        told = _posterior(phi[kept], labels[kept], prior_variance, start)
        start = told.mean  # the next is near
        logits = told.logits(phi[held]).mean_field()  # [h, C]
        losses[prior_variance] = float(torch.nn.functional.cross_entropy(logits, labels[held]))
    return min(losses, key=losses.__getitem__)


def _map_weights(phi: Tensor, labels: Tensor, prior_variance: float, start: Tensor) -> Tensor:
    """The most probable weights, by L-BFGS; the objective is strictly convex.  [M, C]"""
    beta = start.clone().requires_grad_()
    optimiser = torch.optim.LBFGS(
        [beta],
        max_iter=500,
        history_size=20,
        tolerance_grad=1e-7,
        tolerance_change=1e-12,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = torch.nn.functional.cross_entropy(phi @ beta, labels)
        loss = loss + 0.5 * beta.square().sum() / (prior_variance * len(phi))
        loss.backward()
        return loss

    with torch.enable_grad():
        optimiser.step(closure)
        closure()
    slope = math.inf if beta.grad is None else float(beta.grad.abs().max())
    if not slope < 1e-4:
        raise NumericalError(f"L-BFGS did not find the weights: the largest slope left is {slope:.1e}")
    return beta.detach()


def _posterior(phi: Tensor, labels: Tensor, prior_variance: float, start: Tensor) -> WeightPosterior:
    """Laplace around the most probable weights, class by class."""
    beta = _map_weights(phi, labels, prior_variance, start)  # [M, C]
    log_probs = (phi @ beta).log_softmax(-1)  # [n, C]
    weight = log_probs.exp() * (1 - log_probs.exp())  # [n, C]
    prior = torch.eye(phi.shape[1], dtype=phi.dtype, device=phi.device) / prior_variance  # [M, M]
    precision = torch.stack([phi.mT @ (w[:, None] * phi) + prior for w in weight.mT])  # [C, M, M]
    root = cholesky(precision, name="weight precision", noise=1 / prior_variance)
    log_det = 2 * float(root.diagonal(dim1=-2, dim2=-1).log().sum()) + beta.numel() * math.log(prior_variance)
    fitted = float(log_probs.gather(1, labels[:, None]).sum())
    evidence = fitted - 0.5 * (float(beta.square().sum()) / prior_variance + log_det)
    return WeightPosterior(beta, root, prior_variance, evidence)
