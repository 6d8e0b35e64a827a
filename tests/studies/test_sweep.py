"""Sweeps train all combinations, choose on validation data, survive failures, go on where they stopped."""

import csv
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpattention.runs import OverSeeds, Recipe, chosen_row, load_recipe, open_run
from gpattention.studies.sweep import (
    LONGEST,
    SweepRow,
    SweepSetting,
    choose_setting,
    label_of,
    parse_over,
    plan_sweep,
    run_sweep,
    split_values,
    train_one,
)
from gpattention.training import CheckpointError, TrainingStoppedError
from tests.runs.tiny_runs import digits_recipe


def test_a_sweep_from_end_to_end(tmp_path: Path) -> None:
    over = {"regularizer.end": [0.001, 0.1], "optimizer.batch_size": ["200", "5000"]}
    done: list[SweepRow] = []
    result = run_sweep(digits_recipe(), over, seeds=2, folder=tmp_path, on_done=done.append)
    assert tuple(done) == result.rows
    assert len(result.rows) == 8
    assert [row.recipe.seed for row in result.rows] == [0, 1] * 4
    for row in result.rows:
        assert row.folder.parent.name == label_of(row.settings)
        if row.settings["optimizer.batch_size"] == "5000":
            assert "ValueError: expected at least 5000 training items" in row.error
            assert (row.accuracy, row.nll) == (None, None)
            continue
        run = open_run(row.folder)
        assert run.recipe == row.recipe
        assert str(run.recipe.regularizer.end) == row.settings["regularizer.end"]
        kept = chosen_row(run.recipe, run.rows)
        assert (row.accuracy, row.nll) == (kept["validation_accuracy"], kept["validation_nll"])
    assert [s.failed for s in result.settings] == [0, 2, 0, 2]
    mean = sum(row.accuracy or 0 for row in result.rows[:2]) / 2
    assert result.settings[0].accuracy.mean == pytest.approx(mean)
    best = max((result.settings[i] for i in (0, 2)), key=lambda s: (s.accuracy.mean, -s.nll.mean))
    assert result.chosen is best

    with (tmp_path / "sweep.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [line["status"] for line in table] == ["finished", "finished", "failed", "failed"] * 2
    assert [line["regularizer.end"] for line in table] == ["0.001"] * 4 + ["0.1"] * 4
    assert (tmp_path / table[0]["folder"] / "recipe.json").is_file()
    page = (tmp_path / "sweep.md").read_text()
    assert page.count("**") == 2 * 5  # one row of five cells
    assert page.count("\n- `") == 4
    chosen = load_recipe(tmp_path / "chosen.toml")
    assert chosen == result.chosen_recipe
    assert str(chosen.regularizer.end) == best.settings["regularizer.end"]
    assert replace(chosen, regularizer=digits_recipe().regularizer) == digits_recipe()


def test_resuming_trains_only_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    over = {"regularizer.end": [0.001, 0.1]}
    first = run_sweep(digits_recipe(), over, folder=tmp_path)
    with pytest.raises(FileExistsError, match="holds a run already: resume the sweep"):
        run_sweep(digits_recipe(), over, folder=tmp_path)
    with pytest.raises(
        CheckpointError, match=r"than the one to resume: model.attention is 'cgp' there and 'scgp'"
    ):
        run_sweep(digits_recipe("scgp"), over, folder=tmp_path, resume=True)
    events = first.rows[1].folder / "events.jsonl"
    lines = events.read_text().splitlines(keepends=True)
    events.write_text("".join(line for line in lines if '"finished"' not in line))  # as if it had been killed
    trained: list[Path] = []

    def train(run: SweepRow, slot: int, **options: Any) -> object:
        trained.append(run.folder)
        return train_one(run, slot, **options)

    monkeypatch.setattr("gpattention.studies.sweep.train_one", train)
    again = run_sweep(digits_recipe(), over, folder=tmp_path, resume=True)
    assert trained == [first.rows[1].folder]
    assert again == first
    longer = run_sweep(digits_recipe(), {"regularizer.end": [0.001, 0.1, 1]}, folder=tmp_path, resume=True)
    assert longer.rows[:2] == first.rows
    assert len(trained) == 2
    (first.rows[0].folder / "recipe.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not a recipe"):
        run_sweep(digits_recipe(), over, folder=tmp_path, resume=True)


# a `sitecustomize` that kills a process which is about to train kernel attention
DEADLY = """
import os, signal, sys
def watch(event, arguments):
    if event == 'open' and 'killed' in str(arguments[0]) and '=kernel' in str(arguments[0]):
        os.kill(os.getpid(), signal.SIGKILL)
if 'spawn_main' in ' '.join(sys.orig_argv):
    sys.addaudithook(watch)
"""


def test_processes_train_the_same_and_a_killed_one_is_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = run_sweep(digits_recipe("softmax"), {}, folder=tmp_path / "alone")
    (tmp_path / "sitecustomize.py").write_text(DEADLY)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{Path(__file__).parents[2]}")
    over = {"model.attention": ["kernel", "softmax"]}
    swept = run_sweep(digits_recipe(), over, jobs=2, folder=tmp_path / "killed")
    killed, whole = swept.rows
    assert killed.error == "its process was killed by SIGKILL"
    assert whole.error == ""
    assert whole.accuracy == pytest.approx(alone.rows[0].accuracy, abs=0.02)  # threads may round differently
    assert whole.nll == pytest.approx(alone.rows[0].nll, rel=1e-3)
    assert (swept.chosen and swept.chosen.settings) == {"model.attention": "softmax"}


PROGRAM = """
import sys
from gpattention.studies.sweep import run_sweep
from gpattention.training import TrainingStoppedError
from tests.runs.tiny_runs import digits_recipe

if __name__ == "__main__":
    recipe = digits_recipe(phases={"kernel_epochs": 0, "epochs": 3000})
    try:
        run_sweep(recipe, {"model.attention": ["softmax", "kernel"]}, jobs=2, folder=sys.argv[1])
    except TrainingStoppedError as stop:
        print(stop)
"""


@pytest.mark.slow
def test_a_stopped_sweep_leaves_runs_to_resume(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    folder = tmp_path / "sweep"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(tmp_path / "program.py"), str(folder)]
    program = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while len(list(folder.glob("*/*/metrics.csv"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        program.send_signal(signal.SIGTERM)
        output, _ = program.communicate(timeout=50)
    finally:
        program.kill()
    assert output == "stopped by SIGTERM; resume to go on\n"
    states = [(run / "events.jsonl").read_text() for run in folder.glob("*/*")]
    assert ['"stopped"' in events for events in states] == [True, True]  # they saved themselves


def test_requests_to_stop_failures_and_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[str] = []

    def train(recipe: Recipe, folder: Path, **options: Any) -> None:
        devices.append(options["device"])
        raise (TrainingStoppedError("stopped by SIGINT at step 3") if recipe.seed else MemoryError())

    monkeypatch.setattr("gpattention.studies.sweep.train_recipe", train)
    first, second = plan_sweep(digits_recipe(), {}, 2, tmp_path)
    assert train_one(first, 0, root=None, device="cpu") == "MemoryError"
    for count in (2, 1):
        monkeypatch.setattr("torch.cuda.device_count", lambda count=count: count)
        for slot, device in enumerate(("cuda", "cuda", "cuda", "cuda:1", "cpu")):
            assert isinstance(train_one(second, slot, root=None, device=device), TrainingStoppedError)
    two, one = ["cuda:0", "cuda:1", "cuda:0"], ["cuda"] * 3
    assert devices == ["cpu", *two, "cuda:1", "cpu", *one, "cuda:1", "cpu"]
    with pytest.raises(TrainingStoppedError, match="SIGINT at step 3; resume to go on"):
        run_sweep(digits_recipe(), {}, seeds=2, folder=tmp_path)
    (tmp_path / "chosen.toml").write_text("of an earlier time")
    result = run_sweep(digits_recipe(), {"model.attention": ["nothing"]}, folder=tmp_path)
    assert result.chosen is result.chosen_recipe is None
    assert not (tmp_path / "chosen.toml").exists()
    assert "None was chosen" in (tmp_path / "sweep.md").read_text()
    monkeypatch.setattr("gpattention.studies.sweep.train_one", lambda *_, **__: "")
    result = run_sweep(digits_recipe(), {}, folder=tmp_path / "empty")  # without validations
    assert "FileNotFoundError: expected a run in" in result.rows[0].error


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 9), st.integers(0, 1)), min_size=1, max_size=8))
def test_the_chosen_one_is_beaten_by_none(found: list[tuple[float, float, int]]) -> None:
    settings = [SweepSetting({}, 1, failed, OverSeeds({0: a}), OverSeeds({0: n})) for a, n, failed in found]
    whole = [(-accuracy, nll) for accuracy, nll, failed in found if not failed]
    for choose, order in (("accuracy", lambda pair: pair), ("nll", lambda pair: pair[::-1])):
        best = choose_setting(settings, choose)  # type: ignore[arg-type]
        if whole:
            assert best.failed == 0
            assert (-best.accuracy.mean, best.nll.mean) == min(whole, key=order)
        else:
            assert best is None


