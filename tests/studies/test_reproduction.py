"""A plan's runs: trained once, shared, stopped, gone on with, judged."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpattention.cli.main import main
from gpattention.experiments import find_runs, open_run, train_recipe
from gpattention.studies.reproduction import evaluate_plan, load_plan, train_plan, working
from gpattention.studies.reproduction.working import STOPPED
from gpattention.training.folder import FIRST_PHASE

PLANS = sorted((Path(__file__).parents[2] / "recipes" / "plans").glob("*.toml"))
RECIPE = """
[data]
name = "digits"
[model]
attention = "cgp"
config = { width = 8, heads = 2, depth = 1 }
[optimizer]
batch_size = 400
[phases]
kernel_epochs = 1
epochs = 1
"""
PLAN = """
train = ["--precision", "tf32"]
suites = ["clean"]
evaluate = ["--limit", "20", "--samples", "2", "--predictors", "model"]
[[runs]]
recipe = "small"
[[runs]]
recipe = "small"
name = "other"
changes = ["model.attention=direct"]
evaluate = ["--predictors", "mean"]
"""


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    (tmp_path / "small.toml").write_text(RECIPE)
    file = tmp_path / "plan.toml"
    file.write_text(PLAN)
    return file


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_plans_of_the_project_can_be_read(path: Path) -> None:
    plan = load_plan(path)
    assert len(plan.trainings) >= len(plan.models) > 1
    for target, source in plan.sources().items():
        assert target != source


def test_a_plan_from_start_to_end(plan_file: Path, tmp_path: Path) -> None:
    plan, runs = load_plan(plan_file), tmp_path / "runs"
    outcomes = train_plan(plan, runs, at_once=2, device="cpu")
    assert [(o.name, o.code) for o in outcomes] == [("small-seed0", 0), ("other-seed0", 0)], [
        o.said for o in outcomes
    ]
    taken = (runs / "other-seed0" / "events.jsonl").read_text().splitlines()[0]
    assert json.loads(taken)["event"] == "first phase taken"
    alone = train_recipe(plan.trainings[1].recipe, tmp_path / "alone")
    assert open_run(runs / "other-seed0").rows == open_run(alone.folder).rows
    assert train_plan(plan, runs, device="cpu") == []  # nothing is left to do
    command = ["reproduce", str(plan_file), "--runs", str(runs), "--device", "cpu"]
    assert main([*command, "-o", str(tmp_path / "out")]) == 0
    assert len(find_runs(runs)) == 2
    for run, predictor in ((runs / "small-seed0", "model"), (runs / "other-seed0", "mean")):
        records = json.loads((run / "evaluation" / "clean.json").read_text())["records"]
        assert {r["predictor"] for r in records} == {predictor}
    told = (tmp_path / "out" / "README.md").read_text()
    assert "2 of 2 runs of the plan" in told
    assert "cpu, eager, tf32" in told
    assert [o.code for o in evaluate_plan(plan.only(["small"]), runs, device="cpu")] == [0]


@pytest.mark.slow
def test_a_first_phase_that_is_gone_is_trained_again(plan_file: Path, tmp_path: Path) -> None:
    plan, runs = load_plan(plan_file), tmp_path / "runs"
    train_plan(plan, runs, at_once=2, device="cpu")
    before = open_run(runs / "other-seed0").rows
    for folder in (runs / "other-seed0", runs / "small-seed0" / FIRST_PHASE):
        shutil.rmtree(folder)
    assert [(o.name, o.code) for o in train_plan(plan, runs, device="cpu")] == [("other-seed0", 0)]
    assert open_run(runs / "other-seed0").rows == before


@pytest.mark.slow
def test_a_deadline_saves_and_a_second_call_goes_on(plan_file: Path, tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(RECIPE.replace("epochs = 1", "epochs = 2000"))
    plan, runs = load_plan(plan_file), tmp_path / "runs"
    outcomes = train_plan(plan, runs, at_once=1, minutes=0.2, device="cpu")
    assert [(o.name, o.code) for o in outcomes] == [("small-seed0", STOPPED)]
    assert "resume to go on" in outcomes[0].said
    command = ["reproduce", str(plan_file), "--runs", str(runs), "--device", "cpu", "--minutes", "0.2"]
    assert main([*command, "--models", "small", "--seeds", "0"]) == STOPPED
    events = (runs / "small-seed0" / "events.jsonl").read_text()
    assert '"resumed"' in events


def test_no_process_is_left_behind(plan_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start(work: object) -> "subprocess.Popen[bytes]":
        seconds = 60 if started else 0
        started.append(subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({seconds})"]))
        return started[-1]

    def tell(outcome: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(working, "_start", start)
    plan_file.write_text('seeds = [0, 1]\n[[runs]]\nrecipe = "small"\n')
    with pytest.raises(BrokenPipeError):
        train_plan(load_plan(plan_file), tmp_path / "runs", at_once=2, device="cpu", on_done=tell)
    assert len(started) == 2
    assert started[1].poll() == -signal.SIGTERM


def test_what_waits_for_a_failed_run_fails(
    plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "small.toml").write_text(RECIPE.replace('"digits"', '"cifar10"'))
    command = ["reproduce", str(plan_file), "--runs", str(tmp_path / "runs"), "--device", "cpu"]
    assert main([*command, "--data", str(tmp_path / "nothing"), "--stage", "train"]) == 1
    told = capsys.readouterr().out
    assert "small-seed0: failed (2)" in told
    assert "other-seed0: failed (1) after 0 s: the run whose first phase" in told
    assert "not finished: small-seed0, other-seed0" in told


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("seeds = [0]", r"expected \[\[runs\]\]"),
        ("run = 1", "unknown key 'run'"),
        ("x =", "is not TOML"),
        ('suites = ["clan"]\n[[runs]]\nrecipe = "small"', "expected suites among"),
        ('[[runs]]\nname = "a"', "expected recipe or shared in every"),
        ('[[runs]]\nrecipe = "small"\n[[runs]]\nrecipe = "small"', "two runs are called small-seed0"),
        ('[[runs]]\nrecipe = "small"\nseed = 1', "unknown key 'seed'"),
    ],
)
def test_plans_that_are_refused(plan_file: Path, text: str, told: str) -> None:
    plan_file.write_text(text)
    with pytest.raises(ValueError, match=told):
        load_plan(plan_file)


def test_names_that_are_not_there(plan_file: Path, tmp_path: Path) -> None:
    plan = load_plan(plan_file)
    with pytest.raises(ValueError, match=r"expected models of the plan \(small, other\), got 'smal'"):
        plan.only(["smal"])
    with pytest.raises(ValueError, match=r"expected seeds of the plan \(0\), got 3"):
        plan.only(seeds=[3])
    with pytest.raises(ValueError, match="expected at_once >= 1, got 0"):
        train_plan(plan, tmp_path / "runs", at_once=0)
    with pytest.raises(FileNotFoundError, match="no plan"):
        load_plan(tmp_path / "none.toml")
    plan_file.write_text('[[runs]]\nrecipe = "large"')
    with pytest.raises(FileNotFoundError, match="no recipe 'large'"):
        load_plan(plan_file)
    assert main(["reproduce", str(plan_file), "--seeds", "a"]) == 2
