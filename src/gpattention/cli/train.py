"""`gpattention train`."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from gpattention.cli.arguments import add_changes, add_data, add_device, new_command
from gpattention.cli.bar import Bar
from gpattention.experiments import train_images
from gpattention.training import choose_device, load_recipe

if TYPE_CHECKING:
    from gpattention.cli.arguments import Commands

EXAMPLES = """\
examples:
  gpattention train recipes/digits-cgp.toml
  gpattention train recipes/digits-cgp.toml --set phases.epochs=30 --set model.attention=scgp --run runs/mine
  gpattention train recipes/digits-cgp.toml --resume        go on where a run was stopped or killed
"""


def add_parser(commands: "Commands") -> None:
    """Arguments of training."""
    train = new_command(commands, "train", "train a recipe", EXAMPLES)
    train.add_argument("recipe", help="a TOML file, see recipes/")
    train.add_argument("--run", help="run folder (default: runs/NAME)")
    train.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    add_changes(train)
    add_device(train)
    add_data(train)
    train.set_defaults(run_command=run)


def run(given: argparse.Namespace) -> None:
    """A recipe into a run folder."""
    recipe = load_recipe(given.recipe, given.changes)
    folder = Path(given.run) if given.run else Path("runs") / recipe.name
    result = train_images(
        recipe,
        folder,
        root=given.data,
        resume=given.resume,
        device=choose_device(given.device),
        progress=Bar(recipe.name),
    )
    last = result.rows[-1]
    print(f"validation accuracy {last['validation_accuracy']:.4f}, NLL {last['validation_nll']:.4f}")
    print(f"run: {result.folder}")
