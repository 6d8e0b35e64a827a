"""The folder of results: it follows from the runs or their records alone, and what it says is so."""

import csv
import io
import json
import lzma
import re
import shutil
import tarfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from gpattention.cli.main import main
from gpattention.runs import Column, RunData
from gpattention.studies import plan_results
from gpattention.studies.plan_results import (
    ARCHIVE,
    PlanResults,
    best_candidate,
    choice_markdown,
    chosen_of,
    gather,
    goal_figure,
    goal_verdict,
    packed,
    rank,
    read_results,
    rival_columns,
    rival_verdicts,
    summary_csv,
    summary_markdown,
    unpack,
    write_results,
)
from gpattention.studies.plans import Candidate, Plan, load_plan
from gpattention.studies.verdicts import holm, paired_bootstrap
from tests.studies.plan_runs import Figure, by_item, flat, write_plan, write_runs

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
SUITES = tuple(f"evaluation/{suite}.json" for suite in ("clean", "corrupted", "ood"))
NAMES = (*SUITES, "events.jsonl", "metrics.csv", "recipe.json")
OTHER_ITEMS = "Not all single models are evaluated on as many items"


def numbered(model: str, seed: int, predictor: str, place: str, metric: str) -> float:
    """Each figure another number, the same every time."""
    return (sum(map(ord, f"{model}{predictor}{place}{metric}")) % 97) / 100 + 0.01 * seed


