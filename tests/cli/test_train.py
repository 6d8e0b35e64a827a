"""`gpattention train` and `sweep`: they train, resume, tell of the weights that are kept, mark the winner."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpattention.runs import load_recipe
from tests.cli.conftest import Run

RECIPE = Path(__file__).parents[2] / "recipes" / "digits-cgp.toml"
SMALL = ["--set", "phases.kernel_epochs=1", "--set", "phases.epochs=1", "--set", "model.config.width=16"]


def test_train_and_resume(tmp_path: Path, run: Run) -> None:
    train, folder = ["train", RECIPE, *SMALL], ["--run", tmp_path / "run"]
    out, err = run(*train, *folder)
    assert "on validation items: accuracy 0." in out
    assert f"on test items: gpattention evaluate {tmp_path / 'run'}" in out
    assert re.fullmatch(
        r"digits-cgp epoch 2/2 gp +loss \d\.\d{3}  on validation: accuracy \d\.\d{3}  NLL \d\.\d{3}  \d+ s\n",
        err,
    )
    assert "holds a run already" in run(*train, *folder, code=2).err
    run(*train, *folder, "--resume")
    run("train", "--resume", *folder)  # the run knows its recipe
    err = run("train", "--resume", *folder, "--set", "seed=1", "--set", "phases.epochs=3", code=2).err
    differences = (
        "seed is 0 there and 1 here, phases.epochs is 1 there and 3 here. A changed recipe is a new run"
    )
    assert differences in err


def test_train_tells_of_the_weights_that_it_keeps(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    values = ((0.9, 0.5), (0.8, 0.3), (0.7, 0.4))
    rows = tuple(
        {"epoch": epoch, "phase": "gp", "validation_accuracy": accuracy, "validation_nll": nll}
        for epoch, (accuracy, nll) in enumerate(values, start=1)
    )
    trained = SimpleNamespace(rows=rows, folder=Path("run"))
    monkeypatch.setattr("gpattention.cli.train.train_recipe", lambda *_, **__: trained)
    for select, kept in (("best", "0.9000, NLL 0.5000 (epoch 1"), ("last", "0.7000, NLL 0.4000 (epoch 3")):
        out = run("train", RECIPE, "--set", f"checkpoint.select={select}").out
        assert f"on validation items: accuracy {kept}, whose weights are kept)" in out


def test_sweep_marks_the_winner(recipe: Path, tmp_path: Path, run: Run) -> None:
    arguments = [
        "sweep", recipe, "--over", "model.attention=kernel,nothing", "--run", tmp_path / "sweep",
        "--choose", "nll", "--set", "optimizer.batch_size=300", "--device", "cpu",
    ]  # fmt: skip
    out = run(*arguments).out
    assert out.startswith("2 runs, 1 at a time\n1/2  model.attention=kernel seed 0: accuracy 0.")
    assert "2/2  model.attention=nothing seed 0: failed, ValueError: expected kind" in out
    (marked,) = [line for line in out.splitlines() if line.startswith("*  ")]
    assert marked.split()[1] == "kernel"
    assert "* chosen by NLL (lowest) on the validation split" in out
    chosen = load_recipe(tmp_path / "sweep" / "chosen.toml")
    assert (chosen.model.attention, chosen.optimizer.batch_size) == ("kernel", 300)
    assert "holds a run already: resume the sweep" in run(*arguments, code=2).err
    assert run(*arguments, "--resume").out == out


def test_nothing_to_choose_is_a_failure(recipe: Path, tmp_path: Path, run: Run) -> None:
    out = run("sweep", recipe, "--over", "model.attention=nothing", "--run", tmp_path / "sweep", code=1).out
    assert "nothing was chosen: every setting has a run that failed" in out
