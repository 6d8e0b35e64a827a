"""Suite `selective`, and the rules that it evaluates: thresholds and conformal sets."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from gpattention.evaluation import ConformalSets, SelectivePredictor, risk_coverage_curve
from gpattention.evaluation.predictions import Predicted
from gpattention.evaluation.suites import selective_findings
from gpattention.evaluation.suites.selective import SCORES, upper_bound
from gpattention.models.prediction import Prediction
from tests.evaluation.cases import mean_probs, predicted
from tests.models.stub_models import normal, seeded

VALIDATION, TEST = predicted(150, seed=3), predicted(120, seed=30)


def expected_findings() -> dict[str, float]:
    """Of answers and conformal sets, by NumPy."""
    probs, labels = mean_probs(VALIDATION), VALIDATION.known_labels.numpy()
    order = np.argsort(-probs.max(-1))
    risk = (probs.argmax(-1) != labels)[order].cumsum() / np.arange(1, 151)  # of answering up to each
    last = {f"coverage_{c}": 150 * c // 100 - 1 for c in (80, 90)}
    good = {f"risk_{r:02d}": np.nonzero(risk <= r / 100)[0] for r in (1, 5, 10)}
    last |= {name: places[-1] for name, places in good.items() if len(places)}
    found = {f"coverage_at_{name}": 0.0 for name in good}
    new, truth = mean_probs(TEST), TEST.known_labels.numpy()
    for name, place in last.items():
        kept = new.max(-1) >= probs.max(-1)[order][place] - 1e-12
        found[f"coverage_at_{name}"] = kept.mean()
        found[f"risk_at_{name}"] = (new.argmax(-1) != truth)[kept].mean()
    scores = np.sort(1 - probs[np.arange(150), labels])
    for alpha in (0.05, 0.1):
        sets = 1 - new <= scores[int(np.ceil(151 * (1 - alpha))) - 1] + 1e-12
        found[f"conformal_coverage {alpha}"] = sets[np.arange(120), truth].mean()
        found[f"conformal_size {alpha}"] = sets.sum(-1).mean()
    return found


def test_answers_and_sets_against_numpy() -> None:
    records = selective_findings("model", VALIDATION, TEST).records
    found = {" ".join([r.metric, *map(str, r.detail.values())]): r.value for r in records}
    assert 0 < found.pop("aurc") < 1
    expected = expected_findings()
    assert "risk_at_risk_10" in expected
    assert found == pytest.approx(expected)


def test_curve() -> None:
    many = predicted(700, seed=5)
    curve = selective_findings("mean", VALIDATION, many).curves["risk_coverage"]["mean"]
    assert len(curve["risk"]) == len(curve["coverage"]) == 200
    assert curve["coverage"] == sorted(curve["coverage"])
    wrong = float((many.prediction.label != many.known_labels).double().mean())
    assert (curve["coverage"][-1], curve["risk"][-1]) == (1, pytest.approx(wrong))


def test_where_nothing_is_answered_there_is_no_risk() -> None:
    """Of a model that is always wrong, and with a threshold above every test item's confidence."""
    logits = normal(1, 40, 2)
    bad = Predicted.from_logits(logits, 1 - logits[0].argmax(-1))
    sure = Predicted.from_logits(10 * torch.eye(2).repeat(20, 1)[None], torch.arange(40) % 2)
    unsure = Predicted.from_logits(torch.eye(2).repeat(5, 1)[None], torch.arange(10) % 2)
    for validation, test in ((bad, bad), (sure, unsure)):
        values = {r.metric: r.value for r in selective_findings("model", validation, test).records}
        assert values["coverage_at_risk_05"] == 0
        assert "risk_at_risk_05" not in values
        assert values.get("risk_at_coverage_80") == (1 if test is bad else None)


def test_too_few_items_for_a_conformal_set() -> None:
    made = selective_findings("model", predicted(12, seed=4), TEST)
    assert {r.detail["alpha"] for r in made.records if r.metric == "conformal_size"} == {0.1}
    assert made.notes[0].startswith("no conformal sets of model for alpha=0.05: expected at least 19")


