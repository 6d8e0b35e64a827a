"""Conformal sets: the exact quantile by hand, coverage within binomial error, refusals."""

import math

import pytest
import torch
from torch import Tensor

from gpattention.evaluation import ConformalSets
from tests.models.stub_models import normal, seeded


def draws(count: int, seed: int, *, classes: int = 6, miscalibrated: float = 1.0) -> tuple[Tensor, Tensor]:
    """Probabilities and labels; the labels follow the tempered probabilities."""
    logits = 2 * normal(count, classes, seed=seed)
    labels = torch.multinomial((logits / miscalibrated).softmax(-1), 1, generator=seeded(seed + 1))[:, 0]
    return logits.softmax(-1), labels


def binary(right: list[float]) -> tuple[Tensor, Tensor]:
    """Probabilities of two classes, the right one being class 0."""
    p = torch.tensor(right, dtype=torch.float64)
    return torch.stack([p, 1 - p], 1), torch.zeros(len(right), dtype=torch.long)


def test_lac_by_hand() -> None:
    """Nine items at alpha = 0.2: the ceil(10 * 0.8) = 8th smallest of 1 - p is the threshold."""
    fitted = ConformalSets.fit(*binary([0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.3]), 0.2)
    assert fitted.threshold == pytest.approx(0.4)
    probs = torch.tensor([[0.61, 0.39], [0.59, 0.41], [0.05, 0.95]])
    assert fitted.sets(probs).tolist() == [[True, False], [False, False], [False, True]]
    assert (fitted.items, fitted.classes, fitted.alpha) == (9, 2, 0.2)


def test_never_empty() -> None:
    fitted = ConformalSets.fit(*binary([0.95] * 9), 0.2, never_empty=True)
    probs = torch.tensor([[0.6, 0.4], [0.97, 0.03], [0.1, 0.9]])
    assert fitted.sets(probs).tolist() == [[True, False], [True, False], [False, True]]
    assert int(ConformalSets.fit(*binary([0.95] * 9), 0.2).sets(probs).sum()) == 1


def test_aps_by_hand() -> None:
    """A class costs the probability of all at least as probable: 0.5, 0.8 and 1 for 0.5, 0.3, 0.2."""
    probs = torch.tensor([[0.3, 0.5, 0.2]], dtype=torch.float64).expand(9, 3)
    labels = torch.tensor([1, 1, 1, 1, 1, 1, 0, 0, 2])
    fitted = ConformalSets.fit(probs, labels, 0.2, score="aps")
    assert fitted.threshold == pytest.approx(0.8)  # the 8th smallest
    assert fitted.sets(probs[:1]).tolist() == [[True, True, False]]
    assert fitted.sets(torch.tensor([[0.85, 0.1, 0.05]])).tolist() == [[False, False, False]]
    assert fitted.sets(torch.tensor([[0.4, 0.35, 0.25]])).tolist() == [[True, True, False]]


