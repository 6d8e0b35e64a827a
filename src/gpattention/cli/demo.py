"""`gpattention demo`."""

import sys

from gpattention.cli.console import say
from gpattention.cli.evaluate import results_table
from gpattention.cli.main import App
from gpattention.cli.options import goes_on
from gpattention.studies.demo import (
    COLUMNS,
    CORRUPTIONS,
    DRAWS,
    MODELS,
    SEVERITIES,
    STARTS_ANEW,
    run_demo,
)

app = App()
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

    def trained(model: str, seconds: float) -> None:
        print(f"  {model:<8} {seconds:4.0f} s", flush=True)

    epochs_of = {"kernel_epochs": kernel_epochs, "epochs": epochs}
    result = run_demo(run, models=kinds, seed=seed, workers=jobs, on_done=trained, **epochs_of)
    shown = results_table("model", result.results, COLUMNS, bold=sys.stdout.isatty(), note=f"\n{NOTE}")
    print(f"\n{shown}\n")
    say(f"report: {result.report}")
