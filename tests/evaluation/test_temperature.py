"""The temperature that made the labels is found again, and the likelihood has no slope there."""

import math

import pytest
import torch
from torch import Tensor

from gpattention.evaluation import (
    ModelPredictor,
    TemperatureScaling,
    fit_temperature,
    temperature_profile,
)
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


def drawn_problem(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of several draws [S, B, C], labels [B], some right, and which items count [B]."""
    g = seeded(seed)
    samples, items, classes = (int(torch.randint(*limits, (1,), generator=g)) for limits in SIZES)
    size, spread = (float(x) for x in torch.rand(2, generator=g))
    shared = torch.randn(1, items, classes, generator=g, dtype=torch.float64)
    own = torch.randn(samples, items, classes, generator=g, dtype=torch.float64)
    logits = 10 ** (2 * size - 0.7) * (shared + 4 * spread * own)
    noise = torch.randint(0, classes, (items,), generator=g)
    right = torch.rand(items, generator=g) < 0.6
    counts = torch.rand(items, generator=g) < 0.8
    counts[0] = True
    return logits, torch.where(right, logits.mean(0).argmax(-1), noise), counts


SIZES = ((2, 9), (6, 60), (2, 7))
FINE = torch.linspace(-math.log(100), math.log(100), 2001, dtype=torch.float64)


def fine_grid(logits: Tensor, labels: Tensor) -> Tensor:
    """Summed negative log-likelihood at every temperature of the grid, the brute way.  [T]"""
    each = (logits / FINE.exp()[:, None, None, None]).softmax(-1)  # [T, S, B, C]
    right = each[..., torch.arange(len(labels)), labels].mean(1)  # [T, B]
    return -right.log().sum(-1)


@pytest.mark.parametrize("start", range(0, 500, 100))
def test_fits_of_several_draws_are_those_of_a_fine_grid(start: int) -> None:
    """None is refused whose optimum lies inside, none stops above it, at any of 500 problems."""
    faults, refused, softened = [], 0, 0
    for seed in range(start, start + 100):
        logits, labels, counts = drawn_problem(seed)
        logits, labels = logits[:, counts], labels[counts]
        nll = fine_grid(logits, labels)
        best = int(nll.argmin())
        inside, least, one = 0 < best < len(nll) - 1, float(nll[best]), float(nll[len(nll) // 2])
        try:
            found = math.log(fit_temperature(logits, labels))
        except NumericalError:
            refused += 1
            faults += [(seed, "refused")] if inside else []
            continue
        right = bool((logits.softmax(-1).mean(0).argmax(-1) == labels).all())
        unshown = right or (float(FINE[best]) < 0 and 2 * (one - least) < 3.84 - 1e-3)
        log_t = torch.tensor(found, dtype=torch.float64)
        if unshown and found != 0:
            faults.append((seed, "not shown"))
        elif not unshown and len(labels) * float(temperature_nll(logits, labels, log_t)) > least + 1e-9:
            faults.append((seed, "above"))
        elif not inside:
            faults.append((seed, "outside"))
        softened += found > 0
    assert faults == []
    assert refused < 40
    assert softened > 20


def test_intervals_are_those_of_a_fine_grid() -> None:
    for seed in range(100):
        logits, labels, counts = drawn_problem(seed)
        logits, labels = logits[: seed % 3 + 1, counts], labels[counts]  # one draw, or several
        profile = temperature_profile(logits, labels)
        nll = fine_grid(logits, labels)
        inside = FINE[2 * (nll - nll.min()) <= 3.84]
        step = float(FINE[1] - FINE[0])
        for end, expected in zip(profile.interval, (inside[0], inside[-1]), strict=True):
            assert math.log(end) == pytest.approx(float(expected), abs=2 * step)
        assert profile.excludes_one == (float(nll[len(nll) // 2] - nll.min()) > 1.92)
        assert profile.interval[0] <= profile.optimum <= profile.interval[1]


def test_sharpening_must_be_shown() -> None:
    """The same logits, too flat by a factor of 1.3: 40 items do not show it, 10,000 do."""
    logits = 2 * normal(1, 10_000, 5, seed=0)
    labels = labels_of(logits.softmax(-1)[0], 5)
    few, many = (temperature_profile(logits[:, :n] / 1.3, labels[:n]) for n in (40, 10_000))
    assert few.optimum < 1
    assert few.interval[0] < few.optimum < 1 < few.interval[1]
    assert few.temperature == fit_temperature(logits[:, :40] / 1.3, labels[:40]) == 1
    assert "but its 95 % interval" in few.reason
    assert "holds 1" in few.reason
    assert many.interval[1] < 1
    assert many.temperature == many.optimum == pytest.approx(1 / 1.3, rel=0.03)
    assert fit_temperature(logits / 1.3, labels) == many.optimum
    assert "excludes 1" in many.reason
    softer = temperature_profile(logits[:, :40] * 1.3, labels[:40])  # softening need not be
    assert softer.interval[0] < 1 < softer.optimum == softer.temperature


def test_where_nothing_is_wrong_the_temperature_is_one() -> None:
    logits, labels = 3 * torch.eye(4)[None], torch.arange(4)
    profile = temperature_profile(logits, labels)
    assert (profile.wrong, profile.temperature) == (0, 1.0)
    assert "all 4 items are right" in profile.reason
    draws = torch.cat([logits, logits, logits.flip(1)])  # right in the mean, one draw of three is not
    assert temperature_profile(draws, labels).temperature == 1


def test_a_limit_is_no_estimate() -> None:
    """Logits that say nothing about the labels: few do not exclude 1, many do."""
    logits = 0.2 * normal(1, 4000, 2, seed=3)
    wrong = 1 - labels_of(logits.softmax(-1)[0], 4)  # worse than guessing
    few, many = (temperature_profile(logits[:, :n], wrong[:n]) for n in (20, 4000))
    assert few.on_bound == many.on_bound == 100
    assert (few.temperature, many.temperature) == (1, pytest.approx(100))
    assert "the limit, 100" in few.reason
    assert "at its limit, 100" in many.reason


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