@given(st.lists(st.sampled_from(["1e-3", "[1, 2]", '"a,b"', "{x = [1, 2]}", "'c,]'", "cgp"]), min_size=1))
def test_values_are_cut_at_their_own_commas_only(parts: list[str]) -> None:
    assert split_values(",".join(parts)) == parts
    assert parse_over([f"a.b={' , '.join(parts)}", "c = x"]) == {"a.b": parts, "c": ["x"]}
    for wrong in (["a.b"], ["=1"], ["a="], ["a=1", "a=2"]):
        with pytest.raises(ValueError, match=r"section.key=value,value, got|got --over a twice"):
            parse_over(wrong)


def test_the_row_of_the_weights_that_are_kept() -> None:
    figures = [("kernel", 0.9, 0.1), ("gp", 0.5, 0.9), ("gp", 0.7, 0.5), ("gp", 0.7, 0.4), ("gp", 0.6, 0.4)]
    names = ("phase", "validation_accuracy", "validation_nll")
    rows = [{"epoch": i, **dict(zip(names, each, strict=True))} for i, each in enumerate(figures, 1)]
    for select, epoch in (("best", 3), ("best-nll", 4), ("last", 5)):  # of equals the first
        assert chosen_row(digits_recipe(checkpoint={"select": select}), rows)["epoch"] == epoch
    with pytest.raises(ValueError, match="expected a run with a validation"):
        chosen_row(digits_recipe(), [])


