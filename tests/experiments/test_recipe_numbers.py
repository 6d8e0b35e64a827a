"""Recipes tell what they gave, and it is what results/ says."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "recipe_numbers.py"
RECIPE = '# A recipe.\nseed = 0\n\n[data]\nname = "digits"  # What it gave is not here\n'


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("recipe_numbers", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_recipe_is_up_to_date() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_a_block_is_put_in_replaced_and_taken_out(script: ModuleType) -> None:
    first = script.with_block(RECIPE, ["#   plan, model, 3 seeds", "#     test, as it is: NLL 1.000 ± 0.100"])
    assert first.splitlines()[:4] == [
        "# A recipe.",
        "# What it gave with a plan's changes, mean and standard error (more in results/PLAN):",
        "#   plan, model, 3 seeds",
        "#     test, as it is: NLL 1.000 ± 0.100",
    ]
    assert script.with_block(first, ["#   other"]).count("# What it gave with") == 1
    assert script.with_block(first, []) == RECIPE


def test_figures_of_a_summary(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "summary.csv").write_text(
        "model,predictor,suite,set,metric,score,mean,standard_error,runs,seeds,items\n"
        "m,model,clean,test,accuracy,,0.755,0.004,3,0 1 2,2000\n"
        "m,model,clean,test,nll,,0.72191,0.0305,3,0 1 2,2000\n"
        "m,model,clean,test,mcc,,0.7,0.01,3,0 1 2,2000\n"
        "m,model,ood,ood/out-of-domain,auroc,entropy,0.6,0.1,3,0 1 2,2000\n"
        "m,model+temperature,corrupted,corrupted/mean,ece,,0.0774,0.0042,3,0 1 2,2000\n"
    )
    assert script.lines_of("plan", "m", script.read(tmp_path / "summary.csv")) == [
        "#   plan, m, 3 seeds",
        "#     test, as it is: accuracy 75.5 ± 0.4, NLL 0.722 ± 0.030",
        "#     CIFAR-10-C, temperature: ECE 0.077 ± 0.004",
    ]


def test_one_seed_has_no_spread(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "summary.csv").write_text(
        "model,predictor,suite,set,metric,score,mean,standard_error,runs,seeds,items\n"
        "m,model,clean,test,accuracy,,0.109,,1,0,2000\n"
    )
    assert script.lines_of("plan", "m", script.read(tmp_path / "summary.csv")) == [
        "#   plan, m, 1 seed",
        "#     test, as it is: accuracy 10.9",
    ]
