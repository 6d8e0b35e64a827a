"""The folder of results: what is in it, that it follows from the runs alone, and that it stays as it is."""

import csv
import io
import json
import re
from collections import Counter
from pathlib import Path
from statistics import fmean

import pytest

from gpattention.cli.main import main
from gpattention.runs.results import recorded_settings
from gpattention.studies.reproduction import load_plan
from gpattention.studies.reproduction.results import write_results, writing
from gpattention.studies.reproduction.results.account import in_words, readme, shown_path, wall_seconds
from gpattention.studies.reproduction.results.choice import choose
from gpattention.studies.reproduction.results.plots import draw_figures
from gpattention.studies.reproduction.results.reading import read_results
from gpattention.studies.reproduction.results.summary import summary_csv, summary_markdown
from tests.studies.reproduced import flat, write_plan, write_runs

RIVALS = 'rivals = ["softmax:mc_dropout", "softmax:ensemble"]'


def numbered(model: str, seed: int, predictor: str, place: str, metric: str) -> float:
    """Each figure another number, the same every time."""
    return (sum(map(ord, f"{model}{predictor}{place}{metric}")) % 97) / 100 + 0.01 * seed


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The runs and the results of a plan."""
    root = tmp_path_factory.mktemp("made")
    plan = write_plan(root, more=RIVALS)
    write_runs(plan, root / "runs", numbered, ensemble=True)
    write_results(plan, root / "runs", root / "out", plan_file=root / "plan.toml")
    return root / "runs", root / "out"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


def test_everything_is_there(made: tuple[Path, Path]) -> None:
    names = set(contents(made[1]))
    assert {"summary.md", "summary.csv", "choice.md", "README.md", "report.html", "configs.json"} <= names
    pictures = {"severity-accuracy", "severity-nll", "severity-ece", "training-accuracy", "training-nll"}
    pictures |= {"ood-near", "reliability-softmax-mc_dropout", "reliability-softmax-ensemble"}
    assert {f"{name}.{form}" for name in pictures for form in ("png", "svg")} <= names
    assert {"training-softmax.csv", "training-gp.csv"} <= names
    assert not {name for name in names if name.startswith("table")}  # the paper has no digits


def test_the_same_runs_give_the_same_bytes(made: tuple[Path, Path], tmp_path: Path) -> None:
    runs, out = made
    before = contents(runs)
    write_results(load_plan(runs.parent / "plan.toml"), runs, tmp_path / "out", plan_file="plan.toml")
    assert contents(tmp_path / "out") == contents(out)
    assert contents(runs) == before  # nothing is written there


def test_no_page_tells_where_it_was_made(made: tuple[Path, Path]) -> None:
    for name, content in contents(made[1]).items():
        assert str(made[0].parent).encode() not in content, name


def test_the_csv_has_the_means_over_seeds(made: tuple[Path, Path]) -> None:
    rows = list(csv.DictReader((made[1] / "summary.csv").read_text().splitlines()))
    keys = Counter(
        tuple(row[k] for k in ("model", "predictor", "suite", "set", "metric", "score")) for row in rows
    )
    assert set(keys.values()) == {1}
    for row in rows:
        places = [row["set"]]
        if "severity" in row["set"]:
            places = [f"corrupted/{kind}/{row['set'][-1]}" for kind in ("fog", "snow")]
        metric = f"{row['metric']} {row['score']}".strip()
        ensemble = row["predictor"] == "ensemble"
        seeds = [0] if ensemble else [int(seed) for seed in row["seeds"].split()]
        values = [numbered(row["model"], s, row["predictor"], p, metric) for s in seeds for p in places]
        assert float(row["mean"]) == pytest.approx(fmean(values), rel=1e-5), row
        assert row["seeds"] == ("all" if ensemble else "0 1 2")
        assert int(row["runs"]) == len(seeds)
        assert row["items"] == "50"
        assert (row["standard_error"] == "") == (len(seeds) == 1)
    assert {row["set"] for row in rows} >= {f"corrupted/severity/{s}" for s in range(1, 6)}


def test_the_readme_tells_how(made: tuple[Path, Path]) -> None:
    text = (made[1] / "README.md").read_text()
    assert "6 of 6 runs of the plan are trained and evaluated: 2 models, seeds 0, 1, 2." in text
    assert "gpattention reproduce plan.toml --runs runs --stage train --device cuda" in text
    assert "gpattention reproduce plan.toml --runs runs --stage results -o out" in text
    row = "| gp-seed0 | 1970-01-01 00:16 | 1970-01-01 01:24 | 2 min | cuda:0, graph | 1 |  |"
    assert row in text  # 90 s and 60 s, the hour between them left out
    settings = "samples 4, limit 50, seed 0, predictors model mc_dropout"
    assert f"| gp | clean, corrupted, ood | {settings} | 4 min | a CPU, torch 2.13 |" in text
    assert "- reduced: at most 50 items of each set" in text
    for target in re.findall(r"\]\((.*?)\)", text):
        assert (made[1] / target).is_file()
    named = set(re.findall(r"\]\((.*?)\)", text))
    assert named == set(contents(made[1])) - {"README.md"}


def test_training_of_all_seeds(made: tuple[Path, Path]) -> None:
    rows = list(csv.DictReader((made[1] / "training-gp.csv").read_text().splitlines()))
    assert [(row["seed"], row["epoch"]) for row in rows] == [(s, e) for s in "012" for e in "12"]
    configs = json.loads((made[1] / "configs.json").read_text())
    assert configs["gp"]["seeds"] == [0, 1, 2]
    assert configs["gp"]["recipe"]["data"]["name"] == "digits"


def test_runs_that_are_missing_or_others(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, seeds=[0])
    write_runs(plan, tmp_path / "runs", flat)
    (tmp_path / "runs" / "gp-seed0").rename(tmp_path / "runs" / "elsewhere")  # found by its recipe's name
    recipe = tmp_path / "runs" / "elsewhere" / "recipe.json"
    plain = json.loads(recipe.read_text())
    plain["phases"]["epochs"] = 7
    recipe.write_text(json.dumps(plain))
    events = tmp_path / "runs" / "softmax-seed0" / "events.jsonl"
    events.write_text("\n".join(events.read_text().splitlines()[:-1]) + "\n")
    more = write_plan(tmp_path, ("softmax", "gp", "third"), seeds=[0])
    write_results(more, tmp_path / "runs", tmp_path / "out")
    text = (tmp_path / "out" / "README.md").read_text()
    assert "- gp: not the plan's recipe: phases.epochs = 7, in the plan 1" in text
    assert "- not trained or not evaluated: third-seed0" in text
    assert "| softmax-seed0 | 1970-01-01 00:16 | not finished |" in text
    assert "recipes/plans/plan.toml" in text  # the plan's own file was not given
    only = more.only(["third"])
    with pytest.raises(ValueError, match=r"expected evaluated runs of plan in .*runs, got none"):
        write_results(only, tmp_path / "runs", tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_the_papers_tables_come_along(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, ("cifar10-cgpt",), seeds=[0], data="cifar10")
    write_runs(plan, tmp_path / "runs", numbered)
    cola = write_plan(tmp_path / "cola", ("cola-cgpt",), seeds=[0], texts=True)
    write_runs(cola, tmp_path / "runs", numbered)  # beside them, and no part of the plan
    seen: list[Path] = []
    written = write_results(plan, tmp_path / "runs", tmp_path / "out", on_file=seen.append)
    assert seen == written
    names = {file.name for file in written}
    assert {"table2.md", "table2.csv"} <= names
    assert "table1.md" not in names
    figure = numbered("cifar10-cgpt", 0, "model", "corrupted/mean", "batch_ece")
    assert f"| {figure:.3f} |" in (tmp_path / "out" / "table2.md").read_text().replace("**", "")


def test_large_reports_lose_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = write_plan(tmp_path, seeds=[0], texts=True)
    write_runs(plan, tmp_path / "runs", flat)
    results = read_results(plan, tmp_path / "runs")
    whole, nothing = writing.report_page(results)
    assert nothing == ()
    monkeypatch.setattr(writing, "LARGEST", len(whole) - 1)
    page, left_out = writing.report_page(results)
    assert len(page) < len(whole)
    assert left_out == ("the gallery of items",)
    told = "- report.html is without the gallery of items, to keep it small"
    assert told in readme(results, [], ["report.html"], left_out)
    monkeypatch.setattr(writing, "LARGEST", 1)
    assert writing.report_page(results)[1] == tuple(what for what, _, _ in writing.LEFT_OUT)


def test_reports_have_no_gallery_of_images(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, ("gp",), seeds=[0])
    write_runs(plan, tmp_path / "runs", flat)
    page, left_out = writing.report_page(read_results(plan, tmp_path / "runs"))
    assert b'id="environment"' in page
    assert b'id="gallery"' not in page  # rather than a section that no command fills
    assert left_out == ("the gallery of items",)


def test_texts(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, more=RIVALS, texts=True)
    write_runs(plan, tmp_path / "runs", numbered)
    results = read_results(plan, tmp_path / "runs")
    page = summary_markdown(results)
    assert "## In domain: test items" in page
    assert "## Out of domain: out-of-domain" in page
    assert "| MCC, % ↑ |" in page
    assert "Corrupted" not in page
    found = {row["set"] for row in csv.DictReader(io.StringIO(summary_csv(results)))}
    assert found == {"validation", "test", "ood/out-of-domain", "ood/near"}
    drawn = {name for name, _ in draw_figures(results, choose(results))}
    assert "reliability-softmax-mc_dropout" in drawn  # of test items
    assert "severity-nll" not in drawn


def test_evaluations_of_before_count_their_items_otherwise(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, ("gp",), seeds=[0])
    write_runs(plan, tmp_path / "runs", flat)
    for file in (tmp_path / "runs").rglob("evaluation/*.json"):
        plain = json.loads(file.read_text())
        del plain["curves"]["items"]
        plain["environment"]["settings"] = "{" if file.stem == "ood" else json.dumps({"limit": 40})
        file.write_text(json.dumps(plain))
    results = read_results(plan, tmp_path / "runs")
    sets = {"test": "clean", "corrupted/mean": "corrupted", "ood/near": "ood"}
    metrics = {"ood/near": "auroc"}
    found = [results.table.find("gp", suite, s, metrics.get(s, "nll")) for s, suite in sets.items()]
    assert [each.items for each in found] == ["50", "40", ""]  # the reliability diagram, the limit, nothing
    assert recorded_settings(results.runs[0].suites["ood"]) == {}


def test_wall_time_leaves_out_stops() -> None:
    def events(*pairs: tuple[float, str]) -> tuple[dict[str, object], ...]:
        return tuple({"time": time, "event": event} for time, event in pairs)

    assert wall_seconds(()) == 0
    assert wall_seconds(events((3, "phase"), (5, "validated"), (9, "phase"), (10, "finished"))) == 7
    resumed = events((3, "phase"), (5, "stopped"), (90, "phase"), (91, "resumed"), (95, "finished"))
    assert wall_seconds(resumed) == 2 + 5
    begun, again = events((1, "phase"), (2, "phase"), (4, "stopped")), events((40, "phase"), (41, "phase"))
    assert wall_seconds((*begun, *again, *events((42, "resumed"), (50, "finished")))) == 3 + 10
    taken = events((3, "first phase taken"), (8, "phase"), (9, "resumed"), (10, "finished"))
    assert wall_seconds(taken) == 2
    assert [in_words(s) for s in (3.21, 90, 7199, 7260)] == ["3.2 s", "2 min", "2 h 0 min", "2 h 1 min"]


def test_paths_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert shown_path(tmp_path / "a" / "b") == "a/b"
    assert shown_path(Path("a")) == "a"
    assert shown_path(tmp_path.parent / "other") == "other"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = write_plan(tmp_path, seeds=[0])
    write_runs(plan, tmp_path / "runs", flat)
    command = ["reproduce", str(tmp_path / "plan.toml"), "--runs", str(tmp_path / "runs")]
    assert main([*command, "--stage", "results"]) == 2
    assert "expected -o FOLDER with --stage results" in capsys.readouterr().err
    assert main([*command, "--seeds", "0,a"]) == 2
    assert "expected --seeds to be whole numbers, got 'a'" in capsys.readouterr().err
    assert main([*command, "--stage", "results", "-o", str(tmp_path / "out"), "--models", "gp"]) == 0
    assert re.search(r"results: \d+ files in .*out, README.md tells", capsys.readouterr().out)
    assert "softmax" not in (tmp_path / "out" / "summary.csv").read_text()


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ('rivals = ["softmax"]', "expected MODEL:PREDICTOR, got 'softmax'"),
        ('rivals = ["none:model"]', "expected rivals among softmax, gp, got 'none'"),
        ('choose = ["best"]', "expected choose among"),
        ('choose = ["model+heat"]', "expected choose among"),
        ("[[goals]]\nnme = 1", "unknown key 'nme'"),
        ('[[goals]]\nname = "a"', "expected better in"),
        ('suite = "clan"', "expected suite to be one of"),
        ('measure = "batch_ece"', "expected measure to be a metric"),
        ('aggregation = "mean"', "expected aggregation to be one of"),
        ('better = "higher"', "expected better = 'lower' for nll, got 'higher'"),
        ('suite = "ood"', "expected set, as ood has several"),
    ],
)
def test_plans_that_are_refused(tmp_path: Path, more: str, told: str) -> None:
    if not more.startswith(("rivals", "choose", "[[goals]]")):
        goal = {"name": '"a"', "suite": '"clean"', "measure": '"nll"', "value": "1", "source": '"b"'}
        goal["better"] = '"lower"'
        key, _, value = more.partition(" = ")
        goal[key] = value
        more = "[[goals]]\n" + "\n".join(f"{k} = {v}" for k, v in goal.items())
    with pytest.raises(ValueError, match=re.escape(told)):
        write_plan(tmp_path, more=more)


def test_goals_know_their_metric(tmp_path: Path) -> None:
    goal = (
        '[[goals]]\nname="a"\nsuite="{}"\nmeasure="{}"\nvalue=1\nsource="b"\nbetter="{}"\naggregation="{}"\n'
    )
    more = goal.format("clean", "ece", "lower", "batch-mean") + goal.format(
        "corrupted", "accuracy", "higher", "batch-mean"
    )
    ece, accuracy = write_plan(tmp_path, more=more).goals
    assert (ece.metric, ece.set, ece.larger) == ("batch_ece", "test", False)
    assert (accuracy.metric, accuracy.set, accuracy.larger) == ("accuracy", "corrupted/mean", True)
