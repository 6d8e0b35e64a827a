"""`gpattention demo` trains, compares and writes a page; `models` lists every kind."""

from pathlib import Path

import pytest

from gpattention.studies.demo import COLUMNS, MODELS, demo_recipe, run_demo
from tests.cli.conftest import Run

FEW = ["--epochs", "1", "--kernel-epochs", "1"]


def test_demo_trains_compares_and_writes_a_page(tmp_path: Path, run: Run) -> None:
    out = run("demo", "--run", tmp_path, "--models", "softmax,scgp", *FEW).out
    assert "softmax" in out
    assert "corr. acc." in out
    assert "On corrupted digits " in out
    assert "One seed cannot say how much of this is chance" in out
    assert out.index("next:") > out.index(f"report: {tmp_path / 'report.html'}")
    assert f"gpattention demo --models softmax,cgp --seeds 3 --run {tmp_path}-seeds" in out
    page = (tmp_path / "report.html").read_text()
    assert "Kinds of attention on handwritten digits" in page
    assert page.count("<svg") > 5
    assert "http" not in page.replace("http-equiv", "")
    for model in ("softmax", "scgp"):
        assert (tmp_path / model / "evaluation" / "corrupted.json").is_file()
    result = run_demo(tmp_path, models=("softmax",), epochs=1, kernel_epochs=0)  # an earlier demo is replaced
    assert 0 <= result.results.find("softmax", "clean", "test", "accuracy").mean <= 1
    assert [column.find(result.results, "softmax", "model") is None for column in COLUMNS] == [False] * 8


def test_quick_is_two_models_and_seeds_have_a_run_each(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = list[dict[str, object]]()

    def stand_in(folder: str, **given: object) -> None:
        called.append(given)
        raise ValueError("enough")

    monkeypatch.setattr("gpattention.cli.demo.run_demo", stand_in)
    run("demo", "--quick", "--epochs", "3", code=2)
    run("demo", "--seeds", "2", code=2)
    keys = ("models", "kernel_epochs", "epochs", "seeds")
    assert [called[0][key] for key in keys] == [("softmax", "cgp"), 8, 3, 1]
    assert [called[1][key] for key in keys] == [tuple(MODELS), 10, 20, 2]


def test_a_demo_replaces_no_other_run(tmp_path: Path, run: Run) -> None:
    (tmp_path / "softmax").mkdir()
    for written in ('{"name": "thesis"}', "{"):
        (tmp_path / "softmax" / "recipe.json").write_text(written)
        err = run("demo", "--run", tmp_path, "--models", "softmax", "--jobs", "1", *FEW, code=2).err
        assert "holds a run that is not the demo's" in err
        assert (tmp_path / "softmax" / "recipe.json").read_text() == written


def test_demo_recipes_are_the_same_but_for_the_attention() -> None:
    recipes = [demo_recipe(name).to_dict() for name in MODELS]
    for recipe in recipes:
        del recipe["name"]
        recipe["model"] = recipe["model"]["config"]
    assert all(recipe == recipes[0] for recipe in recipes)


def test_models_lists_every_kind(run: Run) -> None:
    listed = run("models").out
    assert all(kind in listed for kind in MODELS)