# Selective prediction: thresholds that keep coverage and risk, and bounds that hold


def problem(count: int = 400, seed: int = 0, sharp: float = 2.0) -> tuple[Prediction, Tensor]:
    """Labels drawn from the predictions themselves: sure items are right more often."""
    centre = sharp * normal(1, count, 4, seed=seed, dtype=torch.float64)
    spread = 0.7 * normal(5, count, 4, seed=seed + 1, dtype=torch.float64)
    prediction = Prediction.from_logits(centre + spread)
    return prediction, torch.multinomial(prediction.probs, 1, generator=seeded(seed + 2))[:, 0]


def binary(confidences: list[float]) -> Prediction:
    """Class 0 with these confidences."""
    p = torch.tensor(confidences, dtype=torch.float64)
    return Prediction.from_logits(torch.stack([p, 1 - p], 1).log()[None])


def risk_of(prediction: Prediction, labels: Tensor, accepted: Tensor) -> float:
    return float((prediction.label != labels)[accepted].double().mean())


def test_a_curve_by_hand_with_ties() -> None:
    """Surest first: right, (wrong, right) of equal score, wrong."""
    prediction, labels = binary([0.7, 0.9, 0.6, 0.7]), torch.tensor([1, 0, 1, 0])
    curve = risk_coverage_curve(prediction, labels)
    assert curve.coverage.tolist() == [0.25, 0.75, 1.0]
    assert curve.risk.tolist() == [0, 1 / 3, 0.5]
    assert curve.threshold.tolist() == pytest.approx([0.9, 0.7, 0.6])
    assert (curve.accepted.tolist(), curve.errors.tolist()) == ([1, 3, 4], [0, 1, 2])
    assert SelectivePredictor.fit(prediction, labels, coverage=0.5).coverage == 0.75


@pytest.mark.parametrize("score", SCORES)
def test_a_curve_against_accepting_item_by_item(score: str) -> None:
    prediction, labels = problem()
    curve = risk_coverage_curve(prediction, labels, score=score)
    value = getattr(prediction, score)
    for place in (0, 17, 200, 399):
        t = curve.threshold[place]
        taken = value >= t if score == "confidence" else value <= t
        assert int(taken.sum()) == int(curve.accepted[place]) == place + 1
        assert float(curve.risk[place]) == pytest.approx(risk_of(prediction, labels, taken))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("score", SCORES)
def test_the_coverage_wanted_is_accepted(score: str, dtype: torch.dtype) -> None:
    """In float32 too a threshold accepts its own item."""
    whole, labels = problem()
    prediction = Prediction.from_logits(whole.logits.to(dtype))
    for coverage in (0.1, 0.33, 0.7, 0.95, 1.0):
        chosen = SelectivePredictor.fit(prediction, labels, coverage=coverage, score=score)
        accepted = chosen.accept(prediction)
        found = float(accepted.double().mean())
        assert found == pytest.approx(chosen.coverage)
        assert coverage <= found <= coverage + (0 if dtype == torch.float64 else 0.01)
        assert chosen.risk == pytest.approx(risk_of(prediction, labels, accepted))
        assert chosen.risk_bound is None


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("risk", [0.1, 0.2, 0.25])
def test_a_risk_is_kept_at_the_largest_coverage(risk: float, score: str) -> None:
    prediction, labels = problem()
    chosen = SelectivePredictor.fit(prediction, labels, risk=risk, score=score)
    assert risk_of(prediction, labels, chosen.accept(prediction)) == pytest.approx(chosen.risk)
    assert chosen.risk <= risk
    curve = risk_coverage_curve(prediction, labels, score=score)
    assert bool((curve.risk[curve.coverage > chosen.coverage] > risk).all())


def test_a_risk_met_exactly_is_met() -> None:
    labels = torch.zeros(10).long()
    labels[3] = 1
    chosen = SelectivePredictor.fit(binary([0.9 - 0.01 * i for i in range(10)]), labels, risk=0.1)
    assert (chosen.coverage, chosen.risk) == (1.0, 0.1)


