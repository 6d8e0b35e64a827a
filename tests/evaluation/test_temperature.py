"""The temperature that made the labels is found again, and the likelihood has no slope there."""

import pytest
import torch
from torch import Tensor

from gpattention.evaluation import ModelPredictor, TemperatureScaling, fit_temperature
from gpattention.gp import NonFiniteError, NumericalError
from gpattention.models.prediction import Prediction
from gpattention.models.temperature import temperature_nll
from tests.models.stub_models import StubModel, normal, seeded


def labels_of(probs: Tensor, seed: int) -> Tensor:
    return torch.multinomial(probs, 1, generator=seeded(seed))[:, 0]


def tempered(temperature: float, samples: int) -> tuple[Tensor, Tensor]:
    """Logits [S, B, C] and labels drawn from their mean softmax at that temperature."""
    logits = 2 * normal(1, 40_000, 5, seed=0) + normal(samples, 40_000, 5, seed=1) * (samples > 1)
    return logits * temperature, labels_of(logits.softmax(-1).mean(0), 2)


@pytest.mark.parametrize("samples", [1, 6])
@pytest.mark.parametrize("temperature", [0.4, 1.0, 3.0, 20.0])
def test_known_temperatures_are_recovered(temperature: float, samples: int) -> None:
    logits, labels = tempered(temperature, samples)
    assert fit_temperature(logits, labels) == pytest.approx(temperature, rel=0.03)


@pytest.mark.parametrize("samples", [1, 6])
def test_the_likelihood_is_flat_and_least_there(samples: int) -> None:
    logits, labels = (x[..., :500, :] if x.ndim == 3 else x[:500] for x in tempered(2.5, samples))
    best = torch.tensor(fit_temperature(logits, labels), dtype=torch.float64).log().requires_grad_()
    least = temperature_nll(logits.double(), labels, best)
    (slope,) = torch.autograd.grad(least, best)
    assert abs(float(slope)) < 1e-7
    for step in (-0.05, 0.05):
        assert float(temperature_nll(logits.double(), labels, best.detach() + step)) > float(least.detach())


def test_the_likelihood_is_that_of_the_averaged_probabilities() -> None:
    logits, labels = normal(4, 30, 3, seed=5, dtype=torch.float64), torch.arange(30) % 3
    averaged = (logits / 2).softmax(-1).mean(0)[torch.arange(30), labels]
    found = temperature_nll(logits, labels, torch.tensor(2.0, dtype=torch.float64).log())
    torch.testing.assert_close(found, -averaged.log().mean())


@pytest.mark.parametrize("samples", [0, 6])
def test_predictors_are_tempered(samples: int) -> None:
    model, x = StubModel(), normal(400, 5, seed=6)
    plain = ModelPredictor(model, variances=True)
    labels = labels_of(plain.predict(x, samples=samples).probs, 7)
    model.head.weight.data *= 4
    model.head.bias.data *= 4
    scaled = TemperatureScaling(plain).fit(x, labels, samples=samples)
    before, after = (predictor.predict(x, samples=samples, batch_size=50) for predictor in (plain, scaled))
    assert scaled.temperature == pytest.approx(4, rel=0.25)
    torch.testing.assert_close(after.logits, before.logits / scaled.temperature)
    assert torch.equal(after.variances[1], before.variances[1])
    nll = [-p.log_probs[torch.arange(400), labels].mean() for p in (before, after)]
    assert nll[1] < nll[0]


def test_fitting_inside_no_grad_works() -> None:
    with torch.no_grad():
        assert fit_temperature(*tempered(2.0, 1)) == pytest.approx(2, rel=0.03)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inference_mode_makes_no_difference(dtype: torch.dtype) -> None:
    logits, labels = tempered(2.0, 1)
    expected = fit_temperature(logits.to(dtype), labels)
    with torch.inference_mode():
        made = logits.to(dtype, copy=True), labels.clone()
        assert fit_temperature(*made) == expected
    assert fit_temperature(*made) == expected


def test_no_optimum_is_an_error() -> None:
    logits, labels = 3 * torch.eye(4)[None], torch.arange(4)
    with pytest.raises(NumericalError, match="all 4 items are classified right"):
        fit_temperature(logits, labels)
    with pytest.raises(NumericalError, match=r"no temperature minimises.*these 4 items.*worse than guessing"):
        fit_temperature(logits, labels.flip(0))


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"\[samples, items, classes\] .* got shape \(3, 4\)"):
        fit_temperature(normal(3, 4), torch.arange(3))
    with pytest.raises(ValueError, match="logits to be a tensor, got ndarray: torch"):
        fit_temperature(normal(1, 3, 4).numpy(), torch.arange(3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"at least one item, got shape \(1, 0, 4\)"):
        fit_temperature(normal(1, 0, 4), torch.arange(0))
    with pytest.raises(ValueError, match=r"at least one sample .* got shape \(0, 3, 4\)"):
        fit_temperature(normal(0, 3, 4), torch.arange(3))
    for bad in (torch.nan, -torch.inf):
        logits = normal(1, 3, 4)
        logits[0, 1, 2] = bad
        with pytest.raises(NonFiniteError, match="logits hold 1 non-finite"):
            fit_temperature(logits, torch.arange(3))
    with pytest.raises(ValueError, match=r"labels to be whole numbers of shape \[3\].*got shape \(4,\)"):
        fit_temperature(normal(1, 3, 4), torch.arange(4))
    with pytest.raises(ValueError, match="labels from 0 to 1, got 2"):
        fit_temperature(normal(1, 3, 2), torch.arange(3))
    with pytest.raises(RuntimeError, match="TemperatureScaling is not fitted yet"):
        TemperatureScaling(ModelPredictor(StubModel())).predict(normal(2, 5))
    with pytest.raises(ValueError, match=r"got StubModel: wrap a model as ModelPredictor\(model\)"):
        TemperatureScaling(StubModel())  # type: ignore[arg-type]
    assert isinstance(ModelPredictor(StubModel()).predict(normal(2, 5)), Prediction)
