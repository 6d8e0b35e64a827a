"""Selective prediction: thresholds that keep coverage and risk, bounds that hold, refusals that tell why."""

import math

import pytest
import torch
from scipy import stats
from torch import Tensor

from gpattention.evaluation import SelectivePredictor, risk_coverage_curve
from gpattention.evaluation.bounds import upper_bound
from gpattention.models.prediction import Prediction
from tests.models.stub_models import normal, seeded

SCORES = ["confidence", "entropy", "expected_entropy", "mutual_information"]


def problem(count: int = 400, seed: int = 0, sharp: float = 2.0) -> tuple[Prediction, Tensor]:
    """Labels drawn from the predictions themselves: sure items are right more often."""
    centre = sharp * normal(1, count, 4, seed=seed, dtype=torch.float64)
    prediction = Prediction.from_logits(
        centre + 0.7 * normal(5, count, 4, seed=seed + 1, dtype=torch.float64)
    )
    return prediction, torch.multinomial(prediction.probs, 1, generator=seeded(seed + 2))[:, 0]


def binary(confidences: list[float]) -> Prediction:
    """Class 0 with these confidences."""
    p = torch.tensor(confidences, dtype=torch.float64)
    return Prediction.from_logits(torch.stack([p, 1 - p], 1).log()[None])


class TestCurve:
    def test_by_hand_with_ties(self) -> None:
        """Surest first: right, (wrong, right) of equal score, wrong."""
        prediction = binary([0.7, 0.9, 0.6, 0.7])
        curve = risk_coverage_curve(prediction, torch.tensor([1, 0, 1, 0]))
        assert curve.coverage.tolist() == [0.25, 0.75, 1.0]
        assert curve.risk.tolist() == [0, 1 / 3, 0.5]
        assert curve.threshold.tolist() == pytest.approx([0.9, 0.7, 0.6])
        assert (curve.accepted.tolist(), curve.errors.tolist()) == ([1, 3, 4], [0, 1, 2])

    @pytest.mark.parametrize("score", SCORES)
    def test_against_accepting_item_by_item(self, score: str) -> None:
        prediction, labels = problem()
        curve = risk_coverage_curve(prediction, labels, score=score)
        value = getattr(prediction, score)
        for place in (0, 17, 200, 399):
            t = curve.threshold[place]
            taken = value >= t if score == "confidence" else value <= t
            assert int(taken.sum()) == int(curve.accepted[place]) == place + 1
            wrong = prediction.label[taken] != labels[taken]
            assert float(curve.risk[place]) == pytest.approx(float(wrong.double().mean()))
        assert float(curve.risk[-1]) == pytest.approx(float((prediction.label != labels).double().mean()))


class TestCoverage:
    @pytest.mark.parametrize("score", SCORES)
    @pytest.mark.parametrize("coverage", [0.1, 0.7, 0.95, 1.0])
    def test_the_fraction_wanted_is_accepted(self, coverage: float, score: str) -> None:
        prediction, labels = problem()
        chosen = SelectivePredictor.fit(prediction, labels, coverage=coverage, score=score)
        accepted = chosen.accept(prediction)
        assert int(accepted.sum()) == round(400 * coverage)
        assert chosen.coverage == pytest.approx(coverage)
        wrong = prediction.label[accepted] != labels[accepted]
        assert chosen.risk == pytest.approx(float(wrong.double().mean()))
        assert chosen.risk_bound is None

    def test_new_items_are_accepted_alike(self) -> None:
        chosen = SelectivePredictor.fit(*problem(4000), coverage=0.6)
        fresh, _ = problem(4000, seed=50)
        assert float(chosen.accept(fresh).double().mean()) == pytest.approx(
            0.6, abs=4 * math.sqrt(0.48 / 4000)
        )

    def test_ties_are_accepted_together(self) -> None:
        chosen = SelectivePredictor.fit(binary([0.9, 0.7, 0.7, 0.6]), torch.zeros(4).long(), coverage=0.5)
        assert chosen.coverage == 0.75

    def test_float32_thresholds_accept_their_own_item(self) -> None:
        prediction = Prediction.from_logits(normal(3, 301, 4))
        for coverage in (0.1, 0.33, 0.9):
            for score in SCORES:
                chosen = SelectivePredictor.fit(prediction, prediction.label, coverage=coverage, score=score)
                found = float(chosen.accept(prediction).double().mean())
                assert found == pytest.approx(chosen.coverage)
                assert found >= coverage


