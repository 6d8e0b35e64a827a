"""`gpattention sweep`: a line for each run, a table with the winner marked, exit codes."""

from pathlib import Path

import pytest

from gpattention.cli import main
from gpattention.experiments.recipe_file import write_recipe
from gpattention.training import load_recipe
from tests.experiments.tiny_runs import digits_recipe

Output = pytest.CaptureFixture[str]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "tiny.toml"
    write_recipe(file, digits_recipe())
    return file


def test_a_table_with_the_winner_marked(recipe: Path, tmp_path: Path, capsys: Output) -> None:
    arguments = [
        "sweep", str(recipe), "--over", "model.attention=kernel,nothing", "--run", str(tmp_path / "sweep"),
        "--choose", "nll", "--set", "optimizer.batch_size=300", "--device", "cpu",
    ]  # fmt: skip
    assert main(arguments) == 0
    told = capsys.readouterr().out
    assert told.startswith("2 runs, 1 at a time\n1/2  model.attention=kernel seed 0: accuracy 0.")
    assert "2/2  model.attention=nothing seed 0: failed, ValueError: expected kind" in told
    (marked,) = [line for line in told.splitlines() if line.startswith("*  ")]
    assert marked.split()[1] == "kernel"
    assert "* chosen by NLL (lowest) on the validation split" in told
    chosen = load_recipe(tmp_path / "sweep" / "chosen.toml")
    assert (chosen.model.attention, chosen.optimizer.batch_size) == ("kernel", 300)
    assert main(arguments) == 2
    assert "holds a run already: resume the sweep" in capsys.readouterr().err
    assert main([*arguments, "--resume"]) == 0
    assert capsys.readouterr().out == told


def test_nothing_to_choose_is_a_failure(recipe: Path, tmp_path: Path, capsys: Output) -> None:
    folder = str(tmp_path / "sweep")
    assert main(["sweep", str(recipe), "--over", "model.attention=nothing", "--run", folder]) == 1
    assert "nothing was chosen: every setting has a run that failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.toml"], "no recipe nowhere.toml"),
        (["RECIPE", "--over", "model.attention"], "of the form section.key=value,value"),
        (["RECIPE", "--over", "optimizer.batchsize=1,2"], "did you mean 'batch_size'"),
        (["RECIPE", "--seeds", "0"], "expected seeds >= 1"),
        (["RECIPE", "--jobs", "0"], "expected jobs >= 1"),
    ],
)
def test_mistakes_take_one_line(
    arguments: list[str],
    message: str,
    recipe: Path,
    tmp_path: Path,
    capsys: Output,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", *(str(recipe) if word == "RECIPE" else word for word in arguments)]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1
    assert not (tmp_path / "runs").exists()
