"""A plan's runs: trained once, shared, stopped, gone on with, evaluated; and plans that are refused."""

import json
import re
from pathlib import Path

import pytest

from gpattention.cli.main import main
from gpattention.runs import find_runs, open_run
from gpattention.studies import scheduler
from gpattention.studies.plans import STOPPED, evaluate_plan, load_plan, train_plan
from gpattention.training import train_recipe
from tests.studies.plan_runs import IMAGES, write_plan
from tests.studies.test_scheduler import Started

PLANS = sorted((Path(__file__).parents[2] / "recipes" / "plans").glob("*.toml"))
RECIPE = f"{IMAGES}[optimizer]\nbatch_size = 400\n"
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
    threads = {training.folder: training.threads for training in plan.trainings}
    for target, source in plan.sources().items():
        assert target != source
        assert threads[target] == threads[source]  # another number gives other weights


def test_threads(plan_file: Path, tmp_path: Path) -> None:
    """Every run with each number: other names, other first phases, and the processes have that many."""
    plan_file.write_text(f"threads = [1, 2]\n{PLAN}")
    plan = load_plan(plan_file)
    named = [(t.folder, t.recipe.name, t.threads, t.again) for t in plan.trainings]
    assert named == [
        ("small-seed0", "small", 1, ""), ("other-seed0", "other", 1, ""),
        ("small-2-threads-seed0", "small-2-threads", 2, "small"),
        ("other-2-threads-seed0", "other-2-threads", 2, "other"),
    ]  # fmt: skip
    assert plan.sources() == {
        "other-seed0": "small-seed0", "other-2-threads-seed0": "small-2-threads-seed0",
    }  # fmt: skip
    part, runs = plan.only(["small", "small-2-threads"]), tmp_path / "runs"
    assert [o.code for o in train_plan(part, runs, device="cpu")] == [0, 0]
    assert [o.code for o in evaluate_plan(part, runs, device="cpu")] == [0, 0]
    for folder, threads in (("small-seed0", "1"), ("small-2-threads-seed0", "2")):
        suite = json.loads((runs / folder / "evaluation" / "clean.json").read_text())
        assert suite["environment"]["threads"] == threads


