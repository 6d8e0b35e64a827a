"""`gpattention models`."""

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from gpattention.attention import attention_class, list_attention
from gpattention.cli.arguments import new_command
from gpattention.cli.table import say
from gpattention.studies.reproduction.model_card import write_model_card, write_shared_run

if TYPE_CHECKING:
    from gpattention.cli.arguments import Commands

EXAMPLES = """\
examples:
  gpattention models                                                        list kinds of attention
  gpattention models card runs/cifar10-60/cifar10-cgpt-seed0 -o results/models/cifar10-cgpt
  gpattention models run results/models/cifar10-cgpt -o runs/shared         judge a model that was shared
"""
CARD_EXAMPLES = """\
examples:
  gpattention models card runs/digits-cgp -o results/models/digits-cgp
  gpattention models card runs/cifar10-60/cifar10-cgpt-seed0 -o results/models/cgpt --name "CGPT on CIFAR-10"

Copies config.json, model.safetensors (3 MB at most) and preprocessing/, and writes recipe.toml and README.md
with the measures of the run's evaluation. `gpattention predict`, from_pretrained and load_preprocessing take
the folder.
"""
RUN_EXAMPLES = """\
examples:
  gpattention models run results/models/cifar10-direct-rows -o runs/shared
  gpattention evaluate runs/shared --suite clean,corrupted --data ~/data

The way back of `models card`: a run folder that evaluate, report and adopt take. What training wrote down is
not shared: such a run has no curves, and training cannot go on with it.
"""


def add_parser(commands: "Commands") -> None:
    """Without a command below it, the list."""
    models = new_command(commands, "models", "list kinds of attention, or share a trained model", EXAMPLES)
    models.set_defaults(run_command=run)
    below = models.add_subparsers(title="commands", metavar="COMMAND")
    card = new_command(below, "card", "copy a run's model and write its card", CARD_EXAMPLES)
    card.add_argument("run", metavar="RUN", help="a run folder")
    card.add_argument("-o", "--out", metavar="FOLDER", required=True, help="where the model goes")
    card.add_argument("--name", metavar="TEXT", help="of the model (default: that of the recipe)")
    card.set_defaults(run_command=run_card)
    shared = new_command(below, "run", "make a run folder of a shared model, to judge it", RUN_EXAMPLES)
    shared.add_argument("model", metavar="MODEL", help="a folder that models card made")
    shared.add_argument("-o", "--out", metavar="RUN", required=True, help="the run folder to make")
    shared.set_defaults(run_command=run_shared)


def run(given: argparse.Namespace) -> None:
    """Kinds of attention and what they can do."""
    print(f"{'kind':<12}{'draws':<7}{'cross':<7}{'causal':<8}{'rows':<6}regularisers")
    for kind in list_attention():
        cls = attention_class(kind)
        flags = (cls.draws, cls.crosses, cls.causal_form, cls.normalizes)
        cells = [("yes" if flag else "no") for flag in flags]
        print(f"{kind:<12}{cells[0]:<7}{cells[1]:<7}{cells[2]:<8}{cells[3]:<6}{', '.join(cls.regularizers)}")


def run_card(given: argparse.Namespace) -> None:
    """The files, one a line."""
    _tell(write_model_card(given.run, given.out, name=given.name))


def run_shared(given: argparse.Namespace) -> None:
    """The files, and what they are for."""
    _tell(write_shared_run(given.model, given.out))
    say(f"judge it with: gpattention evaluate {shlex.quote(str(given.out))}")


def _tell(files: list[Path]) -> None:
    for file in files:
        say(f"{file} ({file.stat().st_size / 1e3:.1f} kB)")
