"""The choice and its verdicts: what is chosen on validation items, and whether it is better.

Chosen is the predictor of the lowest NLL, mean over seeds.  Ensembles are not chosen among: their members
have other splits, so that next to no validation item is new to all of them.  Nor are the rivals' models,
which are what the choice is judged against, nor predictors that the plan leaves out, nor those judged on
more or fewer items than most.
"""

from dataclasses import dataclass
from typing import Literal

from gpattention.metrics import metric_of
from gpattention.runs import Column, Difference, OverSeeds, compared, difference, difference_from
from gpattention.runs.results import HOW_CLEAR
from gpattention.runs.tables import markdown, markdown_code, markdown_table
from gpattention.studies.reproduction.plan import Candidate, Goal
from gpattention.studies.reproduction.results.reading import PlanResults
from gpattention.studies.reproduction.results.summary import summary_lines

Outcome = Literal["met, clear", "met", "missed", "no figure"]
Beaten = Literal["beaten, clear", "beaten in the mean", "not beaten", "no figure"]
JUDGED = Column("clean", "validation", "nll")
ROUNDING = 1e-9  # equal figures of several seeds need not have equal means
PLACES = (("corrupted", "corrupted/mean"), ("clean", "ood/out-of-domain"), ("clean", "test"))
HOW_CHOSEN = """\
Chosen is what has the lowest NLL on validation items, mean over seeds; test items, corrupted ones and those
of other kinds have no part in it. Temperatures are fitted on the same validation items (one number each),
which favours them a little. Models that the plan calls rivals, and predictors that it does not list under
`choose` (where it has that key), are ranked but not chosen. Ensembles are not ranked: their members have
other splits, so that hardly any validation item is new to all of them.
"""
HOW_JUDGED = """\
A rival is beaten where NLL and ECE (pooled) are lower and {kept} is no less, in the mean over seeds; "clear"
where Student's t test says so of NLL and ECE both, at 95 %. Differences are the chosen one's figure less the
rival's, seed by seed where both have the same seeds (a seed also decides the split), else Welch's test; ± is
the standard error, and in brackets is how many of these the difference is. An ensemble is one figure: the
standard error is then that of the other side alone, and between two ensembles there is none.
"""


@dataclass(frozen=True)
class Ranked:
    """A candidate and its figures on validation items."""

    candidate: Candidate
    nll: OverSeeds
    accuracy: OverSeeds | None
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
    figures = [line.single(JUDGED) for line in lines]
    like_most = compared(figures)
    ranking = []
    for place, (line, nll) in enumerate(zip(lines, figures, strict=True)):
        if nll is not None:
            rival, alike = line.model.name in rivals, place in like_most
            ranking.append(
                Ranked(
                    candidate=Candidate(line.model.name, line.predictor),
                    nll=nll,
                    accuracy=line.find(Column("clean", "validation", "accuracy")),
                    rival=rival,
                    free=alike and not rival and (not allowed or line.predictor in allowed),
                    alike=alike,
                )
            )
    return Choice(tuple(sorted(ranking, key=lambda ranked: ranked.nll.mean)))


@dataclass(frozen=True)
class GoalVerdict:
    """One goal and the chosen model's figure."""

    goal: Goal
    figure: OverSeeds | None

    @property
    def gap(self) -> Difference | None:
        """The figure less the goal, which is taken as it is printed."""
        return None if self.figure is None else difference_from(self.figure, self.goal.value)

    @property
    def outcome(self) -> Outcome:
        """Met where it is better at all."""
        gap = self.gap
        if gap is None:
            return "no figure"
        if not (gap.mean > 0 if self.goal.larger else gap.mean < 0):
            return "missed"
        return "met, clear" if gap.clear else "met"


@dataclass(frozen=True)
class RivalVerdict:
    """The chosen model against one rival: NLL and ECE are to be lower, and accuracy no less."""

    one: Candidate
    rival: Candidate
    gaps: dict[str, Difference | None]  # one less the rival, by metric
    items: tuple[str, str] = ("", "")  # how many items each was judged on

    @property
    def outcome(self) -> Beaten:
        """Clear if NLL and ECE both are; less accuracy in the mean is not beaten."""
        nll, ece, kept = (self.gaps[metric] for metric in ("nll", "ece", self.kept))
        if nll is None or ece is None or kept is None:
            return "no figure"
        if not (nll.mean < 0 and ece.mean < 0 and kept.mean >= -ROUNDING):
            return "not beaten"
        return "beaten, clear" if nll.clear and ece.clear else "beaten in the mean"

    @property
    def kept(self) -> str:
        """What must be no less: accuracy, of texts MCC."""
        return next(metric for metric in self.gaps if metric not in ("nll", "ece"))