def other(model: str, seed: int, predictor: str, place: str, metric: str) -> float:
    """Figures of a second training."""
    return numbered(model, seed, predictor, place, metric) / 3


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan, its runs and their results."""
    root = tmp_path_factory.mktemp("made")
    plan = write_plan(root, more=RIVALS, seeds=[0, 1])
    write_runs(plan, root / "runs", numbered, ensemble=True)
    for run in (root / "runs").iterdir():  # what a run has besides
        for name in ("model/model.safetensors", "evaluation/predictions/test.safetensors"):
            (run / name).parent.mkdir()
            (run / name).write_bytes(b"weights")
    before = contents(root / "runs")
    written = write_results(plan, root / "runs", root / "out", plan_file=root / "plan.toml")
    assert {file.name for file in written} == set(contents(root / "out"))
    assert contents(root / "runs") == before  # nothing is written there
    return root


def contents(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


def members(file: Path) -> dict[str, bytes]:
    with tarfile.open(file) as tar:
        return {m.name: tar.extractfile(m).read() for m in tar}  # type: ignore[union-attr]


def gathered(plan: Plan, runs: Path, archive: Path, place: Path) -> dict[str, bytes]:
    place.mkdir()
    gather(plan, runs, archive, place)
    return contents(place)


# The folder


def test_everything_is_there(made: Path) -> None:
    found = contents(made / "out")
    names = {"summary.md", "summary.csv", "choice.md", "README.md", "report.html", "configs.json", ARCHIVE}
    assert names | {"training-softmax.csv", "training-gp.csv"} <= set(found)
    for name, content in found.items():
        assert str(made).encode() not in content, name  # no page tells where it was made
    page = found["report.html"].decode()
    assert 'id="environment"' in page
    assert 'id="gallery"' not in page  # rather than a section that no command fills


def test_the_csv_has_the_means_over_seeds(made: Path) -> None:
    rows = list(csv.DictReader((made / "out" / "summary.csv").read_text().splitlines()))
    key = ("model", "predictor", "suite", "set", "metric", "score")
    assert set(Counter(tuple(row[k] for k in key) for row in rows).values()) == {1}
    for row in rows:
        places = [row["set"]]
        if "severity" in row["set"]:
            places = [f"corrupted/{kind}/{row['set'][-1]}" for kind in ("fog", "snow")]
        metric = f"{row['metric']} {row['score']}".strip()
        ensemble = row["predictor"] == "ensemble"
        seeds = [0] if ensemble else [int(seed) for seed in row["seeds"].split()]
        values = [numbered(row["model"], s, row["predictor"], p, metric) for s in seeds for p in places]
        assert float(row["mean"]) == pytest.approx(fmean(values), rel=1e-5), row
        assert row["seeds"] == ("all" if ensemble else "0 1")
        assert (int(row["runs"]), row["items"]) == (len(seeds), "50")
        assert (row["standard_error"] == "") == (len(seeds) == 1)
    assert {row["set"] for row in rows} >= {f"corrupted/severity/{s}" for s in range(1, 6)}


def test_the_readme_says_how(made: Path) -> None:
    text, names = (made / "out" / "README.md").read_text(), set(contents(made / "out"))
    for line in (
        "4 of 4 runs of the plan are trained and evaluated: 2 models, seeds 0, 1.",
        "gpattention reproduce plan.toml --runs runs --stage train --device cuda",
        "gpattention reproduce plan.toml --runs runs --stage results -o out",
        # 90 s and 60 s, the hour between them left out
        "| gp-seed0 | 1970-01-01 00:16 | 1970-01-01 01:24 | 2 min | cuda:0, graph | 1 |  |",
        "| gp | clean, corrupted, ood | samples 4, limit 50, seed 0, predictors model mc_dropout | 3 min "
        "| a CPU, torch 2.13 |",
        "- reduced: at most 50 items of each set",
        "- 0.0 to 0.1 % flagged at a rate of 5 %",
    ):
        assert line in text
    assert set(re.findall(r"\]\((.*?)\)", text)) == names - {"README.md", "report.html"}
    rows = list(csv.DictReader((made / "out" / "training-gp.csv").read_text().splitlines()))
    assert [(row["seed"], row["epoch"]) for row in rows] == [(s, e) for s in "01" for e in "12"]
    configs = json.loads((made / "out" / "configs.json").read_text())
    assert configs["gp"]["seeds"] == [0, 1]
    assert configs["gp"]["recipe"]["data"]["name"] == "digits"


def test_runs_that_are_missing_or_others_and_what_earlier_results_had(tmp_path: Path) -> None:
    runs, out = tmp_path / "runs", tmp_path / "out"
    write_runs(write_plan(tmp_path, seeds=[0]), runs, flat)
    recipe, events = runs / "gp-seed0" / "recipe.json", runs / "softmax-seed0" / "events.jsonl"
    plain = json.loads(recipe.read_text())
    plain["phases"]["epochs"] = 7
    recipe.write_text(json.dumps(plain))
    events.write_text("\n".join(events.read_text().splitlines()[:-1]) + "\n")
    more = write_plan(tmp_path, ("softmax", "gp", "third"), seeds=[0])
    write_results(more, runs, out)
    text = (out / "README.md").read_text()
    for line in (
        "- gp: not the plan's recipe: phases.epochs = 7, in the plan 1",
        "- not trained or not evaluated: third-seed0",
        "| softmax-seed0 | 1970-01-01 00:16 | not finished |",
        "recipes/plans/plan.toml",  # the plan's own file was not given
    ):
        assert line in text
    with pytest.raises(ValueError, match=r"evaluated runs of plan in .*runs, got none"):
        write_results(more.only(["third"]), runs, tmp_path / "none")
    assert not (tmp_path / "none").exists()
    (out / "notes.txt").write_text("somebody's own")
    (out / "training-mine.csv").write_text("not named in the README")
    before = contents(out)
    names = {file.name for file in write_results(more.only(models=["gp"]), runs, out)}
    text = (out / "README.md").read_text()
    assert {"notes.txt", "training-mine.csv", "training-softmax.csv"} <= set(before) - names
    assert before.items() - contents(out).items() <= {(name, before[name]) for name in names}
    assert "training-softmax.csv" not in text  # which stays, as a file that these results have not
    assert "1 of 1 runs of this part of the plan are trained and evaluated" in text
    assert " --models gp --stage train --device cuda\n" in text


def test_threads_stand_on_a_page_of_their_own(tmp_path: Path) -> None:
    def drifting(model: str, seed: int, predictor: str, place: str, metric: str) -> float:
        gap = 0.0 if "threads" not in model else 0.002 if model.startswith("gp") else 0.001 * (seed - 1)
        return 0.5 + 0.1 * model.startswith("gp") + 0.01 * seed + gap

    plan = write_plan(tmp_path, more="threads = [1, 2]", seeds=[0, 1, 2])
    write_runs(plan, tmp_path / "runs", drifting)
    write_results(plan, tmp_path / "runs", tmp_path / "out")
    found = contents(tmp_path / "out")
    page = found["threads.md"].decode()
    assert "| gp | model | 2 | **+0.20 ± 0.00 (0.20)** |" in page  # accuracy, %
    assert re.search(r"\| softmax \| model \| 2 \| [+-]0.00 ± 0.06 \(0.10\) \|", page), page
    assert "| Clean: test items | Accuracy, % ↑ | **gp** | **gp** |" in page
    assert "| Clean: test items | NLL ↓ | **softmax** | **softmax** |" in page
    for name in ("summary.md", "summary.csv", "choice.md"):
        assert b"threads" not in found[name]  # those are of the first number
    assert b"12 of 12 runs" in found["README.md"]
    assert "training-gp-2-threads.csv" not in found


def test_texts(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, more=RIVALS, texts=True)
    write_runs(plan, tmp_path / "runs", numbered)
    results = read_results(plan, tmp_path / "runs")
    page = summary_markdown(results)
    for text in ("## In domain: test items", "## Out of domain: out-of-domain", "| MCC, % ↑ |"):
        assert text in page
    assert "Corrupted" not in page
    found = {row["set"] for row in csv.DictReader(io.StringIO(summary_csv(results)))}
    assert found == {"validation", "test", "ood/out-of-domain", "ood/near"}
    columns = rival_columns(results)
    assert {(column.set, column.metric) for column in columns} == {
        ("ood/out-of-domain", metric) for metric in ("mcc", "nll", "ece")
    }
    found_files = gathered(plan, tmp_path / "runs", tmp_path / "none", tmp_path / "place")
    assert "gallery" in json.loads(found_files["gp-seed0/evaluation/clean.json"])["curves"]


# What is chosen on validation items, and whether it beats goals and rivals


def read(tmp_path: Path, figure: Figure, models: str = "softmax gp other", more: str = "", **options: Any):
    plan = write_plan(tmp_path / "plan", models.split(), more=more)
    write_runs(plan, tmp_path / "runs", figure, **options)
    return read_results(plan, tmp_path / "runs")


def nlls(**by_model: float) -> Figure:
    """Validation NLL by model; elsewhere the order is the other way round."""

    def figure(model: str, seed: int, predictor: str, place: str, metric: str) -> float:
        own = by_model[model] + 0.01 * (predictor != "model") + 0.001 * seed
        return own if (place, metric) == ("validation", "nll") or metric == "accuracy" else 2 - own

    return figure


def chosen(results: PlanResults) -> str:
    first = chosen_of(rank(results))
    return "" if first is None else str(first.candidate)


def test_rivals_and_what_the_plan_leaves_out_are_ranked_not_chosen(tmp_path: Path) -> None:
    more = f'{RIVALS}\nchoose = ["model+temperature"]'
    results = read(tmp_path, nlls(softmax=0.3, gp=0.4, other=0.6), more=more, ensemble=True)
    ranking = rank(results)
    assert chosen(results) == "gp:model+temperature"
    assert str(ranking[0].candidate) == "softmax:model"
    assert [ranked.nll.mean for ranked in ranking] == sorted(r.nll.mean for r in ranking)
    assert len(ranking) == 9  # three models with three predictors, and no ensemble
    assert not [ranked for ranked in ranking if ranked.candidate.is_ensemble]
    page = choice_markdown(results, ranking)
    assert "**Chosen: `gp:model+temperature`**" in page
    assert "Lower still, but a rival's: `softmax:model`, 0.3010 ± 0.0006." in page
    assert "| 50 |" in page


@pytest.mark.parametrize(("value", "outcome"), [(1.0, "missed"), (1.5995, "met"), (3.0, "met, clear")])
def test_goals(tmp_path: Path, value: float, outcome: str) -> None:
    results = read(tmp_path, nlls(softmax=0.5, gp=0.4, other=0.6), more=GOAL.format(value=value))
    page = choice_markdown(results, rank(results))
    counts = int(outcome != "missed"), int(outcome == "met, clear")
    assert f"Goals met: {counts[0]} of 1, {counts[1]} of them clear (Student's t, 95 %)" in page
    assert re.search(rf"\| < {value:.4f} \| 1\.5990 ± 0\.0006 \|.*\| {outcome} \|\n", page)
    assert goal_verdict(results.plan.goals[0], None) == (None, "no figure")


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
def test_rivals(tmp_path: Path, gaps: tuple[float, float, float], spread: float, outcome: str) -> None:
    results = read(tmp_path, corrupted(*gaps, spread=spread), "softmax gp", RIVALS, ensemble=True)
    single, ensemble, both = rival_verdicts(results, Candidate("gp", "model"))
    assert single.outcome == outcome
    assert single.gaps[1].basis == "paired"  # so that what seeds share does not count
    assert single.gaps[1].mean == pytest.approx(gaps[0])
    assert (str(both.one), str(both.rival)) == ("gp:ensemble", "softmax:ensemble")
    assert both.gaps[2].error is None
    assert ensemble.gaps[2].basis == "one side"
    none = rival_verdicts(results, Candidate("gp", "mean"))
    assert {verdict.outcome for verdict in none if verdict.one.predictor == "mean"} == {"no figure"}
    page = choice_markdown(results, rank(results))
    assert f"Rivals beaten: {int(outcome != 'not beaten') + ('beaten' in ensemble.outcome[:6])} of 2" in page
    for models, pages in ((["gp"], "- The plan's rivals softmax are not in this part of it."),
                          (["softmax"], "Nothing that may be chosen")):  # fmt: skip
        part = read_results(results.plan.only(models), tmp_path / "runs")
        assert rival_verdicts(part, Candidate("gp", "model")) == [] or models == ["softmax"]
        page = choice_markdown(part, rank(part))
        assert pages in page
        assert "Rivals beaten" not in page


STRICT = """criterion = "shifts"
suites = ["criterion", "clean", "corrupted"]
rivals = ["softmax:chosen", "kernel:chosen", "softmax:ensemble", "kernel:ensemble"]
"""


def test_plans_that_choose_by_shifts(tmp_path: Path) -> None:
    """Another ranking, rivals by their own best predictor, Holm, and ensembles over items."""
    base = {"gp": 0.50, "softmax": 0.60, "kernel": 0.52}
    wobble = {"gp": (0.0, 0.0, 0.0), "softmax": (0.001, -0.001, 0.0), "kernel": (0.004, -0.004, 0.003)}

    def figure(model: str, seed: int, predictor: str, place: str, metric: str) -> float:
        if metric == "accuracy":
            return 0.7
        if place == "validation/criterion":  # rivals are better with dropout, ours as it is
            return base[model] + (0.05 if (predictor == "mc_dropout") == (model == "gp") else 0.0)
        return base[model] + 0.01 * seed + wobble[model][seed]

    plan = write_plan(tmp_path, ("gp", "softmax", "kernel"), more=STRICT)
    write_runs(plan, tmp_path / "runs", figure, ensemble=True)
    results = read_results(plan, tmp_path / "runs")
    ranking = rank(results)
    chosen = chosen_of(ranking)
    assert chosen is not None
    assert (str(chosen.candidate), chosen.nll.mean) == ("gp:model", pytest.approx(0.5))
    verdicts = {str(v.rival): v for v in rival_verdicts(results, chosen.candidate)}
    singles = {name: verdicts[name] for name in ("softmax:mc_dropout", "kernel:mc_dropout")}
    chances = {name: v.gaps[1].chance for name, v in singles.items()}
    assert {name: v.adjusted for name, v in singles.items()} == holm(chances)
    assert [v.outcome for v in singles.values()] == ["beaten, clear", "beaten, clear"]
    for name in ("softmax:ensemble", "kernel:ensemble"):
        verdict, other = verdicts[name], name.partition(":")[0]
        assert (str(verdict.one), verdict.basis) == ("gp:ensemble", "items")
        assert verdict.gaps[1] == paired_bootstrap(by_item("gp", "nll"), by_item(other, "nll"))
        assert verdict.gaps[0].mean < 0  # of these items accuracy is more where NLL is
        assert verdict.outcome == "not beaten"
    page = choice_markdown(results, ranking)
    for text in ("p of NLL (Holm)", "no claim over seeds", "| Criterion ↓ |", "`gp:model`**, criterion"):
        assert text in page, text


def test_goals_beside_the_model_s_own_best_and_of_a_score(tmp_path: Path) -> None:
    def figure(model: str, seed: int, predictor: str, place: str, metric: str) -> float:
        if metric.startswith("auroc"):
            return 0.9 if metric.endswith("energy") else 0.6
        return 0.5 + 0.1 * seed + (0.02 if predictor == "mc_dropout" else 0.0)

    goals = [
        {"name": "near", "suite": "clean", "measure": "nll", "value": 0.01, "better": "lower"},
        {"name": "far", "suite": "ood", "measure": "auroc", "value": 0.84, "better": "higher"},
    ]
    more = [{"beside": "own best"}, {"set": "ood/*", "score": "energy", "predictor": "model"}]
    text = ""
    for goal, own in zip(goals, more, strict=True):
        values = "".join(f"{k} = {json.dumps(v)}\n" for k, v in {**goal, **own, "source": "a lead"}.items())
        text += f"[[goals]]\n{values}"
    plan = write_plan(tmp_path, ("gp",), more=text)
    write_runs(plan, tmp_path / "runs", figure)
    results = read_results(plan, tmp_path / "runs")
    near, far = plan.goals
    for predictor, gap, outcome in (("model", 0.0, "met, clear"), ("mc_dropout", 0.02, "missed")):
        found = goal_figure(results, near, Candidate("gp", predictor))
        assert found is not None
        assert (found.mean, found.count) == (pytest.approx(gap), 3)
        assert goal_verdict(near, found)[1] == outcome
    found = goal_figure(results, far, Candidate("gp", "mc_dropout"))
    assert found is not None
    assert found.mean == pytest.approx(0.9)


@pytest.mark.parametrize("metric", ["accuracy", "nll"])
@pytest.mark.parametrize("spread", [0.001, 0.5])
def test_bold_is_what_is_clearly_better(tmp_path: Path, metric: str, spread: float) -> None:
    sign, clear = 1 if metric == "accuracy" else -1, spread < 0.1

    def figure(model: str, seed: int, predictor: str, place: str, named: str) -> float:
        better = 0.1 + spread * (seed - 1) if model == "gp" else 0.0
        return 0.5 + 0.2 * seed + sign * (1.0 if predictor == "ensemble" else better)

    results = read(tmp_path, figure, "softmax gp", predictors=("model",), ensemble=True)
    assert [each.is_ensemble for each in results.candidates] == [False, False, True, True]
    best = best_candidate(results, Column("clean", "test", metric))
    assert best == (Candidate("gp", "model") if clear else None)
    page = summary_markdown(results)
    assert ("**" in page) == clear
    assert "| gp | model | 3 |" in page
    assert "| gp | ensemble | 1 of 3 |" in page
    assert best_candidate(results, Column("clean", "nowhere", "nll")) is None


def test_only_figures_on_as_many_items_are_compared(tmp_path: Path) -> None:
    def fewer(run: RunData) -> RunData:
        suites = {}
        for name, suite in run.suites.items():
            counts = {who: dict.fromkeys(sets, 31) for who, sets in suite.curves["items"].items()}
            suites[name] = replace(suite, curves={**suite.curves, "items": counts})
        return replace(run, suites=suites)

    results = read(tmp_path, nlls(softmax=0.5, gp=0.4, other=0.6), predictors=("model",))
    column = Column("clean", "validation", "nll")
    assert str(best_candidate(results, column)) == chosen(results) == "gp:model"
    assert OTHER_ITEMS not in summary_markdown(results)
    models = [replace(m, runs=tuple(map(fewer, m.runs))) if m.name == "gp" else m for m in results.models]
    few = replace(results, models=tuple(models))
    assert str(best_candidate(few, column)) == chosen(few) == "softmax:model"
    page = summary_markdown(few)
    assert page.count(OTHER_ITEMS) == page.count("\n## ")
    assert "| gp | model | 3 | 31 |" in page
    page = choice_markdown(few, rank(few))
    assert "Lower still, but on 31 items, not as many as most: `gp:model`" in page
    assert "| 1 | gp | model | other items | 3 | 31 |" in page


# The archive of records


def test_the_archive_holds_records_and_nothing_else(made: Path, tmp_path: Path) -> None:
    archive = made / "out" / ARCHIVE
    found = members(archive)
    runs = ("gp-seed0", "gp-seed1", "softmax-seed0", "softmax-seed1")
    assert list(found) == [f"{run}/{name}" for run in runs for name in NAMES]
    for name, content in found.items():
        original = (made / "runs" / name).read_bytes()
        if name.endswith(".json"):
            plain = json.loads(original)
            plain.get("curves", {}).pop("gallery", None)
            original = (json.dumps(plain, separators=(",", ":")) + "\n").encode()
        assert content == original
    with tarfile.open(archive) as tar:
        assert {(m.mtime, m.uid, m.gid, m.uname, m.gname, m.mode) for m in tar} == {(0, 0, 0, "", "", 0o644)}
    unpack(archive, tmp_path / "all")
    (tmp_path / "all" / "gp-seed0" / "recipe.json").chmod(0o600)
    assert packed(tmp_path / "all") == archive.read_bytes()  # its bytes depend on nothing else
    file = tmp_path / "all" / "gp-seed0" / "evaluation" / "ood.json"
    file.write_text(re.sub(r'"value":[\d.]+', '"value":NaN', file.read_text(), count=1))
    again = gathered(load_plan(made / "plan.toml"), tmp_path / "all", tmp_path / "none", tmp_path / "place")
    assert b'"value":NaN' in again["gp-seed0/evaluation/ood.json"]


def test_further_runs_complete_results_and_records_alone_give_the_same(made: Path, tmp_path: Path) -> None:
    plan = load_plan(made / "plan.toml")
    for model in ("gp", "softmax"):  # the runs of one at a time, the other's are gone
        for run in (made / "runs").glob(f"{model}-*"):
            shutil.copytree(run, tmp_path / "runs" / run.name)
        write_results(plan, tmp_path / "runs", tmp_path / "out", plan_file="plan.toml")
        shutil.rmtree(tmp_path / "runs")
    assert contents(tmp_path / "out") == contents(made / "out")
    archived: list[tuple[str, ...]] = []
    options = {"plan_file": "plan.toml", "on_archived": archived.append}
    write_results(plan, tmp_path / "runs", tmp_path / "out", **options)
    assert archived == [("softmax-seed0", "softmax-seed1", "gp-seed0", "gp-seed1")]
    assert contents(tmp_path / "out") == contents(made / "out")
    for name, content in contents(tmp_path / "out").items():
        assert b"gpattention-records-" not in content, name  # the folder of the call


def test_runs_that_are_not_asked_for_are_kept_and_evaluated_run_folders_win(
    made: Path, tmp_path: Path
) -> None:
    plan, archive = load_plan(made / "plan.toml"), made / "out" / ARCHIVE
    (tmp_path / "place").mkdir()
    assert gather(plan.only(["softmax"], [1]), made / "runs", archive, tmp_path / "place") == ()
    assert packed(tmp_path / "place") == archive.read_bytes()
    write_runs(plan.only(["gp"]), tmp_path / "new", other, ensemble=True)
    shutil.rmtree(tmp_path / "new" / "gp-seed1" / "evaluation")  # trained again, not yet evaluated
    found, old = gathered(plan, tmp_path / "new", archive, tmp_path / "third"), members(archive)
    assert set(found) == set(old)
    assert {name for name in old if found[name] != old[name]} == {f"gp-seed0/{name}" for name in SUITES}


def test_suites_that_the_run_folder_lacks_are_not_lost(made: Path, tmp_path: Path) -> None:
    plan = load_plan(made / "plan.toml").only(["gp"], [0])
    write_runs(plan, tmp_path / "runs", other)
    (tmp_path / "runs" / "gp-seed0" / "evaluation" / "ood.json").unlink()
    with pytest.raises(ValueError, match=r"has ood of gp-seed0, which .* evaluate the run by ood"):
        gathered(plan, tmp_path / "runs", made / "out" / ARCHIVE, tmp_path / "place")


def break_off(run: Path, *further: str) -> None:
    """A run whose training failed and was never evaluated."""
    shutil.rmtree(run / "evaluation")
    failed = {"time": 5.0, "event": "failed", "step": 7, "reason": "the loss is nan"}
    lines = [json.dumps(failed), *(json.dumps({"time": 6.0, "event": event}) for event in further)]
    with (run / "events.jsonl").open("a") as events:
        events.writelines(f"{line}\n" for line in lines)


def test_runs_that_broke_off_are_listed_and_kept(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, ("cifar10-softmax", "cifar10-cgpt"), seeds=[0, 1], data="cifar10")
    write_runs(plan, tmp_path / "runs", numbered)
    cola = write_plan(tmp_path / "cola", ("cola-cgpt",), seeds=[0], texts=True)
    write_runs(cola, tmp_path / "runs", numbered)  # beside them, and no part of the plan
    break_off(tmp_path / "runs" / "cifar10-cgpt-seed1")
    break_off(tmp_path / "runs" / "cifar10-softmax-seed1", "phase", "resumed")  # somebody went on
    with pytest.raises(ValueError, match=r"evaluated runs of plan in .*, got none"):
        write_results(plan.only(seeds=[1]), tmp_path / "runs", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    write_results(plan, tmp_path / "runs", tmp_path / "out")
    first = contents(tmp_path / "out")
    text = first["README.md"].decode()
    assert "2 of 4 runs of the plan are trained and evaluated: 2 models, seeds 0; 1 broke off." in text
    assert "| cifar10-cgpt-seed1 | 7 | 2 | 50.00 | 1.190 | the loss is nan |" in text
    assert "- not trained or not evaluated: cifar10-softmax-seed1\n" in text
    kept = [name for name in members(tmp_path / "out" / ARCHIVE) if "cgpt-seed1" in name]
    assert kept == [f"cifar10-cgpt-seed1/{name}" for name in ("events.jsonl", "metrics.csv", "recipe.json")]
    assert {"table2.md", "table2.csv"} <= set(first)  # the paper's tables come along
    assert "table1.md" not in first
    figure = numbered("cifar10-cgpt", 0, "model", "corrupted/mean", "batch_ece")
    assert f"| {figure:.3f} |" in first["table2.md"].decode().replace("**", "")
    shutil.rmtree(tmp_path / "runs")
    write_results(plan, tmp_path / "runs", tmp_path / "out")
    assert contents(tmp_path / "out") == first


def tarred(files: Mapping[str, bytes], **further: str) -> bytes:
    """An archive with links besides, by name."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        for name, target in further.items():
            member = tarfile.TarInfo(f"gp-seed0/{name}.csv")
            member.type, member.linkname = tarfile.SYMTYPE, target
            tar.addfile(member)
    return lzma.compress(stream.getvalue())


