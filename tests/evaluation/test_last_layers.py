"""Bayesian last layers against dense float64 references, and their uncertainty far from the data."""

import math

import pytest
import torch
from torch import Tensor

from gpattention.evaluation import GPLastLayer, LaplaceLastLayer
from gpattention.evaluation.gp_layer import PRIOR_VARIANCES, RandomFeatures, median_distance
from gpattention.evaluation.laplace import FullCurvature, KronCurvature
from gpattention.evaluation.last_layer import LogitGaussian, extract_features
from gpattention.gp import NumericalError
from gpattention.models.prediction import predict
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


class TestLaplace:
    @pytest.mark.parametrize("bias", [True, False])
    def test_full_covariance_is_that_of_the_dense_hessian(self, bias: bool) -> None:
        model, phi = model_and_features(bias=bias)
        weight, delta = weight_of(model), 0.7
        precision = dense_hessian(weight, phi) + delta * torch.eye(weight.numel(), dtype=phi.dtype)
        jacobian = torch.stack(
            [torch.kron(torch.eye(3, dtype=phi.dtype), f[None]) for f in phi]
        )  # [n, C, C E]
        expected = jacobian @ precision.inverse() @ jacobian.mT  # [n, C, C]
        laplace = LaplaceLastLayer(model, prior_precision=delta).fit(X.double(), LABELS, batch_size=7)
        told = laplace.logit_gaussian(model.features(X.double()).detach())
        torch.testing.assert_close(told.covariance, expected, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(told.variance, expected.diagonal(dim1=-2, dim2=-1), rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(told.mean, phi @ weight.mT)
        assert laplace.prior_precision == delta

    def test_evidence_and_its_best_prior_precision(self) -> None:
        model, phi = model_and_features()
        weight = weight_of(model)
        hessian, eye = dense_hessian(weight, phi), torch.eye(weight.numel(), dtype=phi.dtype)
        fitted = -torch.nn.functional.cross_entropy(phi @ weight.mT, LABELS, reduction="sum")

        def evidence(delta: float) -> float:
            prior = -0.5 * delta * weight.square().sum() + 0.5 * weight.numel() * math.log(delta)
            return float(fitted + prior - 0.5 * torch.logdet(hessian + delta * eye))

        laplace = LaplaceLastLayer(model).fit(X.double(), LABELS)
        best = laplace.prior_precision
        assert laplace.log_marginal_likelihood == pytest.approx(evidence(best), rel=1e-9)
        assert evidence(best) > max(evidence(0.9 * best), evidence(1.1 * best))
        slope = (evidence(best * 1.0001) - evidence(best / 1.0001)) / 2e-4
        assert abs(slope) < 1e-3

    def test_kronecker_product(self) -> None:
        model, phi = model_and_features()
        weight, delta = weight_of(model), 0.7
        p = (phi @ weight.mT).softmax(-1)
        outputs = torch.stack([q.diag() - q[:, None] * q for q in p]).mean(0)  # [C, C]
        precision = torch.kron(outputs, phi.mT @ phi) + delta * torch.eye(weight.numel(), dtype=phi.dtype)
        jacobian = torch.stack([torch.kron(torch.eye(3, dtype=phi.dtype), f[None]) for f in phi])
        expected = jacobian @ precision.inverse() @ jacobian.mT
        laplace = LaplaceLastLayer(model, hessian="kron", prior_precision=delta).fit(X.double(), LABELS)
        told = laplace.logit_gaussian(model.features(X.double()).detach())
        torch.testing.assert_close(told.covariance, expected, rtol=1e-8, atol=1e-10)
        found = KronCurvature.of(phi, p).eigenvalues.sort().values
        curvature = precision - delta * torch.eye(weight.numel(), dtype=phi.dtype)
        torch.testing.assert_close(found, torch.linalg.eigvalsh(curvature), rtol=1e-8, atol=1e-8)

    def test_full_and_kronecker_agree_where_all_items_predict_alike(self) -> None:
        phi, p = normal(40, 4, dtype=torch.float64), torch.tensor([[0.2, 0.3, 0.5]], dtype=torch.float64)
        full, kron = (made.of(phi, p.expand(40, 3)) for made in (FullCurvature, KronCurvature))
        a, b = (c.logit_root(phi, 0.3) for c in (full, kron))
        torch.testing.assert_close(a @ a.mT, b @ b.mT, rtol=1e-9, atol=1e-10)

    def test_more_data_leave_less_uncertainty(self) -> None:
        model, _ = model_and_features()
        many = X.double().repeat(5, 1)
        few, more = (
            LaplaceLastLayer(model, prior_precision=1.0)
            .fit(x, LABELS.repeat(n))
            .predict(X.double(), samples=200)
            for x, n in ((X.double(), 1), (many, 5))
        )
        assert more.mutual_information.mean() < 0.5 * few.mutual_information.mean()

    def test_errors(self) -> None:
        model, _ = model_and_features()
        with pytest.raises(
            RuntimeError, match=r"LaplaceLastLayer is not fitted yet: call fit\(inputs, labels\)"
        ):
            LaplaceLastLayer(model).predict(X.double())
        with pytest.raises(RuntimeError, match="not fitted"):
            _ = LaplaceLastLayer(model).prior_precision
        with pytest.raises(ValueError, match="hessian to be one of full, kron, got 'diag'"):
            LaplaceLastLayer(model, hessian="diag")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="prior_precision to be positive and finite, got -1"):
            LaplaceLastLayer(model, prior_precision=-1)
        with pytest.raises(
            ValueError, match=r"at most 5000 weights for hessian='full', got 21000: take 'kron'"
        ):
            LaplaceLastLayer(StubModel(hidden=20, classes=1000))
        with pytest.raises(ValueError, match=r"labels to be whole numbers of shape \[60\]"):
            LaplaceLastLayer(model).fit(X.double(), LABELS[:5])
        model.head.weight.data.zero_()
        model.head.bias.data.zero_()
        with pytest.raises(NumericalError, match="is the model trained"):
            LaplaceLastLayer(model).fit(X.double(), LABELS)
        model.head = torch.nn.Identity()
        with pytest.raises(ValueError, match=r"model.head to be nn.Linear, got Identity"):
            LaplaceLastLayer(model)


@pytest.mark.parametrize("kind", [GPLastLayer, LaplaceLastLayer])
def test_inference_mode_makes_no_difference(kind: type[GPLastLayer | LaplaceLastLayer]) -> None:
    model, _ = model_and_features()
    expected = kind(model).fit(X.double(), LABELS).predict(X[:4].double(), samples=3)
    with torch.inference_mode():
        told = kind(model).fit(X.double(), LABELS.clone()).predict(X[:4].double(), samples=3)
    assert torch.equal(told.logits, expected.logits)


@pytest.mark.parametrize("kind", [GPLastLayer, LaplaceLastLayer])
def test_models_without_features_are_refused(kind: type[GPLastLayer | LaplaceLastLayer]) -> None:
    with pytest.raises(ValueError, match=r"have a method features\(.*a linear `head`.* got Sequential"):
        kind(torch.nn.Sequential(torch.nn.Linear(5, 3)))  # type: ignore[arg-type]


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


class TestGPLayer:
    def test_uncertainty_grows_away_from_the_data(self) -> None:
        x, labels = clusters(0)
        layer = GPLastLayer(Plane(), features=256).fit(x, labels)
        away = torch.tensor([[1.0, 0.0], [-0.5, math.sqrt(0.75)], [-0.5, -math.sqrt(0.75)]])
        told = [layer.logit_gaussian(r * away).variance.mean() for r in (2.0, 4.0, 7.0, 40.0)]
        assert told[0] < told[1] < told[2]
        assert float(told[0]) < 0.3 * layer.prior_variance
        assert 0.6 * layer.prior_variance < float(told[3]) < 1.1 * layer.prior_variance
        near, far = (layer.predict(r * away, samples=500) for r in (2.0, 40.0))
        assert near.mutual_information.max() < 0.5 * far.mutual_information.min()
        assert near.confidence.min() > far.confidence.max()

    def test_it_classifies_and_its_prior_variance_is_the_best_tried(self) -> None:
        x, labels = clusters(0)
        layer = GPLastLayer(Plane(), features=128).fit(x, labels)
        fresh, truth = clusters(1)
        for samples in (0, 50):
            assert float((layer.predict(fresh, samples=samples).label == truth).float().mean()) > 0.95
        losses = {}
        for given in PRIOR_VARIANCES:
            told = GPLastLayer(Plane(), features=128, prior_variance=given).fit(x, labels)
            assert told.prior_variance == given
            losses[given] = float(-told.predict(fresh, samples=0).log_probs[torch.arange(150), truth].mean())
        assert losses[layer.prior_variance] < 1.2 * min(losses.values()) < 0.3 * max(losses.values())

    def test_evidence_by_dense_determinants(self) -> None:
        x, labels = clusters(0)
        layer = GPLastLayer(Plane(), features=20, lengthscale=1.5, prior_variance=4.0).fit(x, labels)
        phi, mean = RandomFeatures.draw(2, 20, 1.5, 0)(x.double()), layer.logit_gaussian(x).mean
        beta, p = torch.linalg.lstsq(phi, mean).solution, mean.softmax(-1)
        fitted = -torch.nn.functional.cross_entropy(mean, labels, reduction="sum") - beta.square().sum() / 8
        eye = torch.eye(20, dtype=torch.float64)
        log_dets = [torch.logdet(eye + 4 * phi.mT @ ((q * (1 - q))[:, None] * phi)) for q in p.mT]
        assert layer.log_marginal_likelihood == pytest.approx(float(fitted - sum(log_dets) / 2), rel=1e-6)

    def test_weights_against_dense_references(self) -> None:
        """The most probable weights have no slope; the variance is that of the dense inverse."""
        x, labels = clusters(0)
        layer = GPLastLayer(Plane(), features=20, lengthscale=1.5, prior_variance=4.0).fit(x, labels)
        phi = RandomFeatures.draw(2, 20, 1.5, 0)(x.double())  # [n, M]
        told = layer.logit_gaussian(x)
        p = told.mean.softmax(-1)
        onehot = torch.nn.functional.one_hot(labels, 3).double()
        beta = torch.linalg.lstsq(phi, told.mean).solution  # [M, C]
        torch.testing.assert_close(
            phi.mT @ (p - onehot) + beta / 4, torch.zeros(20, 3).double(), rtol=0, atol=1e-3
        )
        for c in range(3):
            precision = phi.mT @ ((p[:, c] * (1 - p[:, c]))[:, None] * phi) + torch.eye(20).double() / 4
            expected = torch.einsum("nm,mk,nk->n", phi, precision.inverse(), phi)
            torch.testing.assert_close(told.variance[:, c], expected, rtol=1e-6, atol=1e-9)

    def test_random_features_approximate_the_kernel(self) -> None:
        x, _ = clusters(0)
        phi = RandomFeatures.draw(2, 50_000, 1.5, 3)(x[:20].double())
        kernel = (-torch.cdist(x[:20].double(), x[:20].double()).square() / (2 * 1.5**2)).exp()
        assert float((phi @ phi.mT - kernel).abs().max()) < 5 / math.sqrt(50_000)

    def test_lengthscale_is_the_median_distance(self) -> None:
        assert median_distance(torch.tensor([[0.0], [1.0], [10.0]])) == 9
        assert median_distance(normal(3000, 4)) == pytest.approx(math.sqrt(2 * 3.36), rel=0.05)
        with pytest.raises(NumericalError, match=r"5 training features is 0.0: give a lengthscale"):
            median_distance(torch.ones(5, 2))

    def test_errors(self) -> None:
        with pytest.raises(RuntimeError, match="GPLastLayer is not fitted yet"):
            GPLastLayer(Plane()).predict(X[:, :2])
        with pytest.raises(ValueError, match="lengthscale to be positive and finite, got 0"):
            GPLastLayer(Plane(), lengthscale=0)
        with pytest.raises(ValueError, match="features to be a whole number >= 1, got 0"):
            GPLastLayer(Plane(), features=0)
        with pytest.raises(ValueError, match="at least 2 items to choose a prior_variance from, got 1"):
            GPLastLayer(Plane(), lengthscale=1.0).fit(X[:1, :2], LABELS[:1])


@pytest.fixture(scope="module", params=["full", "kron", "gp"])
def layer(request):
    model = StubModel()
    made = (
        GPLastLayer(model, features=32)
        if request.param == "gp"
        else LaplaceLastLayer(model, hessian=request.param)
    )
    return made.fit(X, LABELS)


class TestPredictions:
    @pytest.mark.parametrize("batch_size", [1, 7, 13])
    def test_batch_size_changes_nothing(self, layer, batch_size: int) -> None:
        whole = layer.predict(X[:20], samples=6, seed=3)
        assert whole.logits.shape == (6, 20, 3)
        assert whole.logits.dtype == torch.float32
        part = layer.predict(X[:20], samples=6, seed=3, batch_size=batch_size)
        torch.testing.assert_close(part.logits, whole.logits, rtol=1e-5, atol=1e-5)
        later = layer.predict(X[5:20], samples=6, seed=3, first_item=5)
        torch.testing.assert_close(later.logits, whole.logits[:, 5:], rtol=1e-5, atol=1e-5)
        assert not torch.allclose(layer.predict(X[:20], samples=6, seed=4).logits, whole.logits)

    def test_draws_have_the_stated_moments(self, layer) -> None:
        told = layer.logit_gaussian(extract_features(layer._model, X[:3]))
        logits = layer.predict(X[:3], samples=20_000).logits.double()  # [S, 3, C]
        error = (told.variance / 20_000).sqrt()
        assert bool(((logits.mean(0) - told.mean).abs() < 5 * error).all())
        for item in range(3):
            scale = float(told.variance[item].max())
            torch.testing.assert_close(
                logits[:, item].T.cov(), told.covariance[item], rtol=0.05, atol=0.05 * scale
            )

    def test_mean_field_is_near_the_mean_of_draws(self, layer) -> None:
        closed, drawn = layer.predict(X[:20], samples=0), layer.predict(X[:20], samples=5000)
        assert closed.samples == 1
        assert float((closed.probs - drawn.probs).abs().max()) < 0.08


def test_mean_field_of_two_classes_is_the_probit_approximation() -> None:
    mean, root = normal(9, 2, dtype=torch.float64), normal(9, 2, 2, seed=1, dtype=torch.float64)
    told = LogitGaussian(mean, root)
    difference = torch.tensor([1.0, -1.0], dtype=torch.float64)
    variance = difference @ told.covariance @ difference  # [9]
    expected = torch.sigmoid(mean @ difference / (1 + math.pi / 8 * variance).sqrt())
    torch.testing.assert_close(told.mean_field().softmax(-1)[:, 0], expected)
    sure = LogitGaussian(3 * normal(9, 4, dtype=torch.float64), torch.zeros(9, 4, 4, dtype=torch.float64))
    torch.testing.assert_close(sure.mean_field().softmax(-1), sure.mean.softmax(-1))


def test_the_network_itself_does_not_draw() -> None:
    model = StubModel().train()
    layer = LaplaceLastLayer(model).fit(X, LABELS)
    told = layer.logit_gaussian(extract_features(model, X))
    torch.testing.assert_close(
        told.mean.float(), predict(model, X, samples=0).logits[0], rtol=1e-5, atol=1e-5
    )
    assert model.training
