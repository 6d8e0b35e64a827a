"""Runs that train in a second: digits, and a few sentences in CoLA's layout."""

from pathlib import Path
from typing import Any

from gpattention.runs import Recipe, recipe_from_dict
from gpattention.training import train_recipe
from tests.data import official

MODEL = {"width": 16, "heads": 2, "depth": 1}


def digits_recipe(attention: str = "cgp", **changes: Any) -> Recipe:
    plain: dict[str, Any] = {
        "name": "tiny",
        "model": {"attention": attention, "config": MODEL},
        "optimizer": {"batch_size": 200},
        "phases": {"kernel_epochs": 1, "epochs": 1},
    }
    return recipe_from_dict({**plain, **changes})


def cola_recipe() -> Recipe:
    return recipe_from_dict(
        {
            "name": "tiny-cola",
            "data": {"name": "cola", "options": {"subset": True}},
            "model": {"type": "text", "attention": "cgp", "config": {**MODEL, "embedding_width": 8}},
            "optimizer": {"batch_size": 5},
            "phases": {"epochs": 1},
        }
    )


def train_digits(folder: Path, attention: str = "cgp") -> Path:
    train_recipe(digits_recipe(attention), folder)
    return folder


def train_cola(folder: Path, root: Path) -> Path:
    official.write_cola(root)
    train_recipe(cola_recipe(), folder, root=root)
    return folder
