"""What is chosen on validation items, and whether it beats goals and rivals."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gpattention.runs import Column, RunData
from gpattention.studies.reproduction import Candidate
from gpattention.studies.reproduction.results.choice import (
    choice_markdown,
    choose,
    judge_goals,
    judge_rivals,
    rival_columns,
)
from gpattention.studies.reproduction.results.reading import PlanResults, read_results
from gpattention.studies.reproduction.results.summary import (
    OTHER_ITEMS,
    best_place,
    summary_lines,
    summary_markdown,
)
from tests.studies.reproduced import Figure, write_plan, write_runs

RIVALS = 'rivals = ["softmax:mc_dropout", "softmax:ensemble"]'
GOAL = """
[[goals]]
name = "NLL"
suite = "corrupted"
measure = "nll"
value = {value}
source = "Table 2"
better = "lower"
"""
Read = Callable[..., PlanResults]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def made(
        figure: Figure, models: tuple[str, ...] = ("softmax", "gp", "other"), **options: object
    ) -> PlanResults:
        more, texts = str(options.pop("more", "")), bool(options.pop("texts", False))
        plan = write_plan(tmp_path / "plan", models, more=more, texts=texts)
        write_runs(plan, tmp_path / "runs", figure, **options)  # type: ignore[arg-type]
        return read_results(plan, tmp_path / "runs")

    return made


def nlls(**by_model: float) -> Figure:
    """Validation NLL by model; elsewhere the order is the other way round."""

    def figure(model: str, seed: int, predictor: str, place: str, metric: str) -> float:
        own = by_model[model] + 0.01 * (predictor != "model") + 0.001 * seed
        if (place, metric) == ("validation", "nll"):
            return own
        return 2 - own if metric != "accuracy" else own

    return figure


def test_the_choice_is_made_on_validation_alone(read: Read) -> None:
    choice = choose(read(nlls(softmax=0.5, gp=0.4, other=0.6)))
    assert choice.chosen is not None
    assert str(choice.chosen.candidate) == "gp:model"
    assert [ranked.nll.mean for ranked in choice.ranking] == sorted(r.nll.mean for r in choice.ranking)
    assert len(choice.ranking) == 9  # three models with three predictors
    assert choice.lead is not None
    assert choice.lead.mean == pytest.approx(-0.01)


def test_rivals_and_what_the_plan_leaves_out_are_ranked_not_chosen(read: Read) -> None:
    more = f'{RIVALS}\nchoose = ["model+temperature"]'
    results = read(nlls(softmax=0.3, gp=0.4, other=0.6), more=more, ensemble=True)
    choice = choose(results)
    assert choice.chosen is not None
    assert str(choice.chosen.candidate) == "gp:model+temperature"
    assert str(choice.ranking[0].candidate) == "softmax:model"
    assert not [ranked for ranked in choice.ranking if ranked.candidate.is_ensemble]
    page = choice_markdown(results, choice)
    assert "**Chosen: `gp:model+temperature`**" in page
    assert "Lower still, but a rival's: `softmax:model`, 0.3010 ± 0.0006." in page
    assert "| 50 |" in page


@pytest.mark.parametrize(
    ("value", "outcome"),
    [(1.0, "missed"), (1.5995, "met"), (3.0, "met, clear")],
)
def test_goals(read: Read, value: float, outcome: str) -> None:
    results = read(nlls(softmax=0.5, gp=0.4, other=0.6), more=GOAL.format(value=value))
    (verdict,) = judge_goals(results, Candidate("gp", "model"))
    assert verdict.outcome == outcome  # 1.599 ± 0.0006
    page = choice_markdown(results, choose(results))
    counts = int(outcome != "missed"), int(outcome == "met, clear")
    assert f"Goals met: {counts[0]} of 1, {counts[1]} of them clear (Student's t, 95 %)" in page
    assert f"| < {value:.4f} | 1.5990 ± 0.0006 |" in page
    (none,) = judge_goals(results, Candidate("gp", "laplace"))
    assert (none.outcome, none.gap) == ("no figure", None)


def corrupted(nll: float, ece: float, accuracy: float, spread: float) -> Figure:
    """The model gp less softmax, under corruption; `spread` is between seeds, in NLL and ECE alone."""

    def figure(model: str, seed: int, predictor: str, place: str, metric: str) -> float:
        gaps = {"nll": nll, "ece": ece, "accuracy": accuracy}
        if model != "gp" or metric not in gaps or not place.startswith("corrupted"):
            return 0.5 + 0.1 * seed + (model != "gp") * 0.2
        return 0.7 + 0.1 * seed + gaps[metric] + (seed - 1) * spread * (metric != "accuracy")

    return figure


@pytest.mark.parametrize(
    ("gaps", "spread", "outcome"),
    [
        ((-0.1, -0.1, 0.0), 0.01, "beaten, clear"),
        ((-0.1, -0.1, 0.0), 0.5, "beaten in the mean"),
        ((-0.1, -0.1, -0.1), 0.01, "not beaten"),
        ((-0.1, 0.1, 0.1), 0.01, "not beaten"),
        ((0.1, -0.1, 0.1), 0.01, "not beaten"),
    ],
)
def test_rivals(read: Read, gaps: tuple[float, float, float], spread: float, outcome: str) -> None:
    results = read(corrupted(*gaps, spread=spread), ("softmax", "gp"), more=RIVALS, ensemble=True)
    single, ensemble, both = judge_rivals(results, Candidate("gp", "model"))
    assert single.outcome == outcome
    gap = single.gaps["nll"]
    assert gap is not None
    assert gap.basis == "paired"  # so that what seeds share does not count
    assert gap.mean == pytest.approx(gaps[0])
    assert (str(both.one), str(both.rival)) == ("gp:ensemble", "softmax:ensemble")
    assert both.gaps["ece"] is not None
    assert both.gaps["ece"].error is None
    assert ensemble.gaps["ece"] is not None
    assert ensemble.gaps["ece"].basis == "one side"
    page = choice_markdown(results, choose(results))
    assert f"Rivals beaten: {int(outcome != 'not beaten') + ('beaten' in ensemble.outcome[:6])} of 2" in page


def test_rivals_without_figures(read: Read) -> None:
    results = read(nlls(softmax=0.5, gp=0.4), ("softmax", "gp"), more=RIVALS)
    verdicts = judge_rivals(results, Candidate("gp", "model"))
    assert [verdict.outcome for verdict in verdicts] == ["not beaten", "no figure"]


def test_rivals_of_other_parts_are_named_and_not_judged(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, ("softmax", "gp"), more=RIVALS).only(["gp"])
    write_runs(plan, tmp_path / "runs", nlls(gp=0.4))
    results = read_results(plan, tmp_path / "runs")
    assert judge_rivals(results, Candidate("gp", "model")) == []
    page = choice_markdown(results, choose(results))
    assert "- The plan's rivals softmax are not in this part of it." in page
    assert "Rivals beaten" not in page


def test_texts_are_judged_out_of_domain(read: Read) -> None:
    results = read(nlls(softmax=0.5, gp=0.4), ("softmax", "gp"), more=RIVALS, texts=True)
    verdict = judge_rivals(results, Candidate("gp", "model"))[0]
    assert verdict.kept == "mcc"
    assert {column.set for column in rival_columns(results)} == {"ood/out-of-domain"}


def test_nothing_to_choose(read: Read) -> None:
    results = read(nlls(softmax=0.5), ("softmax",), more=RIVALS)
    choice = choose(results)
    assert (choice.chosen, choice.lead) == (None, None)
    assert "Nothing that may be chosen" in choice_markdown(results, choice)


@pytest.mark.parametrize("metric", ["accuracy", "nll"])
@pytest.mark.parametrize(("spread", "bold"), [(0.001, 1), (0.5, None)])
def test_bold_is_what_is_clearly_better(read: Read, metric: str, spread: float, bold: int | None) -> None:
    sign = 1 if metric == "accuracy" else -1

    def figure(model: str, seed: int, predictor: str, place: str, named: str) -> float:
        better = 0.1 + spread * (seed - 1) if model == "gp" else 0.0
        return 0.5 + 0.2 * seed + sign * (1.0 if predictor == "ensemble" else better)

    results = read(figure, ("softmax", "gp"), predictors=("model",), ensemble=True)
    lines = summary_lines(results)
    assert [line.is_ensemble for line in lines] == [False, False, True, True]
    column = Column("clean", "test", metric)
    assert [line.seeds(line.find(column)) for line in lines] == ["3", "3", "1 of 3", "1 of 3"]
    assert best_place(column, lines) == bold
    assert ("**" in summary_markdown(results)) == (bold is not None)
    assert best_place(Column("clean", "nowhere", "nll"), lines) is None


def on_fewer_items(results: PlanResults, model: str) -> PlanResults:
    """The same, but one model judged on 31 items of each set."""

    def fewer(run: RunData) -> RunData:
        suites = {}
        for name, suite in run.suites.items():
            counts = {who: dict.fromkeys(sets, 31) for who, sets in suite.curves["items"].items()}
            suites[name] = replace(suite, curves={**suite.curves, "items": counts})
        return replace(run, suites=suites)

    models = tuple(
        replace(each, runs=tuple(map(fewer, each.runs))) if each.name == model else each
        for each in results.models
    )
    return replace(results, models=models)


def test_only_figures_on_as_many_items_are_compared(read: Read) -> None:
    results = read(nlls(softmax=0.5, gp=0.4, other=0.6), predictors=("model",))
    column = Column("clean", "validation", "nll")
    assert best_place(column, summary_lines(results)) == 1
    assert OTHER_ITEMS not in summary_markdown(results)
    few = on_fewer_items(results, "gp")
    assert best_place(column, summary_lines(few)) == 0  # softmax, of the two that can be compared
    told = summary_markdown(few)
    assert told.count(OTHER_ITEMS) == told.count("\n## ")
    assert "| gp | model | 3 | 31 |" in told


def test_what_is_judged_on_fewer_items_is_not_chosen(read: Read) -> None:
    results = read(nlls(softmax=0.5, gp=0.4, other=0.6), predictors=("model",))
    assert choose(results).chosen.candidate == Candidate("gp", "model")
    few = on_fewer_items(results, "gp")
    choice = choose(few)
    assert choice.chosen.candidate == Candidate("softmax", "model")
    page = choice_markdown(few, choice)
    assert "Lower still, but on 31 items, not as many as most: `gp:model`" in page
    assert "| 1 | gp | model | other items | 3 | 31 |" in page
