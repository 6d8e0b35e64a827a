"""Runs that share their first phase: one trains it, the others go on from its end to the same bits.

The kernel attention of phase 1 knows nothing of what phase 2 will be, so recipes that differ only there have
the same phase 1.  Every run keeps the state at its end in `first-phase/`.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpattention.data.places import StrPath
from gpattention.models.storage import make_folder
from gpattention.reading import read_json
from gpattention.training.build import kernel_config, needs_warm_start
from gpattention.training.checkpoint import (
    CheckpointError,
    list_checkpoints,
    read_checkpoint,
    write_checkpoint,
)
from gpattention.training.folder import FIRST_PHASE, TAKEN, check_new, write_run_recipe
from gpattention.training.recipe import Recipe, recipe_from_dict
from gpattention.training.records import append_event


def take_first_phase(recipe: Recipe, folder: StrPath, source: StrPath) -> None:
    """Make a run whose first phase is that of the run `source`; resume it to train the second.

    Raises `ValueError` where the two first phases would differ, naming what does.
    """
    folder, source = Path(folder), Path(source)
    described = source / "recipe.json"
    if not described.is_file():
        raise FileNotFoundError(f"expected a run in {source}, got no recipe.json there")
    _check_same(recipe, recipe_from_dict(read_json(described, nonfinite=True)), source)
    kept = list_checkpoints(source / FIRST_PHASE)
    if not kept:
        raise CheckpointError(f"{source} has not reached the end of its first phase: no {FIRST_PHASE} in it")
    state = read_checkpoint(kept[-1])
    check_new(folder, taking=True)
    copies = ("checkpoints", FIRST_PHASE)
    for place in copies:  # of one that was killed here
        shutil.rmtree(folder / place, ignore_errors=True)
    make_folder(folder)
    (folder / "events.jsonl").unlink(missing_ok=True)
    # first: whoever is killed here leaves what is known for a copy
    append_event(folder, TAKEN, source=source.name, step=state.state["step"])
    for place in copies:
        write_checkpoint(folder / place, state.state["step"], state, keep=1)
    write_run_recipe(folder, recipe)


def first_phase(recipe: Recipe) -> dict[str, Any]:
    """Everything the first phase depends on, by the names of the recipe."""
    kernel = kernel_config(recipe)
    optimizer = recipe.to_dict()["optimizer"]
    epochs = {} if recipe.optimizer.restart else {"phases.epochs": recipe.phases.epochs}
    return {
        "seed": recipe.seed,
        **_flat("data", recipe.to_dict()["data"]),
        **_flat("optimizer", optimizer),
        "model.type": recipe.model.type,
        **_flat("model.config", recipe.model.config),
        "kind of phase 1": kernel.kind,
        **_flat("options of phase 1", kernel.options),
        "phases.kernel_epochs": recipe.phases.kernel_epochs,
        **epochs,  # the learning rate falls over both phases
    }


def _check_same(recipe: Recipe, other: Recipe, source: Path) -> None:
    if recipe.phases.kernel_epochs < 1:
        raise ValueError(
            f"expected phases.kernel_epochs >= 1, got {recipe.phases.kernel_epochs}: no first phase"
        )
    for one in (recipe, other):
        if not needs_warm_start(one):
            raise ValueError(
                f"expected a kind of attention that starts from kernel attention, got {one.model.attention!r}"
            )
    own, theirs = first_phase(recipe), first_phase(other)
    for name in sorted(set(own) | set(theirs)):
        if own.get(name) != theirs.get(name):
            raise ValueError(
                f"the first phase of {source} is another one: expected {name} to be {own.get(name)!r}, "
                f"got {theirs.get(name)!r}"
            )


def _flat(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{section}.{key}": value for key, value in values.items()}