class TestRisk:
    @pytest.mark.parametrize("score", SCORES)
    @pytest.mark.parametrize("risk", [0.1, 0.2, 0.25])
    def test_it_is_kept_on_the_items_fitted_on_at_the_largest_coverage(self, risk: float, score: str) -> None:
        prediction, labels = problem()
        chosen = SelectivePredictor.fit(prediction, labels, risk=risk, score=score)
        accepted = chosen.accept(prediction)
        assert float((prediction.label != labels)[accepted].double().mean()) == pytest.approx(chosen.risk)
        assert chosen.risk <= risk
        curve = risk_coverage_curve(prediction, labels, score=score)
        assert bool((curve.risk[curve.coverage > chosen.coverage] > risk).all())

    def test_a_risk_met_exactly_is_met(self) -> None:
        labels = torch.zeros(10).long()
        labels[3] = 1
        chosen = SelectivePredictor.fit(binary([0.9 - 0.01 * i for i in range(10)]), labels, risk=0.1)
        assert (chosen.coverage, chosen.risk) == (1.0, 0.1)

    @pytest.mark.parametrize("bound", ["clopper-pearson", "hoeffding"])
    def test_bounds_hold_on_new_items(self, bound: str) -> None:
        """The true risk of a threshold, which the predictions themselves know, is above the wanted one for
        at most a fraction delta of fits; without a bound it is above in about half of them.
        """
        wanted, delta, fits = 0.15, 0.2, 40
        fresh, _ = problem(20_000, seed=999, sharp=4)
        broken = {"bound": 0, "no bound": 0}
        for seed in range(fits):
            held_out = problem(800, seed=10 * seed, sharp=4)
            bounded = SelectivePredictor.fit(*held_out, risk=wanted, delta=delta, bound=bound)
            assert bounded.risk <= bounded.risk_bound <= wanted
            free = SelectivePredictor.fit(*held_out, risk=wanted)
            for name, chosen in (("bound", bounded), ("no bound", free)):
                broken[name] += float(1 - fresh.confidence[chosen.accept(fresh)].mean()) > wanted
        assert broken["bound"] <= delta * fits < broken["no bound"]

    def test_bounds_hold_for_the_best_of_many_thresholds(self) -> None:
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

    def test_bounds_cost_coverage(self) -> None:
        loose, exact, hoeffding = (
            SelectivePredictor.fit(*problem(2000), risk=0.2, **options).coverage
            for options in ({}, {"delta": 0.1}, {"delta": 0.1, "bound": "hoeffding"})
        )
        assert loose > exact >= hoeffding > 0


class TestBounds:
    def test_clopper_pearson_is_the_beta_quantile(self) -> None:
        errors = torch.tensor([0, 1, 3, 50, 7, 0, 900])
        accepted = torch.tensor([10, 10, 200, 1000, 7, 1, 5000])
        for delta in (0.2, 0.05, 1e-4):
            found = upper_bound(errors, accepted, delta, bound="clopper-pearson")
            expected = stats.beta.ppf(1 - delta, errors + 1, accepted - errors)
            expected[4] = 1.0  # all wrong
            assert found.tolist() == pytest.approx(list(expected), rel=1e-7)

    def test_hoeffding(self) -> None:
        found = upper_bound(torch.tensor([5, 9]), torch.tensor([100, 10]), 0.1, bound="hoeffding")
        assert found.tolist() == pytest.approx([0.05 + math.sqrt(math.log(10) / 200), 1.0])


def test_errors() -> None:
    prediction, labels = problem()
    fit = SelectivePredictor.fit
    with pytest.raises(ValueError, match="one of coverage and risk, got coverage=None and risk=None"):
        fit(prediction, labels)
    with pytest.raises(ValueError, match=r"one of coverage and risk, got coverage=0.5 and risk=0.1"):
        fit(prediction, labels, coverage=0.5, risk=0.1)
    with pytest.raises(ValueError, match=r"coverage in \(0, 1\], got 1.2"):
        fit(prediction, labels, coverage=1.2)
    with pytest.raises(ValueError, match=r"risk in \[0, 1\], got -0.1"):
        fit(prediction, labels, risk=-0.1)
    with pytest.raises(ValueError, match=r"delta in \(0, 1\), got 0"):
        fit(prediction, labels, risk=0.2, delta=0)
    with pytest.raises(ValueError, match="delta only together with risk"):
        fit(prediction, labels, coverage=0.2, delta=0.1)
    with pytest.raises(ValueError, match="bound to be one of clopper-pearson, hoeffding, got 'exact'"):
        fit(prediction, labels, risk=0.2, bound="exact")
    with pytest.raises(ValueError, match=r"score to be one of confidence.*got 'luck'"):
        fit(prediction, labels, risk=0.2, score="luck")
    with pytest.raises(ValueError, match=r"labels to be whole numbers of shape \[400\]"):
        fit(prediction, labels[:3], risk=0.2)
    with pytest.raises(ValueError, match="at least one item, got 0"):
        fit(prediction[:0], labels[:0], risk=0.2)
    with pytest.raises(
        ValueError, match=r"got 0.01: the smallest risk on these 4 items is 1.0000, at coverage"
    ):
        fit(binary([0.9, 0.8, 0.7, 0.6]), torch.ones(4).long(), risk=0.01)
    with pytest.raises(
        ValueError, match=r"smallest upper bound of the risk with delta=0.1 on these 4 items is 0\."
    ):
        fit(binary([0.9, 0.8, 0.7, 0.6]), torch.zeros(4).long(), risk=0.1, delta=0.1)
