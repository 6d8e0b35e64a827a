"""The choice, made on validation items alone: the predictor of the lowest NLL, mean over seeds.

Ensembles are not chosen among: their members have other splits, so that next to no validation item is new to
all of them.  Nor are the rivals' models, which are what the choice is judged against, nor predictors that
the plan leaves out, nor those judged on more or fewer items than most.
"""

from dataclasses import dataclass

from gpattention.experiments.reproduction.goals import Candidate
from gpattention.experiments.reproduction.results.columns import Column
from gpattention.experiments.reproduction.results.estimates import Difference, Estimate, difference
from gpattention.experiments.reproduction.results.reading import PlanResults
from gpattention.experiments.reproduction.results.summary import summary_lines
from gpattention.reports.comparable import compared

JUDGED = Column("Validation NLL", "clean", "validation", "nll")


@dataclass(frozen=True)
class Ranked:
    """A candidate and its figures on validation items."""

    candidate: Candidate
    nll: Estimate
    accuracy: Estimate | None
    items: str
    rival: bool  # its model is one
    free: bool  # whether it may be chosen
    alike: bool = True  # judged on as many items as most, without which nothing is chosen


@dataclass(frozen=True)
class Choice:
    """All candidates by their validation NLL, and the first of those that may be chosen."""

    ranking: tuple[Ranked, ...]

    @property
    def chosen(self) -> Ranked | None:
        """None where nothing was judged on validation items."""
        return next((ranked for ranked in self.ranking if ranked.free), None)

    @property
    def lead(self) -> Difference | None:
        """The chosen one's NLL less that of the next that could have been chosen."""
        free = [ranked for ranked in self.ranking if ranked.free]
        return difference(free[0].nll, free[1].nll) if len(free) > 1 else None


def choose(results: PlanResults) -> Choice:
    """Rank everything that was judged on validation items."""
    rivals, allowed = {rival.model for rival in results.plan.rivals}, results.plan.choose
    lines = summary_lines(results)
    like_most = compared([line.basis(JUDGED) for line in lines])
    ranking = []
    for place, line in enumerate(lines):
        model, predictor, alike = line.model, line.predictor, place in like_most
        nll = line.estimate(JUDGED)
        if nll is None or line.is_ensemble:
            continue
        rival = model.name in rivals
        ranking.append(
            Ranked(
                candidate=Candidate(model.name, predictor),
                nll=nll,
                accuracy=model.estimate(predictor, "clean", "validation", "accuracy"),
                items=model.items(predictor, "clean", "validation"),
                rival=rival,
                free=alike and not rival and (not allowed or predictor in allowed),
                alike=alike,
            )
        )
    return Choice(tuple(sorted(ranking, key=lambda ranked: ranked.nll.mean)))
