"""Single detectors against NumPy and scikit-learn, and where there is little to fit to."""

import numpy as np
import pytest
import torch
from sklearn.covariance import ledoit_wolf as sklearn_ledoit_wolf
from torch import Tensor

from gpattention.strangeness import detectors
from tests.evaluation.cases import seeded, softmax
from tests.oracles import strangeness as oracles

ITEMS, WIDTH, CLASSES = 60, 6, 3


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=seeded(seed), dtype=torch.float64)


MIX = normal(WIDTH, WIDTH, seed=9)
LABELS = torch.arange(ITEMS) % CLASSES
USUAL = 3 * normal(CLASSES, WIDTH, seed=1)[LABELS] + normal(ITEMS, WIDTH, seed=2) @ MIX
STRANGE = 2 * normal(20, WIDTH, seed=3) + 1
WEIGHT, BIAS = normal(CLASSES, WIDTH, seed=4), normal(CLASSES, seed=5)


def logits(x: Tensor) -> Tensor:
    return x @ WEIGHT.mT + BIAS


@pytest.mark.parametrize(("items", "width"), [(60, 6), (10, 25), (400, 3), (5, 1)])
def test_covariances_are_those_of_the_article(items: int, width: int) -> None:
    x = normal(items, width, seed=items) @ normal(width, width, seed=width)
    x = x - x.mean(0)
    found, shrinkage = detectors.ledoit_wolf(x)
    expected, theirs = sklearn_ledoit_wolf(x.numpy(), assume_centered=True)
    assert found.numpy() == pytest.approx(expected, rel=1e-5)  # one column is all target: s is 1e-6 there
    assert shrinkage == pytest.approx(max(theirs, 1e-6))
    if width > 1:
        assert found.numpy() == pytest.approx(oracles.ledoit_wolf(x.numpy())[0])


def test_distances_equal_brute_force() -> None:
    usual, strange, labels = USUAL.numpy(), STRANGE.numpy(), LABELS.numpy()
    by_class, of_all = detectors.fit_gaussians(USUAL, LABELS), detectors.fit_gaussians(USUAL)
    assert detectors.mahalanobis(STRANGE, by_class).numpy() == pytest.approx(
        oracles.mahalanobis(strange, usual, labels)
    )
    assert detectors.relative_mahalanobis(STRANGE, by_class, of_all).numpy() == pytest.approx(
        oracles.relative_mahalanobis(strange, usual, labels)
    )
    assert detectors.log_distance(STRANGE, of_all).numpy() == pytest.approx(
        np.log(np.sqrt(1 + oracles.mahalanobis(strange, usual, 0 * labels)))
    )


@pytest.mark.parametrize("neighbour", [1, 7, 1000])
def test_neighbours_equal_brute_force(neighbour: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detectors, "ROWS", 6)  # items come in parts
    found = detectors.knn_distance(STRANGE, USUAL, neighbour)
    expected = oracles.knn(STRANGE.numpy(), USUAL.numpy(), min(neighbour, ITEMS))
    assert found.numpy() == pytest.approx(expected)


def test_vim_equals_brute_force() -> None:
    residual = detectors.fit_residual(USUAL, logits(USUAL), WEIGHT, BIAS)
    found = detectors.vim(STRANGE, logits(STRANGE), residual)
    expected = oracles.vim(STRANGE.numpy(), USUAL.numpy(), WEIGHT.numpy(), BIAS.numpy())
    assert found.numpy() == pytest.approx(expected)


def test_scores_of_logits() -> None:
    z = logits(STRANGE)
    probs = softmax(z.numpy())
    expected = {
        detectors.prediction_entropy: -(probs * np.log(probs)).sum(-1),
        detectors.max_softmax: 1 - probs.max(-1),
        detectors.energy: -np.log(np.exp(z.numpy()).sum(-1)),
        detectors.generalised_entropy: oracles.generalised_entropy(probs, 0.1, 100),
        lambda z: detectors.generalised_entropy(z, 0.3, 2): oracles.generalised_entropy(probs, 0.3, 2),
    }
    for function, values in expected.items():
        assert function(z).numpy() == pytest.approx(values)
    sure = torch.tensor([[2000.0, 0, 0]], dtype=torch.float64)
    assert all(bool(function(sure).isfinite().all()) for function in expected)


def test_distances_do_not_depend_on_units() -> None:
    """But for the shrinkage, which hardly counts with many items."""
    many = normal(20_000, 4, seed=7) @ normal(4, 4, seed=8)
    scale = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)
    a = detectors.mahalanobis(many[:50], detectors.fit_gaussians(many))
    b = detectors.mahalanobis(scale * many[:50] + 5, detectors.fit_gaussians(scale * many + 5))
    torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    "usual",
    [
        torch.ones(5, 3).double(),  # constant
        normal(1, 4),  # one item
        normal(40, 1) @ normal(1, 5, seed=1),  # collinear
        torch.tensor([[1.0, 1.0], [-1.0, -1.0]]).double(),  # of which no shrinkage is asked
        normal(3, 50),  # fewer items than columns
    ],
    ids=["constant", "one", "collinear", "pair", "wide"],
)
def test_little_to_fit_to(usual: Tensor) -> None:
    fitted = detectors.fit_gaussians(usual, torch.arange(len(usual)) % 2)
    near, far = (detectors.mahalanobis(usual + shift, fitted) for shift in (0, 10))
    assert bool((near.isfinite() & far.isfinite() & (far > near)).all())


def test_no_items() -> None:
    with pytest.raises(ValueError, match=r"at least one item.*\(0, 3\)"):
        detectors.fit_gaussians(torch.zeros(0, 3))