def judge_goals(results: PlanResults, one: Candidate) -> list[GoalVerdict]:
    """Every goal of the plan."""
    columns = [(goal, Column(goal.suite, goal.set, goal.metric)) for goal in results.plan.goals]
    return [GoalVerdict(goal, _figure(results, one, column)) for goal, column in columns]


def judge_rivals(results: PlanResults, one: Candidate) -> list[RivalVerdict]:
    """Every rival here; the ensemble of the chosen model also against those that are ensembles too."""
    absent = absent_rivals(results)
    rivals = [rival for rival in results.plan.rivals if rival not in absent]
    verdicts = [_against(results, one, rival) for rival in rivals]
    for rival in rivals:
        own = Candidate(one.model, rival.predictor)
        if rival.is_ensemble and _figure(results, own, rival_columns(results)[0]) is not None:
            verdicts.append(_against(results, own, rival))
    return verdicts


def absent_rivals(results: PlanResults) -> list[Candidate]:
    """Those whose models are in other parts of the plan."""
    return [rival for rival in results.plan.rivals if rival.model not in results.plan.models]


def rival_columns(results: PlanResults) -> list[Column]:
    """NLL, ECE and accuracy where it is hardest: under corruption, else out of domain, else on test items."""
    suite, place = next(
        ((suite, place) for suite, place in PLACES if place in results.table.sets(suite=suite)), PLACES[-1]
    )
    kept = "mcc" if results.texts else "accuracy"
    return [Column(suite, place, metric) for metric in (kept, "nll", "ece")]


def _against(results: PlanResults, one: Candidate, rival: Candidate) -> RivalVerdict:
    gaps: dict[str, Difference | None] = {}
    items = ("", "")
    for column in rival_columns(results):
        mine, theirs = (_figure(results, each, column) for each in (one, rival))
        gaps[column.metric] = None if mine is None or theirs is None else difference(mine, theirs)
        items = ("" if mine is None else mine.items, "" if theirs is None else theirs.items)
    return RivalVerdict(one, rival, gaps, items)


def _figure(results: PlanResults, one: Candidate, column: Column) -> OverSeeds | None:
    return column.find(results.table, one.model, one.predictor)


def choice_markdown(results: PlanResults, choice: Choice) -> str:
    """The page: ranking, goals, rivals, and what they come to."""
    chosen = choice.chosen
    title = f"# {markdown(results.plan.name)}: what is chosen, and whether it is better\n"
    if chosen is None:
        return (
            f"{title}\nNothing that may be chosen was judged on validation items, as the suite clean does.\n"
        )
    goals = judge_goals(results, chosen.candidate)
    rivals = judge_rivals(results, chosen.candidate)
    absent = list(dict.fromkeys(rival.model for rival in absent_rivals(results)))
    parts = [title, _verdict(choice, chosen, goals, rivals, absent)]
    if goals:
        parts.append(f"## Goals\n\n{_goals(goals)}")
    if rivals:
        kept = metric_of(rivals[0].kept).label
        parts.append(f"## Rivals\n\n{HOW_JUDGED.format(kept=kept)}\n{_rivals(results, rivals)}")
    parts.append(f"## Ranking on validation items\n\n{HOW_CHOSEN}\n{_ranking(choice)}")
    return "\n".join(parts)


