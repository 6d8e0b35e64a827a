"""`gpattention demo`."""

import sys

from gpattention.cli.console import say, table
from gpattention.cli.main import App
from gpattention.cli.options import goes_on
from gpattention.metrics import METRICS
from gpattention.runs.tables import Bold
from gpattention.studies.demo import (
    CORRUPTIONS,
    DRAWS,
    MODELS,
    SEVERITIES,
    STARTS_ANEW,
    DemoResult,
    DemoRow,
    run_demo,
)

app = App()
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


@app.command("demo")
@goes_on(STARTS_ANEW)
def demo(
    run: str = "runs/demo",
    models: tuple[str, ...] | None = None,
    kernel_epochs: int = 10,
    epochs: int = 20,
    jobs: int = 2,
    seed: int = 0,
) -> None:
    """Train, evaluate and compare on bundled digits.

    Options:
        run (FOLDER): folder for runs and report.
        models: comma-separated kinds (default: all six).
        kernel_epochs: of phase 1.
        epochs: of phase 2, with draws.
        jobs: models trained at once.
        seed: of data split and training.

    Examples:
      gpattention demo
      gpattention demo --models softmax,cgp --epochs 5
    """
    kinds = models or tuple(MODELS)
    print(f"training {', '.join(kinds)} on handwritten digits, {jobs} at a time")

    def trained(row: DemoRow) -> None:
        print(f"  {row.model:<8} {row.seconds:4.0f} s  accuracy {row.accuracy:.3f}", flush=True)

    epochs_of = {"kernel_epochs": kernel_epochs, "epochs": epochs}
    result = run_demo(run, models=kinds, seed=seed, workers=jobs, on_done=trained, **epochs_of)
    print("\n" + demo_table(result, bold=sys.stdout.isatty()) + "\n")
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
