"""`gpattention train`."""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from gpattention.cli.arguments import add_changes, add_data, add_device, new_command
from gpattention.cli.bar import Bar, CountBar
from gpattention.cli.table import say
from gpattention.experiments import train_recipe
from gpattention.experiments.recipe_file import changed_recipe
from gpattention.experiments.runs import chosen_row, read_recipe
from gpattention.training import PRECISIONS, Recipe, choose_device, launch, load_recipe
from gpattention.training.hardware import is_leading

if TYPE_CHECKING:
    from gpattention.cli.arguments import Commands

EXAMPLES = """\
examples:
  gpattention train recipes/digits-cgp.toml
  gpattention train recipes/digits-cgp.toml --set phases.epochs=30 --set model.attention=scgp --run runs/mine
  gpattention train recipes/digits-cgp.toml --resume        go on where a run was stopped or killed
  gpattention train --resume --run runs/mine                the same, with the recipe that is in the run
  gpattention train recipes/digits-scgp.toml --first-phase runs/digits-cgp   from the same kernel model
  gpattention train recipes/cifar10-cgpt.toml --device cuda --data ~/data --tensorboard
  gpattention train recipes/cifar10-cgpt.toml --devices 4   data parallel in 4 processes, the same batches
  torchrun --nnodes 2 ... -m gpattention train recipes/cifar10-cgpt.toml       several machines
"""


def add_parser(commands: "Commands") -> None:
    """Arguments of training."""
    train = new_command(commands, "train", "train a recipe", EXAMPLES)
    train.add_argument(
        "recipe",
        nargs="?",
        help="a TOML file, see recipes/; with --resume and --run that of the run if not given",
    )
    train.add_argument("--run", help="run folder (default: runs/NAME)")
    train.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    train.add_argument(
        "--first-phase", metavar="RUN", help="take phase 1 from this run, which must have had the same"
    )
    add_changes(train)
    add_device(train)
    add_data(train)
    train.add_argument(
        "--devices", type=int, default=1, metavar="N", help="processes, one GPU each if there are"
    )
    train.add_argument(
        "--precision", default="32-true", choices=PRECISIONS, help="of the computation (default: %(default)s)"
    )
    train.add_argument("--no-graphs", action="store_true", help="do not capture the step as a CUDA graph")
    train.add_argument("--tensorboard", action="store_true", help="write TensorBoard logs into the run")
    train.set_defaults(run_command=run, refuse=train.error)


def run(given: argparse.Namespace) -> None:
    """A recipe into a run folder."""
    recipe = _recipe(given)
    folder = Path(given.run) if given.run else Path("runs") / recipe.name
    if given.devices < 1:
        raise ValueError(f"expected --devices >= 1, got {given.devices}")
    several = given.devices > 1 or os.environ.get("WORLD_SIZE", "1") != "1"
    if several and given.first_phase is not None:
        raise ValueError("expected --first-phase with one process: let it take the phase over, then --resume")
    if given.devices > 1 and "WORLD_SIZE" not in os.environ:
        if recipe.optimizer.batch_size % given.devices:
            raise ValueError(
                f"expected optimizer.batch_size to be a multiple of the {given.devices} processes, "
                f"got {recipe.optimizer.batch_size}"
            )
        launch(["-m", "gpattention", *sys.argv[1:]], given.devices, folder)
        return
    bar = Bar(recipe.name, recipe.epochs)
    leads = is_leading()
    result = train_recipe(
        recipe,
        folder,
        root=given.data,
        resume=given.resume,
        first_phase=given.first_phase,
        device=choose_device(given.device),
        precision=given.precision,
        graphs=not given.no_graphs,
        tensorboard=given.tensorboard,
        progress=bar if leads else None,
        on_validation=bar.validated if leads else None,
        preparing=CountBar("embeddings", "sentences") if leads else None,
    )
    if not leads:
        return
    kept = chosen_row(recipe, result.rows)  # those of the last epoch may be of other weights
    numbers = f"validation accuracy {kept['validation_accuracy']:.4f}, NLL {kept['validation_nll']:.4f}"
    print(f"{numbers} (epoch {kept['epoch']}, whose weights are kept)")
    say(f"run: {result.folder}")


def _recipe(given: argparse.Namespace) -> Recipe:
    """Of its file, or of the run that is to go on."""
    if given.recipe is not None:
        return load_recipe(given.recipe, given.changes)
    if not (given.resume and given.run):
        given.refuse("expected a recipe, or --resume with --run FOLDER to go on with the run in it")
    begun = read_recipe(given.run)
    return changed_recipe(begun, given.changes) if given.changes else begun
