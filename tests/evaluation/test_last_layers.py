"""Bayesian last layers against dense float64 references, and their uncertainty far from the data."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gpattention.evaluation import GPLastLayer, LaplaceLastLayer
from gpattention.evaluation.last_layers import (
    PRIOR_VARIANCES,
    KronCurvature,
    LogitGaussian,
    RandomFeatures,
    median_distance,
)
from gpattention.gp import NumericalError
from gpattention.models.predict import predict
from tests.models.stub_models import StubModel, normal, seeded

X = normal(60, 5, seed=1)
LABELS = torch.randint(3, (60,), generator=seeded(2))


def model_and_features(*, bias: bool = True) -> tuple[StubModel, Tensor]:
    """A model whose features h, and 1 for the bias, are known.  [60, E]"""
    model = StubModel(bias=bias, draws=False).double()
    model.head.weight.data *= 0.5
    h = model.features(X.double()).detach()
    return model, torch.cat([h, torch.ones(60, 1, dtype=h.dtype)], 1) if bias else h


def weight_of(model: StubModel) -> Tensor:
    """[C, E]"""
    weight = model.head.weight.detach()
    return weight if model.head.bias is None else torch.cat([weight, model.head.bias.detach()[:, None]], 1)


def dense_hessian(weight: Tensor, phi: Tensor) -> Tensor:
    """Of the training loss, by automatic differentiation.  [C E, C E]"""

    def loss(flat: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(phi @ flat.reshape(weight.shape).mT, LABELS, reduction="sum")

    return torch.func.hessian(loss)(weight.flatten())


def logit_covariance(precision: Tensor, phi: Tensor) -> Tensor:
    """Of every item, from the precision of the weights.  [n, C, C]"""
    jacobian = torch.stack([torch.kron(torch.eye(3, dtype=phi.dtype), f[None]) for f in phi])  # [n, C, C E]
    return jacobian @ precision.inverse() @ jacobian.mT


@pytest.mark.parametrize(("hessian", "bias"), [("full", True), ("full", False), ("kron", True)])
def test_covariance_is_that_of_the_dense_hessian(hessian: str, bias: bool) -> None:
    model, phi = model_and_features(bias=bias)
    weight, delta = weight_of(model), 0.7
    curvature = dense_hessian(weight, phi)
    if hessian == "kron":
        p = (phi @ weight.mT).softmax(-1)
        outputs = torch.stack([q.diag() - q[:, None] * q for q in p]).mean(0)  # [C, C]
        curvature = torch.kron(outputs, phi.mT @ phi)
        found = KronCurvature.of(phi, p).eigenvalues.sort().values
        torch.testing.assert_close(found, torch.linalg.eigvalsh(curvature), rtol=1e-8, atol=1e-8)
    expected = logit_covariance(curvature + delta * torch.eye(weight.numel(), dtype=phi.dtype), phi)
    laplace = LaplaceLastLayer(model, hessian=hessian, prior_precision=delta)  # type: ignore[arg-type]
    gaussian = laplace.fit(X.double(), LABELS, batch_size=7).logit_gaussian(
        model.features(X.double()).detach()
    )
    torch.testing.assert_close(gaussian.covariance, expected, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(gaussian.variance, expected.diagonal(dim1=-2, dim2=-1), rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(gaussian.mean, phi @ weight.mT)
    assert laplace.prior_precision == delta


def test_the_prior_precision_maximises_the_evidence() -> None:
    model, phi = model_and_features()
    weight = weight_of(model)
    hessian, eye = dense_hessian(weight, phi), torch.eye(weight.numel(), dtype=phi.dtype)
    fitted = -torch.nn.functional.cross_entropy(phi @ weight.mT, LABELS, reduction="sum")

    def evidence(delta: float) -> float:
        prior = -0.5 * delta * weight.square().sum() + 0.5 * weight.numel() * math.log(delta)
        return float(fitted + prior - 0.5 * torch.logdet(hessian + delta * eye))

    best = LaplaceLastLayer(model).fit(X.double(), LABELS).prior_precision
    assert evidence(best) > max(evidence(0.9 * best), evidence(1.1 * best))
    slope = (evidence(best * 1.0001) - evidence(best / 1.0001)) / 2e-4
    assert abs(slope) < 1e-3


@pytest.mark.parametrize("kind", [GPLastLayer, LaplaceLastLayer])
def test_inference_mode_makes_no_difference(kind: type[GPLastLayer | LaplaceLastLayer]) -> None:
    model, _ = model_and_features()
    expected = kind(model).fit(X.double(), LABELS).predict(X[:4].double(), samples=3)
    with torch.inference_mode():
        found = kind(model).fit(X.double(), LABELS.clone()).predict(X[:4].double(), samples=3)
    assert torch.equal(found.logits, expected.logits)


def clusters(seed: int) -> tuple[Tensor, Tensor]:
    """Three classes around three points of the plane."""
    labels = torch.arange(150) % 3
    angle = 2 * math.pi * labels / 3
    centre = 2 * torch.stack([angle.cos(), angle.sin()], 1)
    return centre + 0.4 * normal(150, 2, seed=seed), labels


class Plane(StubModel):
    """features = inputs."""

    def __init__(self) -> None:
        super().__init__(width=2, hidden=2)

    def features(self, inputs, *, draw="none", generator=None):
        return inputs


def test_uncertainty_grows_away_from_the_data() -> None:
    x, labels = clusters(0)
    layer = GPLastLayer(Plane(), features=256).fit(x, labels)
    away = torch.tensor([[1.0, 0.0], [-0.5, math.sqrt(0.75)], [-0.5, -math.sqrt(0.75)]])
    variance = [layer.logit_gaussian(r * away).variance.mean() for r in (2.0, 4.0, 7.0, 40.0)]
    assert variance[0] < variance[1] < variance[2]
    assert float(variance[0]) < 0.3 * layer.prior_variance
    assert 0.6 * layer.prior_variance < float(variance[3]) < 1.1 * layer.prior_variance
    near, far = (layer.predict(r * away, samples=500) for r in (2.0, 40.0))
    assert near.mutual_information.max() < 0.5 * far.mutual_information.min()
    assert near.confidence.min() > far.confidence.max()


def test_it_classifies_and_its_prior_variance_is_the_best_tried() -> None:
    x, labels = clusters(0)
    layer = GPLastLayer(Plane(), features=128).fit(x, labels)
    fresh, truth = clusters(1)
    for samples in (0, 50):
        assert float((layer.predict(fresh, samples=samples).label == truth).float().mean()) > 0.95
    losses = {}
    for given in PRIOR_VARIANCES:
        other = GPLastLayer(Plane(), features=128, prior_variance=given).fit(x, labels)
        assert other.prior_variance == given
        losses[given] = float(-other.predict(fresh, samples=0).log_probs[torch.arange(150), truth].mean())
    assert losses[layer.prior_variance] < 1.2 * min(losses.values()) < 0.3 * max(losses.values())


def test_weights_against_dense_references() -> None:
    """The most probable weights have no slope; the variance is that of dense matrices."""
    x, labels = clusters(0)
    layer = GPLastLayer(Plane(), features=20, lengthscale=1.5, prior_variance=4.0).fit(x, labels)
    phi = RandomFeatures.draw(x, 20, 1.5, 0)(x.double())  # [n, M]
    gaussian, eye = layer.logit_gaussian(x), torch.eye(20).double()
    p, onehot = gaussian.mean.softmax(-1), torch.nn.functional.one_hot(labels, 3).double()
    beta = torch.linalg.lstsq(phi, gaussian.mean).solution  # [M, C]
    slope = phi.mT @ (p - onehot) + beta / 4
    torch.testing.assert_close(slope, torch.zeros(20, 3).double(), rtol=0, atol=1e-3)
    for c in range(3):
        precision = phi.mT @ ((p[:, c] * (1 - p[:, c]))[:, None] * phi) + eye / 4
        expected = torch.einsum("nm,mk,nk->n", phi, precision.inverse(), phi)
        torch.testing.assert_close(gaussian.variance[:, c], expected, rtol=1e-6, atol=1e-9)


def test_random_features_approximate_the_kernel() -> None:
    x, _ = clusters(0)
    phi = RandomFeatures.draw(x, 50_000, 1.5, 3)(x[:20].double())
    kernel = (-torch.cdist(x[:20].double(), x[:20].double()).square() / (2 * 1.5**2)).exp()
    assert float((phi @ phi.mT - kernel).abs().max()) < 5 / math.sqrt(50_000)


def test_lengthscale_is_the_median_distance() -> None:
    assert median_distance(torch.tensor([[0.0], [1.0], [10.0]])) == 9
    assert median_distance(normal(3000, 4)) == pytest.approx(math.sqrt(2 * 3.36), rel=0.05)


@pytest.fixture(scope="module", params=["full", "kron", "gp"])
def layer(request):
    model = StubModel()
    made = (
        GPLastLayer(model, features=32)
        if request.param == "gp"
        else LaplaceLastLayer(model, hessian=request.param)
    )
    return made.fit(X, LABELS)


def test_draws_have_the_stated_moments(layer) -> None:
    gaussian = layer.logit_gaussian(layer._model.features(X[:3]).detach())
    logits = layer.predict(X[:3], samples=20_000).logits.double()  # [S, 3, C]
    error = (gaussian.variance / 20_000).sqrt()
    assert bool(((logits.mean(0) - gaussian.mean).abs() < 5 * error).all())
    for item in range(3):
        scale = float(gaussian.variance[item].max())
        torch.testing.assert_close(
            logits[:, item].T.cov(), gaussian.covariance[item], rtol=0.05, atol=0.05 * scale
        )


def test_mean_field_is_near_the_mean_of_draws(layer) -> None:
    closed, drawn = layer.predict(X[:20], samples=0), layer.predict(X[:20], samples=5000)
    assert closed.samples == 1
    assert float((closed.probs - drawn.probs).abs().max()) < 0.08


def test_mean_field_of_two_classes_is_the_probit_approximation() -> None:
    mean, root = normal(9, 2, dtype=torch.float64), normal(9, 2, 2, seed=1, dtype=torch.float64)
    gaussian = LogitGaussian(mean, root)
    difference = torch.tensor([1.0, -1.0], dtype=torch.float64)
    variance = difference @ gaussian.covariance @ difference  # [9]
    expected = torch.sigmoid(mean @ difference / (1 + math.pi / 8 * variance).sqrt())
    torch.testing.assert_close(gaussian.mean_field().softmax(-1)[:, 0], expected)
    sure = LogitGaussian(3 * normal(9, 4, dtype=torch.float64), torch.zeros(9, 4, 4, dtype=torch.float64))
    torch.testing.assert_close(sure.mean_field().softmax(-1), sure.mean.softmax(-1))


def test_the_network_itself_does_not_draw() -> None:
    model = StubModel().train()
    layer = LaplaceLastLayer(model).fit(X, LABELS)
    gaussian = layer.logit_gaussian(model.features(X))
    torch.testing.assert_close(
        gaussian.mean.float(), predict(model, X, samples=0).logits[0], rtol=1e-5, atol=1e-5
    )
    assert model.training


D = X.double()


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda m: LaplaceLastLayer(m).predict(D), RuntimeError, "LaplaceLastLayer is not fitted"),
    (lambda m: LaplaceLastLayer(m).prior_precision, RuntimeError, "not fitted"),
    (lambda m: LaplaceLastLayer(m, hessian="diag"), ValueError, "hessian .*got 'diag'"),
    (lambda m: LaplaceLastLayer(m, prior_precision=-1), ValueError, "prior_precision .*got -1"),
    (lambda m: LaplaceLastLayer(StubModel(hidden=20, classes=1000)), ValueError, "5000 .*got 21000"),
    (lambda m: LaplaceLastLayer(m).fit(D, LABELS[:5]), ValueError, r"labels .*\[60\]"),
    (lambda m: LaplaceLastLayer(untrained(m)).fit(D, LABELS), NumericalError, "model trained"),
    (lambda m: LaplaceLastLayer(torch.nn.Sequential(m)), ValueError, "features.*`head`.* got Sequential"),
    (lambda m: GPLastLayer(torch.nn.Sequential(m)), ValueError, "features.*`head`.* got Sequential"),
    (lambda m: GPLastLayer(headless(m)), ValueError, r"model.head .*got Identity"),
    (lambda m: GPLastLayer(m).predict(D), RuntimeError, "GPLastLayer is not fitted yet"),
    (lambda m: GPLastLayer(m, lengthscale=0), ValueError, "lengthscale .*got 0"),
    (lambda m: GPLastLayer(m, features=0), ValueError, "features .*got 0"),
    (lambda m: GPLastLayer(m, lengthscale=1).fit(D[:1], LABELS[:1]), ValueError, "2 items .*got 1"),
    (lambda m: median_distance(torch.ones(5, 2)), NumericalError, "5 training features is 0.0"),
])  # fmt: skip
def test_refusals(call: Callable[[StubModel], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(model_and_features()[0])


def untrained(model: StubModel) -> StubModel:
    for parameter in model.head.parameters():
        parameter.data.zero_()
    return model


def headless(model: StubModel) -> StubModel:
    model.head = torch.nn.Identity()
    return model