@pytest.mark.parametrize("options", [{}, {"score": "aps"}, {"score": "aps", "seed": 3}], ids=str)
@pytest.mark.parametrize("miscalibrated", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("alpha", [0.05, 0.2])
def test_coverage(alpha: float, miscalibrated: float, options: dict) -> None:
    """Whatever the model; the threshold of n items and the count of m items both scatter."""
    n, m = 4000, 20_000
    fitted = ConformalSets.fit(*draws(n, 0, miscalibrated=miscalibrated), alpha, **options)
    probs, labels = draws(m, 10, miscalibrated=miscalibrated)
    sets = fitted.sets(probs)
    found = float(sets[torch.arange(m), labels].double().mean())
    error = math.sqrt(alpha * (1 - alpha) * (1 / n + 1 / m))
    assert 1 - alpha - 4 * error < found
    if options != {"score": "aps"}:  # whose scores are 1 for many items
        assert found < 1 - alpha + 4 * error


def test_mean_coverage_over_many_small_fits() -> None:
    """Exactly ceil((n + 1)(1 - alpha)) / (n + 1) for scores without ties: 18 / 20 of 19 items at 0.1."""
    found = []
    for seed in range(300):
        fitted = ConformalSets.fit(*draws(19, 7 * seed), 0.1)
        probs, labels = draws(200, 7 * seed + 3)
        found.append(fitted.sets(probs)[torch.arange(200), labels].double().mean())
    each = torch.stack(found)
    assert abs(float(each.mean()) - 0.9) < 4 * float(each.std()) / math.sqrt(300)


def test_aps_sets_hold_the_most_probable_classes() -> None:
    probs, labels = draws(500, 0)
    sets = ConformalSets.fit(probs, labels, 0.1, score="aps").sets(probs)
    inside = torch.where(sets, probs, 1.0).min(-1).values
    outside = torch.where(sets, 0.0, probs).max(-1).values
    assert bool((inside >= outside).all())


def test_randomised_sets_belong_to_items() -> None:
    probs, labels = draws(300, 0)
    fitted = ConformalSets.fit(probs, labels, 0.1, score="aps", seed=5)
    whole = fitted.sets(probs)
    assert torch.equal(fitted.sets(probs[100:], first_item=100), whole[100:])
    assert not torch.equal(whole, ConformalSets.fit(probs, labels, 0.1, score="aps").sets(probs))
    assert int(whole.sum()) < int(ConformalSets.fit(probs, labels, 0.1, score="aps").sets(probs).sum())


def test_held_out_and_new_items_do_not_share_noise() -> None:
    """With the noise of fitting, exactly ceil(301 * 0.9) of the fitted items would be covered."""
    probs, labels = draws(300, 0)
    sets = ConformalSets.fit(probs, labels, 0.1, score="aps", seed=5).sets(probs)
    assert int(sets[torch.arange(300), labels].sum()) != 271


@pytest.mark.parametrize(("alpha", "least"), [(0.1, 9), (0.05, 19), (0.2, 4), (0.01, 99)])
def test_too_few_items(alpha: float, least: int) -> None:
    ConformalSets.fit(*binary([0.7] * least), alpha)
    with pytest.raises(
        ValueError, match=f"at least {least} held-out items for alpha={alpha}, got {least - 1}"
    ):
        ConformalSets.fit(*binary([0.7] * (least - 1)), alpha)


def test_rounded_probabilities_are_taken() -> None:
    probs, labels = draws(50, 0)
    rounded = probs.bfloat16()  # whose sums are off by more than a thousandth
    assert ConformalSets.fit(rounded, labels, 0.1).sets(rounded).shape == probs.shape


def test_errors() -> None:
    probs, labels = draws(50, 0)
    with pytest.raises(ValueError, match=r"alpha in \(0, 1\), got 1"):
        ConformalSets.fit(probs, labels, 1)
    with pytest.raises(ValueError, match="score to be one of lac, aps, got 'raps'"):
        ConformalSets.fit(probs, labels, 0.1, score="raps")
    with pytest.raises(ValueError, match="seed only with score='aps', got seed=1 with score='lac'"):
        ConformalSets.fit(probs, labels, 0.1, seed=1)
    with pytest.raises(ValueError, match=r"probs >= 0 that add up to 1, got \[.*\] for item 3"):
        ConformalSets.fit(probs.index_fill(0, torch.tensor(3), 0.3), labels, 0.1)
    with pytest.raises(ValueError, match="for item 0"):
        ConformalSets.fit(probs * math.nan, labels, 0.1)
    with pytest.raises(ValueError, match=r"probs to be floating-point \[items, classes\], got shape \(50,\)"):
        ConformalSets.fit(probs[:, 0], labels, 0.1)
    with pytest.raises(ValueError, match="probs to be a tensor, got ndarray: torch"):
        ConformalSets.fit(probs.numpy(), labels, 0.1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="labels from 0 to 5, got 6"):
        ConformalSets.fit(probs, labels + 6 * (labels == labels[0]) - labels[0] * (labels == labels[0]), 0.1)
    with pytest.raises(ValueError, match="probs of 6 classes as fitted on, got 2"):
        ConformalSets.fit(probs, labels, 0.1).sets(torch.full((3, 2), 0.5))