@given(st.dictionaries(st.text(min_size=1, max_size=40), st.text(max_size=90), max_size=3))
def test_labels_are_names_of_folders_and_differ(settings: dict[str, str]) -> None:
    label = label_of(settings)
    assert 0 < len(label) <= LONGEST
    assert "/" not in label
    assert label.isascii()
    assert label_of({**settings, "one.more": "1"}) != label


def test_a_plan_names_each_run(tmp_path: Path) -> None:
    plan = plan_sweep(digits_recipe(seed=7), {"optimizer.clip": [1, 2.5]}, 2, tmp_path)
    assert [str(run.folder.relative_to(tmp_path)) for run in plan] == [
        "optimizer.clip=1/seed-7", "optimizer.clip=1/seed-8",
        "optimizer.clip=2.5/seed-7", "optimizer.clip=2.5/seed-8",
    ]  # fmt: skip
    assert [run.recipe.optimizer.clip for run in plan] == [1, 1, 2.5, 2.5]
    assert {run.recipe.name for run in plan} == {"tiny-optimizer.clip=1", "tiny-optimizer.clip=2.5"}
    (seeds_alone,) = plan_sweep(digits_recipe(), {}, 1, tmp_path)
    assert seeds_alone.recipe == digits_recipe()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"over": {"optimizer.batchsize": [1]}}, "did you mean 'batch_size'"),
        ({"over": {"optimizer.batch_size": [0]}}, "expected optimizer.batch_size >= 1"),
        ({"over": {"seed": [1, 2]}}, "seeds are what --seeds is for"),
        ({"over": {"optimizer.clip": []}}, "expected a list of values for optimizer.clip"),
        ({"over": {"optimizer.clip": "12"}}, "expected a list of values for optimizer.clip"),
        ({"over": {"optimizer.clip": [1, 1]}}, "got 1 twice"),
        ({"over": {"optimizer.clip": ["1", ""]}}, "got an empty one"),
        ({"seeds": 0}, "seeds .* >= 1, got 0"),
        ({"jobs": 0}, "jobs .* >= 1, got 0"),
        ({"choose": "ece"}, "expected choose to be one of accuracy, nll, got 'ece'"),
    ],
)
def test_mistakes_show_before_a_folder_is_made(
    options: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        run_sweep(digits_recipe(), **{"over": {}, "folder": tmp_path / "new", **options})  # type: ignore[arg-type]
    assert not (tmp_path / "new").exists()


def test_recipes_come_as_files_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gpattention.studies.sweep.train_one", lambda *_, **__: "not trained")
    (tmp_path / "mine.toml").write_text("[optimizer]\nbatch_size = 200\n")
    from_file = run_sweep(tmp_path / "mine.toml", {}, changes=["phases.epochs=3"])
    assert (from_file.recipe.phases.epochs, from_file.folder) == (3, Path("runs/sweep-mine"))
    assert run_sweep(from_file.recipe, {}, folder="x", changes=["seed=4"]).rows[0].recipe.seed == 4