def test_a_plan_from_start_to_end(plan_file: Path, tmp_path: Path) -> None:
    plan, runs = load_plan(plan_file), tmp_path / "runs"
    outcomes = train_plan(plan, runs, at_once=2, device="cpu")
    assert [(o.name, o.code) for o in outcomes] == [("small-seed0", 0), ("other-seed0", 0)], [
        o.message for o in outcomes
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
    page = (tmp_path / "out" / "README.md").read_text()
    assert "2 of 2 runs of the plan" in page
    assert "cpu, eager, tf32" in page
    assert [o.code for o in evaluate_plan(plan.only(["small"]), runs, device="cpu")] == [0]


@pytest.mark.slow
def test_a_deadline_saves_and_a_second_call_goes_on(plan_file: Path, tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(RECIPE.replace("epochs = 1", "epochs = 2000"))
    plan, runs = load_plan(plan_file), tmp_path / "runs"
    outcomes = train_plan(plan, runs, at_once=1, minutes=0.2, device="cpu")
    assert [(o.name, o.code) for o in outcomes] == [("small-seed0", STOPPED)]
    assert "resume to go on" in outcomes[0].message
    command = ["reproduce", str(plan_file), "--runs", str(runs), "--device", "cpu", "--minutes", "0.2"]
    assert main([*command, "--models", "small", "--seeds", "0"]) == STOPPED
    events = (runs / "small-seed0" / "events.jsonl").read_text()
    assert '"resumed"' in events


def test_no_process_is_left_behind(plan_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Answering(Started):
        def __call__(self, *given: object) -> scheduler._Worker:
            worker = super().__call__(*given)  # type: ignore[arg-type]
            if len(self.processes) == 1:
                self.ends[0].send((True, 0))
            return worker

    def fail(outcome: object) -> None:
        raise BrokenPipeError

    started = Answering()
    monkeypatch.setattr(scheduler, "_start", started)
    plan_file.write_text('seeds = [0, 1]\n[[runs]]\nrecipe = "small"\n')
    with pytest.raises(BrokenPipeError):
        train_plan(load_plan(plan_file), tmp_path / "runs", at_once=2, device="cpu", on_done=fail)
    assert [process.calls[0] for process in started.processes] == ["join", "terminate"]


def test_what_waits_for_a_failed_run_fails(
    plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "small.toml").write_text(RECIPE.replace('"digits"', '"cifar10"'))
    command = ["reproduce", str(plan_file), "--runs", str(tmp_path / "runs"), "--device", "cpu"]
    assert main([*command, "--data", str(tmp_path / "nothing"), "--stage", "train"]) == 1
    text = capsys.readouterr().out
    assert "small-seed0: failed (2)" in text
    assert "other-seed0: failed (1) after 0 s: the run whose first phase" in text
    assert "not finished: small-seed0, other-seed0" in text


ONE = '[[runs]]\nrecipe = "small"\n'
GOAL = {
    "name": '"a"', "suite": '"clean"', "measure": '"nll"', "value": "1", "source": '"b"', "better": '"lower"',
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seeds = [0]", r"[[runs]]"),
        ("run = 1", "unknown key 'run'"),
        (f'criterion = "test"\n{ONE}', "criterion to be one of clean, shifts, got 'test'"),
        (f'criterion = "shifts"\n{ONE}', "criterion among suites"),
        (("beside", '"the best"'), "got 'the best'"),
        (f"threads = [1, 1]\n{ONE}", "list of different numbers, got [1, 1]"),
        (f"threads = [0]\n{ONE}", "threads to be a whole number >= 1, got 0"),
        ("x =", "is not TOML"),
        (f'suites = ["clan"]\n{ONE}', "got 'clan'"),
        ('[[runs]]\nname = "a"', "recipe or shared in every"),
        (ONE + ONE, "two runs are called small-seed0"),
        (f"{ONE}seed = 1", "unknown key 'seed'"),
        (f'rivals = ["small"]\n{ONE}', "MODEL:PREDICTOR, got 'small'"),
        (f'rivals = ["none:model"]\n{ONE}', "rivals to be one of small, got 'none'"),
        (f'choose = ["best"]\n{ONE}', "got 'best'"),
        (f'choose = ["model+heat"]\n{ONE}', "got 'model+heat'"),
        (f"{ONE}[[goals]]\nnme = 1", "unknown key 'nme'"),
        (f'{ONE}[[goals]]\nname = "a"', "expected better in"),
        (("suite", '"clan"'), "got 'clan'"),
        (("measure", '"batch_ece"'), "got 'batch_ece'"),
        (("aggregation", '"mean"'), "got 'mean'"),
        (("better", '"higher"'), "better to be one of lower, got 'higher'"),
        (("suite", '"ood"'), "expected set, as ood has several"),
    ],
)
def test_plans_that_are_refused(plan_file: Path, text: str | tuple[str, str], message: str) -> None:
    if isinstance(text, tuple):  # a goal with one value changed
        text = f"{ONE}[[goals]]\n" + "\n".join(f"{k} = {v}" for k, v in {**GOAL, text[0]: text[1]}.items())
    plan_file.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        load_plan(plan_file)


def test_goals_know_their_metric(tmp_path: Path) -> None:
    changes = ({"measure": '"ece"'}, {"suite": '"corrupted"', "measure": '"accuracy"', "better": '"higher"'})
    goals = ({**GOAL, "aggregation": '"batch-mean"', **each} for each in changes)
    more = "".join("[[goals]]\n" + "".join(f"{k} = {v}\n" for k, v in goal.items()) for goal in goals)
    ece, accuracy = write_plan(tmp_path, more=more).goals
    assert (ece.metric, ece.set, ece.larger) == ("batch_ece", "test", False)
    assert (accuracy.metric, accuracy.set, accuracy.larger) == ("accuracy", "corrupted/mean", True)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda plan, folder: plan.only(["smal"]), ValueError, r"models .* small, other, got 'smal'"),
        (lambda plan, folder: plan.only(seeds=[3]), ValueError, r"seeds .* 0, got '3'"),
        (lambda plan, folder: train_plan(plan, folder, at_once=0), ValueError, r"at_once .* >= 1, got 0"),
        (lambda plan, folder: load_plan(folder / "none.toml"), FileNotFoundError, "no plan"),
    ],
)
def test_names_that_are_not_there(plan_file: Path, tmp_path: Path, call, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        call(load_plan(plan_file), tmp_path)
    plan_file.write_text('[[runs]]\nrecipe = "large"')
    with pytest.raises(FileNotFoundError, match="no recipe 'large'"):
        load_plan(plan_file)
    assert main(["reproduce", str(plan_file), "--seeds", "a"]) == 2