def _verdict(
    choice: Choice,
    chosen: Ranked,
    goals: list[GoalVerdict],
    rivals: list[RivalVerdict],
    absent: list[str],
) -> str:
    told = f"validation NLL {chosen.nll.text(4)}, {_runs(chosen)}"
    lines = [f"**Chosen: {markdown_code(chosen.candidate)}**, {told}."]
    ahead = [ranked for ranked in choice.ranking if ranked.nll.mean < chosen.nll.mean]
    if ahead:
        whose = "a rival's" if ahead[0].rival else "not to be chosen by the plan"
        whose = (
            whose if ahead[0].alike else f"on {ahead[0].nll.items or 'unknown'} items, not as many as most"
        )
        lines.append(
            f"Lower still, but {whose}: {markdown_code(ahead[0].candidate)}, {ahead[0].nll.text(4)}."
        )
    if choice.lead is not None and choice.lead.error is not None and not choice.lead.clear:
        lines.append(f"The difference from the next is not clear ({choice.lead.text(4)}; {HOW_CLEAR}).")
    if goals:
        met = [verdict for verdict in goals if verdict.outcome.startswith("met")]
        clear = sum(verdict.outcome == "met, clear" for verdict in goals)
        lines.append(f"Goals met: {len(met)} of {len(goals)}, {clear} of them clear ({HOW_CLEAR}).")
    single = [verdict for verdict in rivals if verdict.one == chosen.candidate]
    if single:
        beaten = [verdict for verdict in single if verdict.outcome.startswith("beaten")]
        clear = sum(verdict.outcome == "beaten, clear" for verdict in single)
        lines.append(f"Rivals beaten: {len(beaten)} of {len(single)}, {clear} of them clear ({HOW_CLEAR}).")
    if absent:
        lines.append(f"The plan's rivals {markdown(', '.join(absent))} are not in this part of it.")
    return "\n".join(f"- {line}" for line in lines) + "\n"


def _runs(ranked: Ranked) -> str:
    count = ranked.nll.count
    return "one seed, so no standard errors" if count == 1 else f"{count} seeds"


def _goals(verdicts: list[GoalVerdict]) -> str:
    rows = []
    for verdict in verdicts:
        goal, gap = verdict.goal, verdict.gap
        scale, digits = _unit(goal.measure)
        figure = "" if verdict.figure is None else verdict.figure.text(digits, scale)
        measured = f"{metric_of(goal.measure).label}, {goal.aggregation}, {goal.set}"
        aim = f"{'>' if goal.larger else '<'} {goal.value * scale:.{digits}f}"
        told = ["" if gap is None else gap.text(digits, scale), _in_errors(gap), verdict.outcome]
        rows.append([goal.name, measured, goal.source, aim, figure, *told])
    headings = ["Goal", "Measure", "Source", "Aim", "Figure", "Gap", "In standard errors", "Verdict"]
    return markdown_table(headings, rows, left=None)


def _rivals(results: PlanResults, verdicts: list[RivalVerdict]) -> str:
    columns = rival_columns(results)
    rows = []
    for verdict in verdicts:
        cells = []
        for column in columns:
            gap = verdict.gaps[column.metric]
            scale, digits = _unit(column.metric)
            errors = f" ({told})" if (told := _in_errors(gap)) else ""
            cells.append("" if gap is None else f"{gap.text(digits, scale)}{errors}")
        basis: str = next((gap.basis for gap in verdict.gaps.values() if gap is not None), "")
        if basis and len(set(verdict.items)) > 1 and all(verdict.items):  # not like with like
            basis += f"; {verdict.items[0]} items against {verdict.items[1]}"
        rows.append(
            [markdown_code(verdict.one), markdown_code(verdict.rival), *cells, basis, verdict.outcome]
        )
    headings = [f"{column.shown.label} on {column.set}" for column in columns]
    return markdown_table(["Ours", "Rival", *headings, "Error", "Verdict"], rows, left=None)


def _ranking(choice: Choice) -> str:
    rows = []
    for place, ranked in enumerate(choice.ranking, 1):
        mark = (
            "chosen" if ranked is choice.chosen else "rival" if ranked.rival else "" if ranked.free else "-"
        )
        mark = mark if ranked.alike else "other items"
        accuracy = "" if ranked.accuracy is None else ranked.accuracy.text(2, 100)
        told = [str(ranked.nll.count), ranked.nll.items, ranked.nll.text(4), accuracy]
        rows.append([str(place), ranked.candidate.model, ranked.candidate.predictor, mark, *told])
    headings = ["Place", "Model", "Predictor", "", "Seeds", "Items", "Validation NLL ↓", "Accuracy, % ↑"]
    return markdown_table(headings, rows, left=4)


def _unit(metric: str) -> tuple[float, int]:
    shown = metric_of(metric)
    return (shown.scale, 2) if shown.unit == "%" else (1.0, 4)


def _in_errors(gap: Difference | None) -> str:
    return "" if gap is None or gap.in_errors is None else f"{gap.in_errors:+.1f}"
