"""`gpattention demo`."""

import argparse
import sys
from typing import TYPE_CHECKING

from gpattention.cli.arguments import new_command, seed_number
from gpattention.cli.table import say, table
from gpattention.experiments import run_demo
from gpattention.experiments.demo import CORRUPTIONS, DRAWS, MODELS, SEVERITIES, STARTS_ANEW, DemoResult
from gpattention.metrics import METRICS
from gpattention.runs.tables import Bold

if TYPE_CHECKING:
    from gpattention.cli.arguments import Commands

EXAMPLES = """\
examples:
  gpattention demo
  gpattention demo --models softmax,cgp --epochs 5
"""
COLUMNS = {  # of a field, its heading and its metric
    "accuracy": ("accuracy", "accuracy"),
    "nll": ("NLL", "nll"),
    "ece": ("ECE", "ece"),
    "corrupted_accuracy": ("corr. accuracy", "accuracy"),
    "corrupted_nll": ("corr. NLL", "nll"),
    "corrupted_ece": ("corr. ECE", "ece"),
    "near_auroc": ("near AUROC", "auroc"),
    "far_auroc": ("far AUROC", "auroc"),
}
NOTE = (
    f"Handwritten digits 0 to 7; corrupted: {', '.join(CORRUPTIONS)} at severities "
    f"{' and '.join(map(str, SEVERITIES))}; near: digits 8 and 9, never seen in training; far: noise and "
    "patterns. "
    f"Models with a posterior average {DRAWS} draws; AUROC of the predictive entropy. Best in bold."
)


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


def demo_table(result: DemoResult, *, bold: bool) -> str:
    """The best of each column in bold, or starred where bold cannot be shown."""
    values = {field: [getattr(row, field) for row in result.rows] for field in COLUMNS}
    best = {field: METRICS[metric].best(values[field]) for field, (_, metric) in COLUMNS.items()}
    rows = []
    for row in result.rows:
        cells = [(f"{getattr(row, field):.3f}", getattr(row, field) == best[field]) for field in COLUMNS]
        rows.append(
            [row.model, *(Bold(text) if most else text for text, most in cells), f"{row.seconds:.0f}"]
        )
    heads = ["model", *(head for head, _ in COLUMNS.values()), "seconds"]
    return f"{table(heads, rows, right=range(1, len(heads)), bold=bold)}\n\n{NOTE}"
