"""Bayesian last layers: the trained network stays fixed, and only the map to the logits is uncertain.

Laplace approximation of a trained last layer (MacKay 1992; Daxberger et al. 2021): the weights of the head
get a Gaussian around what training found.  Its precision is the curvature of the training loss, which for a
linear layer under softmax is sum_n Lambda_n (x) phi_n phi_n^T with Lambda = diag(p) - p p^T, plus the prior
precision.

Gaussian process in place of the last layer, by random Fourier features (SNGP; Liu et al. 2020):
phi(h) = sqrt(2 / M) cos(h Omega / lengthscale + shift) has phi(h)^T phi(h') near the RBF kernel, so that
logits phi(h)^T beta with beta ~ N(0, prior variance) are near a GP: far from the training features the
weights are as uncertain as before training.  Each class has the Laplace precision of its weights.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pdist

from gpattention.checks import check_choice, check_count, check_labels, check_whole
from gpattention.evaluation.predictions import BasePredictor, Request, not_fitted
from gpattention.gp import ItemNoise, NumericalError
from gpattention.gp.inputs import check_parameter
from gpattention.models import LogitGaussian, Prediction
from gpattention.models.predict import Inputs, Progress, Rows, predict_rows
from gpattention.numerics import cholesky


class LastLayerPredictor(BasePredictor):
    """Base of Bayesian last layers: features of the mean pass, then draws of logits.

    The network runs once for each item, without draws of its own.  Then `samples` draws of the logits follow,
    or the closed mean-field prediction (S = 1) if there are none.
    """

    options: dict[str, Any]  # everything but the model and the items that a fit depends on
    _found: Any = None  # the result of `_fit`

    def __init__(self, model: Any) -> None:
        if not callable(getattr(model, "features", None)) or not hasattr(model, "head"):
            raise ValueError(
                f"expected model to have a method features(inputs, *, draw, generator) and a linear `head` "
                f"that reads them, as VisionTransformer and TextTransformer do, got {type(model).__name__}"
            )
        if not isinstance(model.head, nn.Linear):
            raise ValueError(f"expected model.head to be nn.Linear, got {type(model.head).__name__}")
        self._model = model

    def fit(
        self,
        inputs: Inputs,
        labels: Tensor,
        *,
        batch_size: int | None = None,
        progress: Progress | None = None,
    ) -> Self:
        """Fit to the training items, with labels [B]."""
        options: dict[str, Any] = {"samples": 1, "seed": 0, "batch_size": batch_size, "progress": progress}
        h = predict_rows(self._model, self._features, inputs, **options)[0]  # [n, E]
        head = self._model.head
        check_labels(labels, len(h), head.out_features)
        device = head.weight.device
        with torch.inference_mode(False):  # copies can be differentiated, even of tensors of that mode
            self._fit(h.to(device, torch.float64, copy=True), labels.to(device, torch.int64, copy=True))
        return self

    def _features(self, rows: Rows) -> Tensor:
        """The inputs of the head, without draws.  [b, E]"""
        return self._model.features(rows.inputs, draw="none", generator=None)

    @abstractmethod
    def _fit(self, h: Tensor, labels: Tensor) -> None:
        """Fit to features [n, E] in float64 on the device of the head."""

    def _fitted(self) -> Any:
        if self._found is None:
            raise not_fitted(self)
        return self._found

    @abstractmethod
    def logit_gaussian(self, features: Tensor) -> LogitGaussian:
        """The distribution of the logits at features [B, E]."""

    def _predict(self, inputs: Inputs, request: Request) -> Prediction:
        samples, seed = request.samples, request.seed

        def forward(rows: Rows) -> Tensor:
            h = self._features(rows)  # [b, E]
            found = self.logit_gaussian(h)
            logits = _draw(found, rows.numbers, samples, seed) if samples else found.mean_field()[None]
            exact = torch.promote_types(h.dtype, torch.float32)
            return logits.to(exact).transpose(0, 1).flatten(1)  # [b, S C]

        each = predict_rows(self._model, forward, inputs, **{**vars(request), "samples": 1})[0]  # [B, S C]
        logits = each.unflatten(1, (max(samples, 1), -1)).transpose(0, 1).contiguous()  # [S, B, C]
        return Prediction.from_logits(logits, drawn=samples > 0)


def _draw(gaussian: LogitGaussian, items: Tensor, samples: int, seed: int) -> Tensor:
    """Draws with the noise of each item.  [S, b, C]"""
    sample = torch.arange(samples, device=items.device).repeat_interleave(len(items))  # [S b]
    noise = ItemNoise(seed, items.repeat(samples), sample)
    rank, mean = gaussian.root.shape[-1], gaussian.mean
    # the numbers depend on (seed, item, sample), so that batches do not change draws
    normal = noise.normal((1, len(sample), rank), mean.dtype, mean.device)  # [1, S b, C]
    return gaussian.sample(normal.reshape(samples, len(items), rank))


# Laplace

FULL_LIMIT = 5000  # weights whose full curvature is still factored in reasonable time
_CHUNK = 1024  # items whose curvature is added at once


@dataclass(frozen=True)
class FullCurvature:
    """The full matrix by its eigenvectors; weight (c, e) of the head is row c E + e."""

    eigenvalues: Tensor  # [P], P = C E
    vectors: Tensor  # [P, P]

    @classmethod
    def of(cls, phi: Tensor, probs: Tensor) -> "FullCurvature":
        """The curvature of items with features phi [n, E] and predictions probs [n, C]."""
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

    def logit_root(self, phi: Tensor, prior_precision: float) -> Tensor:
        """Root of the logits' covariance phi^T (curvature + prior)^-1 phi.  [B, C, C]"""
        P, E = len(self.eigenvalues), phi.shape[1]  # noqa: N806
        # the eigenvectors serve all prior precisions
        half = self.vectors / (self.eigenvalues + prior_precision).sqrt()  # [P, P]
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
        """The curvature of items with features phi [n, E] and predictions probs [n, C]."""
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
    """A trained model whose head is as uncertain as its training data leave it.

    Draws vary the weights of the head around the trained ones; `samples=0` is the closed mean-field
    prediction.

    >>> LaplaceLastLayer(model).fit(train_images, train_labels).predict(images, samples=10)

    Args:
        model: has `features` and a linear `head`.
        hessian: "full" is exact for the head and takes memory (C E)^2; "kron" takes C^2 + E^2.
        prior_precision: of every weight; the one with the largest marginal likelihood if not given.

    Raises:
        ValueError: a model without a linear head, or with one that is too large for "full".
    """

    def __init__(
        self, model: Any, *, hessian: Literal["full", "kron"] = "full",
        prior_precision: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__(model)
        check_choice("hessian", hessian, ("full", "kron"))
        if prior_precision is not None:
            check_parameter("prior_precision", prior_precision)
        size = model.head.out_features * (model.head.in_features + (model.head.bias is not None))
        if hessian == "full" and size > FULL_LIMIT:
            wanted = f"at most {FULL_LIMIT} weights for hessian='full'"
            raise ValueError(f"expected {wanted}, got {size}: take 'kron'")
        self.options = {"hessian": hessian, "prior_precision": prior_precision}

    def _fit(self, h: Tensor, labels: Tensor) -> None:
        head, given = self._model.head, self.options["prior_precision"]
        bias = [] if head.bias is None else [head.bias.detach().double()[:, None]]
        weight = torch.cat([head.weight.detach().double(), *bias], 1)  # [C, E], the bias as last column
        phi = self._phi(h)  # [n, E]
        kind = FullCurvature if self.options["hessian"] == "full" else KronCurvature
        curvature = kind.of(phi, (phi @ weight.mT).softmax(-1))
        values, square = curvature.eigenvalues, float(weight.square().sum())
        delta = _best_prior_precision(values, square) if given is None else given
        self._found = curvature, weight, delta

    @property
    def prior_precision(self) -> float:
        """The prior precision of every weight of the head."""
        return float(self._fitted()[2])

    def logit_gaussian(self, features: Tensor) -> LogitGaussian:
        """The logits of the trained head, with the covariance of its weights, at features [B, E]."""
        curvature, weight, delta = self._fitted()
        phi = self._phi(features)  # [B, E]
        return LogitGaussian(phi @ weight.mT, curvature.logit_root(phi, delta))

    def _phi(self, features: Tensor) -> Tensor:
        """Features in float64 on the device of the head, with a 1 for the bias.  [B, E]"""
        head = self._model.head
        phi = features.to(head.weight.device, torch.float64)
        return phi if head.bias is None else torch.cat([phi, torch.ones_like(phi[:, :1])], 1)


def _best_prior_precision(values: Tensor, square: float) -> float:
    """The only maximum of the marginal likelihood, where delta |w|^2 = sum_i l_i / (l_i + delta).

    With delta the left side grows and the right side falls, so bisection of log delta finds it.
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


# Gaussian process

PRIOR_VARIANCES = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)  # of a logit; held-out items choose
_HELD_OUT = 5  # one in so many
_PAIRS_FROM = 1000  # items whose distances give the lengthscale


@dataclass(frozen=True)
class RandomFeatures:
    """Random Fourier features of an RBF kernel of amplitude 1."""

    frequency: Tensor  # [E, M] already divided by the lengthscale
    shift: Tensor  # [M]

    @classmethod
    def draw(cls, h: Tensor, count: int, lengthscale: float, seed: int) -> "RandomFeatures":
        """Of items h [n, E], from a generator of their own: the same on every device."""
        generator = torch.Generator().manual_seed(seed)
        frequency = torch.randn(h.shape[1], count, dtype=torch.float64, generator=generator)
        shift = 2 * math.pi * torch.rand(count, dtype=torch.float64, generator=generator)
        return cls((frequency / lengthscale).to(h.device), shift.to(h.device))

    def __call__(self, h: Tensor) -> Tensor:
        """[B, E] to [B, M]."""
        return math.sqrt(2 / len(self.shift)) * torch.cos(h @ self.frequency + self.shift)


@dataclass(frozen=True)
class WeightPosterior:
    """Gaussians over the weights of every class."""

    mean: Tensor  # [M, C]
    root: Tensor  # [C, M, M] lower Cholesky factor of each class's precision
    prior_variance: float

    @classmethod
    def fit(cls, phi: Tensor, labels: Tensor, prior_variance: float, start: Tensor) -> "WeightPosterior":
        """The Laplace approximation around the most probable weights, class by class."""
        beta = _map_weights(phi, labels, prior_variance, start)  # [M, C]
        probs = (phi @ beta).softmax(-1)  # [n, C]
        prior = torch.eye(phi.shape[1], dtype=phi.dtype, device=phi.device) / prior_variance  # [M, M]
        # one class at a time, as all together would take [C, n, M] numbers
        precision = torch.stack([phi.mT @ (p[:, None] * phi) + prior for p in (probs * (1 - probs)).mT])
        return cls(
            beta, cholesky(precision, name="weight precision", noise=1 / prior_variance), prior_variance
        )

    def logits(self, phi: Tensor) -> LogitGaussian:
        """The logits at random features phi [B, M]."""
        moved = torch.linalg.solve_triangular(self.root, phi.mT[None], upper=False)  # [C, M, B]
        return LogitGaussian(phi @ self.mean, torch.diag_embed(moved.square().sum(1).mT.sqrt()))


class GPLastLayer(LastLayerPredictor):
    """A random-feature GP classifier on the features of a trained model; its head is not used.

    The prior variance is not chosen by Laplace's marginal likelihood, which would make it too large: items
    that are classified with certainty have no curvature, as if they carried no information.  Fitting takes
    [n, M] numbers for n training items and [C, M, M] for the weights.

    >>> GPLastLayer(model).fit(train_images, train_labels).predict(images, samples=10)

    Args:
        model: has `features` and a linear `head`.
        features: number M of random features.
        lengthscale: the median distance between training features if not given.
        prior_variance: of the logits; if not given, the one with which a random fifth of the training items
            is predicted best from the others.
        seed: of the random features.

    Raises:
        ValueError: a model without a linear head, or numbers that are not positive.
    """

    def __init__(
        self, model: Any, *, features: int = 512, lengthscale: float | None = None,
        prior_variance: float | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(model)
        for name, value in (("lengthscale", lengthscale), ("prior_variance", prior_variance)):
            if value is not None:
                check_parameter(name, value)
        self.options = {
            "features": check_count("features", features, least=1), "lengthscale": lengthscale,
            "prior_variance": prior_variance, "seed": check_whole("seed", seed),
        }  # fmt: skip

    def _fit(self, h: Tensor, labels: Tensor) -> None:
        count, lengthscale, prior_variance, seed = self.options.values()
        lengthscale = median_distance(h) if lengthscale is None else lengthscale
        random = RandomFeatures.draw(h, count, lengthscale, seed)
        phi = random(h)  # [n, M]
        start = phi.new_zeros(count, self._model.head.out_features)  # [M, C]
        if prior_variance is None:
            prior_variance = _best_prior_variance(phi, labels, start, seed)
        self._found = random, WeightPosterior.fit(phi, labels, prior_variance, start)

    @property
    def prior_variance(self) -> float:
        """The variance of a logit far from all training items."""
        return float(self._fitted()[1].prior_variance)

    def logit_gaussian(self, features: Tensor) -> LogitGaussian:
        """Mean and variance of every logit, independent between classes.  features [B, E]"""
        random, posterior = self._fitted()
        found: LogitGaussian = posterior.logits(random(features.to(posterior.mean.device, torch.float64)))
        return found


def median_distance(h: Tensor) -> float:
    """Median distance between at most a thousand items, spread evenly over h [n, E]."""
    some = h[torch.linspace(0, len(h) - 1, min(len(h), _PAIRS_FROM), device=h.device).long()]
    distance = float(pdist(some).median()) if len(some) > 1 else 0.0
    if not 0 < distance < math.inf:
        raise NumericalError(
            f"the median distance between {len(some)} training features is {distance}: give a lengthscale"
        )
    return distance


def _best_prior_variance(phi: Tensor, labels: Tensor, start: Tensor, seed: int) -> float:
    """The one with the least negative log-likelihood of held-out items, by the mean-field prediction."""
    order = torch.randperm(len(phi), generator=torch.Generator().manual_seed(seed)).to(phi.device)
    held, kept = order[::_HELD_OUT], order[torch.arange(len(phi), device=phi.device) % _HELD_OUT != 0]
    if len(kept) == 0:
        raise ValueError(f"expected at least 2 items to choose a prior_variance from, got {len(phi)}")
    losses: dict[float, float] = {}
    for prior_variance in PRIOR_VARIANCES:
        posterior = WeightPosterior.fit(phi[kept], labels[kept], prior_variance, start)
        start = posterior.mean  # close to the next one
        losses[prior_variance] = float(cross_entropy(posterior.logits(phi[held]).mean_field(), labels[held]))
    return min(losses, key=losses.__getitem__)


def _map_weights(phi: Tensor, labels: Tensor, prior_variance: float, start: Tensor) -> Tensor:
    """The most probable weights, by L-BFGS; the objective is strictly convex.  [M, C]"""
    beta = start.clone().requires_grad_()
    optimiser = torch.optim.LBFGS(
        [beta], max_iter=500, history_size=20, tolerance_grad=1e-7, tolerance_change=1e-12,
        line_search_fn="strong_wolfe",
    )  # fmt: skip

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = cross_entropy(phi @ beta, labels)
        loss = loss + 0.5 * beta.square().sum() / (prior_variance * len(phi))
        loss.backward()
        return loss

    with torch.enable_grad():
        optimiser.step(closure)
        # a line search leaves the gradient of another point
        closure()
    slope = math.inf if beta.grad is None else float(beta.grad.abs().max())
    if not slope < 1e-4:
        raise NumericalError(f"L-BFGS did not find the weights: the largest slope left is {slope:.1e}")
    return beta.detach()
