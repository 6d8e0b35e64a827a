"""Is the chosen model better?  Against figures of others, and against rivals at the same budget."""

from dataclasses import dataclass
from typing import Literal

from gpattention.experiments.reproduction.goals import Candidate, Goal
from gpattention.experiments.reproduction.results.columns import Column
from gpattention.experiments.reproduction.results.estimates import Difference, Estimate, beyond, difference
from gpattention.experiments.reproduction.results.reading import PlanResults

Outcome = Literal["met, beyond two standard errors", "met", "missed", "no figure"]
Beaten = Literal["beaten, beyond two standard errors", "beaten in the mean", "not beaten", "no figure"]
ROUNDING = 1e-9  # equal figures of several seeds need not have equal means
PLACES = (("corrupted", "corrupted/mean"), ("clean", "ood/out-of-domain"), ("clean", "test"))


@dataclass(frozen=True)
class GoalVerdict:
    """One goal and the chosen model's figure."""

    goal: Goal
    figure: Estimate | None

    @property
    def gap(self) -> Difference | None:
        """The figure less the goal."""
        return None if self.figure is None else beyond(self.figure, self.goal.value)

    @property
    def outcome(self) -> Outcome:
        """Met where it is better at all."""
        gap = self.gap
        if gap is None:
            return "no figure"
        if not (gap.mean > 0 if self.goal.larger else gap.mean < 0):
            return "missed"
        return "met, beyond two standard errors" if gap.clear else "met"


@dataclass(frozen=True)
class RivalVerdict:
    """The chosen model against one rival: NLL and ECE are to be lower, and accuracy no less."""

    one: Candidate
    rival: Candidate
    gaps: dict[str, tuple[Column, Difference | None]]  # one less the rival, by metric
    items: tuple[str, str] = ("", "")  # how many items each was judged on

    @property
    def outcome(self) -> Beaten:
        """Beyond two standard errors if NLL and ECE both are; less accuracy in the mean is not beaten."""
        nll, ece = (self.gaps[metric][1] for metric in ("nll", "ece"))
        kept = self.gaps[self.kept][1]
        if nll is None or ece is None or kept is None:
            return "no figure"
        if not (nll.mean < 0 and ece.mean < 0 and kept.mean >= -ROUNDING):
            return "not beaten"
        clear = nll.clear and ece.clear
        return "beaten, beyond two standard errors" if clear else "beaten in the mean"

    @property
    def kept(self) -> str:
        """What must be no less: accuracy, of texts MCC."""
        return next(metric for metric in self.gaps if metric not in ("nll", "ece"))


def judge_goals(results: PlanResults, one: Candidate) -> list[GoalVerdict]:
    """Every goal of the plan."""
    return [
        GoalVerdict(goal, _estimate(results, one, Column("", goal.suite, goal.set, goal.metric)))
        for goal in results.plan.goals
    ]


def judge_rivals(results: PlanResults, one: Candidate) -> list[RivalVerdict]:
    """Every rival here; the ensemble of the chosen model also against those that are ensembles too."""
    absent = absent_rivals(results)
    rivals = [rival for rival in results.plan.rivals if rival not in absent]
    verdicts = [_against(results, one, rival) for rival in rivals]
    for rival in rivals:
        own = Candidate(one.model, rival.predictor)
        if rival.is_ensemble and _estimate(results, own, rival_columns(results)[0]) is not None:
            verdicts.append(_against(results, own, rival))
    return verdicts


def absent_rivals(results: PlanResults) -> list[Candidate]:
    """Those whose models are in other parts of the plan."""
    return [rival for rival in results.plan.rivals if rival.model not in results.plan.models]


def rival_columns(results: PlanResults) -> list[Column]:
    """NLL, ECE and accuracy where it is hardest: under corruption, else out of domain, else on test items."""
    suite, place = next(
        ((suite, place) for suite, place in PLACES if place in results.places(suite)), PLACES[-1]
    )
    kept = "mcc" if results.texts else "accuracy"
    return [Column(metric, suite, place, metric) for metric in (kept, "nll", "ece")]


def _against(results: PlanResults, one: Candidate, rival: Candidate) -> RivalVerdict:
    gaps: dict[str, tuple[Column, Difference | None]] = {}
    for column in rival_columns(results):
        figures = [_estimate(results, each, column) for each in (one, rival)]
        gap = None if figures[0] is None or figures[1] is None else difference(figures[0], figures[1])
        gaps[column.metric] = (column, gap)
    first = rival_columns(results)[0]
    models = [(results.model(each.model), each.predictor) for each in (one, rival)]
    ours, theirs = (m.items(predictor, first.suite, first.place) if m else "" for m, predictor in models)
    return RivalVerdict(one, rival, gaps, (ours, theirs))


def _estimate(results: PlanResults, one: Candidate, column: Column) -> Estimate | None:
    model = results.model(one.model)
    return None if model is None else model.estimate(one.predictor, column.suite, column.place, column.metric)