def test_bounds_hold_on_new_items() -> None:
    """The true risk of a threshold, which the predictions themselves know, is above the wanted one for
    at most a fraction delta of fits; without a bound it is above in about half of them.
    """
    wanted, delta, fits = 0.15, 0.2, 40
    fresh, _ = problem(20_000, seed=999, sharp=4)
    broken = {"bound": 0, "no bound": 0}
    for seed in range(fits):
        held_out = problem(800, seed=10 * seed, sharp=4)
        bounded = SelectivePredictor.fit(*held_out, risk=wanted, delta=delta)
        assert bounded.risk <= bounded.risk_bound <= wanted
        free = SelectivePredictor.fit(*held_out, risk=wanted)
        for name, chosen in (("bound", bounded), ("no bound", free)):
            broken[name] += float(1 - fresh.confidence[chosen.accept(fresh)].mean()) > wanted
    assert broken["bound"] <= delta * fits < broken["no bound"]


def test_bounds_hold_for_the_best_of_many_thresholds() -> None:
    """A score without information: every threshold has risk 0.2, so finding 0.19 is always wrong."""
    fits, delta, found = 50, 0.2, 0
    for seed in range(fits):
        sure = torch.rand(400, generator=seeded(seed), dtype=torch.float64) / 2 + 0.5
        wrong = torch.rand(400, generator=seeded(1000 + seed)) < 0.2
        try:
            SelectivePredictor.fit(binary(sure.tolist()), wrong.long(), risk=0.19, delta=delta)
            found += 1
        except ValueError:
            pass
    assert found <= delta * fits


@pytest.mark.parametrize("delta", [0.2, 0.05, 1e-4])
def test_bounds_against_scipy(delta: float) -> None:
    """Clopper-Pearson is the quantile of a beta distribution."""
    errors, accepted = torch.tensor([0, 1, 3, 50, 0, 900]), torch.tensor([10, 10, 200, 1000, 1, 5000])
    found = upper_bound(errors, accepted, delta)
    assert found.tolist() == pytest.approx(stats.beta.ppf(1 - delta, errors + 1, accepted - errors), rel=1e-7)
    all_wrong = torch.tensor([7])
    assert upper_bound(all_wrong, all_wrong, delta).tolist() == [1]


# Conformal sets: the exact quantile by hand, and coverage within binomial error


def draws(count: int, seed: int, *, classes: int = 6, miscalibrated: float = 1.0) -> tuple[Tensor, Tensor]:
    """Probabilities and labels; the labels follow the tempered probabilities."""
    logits = 2 * normal(count, classes, seed=seed)
    labels = torch.multinomial((logits / miscalibrated).softmax(-1), 1, generator=seeded(seed + 1))[:, 0]
    return logits.softmax(-1), labels


def two_classes(right: list[float]) -> tuple[Tensor, Tensor]:
    """Probabilities of two classes, the right one being class 0."""
    p = torch.tensor(right, dtype=torch.float64)
    return torch.stack([p, 1 - p], 1), torch.zeros(len(right), dtype=torch.long)


def test_lac_by_hand() -> None:
    """Nine items at alpha = 0.2: the ceil(10 * 0.8) = 8th smallest of 1 - p is the threshold."""
    fitted = ConformalSets.fit(*two_classes([0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.3]), 0.2)
    assert fitted.threshold == pytest.approx(0.4)
    probs = torch.tensor([[0.61, 0.39], [0.59, 0.41], [0.05, 0.95]])
    assert fitted.sets(probs).tolist() == [[True, False], [False, False], [False, True]]
    assert (fitted.items, fitted.classes, fitted.alpha) == (9, 2, 0.2)


def test_aps_by_hand() -> None:
    """A class costs the probability of all at least as probable: 0.5, 0.8 and 1 for 0.5, 0.3, 0.2."""
    probs = torch.tensor([[0.3, 0.5, 0.2]], dtype=torch.float64).expand(9, 3)
    fitted = ConformalSets.fit(probs, torch.tensor([1, 1, 1, 1, 1, 1, 0, 0, 2]), 0.2, score="aps")
    assert fitted.threshold == pytest.approx(0.8)  # the 8th smallest
    new = torch.tensor([[0.3, 0.5, 0.2], [0.85, 0.1, 0.05], [0.4, 0.35, 0.25]], dtype=torch.float64)
    assert fitted.sets(new).tolist() == [[True, True, False], [False] * 3, [True, True, False]]


