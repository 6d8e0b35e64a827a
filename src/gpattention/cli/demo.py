"""`gpattention demo`."""

import argparse
import sys
from typing import TYPE_CHECKING

from gpattention.cli.arguments import new_command, seed_number
from gpattention.cli.demo_table import demo_table
from gpattention.cli.table import say
from gpattention.experiments import run_demo
from gpattention.experiments.demo import MODELS, STARTS_ANEW

if TYPE_CHECKING:
    from gpattention.cli.arguments import Commands

EXAMPLES = """\
examples:
  gpattention demo
  gpattention demo --models softmax,cgp --epochs 5
"""


def add_parser(commands: "Commands") -> None:
    """Arguments of the demo."""
    demo = new_command(commands, "demo", "train, evaluate and compare on bundled digits", EXAMPLES)
    demo.add_argument("--run", default="runs/demo", help="folder for runs and report (default: %(default)s)")
    demo.add_argument("--models", help="comma-separated kinds (default: all six)")
    demo.add_argument("--kernel-epochs", type=int, default=10, help="of phase 1 (default: %(default)s)")
    demo.add_argument("--epochs", type=int, default=20, help="of phase 2, with draws (default: %(default)s)")
    demo.add_argument("--jobs", type=int, default=2, help="models trained at once (default: %(default)s)")
    demo.add_argument(
        "--seed", type=seed_number, default=0, help="of data split and training (default: %(default)s)"
    )
    demo.set_defaults(run_command=run, when_stopped=STARTS_ANEW)


def run(given: argparse.Namespace) -> None:
    """Six kinds of attention on digits, a table and a page."""
    models = tuple(MODELS) if given.models is None else tuple(given.models.split(","))
    print(f"training {', '.join(models)} on handwritten digits, {given.jobs} at a time")
    result = run_demo(
        given.run,
        models=models,
        kernel_epochs=given.kernel_epochs,
        epochs=given.epochs,
        seed=given.seed,
        workers=given.jobs,
        on_done=lambda row: print(
            f"  {row.model:<8} {row.seconds:4.0f} s  accuracy {row.accuracy:.3f}", flush=True
        ),
    )
    print("\n" + demo_table(result, bold=sys.stdout.isatty()))
    print()
    say(f"report: {result.report}")