WHOLE = {"gp-seed0/recipe.json": b"{}", "gp-seed0/evaluation/clean.json": b" " * (3 << 20)}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"gp-seed0/model/model.safetensors": b""}, "got 'gp-seed0/model/model.safetensors'"),
        ({"notes/recipe.json": b""}, "got 'notes/recipe.json'"),
        ({"../gp-seed0/recipe.json": b""}, "outside the folder: '../gp-seed0/recipe.json'"),
        ({"/gp-seed0/recipe.json": b""}, "outside the folder: '/gp-seed0/recipe.json'"),
        ({"gp-seed0/evaluation/old/clean.json": b""}, "got 'gp-seed0/evaluation/old/clean.json'"),
        (tarred(WHOLE, metrics="/etc/passwd"), "'gp-seed0/metrics.csv'"),
        (WHOLE, "got 3145728 bytes, more than 2097152"),
    ],
)
def test_foreign_and_large_archives_are_refused(
    tmp_path: Path, files: dict[str, bytes] | bytes, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ARCHIVE).write_bytes(files if isinstance(files, bytes) else tarred(files))
    if files is WHOLE:
        unpack(tmp_path / ARCHIVE, tmp_path / "whole")
        monkeypatch.setattr(plan_results, "LARGEST_ARCHIVE", 2 << 20)
    with pytest.raises(ValueError, match=rf"records\.tar\.xz: expected .*{re.escape(message)}"):
        unpack(tmp_path / ARCHIVE, tmp_path / "place")
    assert list((tmp_path / "place").iterdir()) == []


