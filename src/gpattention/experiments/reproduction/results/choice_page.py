"""The choice and its verdicts as a page."""

from gpattention.experiments.reproduction.results.choosing import Choice, Ranked
from gpattention.experiments.reproduction.results.columns import PER_CENT
from gpattention.experiments.reproduction.results.estimates import Difference
from gpattention.experiments.reproduction.results.markdown import table, words
from gpattention.experiments.reproduction.results.reading import PlanResults
from gpattention.experiments.reproduction.results.verdicts import (
    GoalVerdict,
    RivalVerdict,
    absent_rivals,
    judge_goals,
    judge_rivals,
    rival_columns,
)
from gpattention.reports.escaping import markdown, markdown_code
from gpattention.reports.words import metric_name

HOW_CHOSEN = """\
Chosen is what has the lowest NLL on validation items, mean over seeds; test items, corrupted ones and those
of other kinds have no part in it. Temperatures are fitted on the same validation items (one number each),
which favours them a little. Models that the plan calls rivals, and predictors that it does not list under
`choose` (where it has that key), are ranked but not chosen. Ensembles are not ranked: their members have
other splits, so that hardly any validation item is new to all of them.
"""
HOW_JUDGED = """\
A rival is beaten where NLL and ECE (pooled) are lower and {kept} is no less, in the mean over seeds;
"beyond two standard errors" where NLL and ECE both are. Differences are the chosen one's figure less the
rival's, seed by seed where both have the same seeds (a seed also decides the split). An ensemble is one
figure: the standard error is then that of the other side alone, and between two ensembles there is none.
Standard errors of few seeds are uncertain themselves: for 95 % it takes 4.3 of them with three seeds, 2.8
with five.
"""


def choice_markdown(results: PlanResults, choice: Choice) -> str:
    """Ranking, goals, rivals, and what they come to."""
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
        kept = metric_name(rivals[0].kept)
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
        whose = whose if ahead[0].alike else f"on {ahead[0].items or 'unknown'} items, not as many as most"
        lines.append(
            f"Lower still, but {whose}: {markdown_code(ahead[0].candidate)}, {ahead[0].nll.text(4)}."
        )
    if choice.lead is not None and choice.lead.error is not None and not choice.lead.clear:
        lines.append(f"The next is as good within two standard errors ({choice.lead.text(4)}).")
    if goals:
        met = [verdict for verdict in goals if verdict.outcome.startswith("met")]
        clear = sum("beyond" in verdict.outcome for verdict in goals)
        lines.append(f"Goals met: {len(met)} of {len(goals)}, {clear} of them beyond two standard errors.")
    single = [verdict for verdict in rivals if verdict.one == chosen.candidate]
    if single:
        beaten = [verdict for verdict in single if verdict.outcome.startswith("beaten")]
        clear = sum("beyond" in verdict.outcome for verdict in single)
        lines.append(
            f"Rivals beaten: {len(beaten)} of {len(single)}, {clear} of them beyond two standard errors."
        )
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
        measured = f"{metric_name(goal.measure)}, {goal.aggregation}, {goal.set}"
        aim = f"{'>' if goal.larger else '<'} {goal.value * scale:.{digits}f}"
        told = ["" if gap is None else gap.text(digits, scale), _in_errors(gap), verdict.outcome]
        rows.append([goal.name, measured, goal.source, aim, figure, *told])
    headings = ["Goal", "Measure", "Source", "Aim", "Figure", "Gap", "In standard errors", "Verdict"]
    return words(headings, rows)


def _rivals(results: PlanResults, verdicts: list[RivalVerdict]) -> str:
    columns = rival_columns(results)
    rows = []
    for verdict in verdicts:
        cells = []
        for column in columns:
            gap = verdict.gaps[column.metric][1]
            scale, digits = _unit(column.metric)
            cells += ["" if gap is None else f"{gap.text(digits, scale)}{_by_errors(gap)}"]
        basis: str = next((gap.basis for _, gap in verdict.gaps.values() if gap is not None), "")
        if basis and len(set(verdict.items)) > 1 and all(verdict.items):  # not like with like
            basis += f"; {verdict.items[0]} items against {verdict.items[1]}"
        one, rival = markdown_code(verdict.one), markdown_code(verdict.rival)
        rows.append([one, rival, *cells, basis, verdict.outcome])
    headings = [f"{metric_name(column.metric)} on {column.place}" for column in columns]
    return words(["Ours", "Rival", *headings, "Error", "Verdict"], rows)


def _ranking(choice: Choice) -> str:
    rows = []
    for place, ranked in enumerate(choice.ranking, 1):
        mark = (
            "chosen" if ranked is choice.chosen else "rival" if ranked.rival else "" if ranked.free else "-"
        )
        mark = mark if ranked.alike else "other items"
        accuracy = "" if ranked.accuracy is None else ranked.accuracy.text(2, 100)
        count = str(ranked.nll.count)
        name = ranked.candidate.model
        rows.append(
            [
                str(place),
                name,
                ranked.candidate.predictor,
                mark,
                count,
                ranked.items,
                ranked.nll.text(4),
                accuracy,
            ]
        )
    headings = ["Place", "Model", "Predictor", "", "Seeds", "Items", "Validation NLL ↓", "Accuracy, % ↑"]
    return table(headings, rows, left=4)


def _unit(metric: str) -> tuple[float, int]:
    return (100.0, 2) if metric in PER_CENT else (1.0, 4)


def _in_errors(gap: Difference | None) -> str:
    return "" if gap is None or gap.in_errors is None else f"{gap.in_errors:+.1f}"


def _by_errors(gap: Difference) -> str:
    told = _in_errors(gap)
    return f" ({told})" if told else ""