@pytest.mark.parametrize("score", ["lac", "aps"])
@pytest.mark.parametrize("miscalibrated", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("alpha", [0.05, 0.2])
def test_coverage(alpha: float, miscalibrated: float, score: str) -> None:
    """Whatever the model; the threshold of n items and the count of m items both scatter."""
    n, m = 4000, 20_000
    fitted = ConformalSets.fit(*draws(n, 0, miscalibrated=miscalibrated), alpha, score=score)
    probs, labels = draws(m, 10, miscalibrated=miscalibrated)
    found = float(fitted.sets(probs)[torch.arange(m), labels].double().mean())
    error = math.sqrt(alpha * (1 - alpha) * (1 / n + 1 / m))
    assert 1 - alpha - 4 * error < found
    if score != "aps":  # whose scores are 1 for many items
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


@pytest.mark.parametrize(("alpha", "least"), [(0.1, 9), (0.05, 19), (0.2, 4), (0.01, 99)])
def test_too_few_items(alpha: float, least: int) -> None:
    ConformalSets.fit(*two_classes([0.7] * least), alpha)
    with pytest.raises(ValueError, match=f"at least {least} .*alpha={alpha}, got {least - 1}"):
        ConformalSets.fit(*two_classes([0.7] * (least - 1)), alpha)


WRONG, RIGHT = torch.ones(4).long(), torch.zeros(4).long()
P, Y = draws(50, 0)


def fit_threshold(**options: object) -> SelectivePredictor:
    return SelectivePredictor.fit(**{"prediction": binary([0.9, 0.8, 0.7, 0.6]), "labels": RIGHT, **options})


@pytest.mark.parametrize(("call", "message"), [
    (lambda: fit_threshold(), "coverage=None and risk=None"),
    (lambda: fit_threshold(coverage=0.5, risk=0.1), "coverage=0.5 and risk=0.1"),
    (lambda: fit_threshold(coverage=1.2), "coverage .*got 1.2"),
    (lambda: fit_threshold(risk=-0.1), "risk .*got -0.1"),
    (lambda: fit_threshold(risk=0.2, delta=0), "delta .*got 0"),
    (lambda: fit_threshold(coverage=0.2, delta=0.1), "delta .*got 0.1"),
    (lambda: fit_threshold(risk=0.2, score="luck"), "score .*got 'luck'"),
    (lambda: fit_threshold(risk=0.2, labels=WRONG[:3]), r"labels .*shape \[4\]"),
    (lambda: fit_threshold(risk=0.2, prediction=binary([0.9])[:0], labels=WRONG[:0]), "one item, got 0"),
    (lambda: fit_threshold(risk=0.01, labels=WRONG), "got 0.01: the smallest risk .* is 1.0000"),
    (lambda: fit_threshold(risk=0.1, delta=0.1), r"bound of the risk with delta=0.1 .*4 items is 0\."),
    (lambda: ConformalSets.fit(P, Y, 1), r"alpha .*got 1"),
    (lambda: ConformalSets.fit(P.index_fill(0, torch.tensor(3), 0.3), Y, 0.1), "probs .*item 3"),
    (lambda: ConformalSets.fit(P * math.nan, Y, 0.1), "probs .*item 0"),
    (lambda: ConformalSets.fit(P[:, 0], Y, 0.1), r"probs .*shape \(50,\)"),
    (lambda: ConformalSets.fit(P.numpy(), Y, 0.1), "probs .*ndarray"),
    (lambda: ConformalSets.fit(P, Y + 9, 0.1), "labels from 0 to .*got"),
    (lambda: ConformalSets.fit(P, Y, 0.1, score="raps"), "score .*'raps'"),
    (lambda: ConformalSets.fit(P, Y, 0.1).sets(torch.tensor([[0.5, 0.5]])), "fitted on, got 2"),
])  # fmt: skip
def test_refusals(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
