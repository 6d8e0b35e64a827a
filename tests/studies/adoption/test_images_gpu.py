"""`adopt images` on a CUDA device: fused and captured, and the numbers of the CPU."""

from dataclasses import replace
from pathlib import Path
from shutil import copytree

import pytest
import torch

from gpattention.experiments import train_recipe
from gpattention.studies.adoption.images import ImageSettings, adopt_images
from gpattention.studies.adoption.methods import Further
from tests.experiments.tiny_runs import digits_recipe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:The best temperature lies on its bound"),  # a tiny model guesses
]


@pytest.mark.parametrize("attention", ["softmax", "kernel"])
def test_every_row_is_that_of_the_cpu(tmp_path: Path, attention: str) -> None:
    config = {"width": 32, "heads": 2, "depth": 2, "dropout": 0.0}  # masks are drawn otherwise on a GPU
    recipe = digits_recipe(attention, name="tiny", model={"attention": attention, "config": config})
    train_recipe(recipe, tmp_path / "cpu" / "tiny")
    copytree(tmp_path / "cpu" / "tiny", tmp_path / "cuda" / "tiny")
    settings = ImageSettings(
        kinds=("direct", "cgp"), parts=("clean", "ood"), samples=4, limit=200,
        further=Further(prior_scale=0.3),
        fit={"steps": 5, "samples": 2, "levels": ("global",)},
    )  # fmt: skip
    found = {
        device: {
            (cell.method, name, metric): value
            for cell in adopt_images([tmp_path / device], replace(settings, device=device)).cells
            for name, values in cell.values.items()
            for metric, value in values.items()
            if metric in ("nll", "aurc", "auroc_entropy")
        }
        for device in ("cpu", "cuda")
    }
    assert found["cuda"] == pytest.approx(found["cpu"], rel=2e-2, abs=5e-3)