@pytest.mark.parametrize("broken", [slice(0, 900), slice(0, -1), slice(0)], ids=str)
def test_broken_archives_are_refused_and_nothing_is_written(
    made: Path, tmp_path: Path, broken: slice
) -> None:
    content, out = (made / "out" / ARCHIVE).read_bytes()[broken], tmp_path / "out"
    out.mkdir()
    (out / ARCHIVE).write_bytes(content)
    (out / "summary.md").write_text("earlier")
    with pytest.raises(ValueError, match=r"out/records\.tar\.xz: expected a sound \.tar"):
        write_results(load_plan(made / "plan.toml"), made / "runs", out)
    assert contents(out) == {ARCHIVE: content, "summary.md": b"earlier"}


def test_records_that_cannot_be_used_are_refused_without_the_folder_of_the_call(
    made: Path, tmp_path: Path
) -> None:
    plan, whole = load_plan(made / "plan.toml"), members(made / "out" / ARCHIVE)
    (tmp_path / "out").mkdir()
    broken = tarred({**whole, "gp-seed0/evaluation/clean.json": b"{}"})
    (tmp_path / "out" / ARCHIVE).write_bytes(broken)
    message = rf"{tmp_path}/out/records\.tar\.xz/gp-seed0/evaluation/clean\.json is not an evaluation"
    with pytest.raises(ValueError, match=message):
        write_results(plan, tmp_path / "none", tmp_path / "out")
    assert contents(tmp_path / "out") == {ARCHIVE: broken}
    third = write_plan(tmp_path, ("third",), seeds=[0])
    (tmp_path / "out" / ARCHIVE).write_bytes(tarred(whole))
    with pytest.raises(ValueError, match=r"runs of plan in .*records\.tar\.xz, got none"):
        write_results(third, tmp_path / "none", tmp_path / "out")
    with pytest.raises(FileNotFoundError, match=r"no folder .*none"):
        write_results(third, tmp_path / "none", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_the_command(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs, archive = tmp_path / "runs", tmp_path / "out" / ARCHIVE
    command = ["reproduce", str(made / "plan.toml"), "--runs", str(runs), "--stage", "results"]
    assert main(command) == 2
    assert "expected -o FOLDER with --stage results" in capsys.readouterr().err
    archive.parent.mkdir()
    shutil.copy(made / "out" / ARCHIVE, archive)
    assert main([*command, "-o", str(tmp_path / "out"), "--models", "gp"]) == 0
    text = capsys.readouterr().out
    line = f"results: 2 of 2 runs are not evaluated in {runs} and come from {archive}: gp-seed0, gp-seed1\n"
    assert text.startswith(line)
    assert re.search(r"results: \d+ files in .*out, README.md says", text)
    assert "softmax" not in (tmp_path / "out" / "summary.csv").read_text()
    assert archive.read_bytes() == (made / "out" / ARCHIVE).read_bytes()  # softmax is still there
    archive.write_bytes(b"x")
    assert main([*command, "-o", str(tmp_path / "out")]) == 2
    assert f"{archive}: expected a sound .tar" in capsys.readouterr().err
