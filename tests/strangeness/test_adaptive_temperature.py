"""A temperature that knows shift: what it gains, what it may cost, and that shifts are really left out."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gpattention.evaluation import AdaptiveTemperature, Strangeness, fit_temperature, temperature_profile
from gpattention.models import Signals
from gpattention.strangeness import adaptive_temperature as module
from tests.evaluation.cases import seeded
from tests.oracles import strangeness as oracles
from tests.refusals import refusals
from tests.threads import at_once

Items = tuple[Tensor, Signals, Tensor]
HEADS = 3
SITES = tuple(f"attention head {k}" for k in range(HEADS))


def items(
    count: int, seed: int, shift: float = 0.0, *, classes: int = 3, samples: int | None = None,
    sharpness: float = 2.0, problem: int = 0,
) -> Items:  # fmt: skip
    """A classifier that is as sure under shift as without, and far less often right; its heads notice."""
    g = seeded(1000 * problem + seed)
    labels = torch.randint(classes, (count,), generator=g)
    noise = 1 + shift * torch.rand(count, 1, generator=g)  # not all items are shifted alike
    right = torch.nn.functional.one_hot(labels, classes) + 0.7 * noise * torch.randn(
        count, classes, generator=g
    )
    features = torch.cat([right, noise + 0.1 * torch.randn(count, 1, generator=g)], 1)
    profile = torch.randn(count, HEADS, generator=g)
    profile[:, 1] += 4 * (noise[:, 0] - 1)
    logits = sharpness * right
    if samples is not None:
        logits = logits + 0.5 * torch.randn(samples, count, classes, generator=g)
    tokens = torch.full((count,), 16)
    return (
        logits,
        Signals(right, features, profile, torch.randn(count, HEADS, generator=g), tokens, SITES),
        labels,
    )


SHIFTS = (0.5, 1.0, 2.0)


def shifted(count: int = 200, **options: Any) -> dict[str, Items]:
    return {f"by {by}": items(count, 50 + i, by, **options) for i, by in enumerate(SHIFTS)}


def nll(found: Items, temperature: Tensor | float) -> float:
    logits, _, labels = found
    draws = (logits if logits.ndim == 3 else logits[None]).double().numpy()
    each = torch.as_tensor(temperature).double().expand(len(labels)).numpy()
    return oracles.nll(draws, labels.numpy(), each)


def as_draws(logits: Tensor) -> Tensor:
    return logits if logits.ndim == 3 else logits[None]


CLEAN = items(600, 0)
FITTED = AdaptiveTemperature.fit(*CLEAN, shifted=shifted())


@pytest.mark.parametrize("samples", [None, 4])
def test_shift_is_known(samples: int | None) -> None:
    clean = items(600, 0, samples=samples)
    fitted = AdaptiveTemperature.fit(*clean, shifted=shifted(samples=samples))
    constant = fit_temperature(as_draws(clean[0]), clean[2])
    assert fitted.constant == pytest.approx(constant)
    means = []
    for by in (0.0, 0.75, 1.5):  # neither items nor strengths are those of the fit
        new = items(500, 90, by, samples=samples)
        found = fitted.temperature(*new[:2])
        means.append(float(found.mean()))
        if by:
            assert nll(new, found) < nll(new, constant) - 0.01
        else:
            assert nll(new, found) < nll(new, constant) + 0.01
    assert means == sorted(means)


@pytest.mark.parametrize("problem", range(12))
def test_clean_items_lose_no_more_than_the_bound(problem: int) -> None:
    """Over seeded problems, for all clean items and for those that no density has seen."""
    g = np.random.default_rng(problem)
    options: dict[str, Any] = {
        "classes": int(g.integers(2, 6)), "sharpness": float(g.uniform(0.3, 5)), "problem": problem,
        "samples": [None, 3][problem % 2],
    }  # fmt: skip
    clean = items(int(g.integers(40, 300)), 0, **options)
    bound = [0.0, 0.001, 0.005, 0.05][problem % 4]
    others = shifted(int(g.integers(20, 80)), **options)
    fitted = AdaptiveTemperature.fit(*clean, shifted=others, clean_bound=bound)
    found = fitted.temperature(*clean[:2])
    profile = temperature_profile(as_draws(clean[0]), clean[2])
    unseen = Strangeness.split(len(clean[2]))[2]
    assert fitted.constant == profile.temperature
    for some in (torch.arange(len(found)), unseen):
        part = (clean[0][..., some, :], clean[1][some], clean[2][some])
        assert nll(part, found[some]) <= nll(part, fitted.constant) + bound + 1e-9
    assert bool((found >= min(1, fitted.constant)).all())
    assert bool((found <= 100).all())


def test_a_larger_bound_allows_more() -> None:
    """What clean items pay buys NLL under shift."""
    tight, loose = (
        AdaptiveTemperature.fit(*CLEAN, shifted=shifted(), clean_bound=bound) for bound in (0.0, 1.0)
    )
    costs = [
        nll(CLEAN, fitted.temperature(*CLEAN[:2])) - nll(CLEAN, fitted.constant) for fitted in (tight, loose)
    ]
    assert costs[0] <= 1e-9 < costs[1]
    far = items(500, 91, 1.0)
    assert nll(far, loose.temperature(*far[:2])) < nll(far, tight.temperature(*far[:2]))


def test_a_density_never_makes_surer() -> None:
    """Shifts that are *easier* than clean items, and strange: T stays where it was."""
    others = {}
    for i in range(3):
        logits, signals, labels = items(200, 60 + i)
        easy = 4 * torch.nn.functional.one_hot(labels, 3).float() + 0.1 * logits
        others[str(i)] = (easy, replace(signals, variance=signals.variance + 3), labels)
    fitted = AdaptiveTemperature.fit(*CLEAN, shifted=others, parts=["variance_density"])
    assert bool((fitted.coefficients[1:] >= 0).all())
    logits, signals, _ = others["0"]
    assert bool((fitted.temperature(logits, signals) >= 0.98 * fitted.temperature(*CLEAN[:2]).min()).all())


def test_shifts_are_judged_by_fits_without_them() -> None:
    """A poisoned shift is judged by the same fit as before."""
    others = shifted()
    poisoned = dict(others)
    logits, signals, labels = others["by 2.0"]
    poisoned["by 2.0"] = (30 * logits.flip(-1), signals, labels)
    one, other = (_problem(sets) for sets in (others, poisoned))
    columns, free = [0, 1], [True, False]
    assert one.without(3).solve(columns, free).equal(other.without(3).solve(columns, free))
    for left in (1, 2):
        assert not one.without(left).solve(columns, free).equal(other.without(left).solve(columns, free))


def test_fits_that_leave_shifts_out_are_those_without_them() -> None:
    """To the bit, although densities and curves are made once."""
    others = shifted(samples=3)
    clean = items(300, 0, samples=3)
    whole, without = AdaptiveTemperature.cross_fit(*clean, shifted=others)
    assert list(without) == list(others)
    plain = {name: {k: v for k, v in others.items() if k != name} for name in others}
    pairs = [(whole, others), *((without[name], left) for name, left in plain.items())]
    assert len({found.judged["by 2.0"] for found, left in pairs if "by 2.0" in left}) == 3
    for found, left in pairs:
        expected = AdaptiveTemperature.fit(*clean, shifted=left)
        assert found.judged == expected.judged
        assert found.scores.parts == expected.scores.parts
        assert found.coefficients.equal(expected.coefficients)
        assert found.reach.equal(expected.reach)
        assert found.temperature(*clean[:2]).equal(expected.temperature(*clean[:2]))
    with pytest.raises(ValueError, match="at least three shifts, got"):
        AdaptiveTemperature.cross_fit(*clean, shifted=plain["by 2.0"])


def _problem(others: dict[str, Items]) -> Any:
    every = [CLEAN, *others.values()]
    sets = [(x[0][None].double(), x[1].variance[:, :2].double(), x[2]) for x in every]
    return module._Problem.make(sets, torch.arange(200), 1.3, 0.01)


def test_curves_are_the_likelihoods() -> None:
    """The tabulated curves and their derivatives against exact numbers between the points."""
    problem = _problem(shifted(30))
    u = torch.linspace(0.03, 4.5, len(problem.z)).double()
    value, slope, bend = problem._at(u)
    every = [CLEAN, *shifted(30).values()]
    logits, labels = torch.cat([x[0] for x in every]).double(), torch.cat([x[2] for x in every])
    u = u.requires_grad_()
    exact = torch.nn.functional.cross_entropy(logits / u.exp()[:, None], labels, reduction="none")
    (first,) = torch.autograd.grad(exact.sum(), u, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), u)
    torch.testing.assert_close(value, exact.detach(), rtol=0, atol=1e-4)
    torch.testing.assert_close(slope, first.detach(), rtol=0, atol=1e-2)
    torch.testing.assert_close(bend, second, rtol=0, atol=0.3)


def test_signals_that_say_nothing_are_left_out() -> None:
    logits, signals, labels = CLEAN
    others = {
        name: (x[0], replace(x[1], variance=torch.randn(200, HEADS, generator=seeded(7 + i))), x[2])
        for i, (name, x) in enumerate(shifted().items())
    }
    fitted = AdaptiveTemperature.fit(
        logits, replace(signals, variance=torch.randn(600, HEADS, generator=seeded(6))), labels,
        shifted=others, parts=["variance_density", "attention_density"],
    )  # fmt: skip
    assert fitted.scores.parts == ()
    assert len(fitted.temperature(*CLEAN[:2]).unique()) == 1
    assert set(FITTED.scores.parts) & {"variance_density", "mahalanobis", "knn", "mahalanobis_normed"}


def test_all_items_right() -> None:
    """No temperature is best; nothing is sharpened."""

    def right(x: Items) -> Items:
        return 9 * torch.nn.functional.one_hot(x[2], 3).float(), x[1], x[2]

    fitted = AdaptiveTemperature.fit(*right(CLEAN), shifted={k: right(v) for k, v in shifted().items()})
    assert fitted.constant == 1
    assert bool((fitted.temperature(*right(CLEAN)[:2]) >= 1).all())


def test_far_beyond_what_was_seen() -> None:
    logits, signals, _ = items(20, 92, 1.0)
    far = [
        replace(signals, variance=signals.variance + by, features=signals.features + by) for by in (1e3, 1e6)
    ]
    found = [FITTED.temperature(logits, one) for one in far]
    assert bool((found[0].isfinite() & (found[0] <= 100)).all())
    assert found[0].numpy() == pytest.approx(found[1].numpy())


@pytest.mark.parametrize("parts", [None, ["entropy"]])
def test_saved_is_the_same_to_the_bit(parts: Any, tmp_path: Path) -> None:
    fitted = AdaptiveTemperature.fit(*CLEAN, shifted=shifted(), parts=parts)
    fitted.save(tmp_path)
    again = AdaptiveTemperature.load(tmp_path)
    new = items(100, 93, 0.5)
    assert again.temperature(*new[:2]).equal(fitted.temperature(*new[:2]))
    assert (again.judged, again.constant) == (fitted.judged, fitted.constant)
    assert list(again.judged) == list(shifted())


def test_threads_share_one() -> None:
    expected = FITTED.temperature(*CLEAN[:2])
    assert all(t.equal(expected) for t in at_once([lambda: FITTED.temperature(*CLEAN[:2])] * 6))


LOGITS, SIGNALS, LABELS = CLEAN
test_refusals = refusals(
    [
        (lambda: AdaptiveTemperature.fit(*CLEAN, shifted={}), "at least two shifts", r"\[\]"),
        (lambda: AdaptiveTemperature.fit(*CLEAN, shifted={"a": CLEAN}), "at least two shifts", "'a'"),
        (lambda: AdaptiveTemperature.fit(*CLEAN, shifted=shifted(), clean_bound=-1), "clean_bound", "-1"),
        (
            lambda: AdaptiveTemperature.fit(*CLEAN, shifted=shifted(), clean_bound=float("nan")),
            "clean_bound", "nan",
        ),
        (
            lambda: AdaptiveTemperature.fit(LOGITS[:9], SIGNALS, LABELS, shifted=shifted()),
            "logits of clean to be of 600", r"\(9, 3\)",
        ),
        (
            lambda: AdaptiveTemperature.fit(LOGITS[:, :1], SIGNALS, LABELS, shifted=shifted()),
            "at least 2 classes", r"\(600, 1\)",
        ),
        (
            lambda: AdaptiveTemperature.fit(LOGITS, SIGNALS, LABELS + 1, shifted=shifted()),
            "labels from 0 to 2", "3",
        ),
        (
            lambda: AdaptiveTemperature.fit(*CLEAN, shifted=shifted() | {"x": (LOGITS, SIGNALS, LABELS[:2])}),
            "labels", r"\(2,\)",
        ),
        (lambda: AdaptiveTemperature.fit(*CLEAN, shifted=shifted(), parts=["odd"]), "parts", "odd"),
        (lambda: AdaptiveTemperature.load("/nowhere"), "nowhere", "adaptive_temperature.json"),
        (lambda: FITTED.temperature(LOGITS[:5], SIGNALS), "of 600 items", r"\(5, 3\)"),
    ],
    error=(ValueError, OSError),  # type: ignore[arg-type]
)  # fmt: skip
